"""What a restart costs peers: transformers with its cache in a file, llama.cpp with its state.

Each is given what it needs to answer at once: its weights are loaded, its file is written. Knows
how either keeps what it has computed; knows nothing of kvchat's engine.
"""

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from kvchat.bench.engines import random_ids
from kvchat.bench.measure import wait_for_device
from kvchat.bench.peers import LlamaCpp, Transformers
from kvchat.bench.report import Figure
from kvchat.core.config import format_bytes
from kvchat.model.loader import LoadedModel
from kvchat.model.self_test import compare_with_own

_MIN_COSINE = 0.98


class SavedTransformers:
    """transformers with its DynamicCache of a context in a safetensors file, as a user keeps it."""

    def __init__(self, peer: Transformers, context: Sequence[int], directory: Path) -> None:
        self._peer = peer
        self._file = directory / "peer-cache.safetensors"
        layers: Any = peer.filled_cache(context).layers
        tensors = {}
        for number, layer in enumerate(layers):
            tensors[f"{number}.keys"] = layer.keys.contiguous()
            tensors[f"{number}.values"] = layer.values.contiguous()
        save_file(tensors, self._file)
        self._num_layers = len(layers)
        self.num_bytes = self._file.stat().st_size

    def answer(self, prompt_ids: Sequence[int], max_tokens: int) -> tuple[list[int], float]:
        """Return the ids that follow a prompt which begins with the context, and the seconds until
        the first of them: load the cache, compute the rest, draw.
        """
        _, first_s = self._generate(prompt_ids, 1)
        ids, _ = self._generate(prompt_ids, max_tokens)
        return ids, first_s

    def _generate(self, prompt_ids: Sequence[int], max_tokens: int) -> tuple[list[int], float]:
        wait_for_device()
        start_s = time.perf_counter()
        cache = self._loaded()
        wait_for_device()
        loaded_s = time.perf_counter() - start_s
        ids, generated_s = self._peer.generate(prompt_ids, max_tokens, cache)
        return ids, loaded_s + generated_s

    def _loaded(self) -> DynamicCache:
        tensors = load_file(self._file, device=str(self._peer.model.device))
        cache = DynamicCache(config=self._peer.model.config)
        for number in range(self._num_layers):
            cache.update(tensors[f"{number}.keys"], tensors[f"{number}.values"], number)
        return cache


def beside_llama_cpp(
    gguf: Path | None, history_len: int, num_new: int, ours_s: float
) -> tuple[list[Figure], str]:
    """Return our time to the first token beside llama.cpp's, and a note on what it was, or why it
    was not run.
    """
    if gguf is None:
        return [], "llama.cpp: not run; give the same model as GGUF by --gguf"
    if importlib.util.find_spec("llama_cpp") is None:
        return [], "llama.cpp: llama_cpp is not installed"
    peer = LlamaCpp(gguf, torch.get_num_threads())
    history = random_ids(history_len, peer.vocab_size, seed=1)
    new = random_ids(num_new, peer.vocab_size, seed=2)
    theirs_s = min(peer.state_load_s(history, new) for _ in range(3))
    figure = _first_token(ours_s, theirs_s, "llama.cpp, its state loaded from memory", "1.5")
    return [figure], f"llama.cpp: {gguf.name}, not checked to be the same model"


def beside_transformers(
    loaded: LoadedModel,
    history: Sequence[int],
    prompt: Sequence[int],
    ours: tuple[Sequence[int], float],
    directory: Path,
) -> tuple[list[Figure], str]:
    """Return our time to the first token beside transformers' with a saved cache, and a note.

    `ours` are the ids that we generated after `prompt`, and the seconds until the first.
    """
    peer = Transformers(loaded.source, loaded.device, loaded.dtype)
    saved = SavedTransformers(peer, history, directory)
    ids, theirs_s = saved.answer(prompt, len(ours[0]))
    note = f"transformers' cache in a file: {format_bytes(saved.num_bytes)}"
    if list(ours[0]) != ids:
        # Low precision may turn a near tie the other way; then the logits must still agree.
        is_close = loaded.dtype != torch.float32 and compare_with_own(loaded) > _MIN_COSINE
        if not is_close:
            return [], "transformers answers otherwise from its saved cache: not compared"
        note += "; a near tie fell the other way"
    return [_first_token(ours[1], theirs_s, "transformers, its cache loaded from a file")], note


def _first_token(ours_s: float, theirs_s: float, peer: str, must: str = "") -> Figure:
    return Figure(
        "first token after a restart",
        ours_s * 1e3,
        "ms",
        theirs_s * 1e3,
        peer,
        theirs_s / ours_s,
        "times as fast",
        must,
    )

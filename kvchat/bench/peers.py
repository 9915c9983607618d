"""The peers that benchmarks compare with: transformers' generation, llama.cpp, and a llama-bench.

Each is used as its documentation recommends. When a restart is measured, a peer's weights are
already loaded and its cache is already saved: transformers' in a file, llama.cpp's in memory.
"""

import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, DynamicCache

from kvchat.bench.engines import random_ids
from kvchat.bench.measure import wait_for_device
from kvchat.bench.report import Figure, times_as_fast
from kvchat.bench.setup import BenchSetup
from kvchat.core.errors import UsageError
from kvchat.core.text import format_bytes
from kvchat.model.checkpoint.source import ModelSource
from kvchat.model.loader import LoadedModel, read_plain_module
from kvchat.model.self_test import compare_with_own

_AFTER_RESTART = "first token after a restart"


class LlamaCpp:
    """llama.cpp on a GGUF file, through the package llama_cpp, which must be installed."""

    name = "llama.cpp"

    def __init__(self, path: Path, num_threads: int, num_logits: int = 0) -> None:
        """`num_logits`: of so many tokens the logits stay, for `perplexity`."""
        llama_cpp = importlib.import_module("llama_cpp")
        self._model: Any = llama_cpp.Llama(
            str(path),
            n_ctx=num_logits or 8192,
            n_threads=num_threads,
            n_threads_batch=num_threads,
            logits_all=num_logits > 0,
            verbose=False,
        )
        self.vocab_size: int = self._model.n_vocab()
        self._prompt_ids: list[int] = []

    def decode_rate(self, prompt_ids: Sequence[int], max_tokens: int) -> float:
        """Return tokens a second after the first, the prompt read before the clock starts."""
        self._read(list(prompt_ids))
        self._model.eval([prompt_ids[-1]])
        start_s = time.perf_counter()
        for _ in range(max_tokens - 1):
            # The time does not depend on which token it is.
            self._model.eval([prompt_ids[0]])
        return (max_tokens - 1) / (time.perf_counter() - start_s)

    def prefill_s(self, prompt_ids: Sequence[int]) -> float:
        """Return the seconds to read a prompt, with the logits of its last row."""
        self._model.reset()
        self._prompt_ids = []
        start_s = time.perf_counter()
        self._model.eval(list(prompt_ids))
        return time.perf_counter() - start_s

    def state_load_s(self, context_ids: Sequence[int], new_ids: Sequence[int]) -> float:
        """Return the seconds to load a context's saved state, prefill `new_ids` and draw a token.

        The state is in memory, so the time to read a file is excluded, in the peer's favour.
        """
        self._read(list(context_ids))
        state = self._model.save_state()
        self._model.reset()
        start_s = time.perf_counter()
        self._model.load_state(state)
        self._model.eval(list(new_ids))
        self._model.sample(temp=0.0)
        seconds = time.perf_counter() - start_s
        self._prompt_ids = []
        return seconds

    def perplexity(self, texts: Iterable[list[int]]) -> float:
        """Return e to the mean negative log-likelihood of every token but the first of each."""
        total, count = 0.0, 0
        for text in texts:
            self._model.reset()
            self._model.eval(text)
            logits = torch.from_numpy(self._model.scores[: len(text) - 1])
            total += float(cross_entropy(logits, torch.tensor(text[1:]), reduction="sum"))
            count += len(text) - 1
        return math.exp(total / count)

    def _read(self, prompt_ids: list[int]) -> None:
        """Set the context to exactly this prompt; skip the prefill if it is already there."""
        if self._prompt_ids == prompt_ids:
            self._model.n_tokens = len(prompt_ids)  # the next eval drops the tokens after these
            return
        self._model.reset()
        self._model.eval(prompt_ids)
        self._prompt_ids = prompt_ids


class LlamaBench:
    """llama.cpp's program llama-bench on a GGUF file, or that of a program made from it.

    It reads tokens of its own: only their number counts. Each measurement is a process, and loading
    is not in its figures. Raises UsageError if it does not run.
    """

    def __init__(self, program: Path, path: Path, num_threads: int) -> None:
        self._command = [str(program), "-m", str(path), "-t", str(num_threads), "-r", "1"]
        self.name = program.name
        self.vocab_size = sys.maxsize

    def decode_rate(self, prompt_ids: Sequence[int], max_tokens: int) -> float:
        """Return tokens a second behind a prompt."""
        return self._rate("-p", "0", "-n", "0", "-gp", f"{len(prompt_ids)},{max_tokens - 1}")

    def prefill_s(self, prompt_ids: Sequence[int]) -> float:
        """Return the seconds to read a prompt."""
        return len(prompt_ids) / self._rate("-p", str(len(prompt_ids)), "-n", "0")

    def _rate(self, *arguments: str) -> float:
        command = [*self._command, "-o", "json", *arguments]
        try:
            # Without what is set for this process's OpenMP, as users run it.
            ran = subprocess.run(
                command, env=os.environ, capture_output=True, text=True, check=True
            )
            [result] = json.loads(ran.stdout[ran.stdout.index("[") :])
            return float(result["avg_ts"])
        except (OSError, subprocess.CalledProcessError, ValueError, KeyError) as error:
            raise UsageError(f"{self._command[0]} measured nothing: {error}") from error


Peer = LlamaCpp | LlamaBench


def without_llama_cpp(gguf: Path | None) -> str:
    """Return why llama.cpp cannot run on this file; empty if it can."""
    if gguf is None:
        return "llama.cpp: not run; give the same model as GGUF by --gguf"
    if importlib.util.find_spec("llama_cpp") is None:
        return "llama.cpp: llama_cpp is not installed"
    return ""


def on_same_model(setup: BenchSetup) -> str:
    """Return the note on the file that llama.cpp ran on."""
    assert setup.peers_gguf is not None
    doubt = ", not checked to be the same model" if setup.gguf is not None else ""
    return f"llama.cpp: {setup.peers_gguf.name}{doubt}"


def prompts_beside_peers(
    setup: BenchSetup,
    prompts: Sequence[Sequence[int]],
    compared: Callable[[Peer, Sequence[int]], Figure],
) -> tuple[list[Figure], str]:
    """Return what `compared` finds of each prompt beside llama.cpp and the setup's own peer, and a
    note on the file or why llama.cpp is missing.

    Token ids that the file does not know become others: a checkpoint may be padded.
    """
    gguf, peers = setup.peers_gguf, list[Peer]()
    missing = without_llama_cpp(gguf)
    if gguf is not None and not missing:
        peers.append(LlamaCpp(gguf, torch.get_num_threads()))
    if gguf is not None and setup.peer is not None:
        peers.append(LlamaBench(setup.peer, gguf, torch.get_num_threads()))
    figures = []
    for peer in peers:
        known = ([token_id % peer.vocab_size for token_id in prompt] for prompt in prompts)
        figures += [compared(peer, prompt) for prompt in known]
    return figures, missing or on_same_model(setup)


def _own_module(source: ModelSource, dtype: torch.dtype) -> Any:
    if source.gguf is not None:  # transformers would look for a checkpoint beside the file
        return read_plain_module(source, dtype, "sdpa")
    return AutoModelForCausalLM.from_pretrained(
        source.directory,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
    )


class Transformers:
    """transformers with its default attention (sdpa) and dynamic cache, on the same weights."""

    name = "transformers"

    def __init__(self, source: ModelSource, device: torch.device, dtype: torch.dtype) -> None:
        self.model: Any = _own_module(source, dtype).to(device).eval()
        self._device = device

    @torch.inference_mode()
    def generate(
        self, prompt_ids: Sequence[int], max_tokens: int, cache: DynamicCache | None = None
    ) -> tuple[list[int], float]:
        """Generate greedily with `generate`; return the new ids and the seconds taken.

        `cache` holds the KV of a prefix of the prompt, and is extended in place.
        """
        prompt = torch.tensor([list(prompt_ids)], device=self._device)
        wait_for_device()
        start_s = time.perf_counter()
        output = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            past_key_values=cache,
            use_cache=True,
        )
        wait_for_device()
        elapsed_s = time.perf_counter() - start_s
        new_ids: list[int] = output[0, len(prompt_ids) :].tolist()
        return new_ids, elapsed_s

    def decode_rate(self, prompt_ids: Sequence[int], max_tokens: int) -> float:
        """Return tokens a second after the first, prefill excluded by a run of one token."""
        _, first_s = self.generate(prompt_ids, 1)
        _, all_s = self.generate(prompt_ids, max_tokens)
        return (max_tokens - 1) / max(all_s - first_s, 1e-9)

    @torch.inference_mode()
    def prefill_s(self, prompt_ids: Sequence[int]) -> float:
        """Return the seconds of one forward pass over a prompt, with the last row's logits."""
        ids = torch.tensor([list(prompt_ids)], device=self._device)
        cache = DynamicCache(config=self.model.config)
        wait_for_device()
        start_s = time.perf_counter()
        self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        wait_for_device()
        return time.perf_counter() - start_s

    @torch.inference_mode()
    def filled_cache(self, prompt_ids: Sequence[int]) -> DynamicCache:
        """Return a new cache with a prompt's KV."""
        cache = DynamicCache(config=self.model.config)
        ids = torch.tensor([list(prompt_ids)], device=self._device)
        self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache


_MIN_COSINE = 0.98


class SavedTransformers:
    """transformers, with a context's DynamicCache saved in a safetensors file."""

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
        """Return the ids after a prompt that starts with the context, and the seconds to the first.

        The seconds cover loading the cache, prefilling the rest of the prompt and drawing.
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


def first_token_beside_llama_cpp(
    setup: BenchSetup, history_len: int, num_new: int, ours_s: float
) -> tuple[list[Figure], str]:
    """Return our time to first token beside llama.cpp's, and a note on its model or why not."""
    gguf = setup.peers_gguf
    missing = without_llama_cpp(gguf)
    if gguf is None or missing:
        return [], missing
    peer = LlamaCpp(gguf, torch.get_num_threads())
    history = random_ids(history_len, peer.vocab_size, seed=1)
    new = random_ids(num_new, peer.vocab_size, seed=2)
    theirs_s = min(peer.state_load_s(history, new) for _ in range(3))
    llama = "llama.cpp, its state loaded from memory"
    figure = times_as_fast(_AFTER_RESTART, ours_s, theirs_s, "ms", llama, "1.5")
    return [figure], on_same_model(setup)


def beside_transformers(
    loaded: LoadedModel,
    history: Sequence[int],
    prompt: Sequence[int],
    ours: tuple[Sequence[int], float],
    directory: Path,
) -> tuple[list[Figure], str]:
    """Return our time to first token beside transformers' with a saved cache, and a note.

    `ours` are the ids that kvchat generated after `prompt`, and the seconds to the first.
    """
    peer = Transformers(loaded.source, loaded.device, loaded.dtype)
    saved = SavedTransformers(peer, history, directory)
    ids, theirs_s = saved.answer(prompt, len(ours[0]))
    note = f"transformers' cache in a file: {format_bytes(saved.num_bytes)}"
    if list(ours[0]) != ids:
        # In low precision a near tie may be decided differently; then the logits must still agree.
        is_close = loaded.dtype != torch.float32 and compare_with_own(loaded) > _MIN_COSINE
        if not is_close:
            return [], "transformers gives another answer from its saved cache: not compared"
        note += "; one near tie was decided differently"
    beside = "transformers, its cache loaded from a file"
    return [times_as_fast(_AFTER_RESTART, ours[1], theirs_s, "ms", beside)], note

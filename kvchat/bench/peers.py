"""Peers that run beside us: transformers' own generation on the same weights, and llama.cpp.

Knows how the peer is best used by somebody who wants to be fair to it. Knows nothing of kvchat's
engine.
"""

import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvchat.bench.measure import wait_for_device
from kvchat.model.source import ModelSource


class LlamaCpp:
    """llama.cpp on a GGUF file, through llama_cpp, which must be installed."""

    def __init__(self, path: Path, num_threads: int) -> None:
        llama_cpp = importlib.import_module("llama_cpp")
        self._model: Any = llama_cpp.Llama(
            str(path),
            n_ctx=8192,
            n_threads=num_threads,
            n_threads_batch=num_threads,
            logits_all=False,
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
            # Which token it is makes no difference to the time it takes.
            self._model.eval([prompt_ids[0]])
        return (max_tokens - 1) / (time.perf_counter() - start_s)

    def state_load_s(self, context_ids: Sequence[int], new_ids: Sequence[int]) -> float:
        """Return the seconds from a saved state of a context to the first token after `new_ids`.

        The state is kept in memory: reading it from a file is left out, in the peer's favour.
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

    def _read(self, prompt_ids: list[int]) -> None:
        """Have a prompt and nothing else in the context; one that is there is not read again."""
        if self._prompt_ids == prompt_ids:
            self._model.n_tokens = len(prompt_ids)  # what lies behind is dropped by the next eval
            return
        self._model.reset()
        self._model.eval(prompt_ids)
        self._prompt_ids = prompt_ids


class Transformers:
    """transformers with its default attention (sdpa) and dynamic cache, on the same weights."""

    def __init__(self, source: ModelSource, device: torch.device, dtype: torch.dtype) -> None:
        model = AutoModelForCausalLM.from_pretrained(
            source.directory,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
        )
        self.model: Any = model.to(device).eval()
        self._device = device

    @torch.inference_mode()
    def generate(
        self, prompt_ids: Sequence[int], max_tokens: int, cache: DynamicCache | None = None
    ) -> tuple[list[int], float]:
        """Generate greedily by `generate`; return the new ids and the seconds it took.

        `cache` holds the keys and values of a beginning of the prompt, and is extended.
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
        """Return the seconds of one forward pass over a prompt, to the last row's logits."""
        ids = torch.tensor([list(prompt_ids)], device=self._device)
        cache = DynamicCache(config=self.model.config)
        wait_for_device()
        start_s = time.perf_counter()
        self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        wait_for_device()
        return time.perf_counter() - start_s

    @torch.inference_mode()
    def filled_cache(self, prompt_ids: Sequence[int]) -> DynamicCache:
        """Return a cache that holds a prompt's keys and values."""
        cache = DynamicCache(config=self.model.config)
        ids = torch.tensor([list(prompt_ids)], device=self._device)
        self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

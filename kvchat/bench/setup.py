"""The settings of a benchmark run, and its checkpoint: the user's, or random weights.

Random weights in a real model's shape run as fast as trained ones, and need no download.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from kvchat.core.config import CacheConfig, ModelConfig
from kvchat.core.errors import UsageError
from kvchat.model.checkpoint.source import ModelSource, find_model


def say_nothing(part: str) -> None:
    """Ignore the part: the `tell` of a run that reports its figures alone."""


@dataclass(frozen=True, slots=True)
class BenchSetup:
    """The settings of every scenario. `is_quick` shrinks the work to a check that it runs.

    `sessions` is a directory of recorded conversations, for scenarios that replay them; `gguf` is
    the same model as GGUF, where it has no such file itself, for llama.cpp and for `peer`, a
    program llama-bench. `draft` drafts for it in `spec`. `tell` is called with what a scenario of
    many parts measures from now on.
    """

    source: ModelSource
    model: ModelConfig
    cache: CacheConfig
    repeats: int
    is_quick: bool
    sessions: Path | None = None
    gguf: Path | None = None
    peer: Path | None = None
    draft: ModelSource | None = None
    tell: Callable[[str], None] = say_nothing

    @property
    def peers_gguf(self) -> Path | None:
        """The file that llama.cpp runs."""
        own = self.source.gguf
        return self.gguf or (own.paths[0] if own is not None else None)

    def scaled(self, length: int) -> int:
        """Return `length` in tokens; in a quick run 1/32 of it, at least 32."""
        return max(32, length // 32) if self.is_quick else length


_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
)


def _llama(*sizes: int, **others: int) -> dict[str, Any]:
    """Return the configuration of a model of these `_SIZES`."""
    llama = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    return {**llama, **dict(zip(_SIZES, sizes, strict=True)), **others}


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _llama(64, 128, 2, 4, 2, 512, 16384),  # for tests of the benchmarks
    "0.4b": _llama(896, 4864, 24, 14, 2, 32000, 16384),
    "135m": _llama(576, 1536, 30, 9, 3, 49152, 8192),
    "8b": _llama(4096, 12288, 36, 32, 8, 151936, 40960, head_dim=128),
}


@contextmanager
def subject(model: str | None, shape: str, dtype: str) -> Iterator[ModelSource]:
    """Yield a checkpoint to measure: the named model, or random weights in `shape`.

    The random checkpoint is a temporary directory, removed on exit. Raises UsageError for an
    unknown shape.
    """
    if model is not None:
        yield find_model(model)
        return
    if shape not in SHAPES:
        raise UsageError(f"There is no shape {shape!r}.", f"Choose from {', '.join(SHAPES)}.")
    directory = Path(tempfile.mkdtemp(prefix="kvchat-bench-"))
    try:
        _write_random(directory, SHAPES[shape], dtype)
        yield ModelSource(f"random {shape}", directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _write_random(directory: Path, shape: dict[str, Any], dtype: str) -> None:
    settings = dict(shape)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(0)
    # Eight billion random numbers take a moment on a GPU, and minutes on a CPU.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    transformers_logging.disable_progress_bar()
    model.save_pretrained(directory)
    del model
    torch.cuda.empty_cache()  # cached memory counts as used; does nothing without a GPU

"""ModelSize: what a model weighs, what its KV takes, and how fast a machine would run it.

It is read from a local model's probe, or from the table of well-known models; `kvchat bench plan`
and `kvchat models fit` compute with it. Predictions are arithmetic on two measured rates.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from math import prod
from typing import Any

import torch

from kvchat.cache.planner import Planner, PrefillRate
from kvchat.core.config import CacheConfig
from kvchat.core.stats import num_like_first
from kvchat.engine.kv_storage import kv_windows
from kvchat.model.checkpoint.source import ModelSource
from kvchat.model.loader import inspect_model
from kvchat.model.spec import ModelSpec
from kvchat.model.state import state_bytes
from kvchat_kernels.kv_code import CODES

# Weights of the usual mixture for 4 bits, Q4_K_M, in bytes: 4.85 bits each.
Q4_BYTES = 4.85 / 8
# Of the measured rate of reading memory, what weights and KV are read at while decoding; and of the
# measured rate of a large product, what the products of a prompt reach: narrow matrices less. Held
# to three real models and one shape in three formats, on two cores of a Xeon with AMX.
_READING = 0.85
_PRODUCTS_BY_WIDTH = 1.6e-4
_MOST_PRODUCTS = 0.3


@dataclass(frozen=True, slots=True)
class AlikeLayers:
    """So many attention layers of one shape; `window` is what they keep at most, None for all."""

    count: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model's sizes, in bytes and numbers of weights.

    weight_bytes   of all weights in memory
    read_bytes     of the weights that one token reads
    body           weights that one token of a prompt is multiplied with
    width          of its hidden states
    layers         those that store KV
    pairs          multiply-adds of attention to one token before
    state          bytes of recurrent state of a context
    """

    name: str
    weight_bytes: int
    read_bytes: int
    body: int
    width: int
    layers: tuple[AlikeLayers, ...]
    pairs: int
    max_context: int
    state: int = 0
    command: str = ""

    def kv_bytes(self, num_tokens: int, code: str = "auto") -> int:
        """Return the bytes of a context's KV and state; `auto` is 16 bits a number."""
        total = self.state
        for layer in self.layers:
            kept = num_tokens if layer.window is None else min(num_tokens, layer.window)
            total += layer.count * kept * layer.num_kv_heads * _head_bytes(layer, code)
        return total

    @property
    def half_context(self) -> float:
        """The context after which a prompt's token takes twice as long."""
        return self.body / self.pairs if self.pairs else math.inf


def _head_bytes(layer: AlikeLayers, code: str) -> int:
    if code in CODES and CODES[code].takes(layer.key_dim, layer.value_dim):
        return CODES[code].num_bytes(layer.key_dim, layer.value_dim)
    return 2 * (layer.key_dim + layer.value_dim)


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """What a machine was measured at: bytes read a second, and FLOP a second of a large product."""

    read: float
    products: float

    def decode_rate(self, size: ModelSize, context: int, code: str = "auto") -> float:
        """Return the predicted tokens a second behind a context."""
        return _READING * self.read / (size.read_bytes + size.kv_bytes(context, code))

    def prefill_rate(self, size: ModelSize) -> float:
        """Return the predicted first tokens of a prompt a second."""
        share = min(_MOST_PRODUCTS, _PRODUCTS_BY_WIDTH * size.width)
        return share * self.products / (2 * size.body)

    def first_token_s(self, size: ModelSize, num_tokens: int, start: int = 0) -> float:
        """Return how long a prompt's tokens after `start` take."""
        return num_like_first(start, num_tokens, size.half_context) / self.prefill_rate(size)

    def planner(self, size: ModelSize) -> Planner:
        """Return a planner that knows how fast the model is computed."""
        prefill = PrefillRate(None, size.half_context)
        prefill.of_long = self.prefill_rate(size)
        return Planner(prefill)


# A model of this machine


def size_of(source: ModelSource) -> ModelSize:
    """Return the sizes of a local model; raises ModelError as `inspect_model` does.

    Raises ValueError for a model that the probe must load to know.
    """
    config, spec = inspect_model(source)
    if spec is None:
        raise ValueError("its layers are known only once its weights are loaded")
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    text = config.get_text_config()
    table = spec.vocab_size * int(text.hidden_size)
    if source.gguf is not None:
        counts = {name: prod(t.shape) for name, t in source.gguf.tensors.items()}
        sizes = {name: t.num_bytes for name, t in source.gguf.tensors.items()}
        used = _used_share(source.gguf.metadata)
        total = sum(sizes.values())
        is_tied = "output.weight" not in sizes
        outer = ("token_embd.weight", "output.weight")
        body = sum(_used(n, counts[n], used) for n in counts if n not in outer)
        read = sum(_used(n, sizes[n], used) for n in sizes)
        read -= 0 if is_tied else sizes.get(outer[0], 0)
    else:
        total = spec.num_parameters * dtype.itemsize
        is_tied = bool(getattr(text, "tie_word_embeddings", False))
        body = spec.num_parameters - table * (1 if is_tied else 2)
        read = total - (0 if is_tied else table * dtype.itemsize)
    pairs = sum(
        layer.num_heads * (layer.key_dim + layer.value_dim)
        for layer in spec.layers
        if layer.span.window is None and layer.span.chunk is None
    )
    return ModelSize(
        source.name,
        total,
        read,
        max(1, body),
        int(text.hidden_size),
        _alike(spec),
        pairs,
        spec.max_context,
        state_bytes(spec.state, dtype) if spec.state else 0,
    )


def _used_share(metadata: dict[str, Any]) -> float:
    """Return the share of a mixture's experts that a token uses; 1 for a dense model."""
    found = {key.rpartition(".")[2]: value for key, value in metadata.items() if "expert" in key}
    count = found.get("expert_count")
    return float(found.get("expert_used_count", count)) / count if count else 1.0


def _used(name: str, size: int, share: float) -> int:
    return int(size * share) if "_exps." in name else size


def _alike(spec: ModelSpec) -> tuple[AlikeLayers, ...]:
    windows = kv_windows(spec, CacheConfig())
    shapes = Counter(
        (
            layer.num_kv_heads,
            layer.key_dim,
            layer.value_dim,
            windows.num_tokens if windows is not None and index in windows.layers else None,
        )
        for index, layer in enumerate(spec.storing_layers)
    )
    return tuple(AlikeLayers(count, *shape) for shape, count in shapes.items())


# Well-known models


@cache
def known_models() -> tuple[ModelSize, ...]:
    """Return the table of well-known open models, with weights in 4 bits."""
    text = (resources.files("kvchat.engine") / "known_models.json").read_text(encoding="utf-8")
    return tuple(_known(entry) for entry in json.loads(text)["models"])


def known_model(name: str) -> ModelSize | None:
    """Return a model of the table by its name, in any case; None if it has none of that name."""
    return next((size for size in known_models() if size.name.lower() == name.lower()), None)


def _known(entry: dict[str, Any]) -> ModelSize:
    total = round(entry["params"] * 1e9)
    table = entry["vocab"] * entry["width"]
    active = round(entry.get("active", entry["params"]) * 1e9)
    tables = table if entry["tied"] else 2 * table
    weight = entry.get("weight_bytes", Q4_BYTES)
    head_count, (key, value) = entry["kv_heads"], entry["dims"]
    num_windows = entry.get("windows", 0)
    layers = [AlikeLayers(entry["layers"] - num_windows, head_count, key, value)]
    if num_windows:
        layers.append(AlikeLayers(num_windows, head_count, key, value, entry["window"]))
    return ModelSize(
        entry["name"],
        round(total * weight),
        round((active - (0 if entry["tied"] else table)) * weight),
        active - tables,
        entry["width"],
        tuple(layers),
        (entry["layers"] - num_windows) * entry["heads"] * (key + value),
        entry["context"],
        entry.get("state", 0),
        f"kvchat -m {entry['repo']}:Q4_K_M" if "repo" in entry else "",
    )


def with_weights_of(size: ModelSize, weight_bytes: float) -> ModelSize:
    """Return a model of the table with so many bytes a weight in place of those of 4 bits."""
    factor = weight_bytes / Q4_BYTES
    return replace(
        size,
        weight_bytes=round(size.weight_bytes * factor),
        read_bytes=round(size.read_bytes * factor),
    )


def contexts_of(size: ModelSize) -> Iterator[int]:
    """Yield the contexts for which a model's KV is told."""
    for context in (4096, 32768, 131072):
        if context <= size.max_context:
            yield context

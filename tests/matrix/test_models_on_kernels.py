"""Whole models whose attention goes through the Triton kernels compute what they do by themselves.

By the model floor's own self-test: chunks, decodes and a second sequence beside them, held to the
logits of transformers' eager attention.
"""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

import kvchat_kernels.paged_attention as paged_attention_package
from kvchat.core.config import CacheConfig
from kvchat.engine.kv_storage import kv_geometry, small_kv
from kvchat.model.self_test import (
    _LARGE_STEPS,
    _STEPS,
    _paged_logits,
    _random_ids,
    _similarity,
    compare_with_own,
)
from kvchat_kernels.coded_kv import CodedKv
from kvchat_kernels.paged_attention import Implementation
from support.fused_models import load_fused, load_plain
from support.gpu_packs import load_packed_as_on_gpu
from support.interpreter import Interpreter
from support.matrix import spread
from support.private_tables import check_private_table
from support.specimens import make_specimen


def similarity_on_kernels(name: str, directory: Path) -> tuple[float, int]:
    """Return the worst row's cosine similarity, and how often a layer's attention was chosen."""
    layers = []

    def choose(*layer: object) -> Implementation:
        layers.append(layer)
        return Implementation("triton")

    as_chosen = paged_attention_package.implementation_for
    paged_attention_package.implementation_for = choose
    try:
        # Not by the compiled step of a CPU, which has an attention of its own.
        return compare_with_own(make_specimen(name, directory).loaded, compiled=False), len(layers)
    finally:
        paged_attention_package.implementation_for = as_chosen


def packed_on_kernels(
    directory: Path, name: str, weights: str, num_layers: int
) -> tuple[float, int]:
    """Return the similarity of paged and own logits, and how many products kernels computed."""
    calls: list[int] = []

    def take_kernels(device: object, impl: str) -> bool:
        calls.append(1)
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvchat_kernels.linear.block_linear.uses_triton", take_kernels)
        patch.setattr("kvchat_kernels.experts.uses_triton", take_kernels)
        loaded = load_packed_as_on_gpu(
            directory, name, weights, patch, num_hidden_layers=num_layers
        )
        return compare_with_own(loaded), len(calls)


def similarity_over_int8_on_kernels(
    name: str, directory: Path, is_fused: bool
) -> tuple[float, int]:
    """Return how alike logits over KV of 8 bits are, of kernels and of torch, and the launches."""
    launches: list[int] = []
    load = load_fused if is_fused else load_plain
    loaded = load(directory, name, "float32")
    geometry = kv_geometry(loaded.spec, CacheConfig(kv_dtype="int8"), loaded.dtype)
    new_kv = partial(small_kv, geometry, loaded.device)
    ids = _random_ids(loaded)
    with loaded.fusing.paused() if loaded.fusing is not None else nullcontext():
        by_torch = _paged_logits(loaded, *ids, new_kv=new_kv)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CodedKv, "_runs_kernels", lambda kv, query: not launches.append(1))
        patch.setattr("kvchat_kernels.coded_kv_write.uses_triton", lambda device, impl: True)
        return _similarity(loaded, by_torch, _paged_logits(loaded, *ids, new_kv=new_kv)), len(
            launches
        )


def private_table_on_kernels(name: str, directory: Path) -> int:
    """Check a model over a private table; return how often a layer's attention was chosen."""
    layers: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            paged_attention_package,
            "implementation_for",
            lambda *layer: layers.append(layer) or Implementation("triton"),
        )
        check_private_table(name, directory, by_modules=True)
    return len(layers)


# Each takes seconds, and what it runs has tests of its own.
LONG = [pytest.param(name, marks=pytest.mark.soak) for name in ("llama", "gemma2, softcap")]


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", ["gpt_oss, sinks", *LONG])
def test_logits_are_those_of_the_models_own_attention(name, interpreter, tmp_path):
    similarity, calls = interpreter(similarity_on_kernels, name, tmp_path)

    assert similarity > 0.9999
    assert calls == 2 * len(_LARGE_STEPS), "some layer's attention ran otherwise"


@pytest.mark.parametrize("name", spread(["llama4, chunks", "gemma2, softcap"]))
def test_logits_over_a_private_table_are_those_of_a_cache_without_the_dropped_tokens(
    name: str, interpreter: Interpreter, tmp_path: Path
) -> None:
    assert interpreter(private_table_on_kernels, name, tmp_path) == 2 * 5


@pytest.mark.matrix(5)
@pytest.mark.parametrize("weights", ["int4", pytest.param("int8", marks=pytest.mark.soak)])
def test_a_packed_model_runs_on_the_kernels_of_its_products(weights, interpreter, tmp_path):
    similarity, calls = interpreter(packed_on_kernels, tmp_path, "llama", weights, 2)

    assert similarity > 0.9999
    assert calls > 50


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.soak)])
def test_a_packed_mixture_runs_on_the_kernels_of_its_experts(name, interpreter, tmp_path):
    similarity, calls = interpreter(packed_on_kernels, tmp_path, name, "int4", 1)

    assert similarity > 0.9999
    assert calls > 5 * len(_STEPS)


@pytest.mark.matrix(7)
@pytest.mark.parametrize(
    ("name", "is_fused"),
    [("llama", True), pytest.param("gemma2, softcap", False, marks=pytest.mark.soak)],
)
def test_a_model_over_kv_of_8_bits_runs_on_its_kernels(name, is_fused, interpreter, tmp_path):
    """Fused layers, the write in 8 bits and attention over it, beside the modules over the same."""
    similarity, launches = interpreter(similarity_over_int8_on_kernels, name, tmp_path, is_fused)

    assert similarity > 0.9999
    assert launches >= 2 * len(_STEPS)

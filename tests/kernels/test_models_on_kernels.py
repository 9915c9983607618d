"""Whole models whose attention goes through the Triton kernels compute what they do by themselves.

By the model floor's own self-test: chunks, decodes and a second sequence beside them, held to the
logits of transformers' eager attention.
"""

from pathlib import Path

import pytest
from interpreter import Interpreter

import kvchat_kernels.paged_attention as paged_attention_package
from kvchat.model.self_test import compare_with_own
from kvchat_kernels.paged_attention import Implementation
from support.gpu_packs import load_packed_as_on_gpu
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
        return compare_with_own(make_specimen(name, directory).loaded), len(layers)
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


LONG = [pytest.param(name, marks=pytest.mark.soak) for name in ("llama", "gemma2, softcap")]


@pytest.mark.parametrize("name", ["gpt_oss, sinks", *LONG])
def test_logits_are_those_of_the_models_own_attention(
    name: str, interpreter: Interpreter, tmp_path: Path
) -> None:
    similarity, calls = interpreter(similarity_on_kernels, name, tmp_path)

    assert similarity > 0.9999
    assert calls >= 2 * 7, "some layer's attention ran otherwise"


@pytest.mark.parametrize("weights", ["int4", pytest.param("int8", marks=pytest.mark.soak)])
def test_a_packed_model_runs_on_the_kernels_of_its_products(
    weights: str, interpreter: Interpreter, tmp_path: Path
) -> None:
    similarity, calls = interpreter(packed_on_kernels, tmp_path, "llama", weights, 2)

    assert similarity > 0.9999
    assert calls > 50


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.soak)])
def test_a_packed_mixture_runs_on_the_kernels_of_its_experts(
    name: str, interpreter: Interpreter, tmp_path: Path
) -> None:
    similarity, calls = interpreter(packed_on_kernels, tmp_path, name, "int4", 1)

    assert similarity > 0.9999
    assert calls > 30

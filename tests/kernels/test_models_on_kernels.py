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


LONG = [pytest.param(name, marks=pytest.mark.soak) for name in ("llama", "gemma2, softcap")]


@pytest.mark.parametrize("name", ["gpt_oss, sinks", *LONG])
def test_logits_are_those_of_the_models_own_attention(
    name: str, interpreter: Interpreter, tmp_path: Path
) -> None:
    similarity, calls = interpreter(similarity_on_kernels, name, tmp_path)

    assert similarity > 0.9999
    assert calls >= 2 * 7, "some layer's attention ran otherwise"

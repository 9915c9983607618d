"""The attention implementation of each layer by device, and its description."""

from dataclasses import replace

import pytest
import torch

from kvchat.model.spec import LayerSpec, ModelSpec, attention_in_words, slow_attention
from kvchat_kernels.paged_attention import FULL, Implementation, LayerShape, implementation_for
from kvchat_kernels.paged_attention.tiles import Card, unsupported

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LAYER = LayerSpec("attention", 8, 2, 128, 128, FULL, False, False, 0, True)
WIDE = replace(LAYER, key_dim=576)
CARD = Card(132, 99 << 10)


def spec_of(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec("X", "x", layers, vocab_size=9, max_context=99, num_parameters=1)


def as_on_a_gpu(device: torch.device, shape: LayerShape) -> Implementation:
    refusal = unsupported(shape, CARD)
    return Implementation("triton" if refusal is None else "reference", refusal)


def test_a_cpu_runs_torchs_own() -> None:
    words = attention_in_words(spec_of(LAYER, WIDE), CPU, torch.bfloat16)

    assert words == "compiled code"


def test_a_device_without_kernels_says_so() -> None:
    words = attention_in_words(spec_of(LAYER), torch.device("mps"), torch.float16)

    assert words == "torch (there are no kernels for mps)"


def test_layers_that_no_kernel_fits_are_counted_with_the_reason() -> None:
    spec = spec_of(LAYER, WIDE, LAYER)

    assert attention_in_words(spec_of(LAYER), CUDA, torch.bfloat16, as_on_a_gpu) == "Triton kernels"
    assert attention_in_words(spec, CUDA, torch.bfloat16, as_on_a_gpu) == (
        "2 layers: Triton kernels; 1 layer: torch (head dim 576 is over 512)"
    )


def test_a_gpu_that_runs_a_layer_without_kernels_tells_the_user_once() -> None:
    spec = spec_of(LAYER, WIDE, WIDE)

    assert slow_attention(spec_of(LAYER), CUDA, torch.bfloat16, as_on_a_gpu) == ()
    assert slow_attention(spec, CPU, torch.bfloat16, as_on_a_gpu) == ()
    assert slow_attention(spec, CUDA, torch.bfloat16, as_on_a_gpu) == (
        "Attention runs in plain torch, which is slow: head dim 576 is over 512.",
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_cuda_device_runs_the_kernels_where_they_fit() -> None:
    assert implementation_for(CUDA, LAYER.shape(torch.bfloat16)).name == "triton"
    assert implementation_for(CUDA, WIDE.shape(torch.bfloat16)).name == "reference"

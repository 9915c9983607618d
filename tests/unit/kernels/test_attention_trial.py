"""A layer's attention tiles run once on the GPU before a model depends on them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from kvchat_kernels.kv_code import INT8, K8V4
from kvchat_kernels.launch import Launch
from kvchat_kernels.paged_attention import Implementation, LayerShape, choice, implementation_for
from kvchat_kernels.paged_attention.tiles import Card
from kvchat_kernels.paged_attention.trial import trial_error
from support.interpreter import Interpreter
from support.matrix import spread

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = LayerShape(4, 2, 20, 12, torch.float32)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A CUDA device that is not there, with the shared memory of an RTX 3060."""
    card = Card(28, 99 << 10)
    monkeypatch.setattr(choice, "kernel_refusal", lambda device: None)
    monkeypatch.setattr("kvchat_kernels.paged_attention.triton_gpu.card_of", lambda device: card)
    implementation_for.cache_clear()
    yield CUDA
    implementation_for.cache_clear()


@pytest.mark.parametrize(
    "shape",
    spread(
        [SHAPE, LayerShape(7, 1, 64, 64, torch.float16), LayerShape(2, 2, 512, 512, torch.float16)],
        [SHAPE],
    ),
)
def test_tiles_that_are_right_pass(shape: LayerShape, interpreter: Interpreter) -> None:
    assert interpreter(trial_error, CPU, shape) is None


def test_a_tile_that_is_too_large_for_a_gpu_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton raises no RuntimeError then, and loading a model died."""

    def refuse(launch: Launch) -> None:
        raise OutOfResources(104448, 101376, "shared memory")

    monkeypatch.setattr(Launch, "run", refuse)

    assert trial_error(CPU, SHAPE) == (
        "the attention kernels do not run here: out of resource: shared memory, "
        "Required: 104448, Hardware limit: 101376. Reducing block sizes or `num_stages` may help"
    )


def test_kernels_that_leave_rows_unwritten_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launch, "run", lambda launch: None)

    assert trial_error(CPU, SHAPE) == "the attention kernels compute wrong results here"


def test_a_layer_whose_trial_fails_runs_torch_and_is_tried_once(monkeypatch, gpu):
    tried = []
    monkeypatch.setattr(
        "kvchat_kernels.paged_attention.trial.trial_error",
        lambda device, shape: tried.append(shape) or "too large",
    )

    chosen = [implementation_for(gpu, SHAPE) for _ in range(2)]

    assert chosen == [Implementation("reference", "too large")] * 2
    assert tried == [SHAPE]


def test_a_layer_whose_trial_succeeds_runs_kernels(monkeypatch, gpu):
    monkeypatch.setattr(
        "kvchat_kernels.paged_attention.trial.trial_error", lambda device, shape: None
    )

    assert implementation_for(gpu, SHAPE) == Implementation("triton")


@pytest.mark.parametrize(
    "shape",
    spread(
        [replace(SHAPE, code=INT8), LayerShape(4, 2, 64, 32, torch.float16, K8V4)],
        [replace(SHAPE, code=INT8)],
    ),
)
def test_tiles_over_few_bits_that_are_right_pass(shape, interpreter):
    assert interpreter(trial_error, CPU, shape) is None

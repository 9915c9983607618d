"""Kernels run on devices that pass the smoke test, and elsewhere only if `impl` forces it."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from kvchat_kernels.launch import (
    evenly_spaced,
    kernel_refusal,
    next_power_of_2,
    row_stride,
    uses_triton,
)
from kvchat_kernels.smoke_test import smoke_test_error
from support.interpreter import Interpreter

CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A CUDA device that is not there, of compute capability 9.0."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    kernel_refusal.cache_clear()
    yield torch.device("cuda")
    kernel_refusal.cache_clear()


def test_tensors_on_a_cpu_go_to_torch_unless_told_otherwise() -> None:
    assert not uses_triton(CPU, "auto")
    assert not uses_triton(CPU, "reference")
    assert uses_triton(CPU, "triton")


def test_an_implementation_there_is_not_is_refused() -> None:
    with pytest.raises(AssertionError, match="fast"):
        uses_triton(CPU, "fast")


def test_a_kernel_that_runs_is_no_reason_against_kernels(interpreter: Interpreter) -> None:
    assert interpreter(smoke_test_error, CPU) is None


def test_where_triton_finds_no_device_it_says_why() -> None:
    """The compiling process has a kernel, and nothing to run it on."""
    reason = smoke_test_error(CPU)

    assert reason is not None
    assert reason.startswith("Triton does not work here: ")
    assert "\n" not in reason


def test_a_gpu_on_which_the_smoke_test_fails_gets_torch(monkeypatch, gpu):
    """A machine without a C compiler may have a GPU and Triton: kvchat must run there, too."""
    tested = []
    monkeypatch.setattr(
        "kvchat_kernels.smoke_test.smoke_test_error",
        lambda device: tested.append(device) or "no compiler",
    )

    assert not uses_triton(gpu, "auto")
    assert kernel_refusal(gpu) == "no compiler"
    assert tested == [gpu], "tried once, and remembered"


def test_a_gpu_on_which_the_smoke_test_succeeds_gets_kernels(monkeypatch, gpu):
    monkeypatch.setattr("kvchat_kernels.smoke_test.smoke_test_error", lambda device: None)

    assert uses_triton(gpu, "auto")
    assert not uses_triton(gpu, "reference")


def test_an_old_gpu_gets_torch(monkeypatch: pytest.MonkeyPatch, gpu: torch.device) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))

    assert not uses_triton(gpu, "auto")


def test_powers_of_two() -> None:
    assert [next_power_of_2(n) for n in (0, 1, 2, 3, 8, 9, 4097)] == [1, 1, 2, 4, 8, 16, 8192]


@pytest.mark.parametrize(
    "rows",
    [
        torch.zeros(2, 3, 10),
        torch.zeros(2, 3, 10)[..., :4],
        torch.zeros(2, 4, 10)[:, ::2],
        torch.zeros(1, 3, 10).transpose(0, 1),
        torch.zeros(2, 1, 10)[:, :, 2:3],
        torch.zeros(10),
        torch.zeros(0, 4),
        torch.zeros(2, 5, 1, 8)[:, :, 0],
    ],
    ids=lambda rows: f"{tuple(rows.shape)} {rows.stride()}",
)
def test_rows_that_are_evenly_spaced_are_taken_as_they_are(rows: torch.Tensor) -> None:
    assert evenly_spaced(rows) is rows
    size = rows.shape[-1]
    places = [
        (torch.tensor(index) * torch.tensor(rows.stride()[:-1])).sum().item()
        for index in product(*(range(length) for length in rows.shape[:-1]))
    ]
    assert places == [number * row_stride(rows) for number in range(rows.numel() // size)]


@pytest.mark.parametrize(
    "rows",
    [
        torch.randn(2, 3, 10)[:, :2],
        torch.randn(3, 2, 10).transpose(0, 1),
        torch.randn(4, 10)[:, ::2],
        torch.randn(10, 4).T,
    ],
    ids=lambda rows: f"{tuple(rows.shape)} {rows.stride()}",
)
def test_rows_that_are_not_are_copied(rows: torch.Tensor) -> None:
    even = evenly_spaced(rows)

    assert even.is_contiguous()
    assert torch.equal(even, rows)
    assert row_stride(even) == rows.shape[-1]

"""Launches by Triton's own launcher, with a driver that loads and runs nothing.

`support/compiling.py` derives types and constants by itself. Here Triton does: it makes a key of
all arguments, which has to tell one `Form` of weights from another, and compiles once a key.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

from kvchat_kernels.experts_kernels import one_row_of_experts_kernel, product_launch
from kvchat_kernels.launch import Launch
from kvchat_kernels.linear.kernel import (
    block_linear_launch,
    few_rows_kernel,
    one_row_kernel,
    unpack_kernel,
    unpack_launch,
)
from support.block_linear_checks import KINDS, Kind, random_blocks
from support.compiling import HOPPER


class IdleDriver(DriverBase):
    """Says that there is a Hopper; notes the kernels that are loaded, and those that are run."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.ran: list[str] = []
        self.utils = self
        self.launcher_cls = self._launcher

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", HOPPER.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_benchmarker(self) -> None:
        return None

    def map_python_to_cpp_type(self, name: str) -> str:
        return name

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": HOPPER.shared_bytes}

    def load_binary(self, name: str, *_: Any) -> tuple[int, int, int, int, int]:
        self.loaded.append(name)
        return 1, 1, 32, 0, 1024  # module, function, registers, spills, threads of a program

    def _launcher(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: self.ran.append(source.name)


KERNELS = (one_row_kernel, few_rows_kernel, unpack_kernel, one_row_of_experts_kernel)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[IdleDriver]:
    made = IdleDriver()
    monkeypatch.setattr(driver, "_active", made)
    yield made
    for kernel in KERNELS:  # what this driver has loaded is no code of a GPU's
        kernel.device_caches.clear()


def launches(kind: Kind) -> list[Launch]:
    weights, rows = random_blocks((64, 256), kind, "cpu"), torch.randn(2, 256).bfloat16()
    out, chosen = torch.empty(2, 64).bfloat16(), torch.tensor([[0, 1]])
    return [
        block_linear_launch(rows[:1], weights, None, out[:1]),
        block_linear_launch(rows, weights, None, out),
        unpack_launch(weights, torch.empty(64, 256).bfloat16()),
        product_launch(rows[:1], chosen, None, weights, 2, out[:, :32]),
    ]


def test_one_kernel_is_compiled_for_each_form_of_weights(idle: IdleDriver) -> None:
    kinds = KINDS[0], KINDS[9]
    for kind in kinds:
        for _ in range(2):
            for launch in launches(kind):
                launch.run()

    names = [kernel.fn.__name__ for kernel in KERNELS]
    assert idle.ran == 2 * len(kinds) * names
    assert idle.loaded == len(kinds) * names

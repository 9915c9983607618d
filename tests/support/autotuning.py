"""Autotuning without a device: a clock that products put forward, products at a price."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import linear

from kvchat.model.gpu.fused_parts import LinearShape, Operands
from kvchat.model.gpu.gemm_autotune import ROW_BUCKETS, GemmAutotuner, LinearFunction, Pass
from kvchat_kernels.skinny_linear import skinny_linear

Cost = Callable[[int, torch.Tensor], float]


@dataclass
class VirtualStopwatch:
    """A stopwatch for passes whose products `spend` the time they are said to take."""

    spent_s: float = 0.0
    num_timed: int = 0

    def now_s(self) -> float:
        return self.spent_s

    def spend(self, seconds: float) -> None:
        self.spent_s += seconds

    def times_s(self, passes: Sequence[Pass], num_repeats: int) -> list[list[float]]:
        self.num_timed += 1
        times: list[list[float]] = [[] for _ in passes]
        for _ in range(num_repeats):
            for run, own in zip(passes, times, strict=True):
                start_s = self.spent_s
                run()
                own.append(self.spent_s - start_s)
        return times


@dataclass
class TimedProduct:
    """torch's product at a price of `cost(num_rows, weight)` seconds, with what it was run on."""

    stopwatch: VirtualStopwatch
    cost: Cost
    product: LinearFunction = linear
    seen: list[tuple[int, int]] = field(default_factory=list)

    def __call__(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        self.stopwatch.spend(self.cost(len(rows), weight))
        self.seen.append((len(rows), weight.data_ptr()))
        return self.product(rows, weight, bias)


def layers_of(
    *sizes: tuple[int, int],
    num_layers: int = 2,
    dtype: torch.dtype = torch.float32,
    has_bias: bool = False,
) -> dict[LinearShape, list[Operands]]:
    """Return layers of (out_features, in_features), by shape."""
    generator = torch.Generator().manual_seed(0)
    made: dict[LinearShape, list[Operands]] = {}
    for out_size, in_size in sizes:
        for _ in range(num_layers):
            weight = torch.randn(out_size, in_size, generator=generator).to(dtype)
            bias = torch.randn(out_size, generator=generator).to(dtype) if has_bias else None
            layer = Operands(weight, bias)
            made.setdefault(layer.shape, []).append(layer)
    return made


class NoRun:
    """A stopwatch that runs no pass and says that the second was the faster."""

    def now_s(self) -> float:
        return 0.0

    def times_s(self, passes: Sequence[Pass], num_repeats: int) -> list[list[float]]:
        return [[2.0], [1.0]]


def check_triton_kernel_agrees(sizes: tuple[int, int], dtype: torch.dtype, has_bias: bool) -> None:
    """Autotuning finds the Triton kernel's numbers to be torch's, for every bucket."""

    def kernel(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return skinny_linear(rows, weight, bias, impl="triton")

    layers = layers_of(sizes, dtype=dtype, has_bias=has_bias)
    outcomes = GemmAutotuner(NoRun(), kernel).run(layers, {})

    assert len(outcomes) == len(ROW_BUCKETS)
    for (shape, num_rows), outcome in outcomes.items():
        assert outcome.is_faster, f"{shape}, {num_rows} rows: {outcome.refusal}"

"""The race: for which linear layers of few rows kvchat's kernel is faster than torch's product.

Runs both over a model's own weights, compares what they return, and keeps the times. Knows rules
and buckets of rows; what stops the time is given. Knows no model and keeps nothing between runs.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import Protocol

import torch
from torch.nn.functional import linear

_log = logging.getLogger(__name__)

# A number of rows has the outcome of the smallest of these that holds it.
ROW_BUCKETS = (1, 2, 4, 8, 16)
# Below this times are as good as equal, and torch's own product is the one that many have tried.
_MIN_GAIN = 1.03
_NUM_REPEATS = 25
_BUDGET_S = 2.0
# Compiling has a budget of its own: it is done once, and would leave no time to race in.
_LIMIT_S = 10.0
# A pass reads as much, where a model has as much: more than any GPU's cache holds twice over.
_PASS_BYTES = 256 << 20
_MAX_PRODUCTS = 32
# How far two right results may be apart, as a share of an output and of the outputs' usual size.
# Both round once; torch may round the parts of a sum as well.
_SLACK = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 0.016}

LinearFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Pass = Callable[[], torch.Tensor]


class Stopwatch(Protocol):
    """What stops the time on the device that weights lie on."""

    def now_s(self) -> float:
        """Return seconds of a clock that goes on whatever the device does."""
        ...

    def times_s(self, passes: Sequence[Pass], num_repeats: int) -> list[list[float]]:
        """Run the passes in turn, all of them `num_repeats` times; return each one's times.

        A pass may be run more often, and first without its time being taken.
        """
        ...


@dataclass(frozen=True, slots=True)
class LinearShape:
    """What layers have in common that take the same time."""

    out_features: int
    in_features: int
    dtype: str
    has_bias: bool

    def __str__(self) -> str:
        bias = " with bias" if self.has_bias else ""
        return f"{self.out_features}x{self.in_features} {self.dtype}{bias}"


@dataclass(frozen=True, slots=True)
class Operands:
    """A layer's weight [out_features, in_features], and bias [out_features] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def shape(self) -> LinearShape:
        dtype = str(self.weight.dtype).removeprefix("torch.")
        out_features, in_features = self.weight.shape
        return LinearShape(out_features, in_features, dtype, self.bias is not None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds per product of either; or why kvchat's kernel was left out, and then no times."""

    torch_s: float = 0.0
    kernel_s: float = 0.0
    refusal: str = ""

    @property
    def is_won(self) -> bool:
        """Whether the kernel is to be used."""
        return not self.refusal and self.kernel_s * _MIN_GAIN <= self.torch_s


# By shape and bucket of rows; what is missing has not been raced.
Outcomes = Mapping[tuple[LinearShape, int], Outcome]


def rows_won(outcomes: Outcomes, shape: LinearShape) -> frozenset[int]:
    """Return for which numbers of rows layers of a shape are to take the kernel."""
    return frozenset(
        num_rows
        for num_rows in range(1, ROW_BUCKETS[-1] + 1)
        if (found := outcomes.get((shape, bucket_of(num_rows)))) is not None and found.is_won
    )


def bucket_of(num_rows: int) -> int:
    """Return the bucket for 1 to 16 rows."""
    return next(bucket for bucket in ROW_BUCKETS if num_rows <= bucket)


class LinearRace:
    """Races `kernel` against `own`, torch's product, for about `budget_s` seconds at the most.

    Proving that both compute the same, which compiles what was never run before, is not counted,
    but with it no more than `limit_s` go by. No shape is begun once either is over; what was begun
    is ended.
    """

    def __init__(
        self,
        stopwatch: Stopwatch,
        kernel: LinearFunction,
        own: LinearFunction = linear,
        budget_s: float = _BUDGET_S,
        limit_s: float = _LIMIT_S,
    ) -> None:
        self._stopwatch = stopwatch
        self._kernel = kernel
        self._own = own
        self._budget_s = budget_s
        self._limit_s = limit_s
        self._proving_s = 0.0

    @torch.inference_mode()
    def run(
        self, layers: Mapping[LinearShape, Sequence[Operands]], known: Outcomes
    ) -> dict[tuple[LinearShape, int], Outcome]:
        """Return what is known, and the outcome of whatever there was time to race beside.

        A single row and the largest shapes come first: that is where a decode spends its time.
        Never raises for what a product does.
        """
        began_s, self._proving_s = self._stopwatch.now_s(), 0.0
        outcomes, refusals = dict(known), list[str]()
        shapes = sorted(layers, key=lambda s: s.out_features * s.in_features, reverse=True)
        for num_rows in ROW_BUCKETS:
            for shape in shapes:
                if (shape, num_rows) in outcomes:
                    continue
                if self._is_over(began_s):
                    _log.info("no time was left to race %s of %d rows", shape, num_rows)
                    return _telling(outcomes, refusals)
                outcome = self._outcome(layers[shape], num_rows)
                if outcome is None:
                    continue
                outcomes[shape, num_rows] = outcome
                if outcome.refusal:
                    refusals.append(f"{shape}, {num_rows} rows: {outcome.refusal}")
        return _telling(outcomes, refusals)

    def _is_over(self, began_s: float) -> bool:
        seconds = self._stopwatch.now_s() - began_s
        return seconds >= self._limit_s or seconds - self._proving_s >= self._budget_s

    def _outcome(self, layers: Sequence[Operands], num_rows: int) -> Outcome | None:
        """Return one outcome; None where there was no memory to find it out in."""
        try:
            rows = _random_rows(num_rows, layers[0].weight)
            chosen = _rotation(layers)
            if not self._all_agree(rows, chosen):
                return Outcome(refusal="it computes other numbers than torch")
            passes = [partial(_run, product, rows, chosen) for product in (self._own, self._kernel)]
            own, kernel = self._stopwatch.times_s(passes, _NUM_REPEATS)
            return Outcome(median(own) / len(chosen), median(kernel) / len(chosen))
        except torch.OutOfMemoryError:
            return None
        except Exception as error:  # a compiler or a driver may fail with anything
            lines = str(error).strip().splitlines() or [""]
            return Outcome(refusal=f"{type(error).__name__}: {lines[0][:120]}")

    def _all_agree(self, rows: torch.Tensor, layers: Sequence[Operands]) -> bool:
        began_s = self._stopwatch.now_s()
        try:
            return all(self._agree(rows, layer) for layer in _distinct(layers))
        finally:
            self._proving_s += self._stopwatch.now_s() - began_s

    def _agree(self, rows: torch.Tensor, layer: Operands) -> bool:
        """Tell whether both give the same numbers, every single one of them."""
        expected = self._own(rows, layer.weight, layer.bias).float()
        found = self._kernel(rows, layer.weight, layer.bias)
        if found.dtype != rows.dtype or found.shape != expected.shape:
            return False
        usual = expected.square().mean(dim=-1, keepdim=True).sqrt()
        allowed = _SLACK[rows.dtype] * (expected.abs() + usual)
        # Not the other way round: a difference that is no number is none that is allowed.
        return bool(((found.float() - expected).abs() <= allowed).all())


def _run(product: LinearFunction, rows: torch.Tensor, layers: Sequence[Operands]) -> torch.Tensor:
    out = rows
    for layer in layers:
        out = product(rows, layer.weight, layer.bias)
    return out


def _rotation(layers: Sequence[Operands]) -> list[Operands]:
    """Return the layers that a pass runs through, over and over where there are few."""
    wanted = -(-_PASS_BYTES // max(1, layers[0].weight.nbytes))
    return list(islice(cycle(layers), max(1, min(wanted, _MAX_PRODUCTS))))


def _distinct(layers: Iterable[Operands]) -> Iterable[Operands]:
    return {id(layer): layer for layer in layers}.values()


def _random_rows(num_rows: int, weight: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, weight.shape[1], generator=generator)
    return rows.to(weight.device, weight.dtype)


def _telling(
    outcomes: dict[tuple[LinearShape, int], Outcome], refusals: Sequence[str]
) -> dict[tuple[LinearShape, int], Outcome]:
    """Say once why the kernel is not used where it could not be; return the outcomes."""
    if refusals:
        more = f", and {len(refusals) - 1} more" if len(refusals) > 1 else ""
        _log.warning("torch's own product is used for %s%s", refusals[0], more)
    return outcomes

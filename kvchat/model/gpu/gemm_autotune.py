"""GEMM autotuning: chooses kvchat's kernel or torch's for linear layers with few input rows.

At load it runs both on the model's own weights, compares the results and times them, for every
shape and bucket of rows without a stored timing on this machine. On CUDA it times captured graphs,
as a decode step runs them. Timings are stored in the user's state directory; an unreadable file or
an impossible value counts as no timing. The choice is made once and depends only on shape and
number of rows, so that later graph captures contain the same kernels.
"""

import logging
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Protocol

import torch
from torch.nn.functional import linear

from kvchat import __version__
from kvchat.core.paths import read_state, write_state
from kvchat.model.device import device_name
from kvchat.model.gpu.cuda_graph import CudaGraphs
from kvchat.model.gpu.fused_parts import LinearShape, MergedProduct, Operands, few_rows_linear
from kvchat.model.loader import LoadedModel
from kvchat_kernels.launch import kernel_refusal

_log = logging.getLogger(__name__)

# A number of rows uses the outcome of the smallest bucket that is not below it.
ROW_BUCKETS = (1, 2, 4, 8, 16)
# Below this speedup the times count as equal, and torch's kernel is better tested.
_MIN_GAIN = 1.03
_NUM_REPEATS = 25
_BUDGET_S = 2.0
# The limit with compilation, which happens once and could use up the whole measuring budget.
_LIMIT_S = 10.0
# The bytes of weights that a pass reads, if the model has as many: over twice any GPU's cache.
_PASS_BYTES = 256 << 20
_MAX_PRODUCTS = 32
# The allowed difference, relative to |output| + the row's root mean square. Both kernels round
# once; torch may also round partial sums.
_SLACK = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 0.016}

LinearFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Pass = Callable[[], torch.Tensor]


class Stopwatch(Protocol):
    """Measures time on the device that holds the weights."""

    def now_s(self) -> float:
        """Return the host's monotonic time in seconds."""
        ...

    def times_s(self, passes: Sequence[Pass], num_repeats: int) -> list[list[float]]:
        """Run the passes in turn, `num_repeats` times each; return the seconds, pass by pass.

        May run passes more often, for example untimed warm-up runs.
        """
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds per product of both kernels; or the reason why kvchat's was refused, untimed."""

    torch_s: float = 0.0
    kernel_s: float = 0.0
    refusal: str = ""

    @property
    def is_faster(self) -> bool:
        """Whether to use kvchat's kernel."""
        return not self.refusal and self.kernel_s * _MIN_GAIN <= self.torch_s


# By (shape, bucket of rows); a missing key was not timed.
Outcomes = Mapping[tuple[LinearShape, int], Outcome]


def rows_for_kernel(outcomes: Outcomes, shape: LinearShape) -> frozenset[int]:
    """Return the numbers of rows for which layers of this shape use kvchat's kernel."""
    return frozenset(
        num_rows
        for num_rows in range(1, ROW_BUCKETS[-1] + 1)
        if (found := outcomes.get((shape, bucket_of(num_rows)))) is not None and found.is_faster
    )


def bucket_of(num_rows: int) -> int:
    """Return the bucket of `num_rows`, 1 to 16."""
    return next(bucket for bucket in ROW_BUCKETS if num_rows <= bucket)


class GemmAutotuner:
    """Compares and times `kernel` (kvchat's) and `own` (torch's product).

    Timing takes about `budget_s` seconds at most. The comparison, which also compiles, does not
    count towards it. Everything together is limited to about `limit_s` seconds. After either limit
    no new shape is started; the current one is finished.
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
        self._checking_s = 0.0

    @torch.inference_mode()
    def run(
        self, layers: Mapping[LinearShape, Sequence[Operands]], known: Outcomes
    ) -> dict[tuple[LinearShape, int], Outcome]:
        """Return `known` and the new outcomes that the time limits allowed.

        Measures single rows and the largest shapes first, because a decode spends most time there.
        Errors of a kernel do not raise; they become a refusal.
        """
        began_s, self._checking_s = self._stopwatch.now_s(), 0.0
        outcomes, refusals = dict(known), list[str]()
        shapes = sorted(layers, key=lambda s: s.out_features * s.in_features, reverse=True)
        for num_rows in ROW_BUCKETS:
            for shape in shapes:
                if (shape, num_rows) in outcomes:
                    continue
                if self._is_over(began_s):
                    _log.info("autotuning hit its time limit before %s, %d rows", shape, num_rows)
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
        return seconds >= self._limit_s or seconds - self._checking_s >= self._budget_s

    def _outcome(self, layers: Sequence[Operands], num_rows: int) -> Outcome | None:
        """Return the outcome for one shape and bucket; None if memory was too small to measure."""
        try:
            rows = _random_rows(num_rows, layers[0].weight)
            chosen = _rotation(layers)
            if not self._all_agree(rows, chosen):
                return Outcome(refusal="it computes other results than torch")
            passes = [partial(_run, product, rows, chosen) for product in (self._own, self._kernel)]
            own, kernel = self._stopwatch.times_s(passes, _NUM_REPEATS)
            return Outcome(median(own) / len(chosen), median(kernel) / len(chosen))
        except torch.OutOfMemoryError:
            return None
        except Exception as error:  # compilers and drivers raise any type
            lines = str(error).strip().splitlines() or [""]
            return Outcome(refusal=f"{type(error).__name__}: {lines[0][:120]}")

    def _all_agree(self, rows: torch.Tensor, layers: Sequence[Operands]) -> bool:
        began_s = self._stopwatch.now_s()
        try:
            return all(self._agree(rows, layer) for layer in _distinct(layers))
        finally:
            self._checking_s += self._stopwatch.now_s() - began_s

    def _agree(self, rows: torch.Tensor, layer: Operands) -> bool:
        """Return whether every element of both results agrees within `_SLACK`."""
        expected = self._own(rows, layer.weight, layer.bias).float()
        found = self._kernel(rows, layer.weight, layer.bias)
        if found.dtype != rows.dtype or found.shape != expected.shape:
            return False
        usual = expected.square().mean(dim=-1, keepdim=True).sqrt()
        allowed = _SLACK[rows.dtype] * (expected.abs() + usual)
        # `all(... <= ...)` and not `any(... > ...)`, so that a NaN counts as a difference.
        return bool(((found.float() - expected).abs() <= allowed).all())


def _run(product: LinearFunction, rows: torch.Tensor, layers: Sequence[Operands]) -> torch.Tensor:
    out = rows
    for layer in layers:
        out = product(rows, layer.weight, layer.bias)
    return out


def _rotation(layers: Sequence[Operands]) -> list[Operands]:
    """Return the layers of one pass; a few layers repeat until `_PASS_BYTES` are read."""
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
    """Log the refusals in one warning; return the outcomes."""
    if refusals:
        more = f", and {len(refusals) - 1} more" if len(refusals) > 1 else ""
        _log.warning("torch's own product is used for %s%s", refusals[0], more)
    return outcomes


class CudaStopwatch:
    """Times passes on `device` with CUDA events around the replays of their graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs = CudaGraphs(device)

    def now_s(self) -> float:
        return time.perf_counter()

    def times_s(self, passes: Sequence[Pass], num_repeats: int) -> list[list[float]]:
        """See Stopwatch. Raises what a pass raises, and RuntimeError if a capture fails."""
        replays = [self._graphs.capture(one) for one in passes]
        for replay in replays:
            replay()  # the first replay uploads the graph
        stream = torch.cuda.current_stream(self._device)
        marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in replays]
        # Queue all replays at once, alternating: the device never waits for the host, and a change
        # of the GPU's clock affects all passes equally.
        for _ in range(num_repeats):
            for replay, own_marks in zip(replays, marks, strict=True):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record(stream)
                replay()
                end.record(stream)
                own_marks.append((start, end))
        stream.synchronize()
        return [[start.elapsed_time(end) / 1e3 for start, end in pairs] for pairs in marks]


_NAME = "linear_race.json"
_VERSION = 1
_MAX_MACHINES = 16
_MAX_OUTCOMES = 1000
_MAX_BYTES = 4 << 20
_SHAPE = re.compile(r"(\d{1,9})x(\d{1,9}) (\w+)( with bias)?, (\d{1,2}) rows")


class AutotuneCache:
    """The stored outcomes of one `machine` (see `machine_name`), in a file in `directory`.

    Stores nothing if `directory` is None. If two processes write, the last one wins; the lost
    outcomes are measured again.
    """

    def __init__(self, directory: Path | None, machine: str) -> None:
        self._path = directory / _NAME if directory is not None else None
        self._machine = machine

    def read(self) -> dict[tuple[LinearShape, int], Outcome]:
        """Return the stored outcomes, by shape and bucket of rows."""
        return _parsed(self._read_all().get(self._machine))

    def write(self, outcomes: Outcomes) -> None:
        """Add outcomes to the stored ones. A failed write is logged; they are measured again."""
        if self._path is None:
            return
        machines = self._read_all()
        known = {**_parsed(machines.pop(self._machine, None)), **outcomes}
        newest = list(known.items())[-_MAX_OUTCOMES:]
        machines[self._machine] = {
            f"{shape}, {num_rows} rows": found.refusal or [found.torch_s, found.kernel_s]
            for (shape, num_rows), found in newest
        }
        kept = dict(list(machines.items())[-_MAX_MACHINES:])
        write_state(self._path, _VERSION, "machines", kept)

    def _read_all(self) -> dict[str, object]:
        if self._path is None:
            return {}
        return read_state(self._path, _VERSION, "machines", _MAX_BYTES)


def _parsed(kept: object) -> dict[tuple[LinearShape, int], Outcome]:
    """Return the valid entries of a stored table."""
    outcomes = {}
    for name, value in kept.items() if isinstance(kept, Mapping) else ():
        match, outcome = _SHAPE.fullmatch(str(name)), _outcome(value)
        if match is None or outcome is None or int(match[5]) not in ROW_BUCKETS:
            continue
        shape = LinearShape(int(match[1]), int(match[2]), match[3], match[4] is not None)
        outcomes[shape, int(match[5])] = outcome
    return outcomes


def _outcome(value: object) -> Outcome | None:
    if isinstance(value, str) and value:
        return Outcome(refusal=value)
    if not isinstance(value, list) or len(value) != 2:
        return None
    if not all(isinstance(x, int | float) and math.isfinite(x) and x > 0 for x in value):
        return None
    return Outcome(float(value[0]), float(value[1]))


def autotune_products(
    loaded: LoadedModel, directory: Path | None, tuner: GemmAutotuner | None = None
) -> tuple[str, ...]:
    """Use kvchat's kernel where it is faster; return those shapes and row counts as sorted text.

    Measures shapes without a stored timing on this machine, which takes at most some seconds, and
    stores the outcomes in `directory`; None stores nothing. If `tuner` is None, only CUDA devices
    are tuned. Every failure costs only speed.
    """
    if loaded.fusing is None:
        return ()
    if tuner is None:
        if loaded.device.type != "cuda" or kernel_refusal(loaded.device) is not None:
            return ()
        tuner = GemmAutotuner(CudaStopwatch(loaded.device), few_rows_linear)
    products = loaded.fusing.merged_products()
    layers: dict[LinearShape, list[Operands]] = defaultdict(list)
    for product in products:
        if product.operands.weight.is_contiguous():
            layers[product.operands.shape].append(product.operands)
    memory = AutotuneCache(directory, machine_name(loaded.device))
    known = memory.read()
    outcomes = tuner.run(layers, known)
    if outcomes.keys() != known.keys():
        memory.write(outcomes)
    return _install(products, layers, outcomes)


def machine_name(device: torch.device) -> str:
    """Return what timings depend on: the device and the versions of torch, Triton and kvchat."""
    name = device_name(device)
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return f"{name}, torch {torch.__version__}, triton {triton}, kvchat {__version__}"


def _install(
    products: Sequence[MergedProduct],
    layers: dict[LinearShape, list[Operands]],
    outcomes: Outcomes,
) -> tuple[str, ...]:
    for product in products:
        if product.operands.shape in layers and product.operands.weight.is_contiguous():
            product.take_kernel(rows_for_kernel(outcomes, product.operands.shape))
    own = {key: found for key, found in outcomes.items() if key[0] in layers}
    won = sorted(f"{shape}, {rows} rows" for (shape, rows), found in own.items() if found.is_faster)
    _log.info("kvchat's kernel is faster for %d of %d sizes", len(won), len(own))
    return tuple(won)

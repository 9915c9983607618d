"""Races FlashInfer's attention with kvchat's at load, for each kind of layer a model has.

Only where FlashInfer is installed, on a CUDA device, over plain KV. Its kernels are first compared
with the reference on the device: one that is wrong or raises is not used, which is one line of the
log. Times are stored in the state directory, so that a kernel that lost is not imported again. Like
all of the GPU path, this has never run on a GPU.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch

from kvchat.core.errors import in_one_line
from kvchat.core.events import LoadProgress
from kvchat.core.types import Fact, Memory
from kvchat.model.device import dtype_name, machine_name
from kvchat.model.gpu.cuda_graph import CudaGraphs
from kvchat.model.loader import LoadedModel, Progress
from kvchat_kernels.paged_attention import implementation_for
from kvchat_kernels.paged_attention.adopted import LayerRule, StepKind, adopt, drop, is_adopted
from kvchat_kernels.paged_attention.choice import implementation
from kvchat_kernels.paged_attention.flashinfer_gpu import (
    FlashInfer,
    flashinfer_on,
    installed_version,
    refusal,
)
from kvchat_kernels.paged_attention.race import difference, timed_passes

_log = logging.getLogger(__name__)

_KIND = "attention race"
_MAX_OUTCOMES = 200
_NUM_REPEATS = 25
# Below this speedup the times count as equal, and ours is the one that every rule is tested on.
_MIN_GAIN = 1.03


Pass = Callable[[], torch.Tensor]


class Stopwatch(Protocol):
    """Measures time on the device that holds the weights."""

    def times_s(self, passes: Sequence[Pass], num_repeats: int) -> list[list[float]]:
        """Run the passes in turn, `num_repeats` times each; return the seconds, pass by pass.

        May run passes more often, for example untimed warm-up runs.
        """
        ...


class CudaStopwatch:
    """Times passes on `device` with CUDA events around the replays of their graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs = CudaGraphs(device)

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


@dataclass(frozen=True, slots=True)
class Contest:
    """A kind of layer in a kind of step, over blocks of so many tokens."""

    step: StepKind
    rule: LayerRule
    block_size: int

    def __str__(self) -> str:
        shape, span = self.rule.shape, self.rule.span
        window = f", window {span.window}" if span.window is not None else ""
        softcap = ", softcap" if self.rule.has_softcap else ""
        return (
            f"{self.step} of {shape.num_heads}/{shape.num_kv_heads} heads of {shape.key_dim}, "
            f"{dtype_name(shape.dtype)}{window}{softcap}, blocks of {self.block_size}"
        )


@dataclass(frozen=True, slots=True)
class RaceTimes:
    """Seconds of one layer's attention, by kvchat's kernels and by FlashInfer's."""

    ours_s: float
    theirs_s: float

    @property
    def is_theirs_faster(self) -> bool:
        return self.theirs_s * _MIN_GAIN <= self.ours_s

    def __str__(self) -> str:
        winner = "FlashInfer" if self.is_theirs_faster else "kvchat"
        return f"{winner} (FlashInfer {self.theirs_s * 1e6:.0f} us, own {self.ours_s * 1e6:.0f} us)"


@dataclass(frozen=True, slots=True)
class Race:
    """What a race runs with; tests give others.

    rival       makes FlashInfer's kernels for a device; it may raise anything
    stopwatch   makes what times passes on a device
    capability  returns the device's compute capability
    """

    rival: Callable[[torch.device], FlashInfer] = flashinfer_on
    stopwatch: Callable[[torch.device], Stopwatch] = CudaStopwatch
    capability: Callable[[torch.device], tuple[int, int]] = torch.cuda.get_device_capability


def race_attention(
    loaded: LoadedModel,
    kv_dtype: torch.dtype,
    block_size: int,
    memory: Memory,
    progress: Progress,
    race: Race | None = None,
) -> tuple[str, ...]:
    """Adopt FlashInfer's attention where it is right and faster; return those contests as text.

    Does nothing, and imports nothing, off CUDA, where FlashInfer is not installed, and without
    a `directory` that keeps the times: then nothing may be written, and FlashInfer writes what it
    compiles to the user's home. Every failure costs only speed. `kv_dtype` is that of the plain KV,
    over blocks of `block_size` tokens.
    """
    if loaded.device.type != "cuda" and race is None:
        return ()
    version = installed_version() if race is None else "of a test"
    if version is None or not memory.outlasts_process or loaded.spec.gathered is not None:
        return ()
    race = race or Race()
    contests = contests_of(loaded, kv_dtype, block_size, race.capability(loaded.device))
    race_memory = RaceMemory(memory, rival_machine(machine_name(loaded.device), version))
    known = race_memory.read()
    open_contests = [
        contest
        for contest in contests
        if (times := known.get(str(contest))) is None or times.is_theirs_faster
    ]
    if not open_contests:
        return ()
    progress(LoadProgress("trying FlashInfer's attention"))
    try:
        rival = race.rival(loaded.device)
    except Exception as error:  # an import of another package raises any type
        _log.warning("FlashInfer is not used: %s", in_one_line(error))
        return ()
    won, new = [], {}
    # Captured steps of a model that was loaded before may use the memory of these.
    in_use = [step for step in StepKind if is_adopted(loaded.device, step)]
    for contest in open_contests:
        drop(loaded.device, contest.step, contest.rule, block_size)  # of an earlier load
        times = _outcome(contest, rival, race.stopwatch, loaded.device, known.get(str(contest)))
        if times is None:
            continue
        new[str(contest)] = times
        _log.info("%s: %s", contest, times)
        if times.is_theirs_faster:
            function = rival.function(contest.step)
            adopt(loaded.device, contest.step, contest.rule, block_size, function)
            won.append(str(contest))
    for step in StepKind:
        if step not in in_use and not is_adopted(loaded.device, step):
            rival.release(step)
    if new.keys() - known.keys():
        race_memory.write(new)
    return tuple(won)


def contests_of(
    loaded: LoadedModel, kv_dtype: torch.dtype, block_size: int, capability: tuple[int, int]
) -> list[Contest]:
    """Return the contests of a model's layers that FlashInfer has kernels for; each once."""
    contests: dict[Contest, None] = {}
    for layer in loaded.spec.layers:
        shape = layer.shape(kv_dtype)
        if layer.has_sinks or implementation_for(loaded.device, shape).name != "triton":
            continue
        rule = LayerRule(shape, layer.span, layer.has_softcap)
        for step in StepKind:
            if refusal(step, rule, block_size, capability) is None:
                contests[Contest(step, rule, block_size)] = None
    return list(contests)


@torch.inference_mode()
def _outcome(
    contest: Contest,
    rival: FlashInfer,
    stopwatch: Callable[[torch.device], Stopwatch],
    device: torch.device,
    known: RaceTimes | None,
) -> RaceTimes | None:
    """Compare, then time unless the times are known; None if FlashInfer is not to be used.

    A failure is not stored: what it needs may be installed by the next time.
    """
    function = rival.function(contest.step)
    try:
        wrong = difference(function, contest.step, contest.rule, contest.block_size, device)
        if wrong is not None:
            _log.warning("FlashInfer is not used for %s: %s", contest, wrong)
            return None
        if known is not None:
            return known
        rivals = implementation("triton"), function
        passes, num_calls = timed_passes(
            rivals, contest.step, contest.rule, contest.block_size, device
        )
        own, theirs = stopwatch(device).times_s(passes, _NUM_REPEATS)
        return RaceTimes(median(own) / num_calls, median(theirs) / num_calls)
    except Exception as error:  # compilers and drivers raise any type
        _log.warning("FlashInfer is not used for %s: %s", contest, in_one_line(error))
        return None


def rival_machine(machine: str, version: str) -> str:
    """Return what times depend on: the machine, as of `machine_name`, and FlashInfer's version."""
    return f"{machine}, flashinfer {version}"


class RaceMemory:
    """The stored times of one machine, in a memory. An impossible value counts as no times."""

    def __init__(self, memory: Memory, machine: str) -> None:
        self._memory = memory
        self._machine = machine

    def read(self) -> dict[str, RaceTimes]:
        """Return the times of every contest that was timed here."""
        return _times(self._memory.get(_KIND, self._machine))

    def write(self, times: Mapping[str, RaceTimes]) -> None:
        """Add times to this machine's."""

        def with_times(fact: Fact) -> Fact:
            newest = list({**_times(fact), **times}.items())[-_MAX_OUTCOMES:]
            return {name: [x.ours_s, x.theirs_s] for name, x in newest}

        self._memory.update(_KIND, self._machine, with_times)


def _times(fact: Fact) -> dict[str, RaceTimes]:
    times = fact.items() if isinstance(fact, dict) else ()
    return {str(name): RaceTimes(*value) for name, value in times if _are_times(value)}


def _are_times(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(isinstance(x, int | float) and math.isfinite(x) and x > 0 for x in value)

"""The training loop of target and draft: legs, a rate schedule, checkpoints, progress lines.

Fixed seed and step counts decide everything; time decides nothing. Knows rows and networks; knows
no dialogue.
"""

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path

import torch
from torch import Tensor

from demo_recipe.checkpoint import Reached, load_checkpoint, save_checkpoint
from demo_recipe.network import Geometry, Network, Rows
from demo_recipe.optimiser import Optimiser, Rates, product_dtype
from demo_recipe.stream import Leg, Mix
from demo_recipe.team import Team
from demo_recipe.tokenizer import ChatTokenizer

STEPS_PER_LINE = 10


@dataclass(frozen=True, slots=True)
class Phase:
    """Some legs of one mix."""

    mix: Mix
    num_legs: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides a training run.

    flat_share  share of the steps at the full rate; then it falls linearly to `last_scale`
    knots       instead of that: factors on the rate at some steps, linear in between
    """

    name: str
    geometry: Geometry
    phases: tuple[Phase, ...]
    seed: int = 1
    batch_tokens: int = 8192
    leg_steps: int = 100
    rates: Rates = field(default_factory=Rates)
    warmup_steps: int = 100
    flat_share: float = 0.4
    last_scale: float = 0.01
    knots: tuple[tuple[int, float], ...] = ()

    @property
    def num_legs(self) -> int:
        return sum(phase.num_legs for phase in self.phases)

    @property
    def num_steps(self) -> int:
        return self.num_legs * self.leg_steps

    def mix_of(self, leg: int) -> Mix:
        """The mix of leg number `leg`, counted from 0."""
        for phase in self.phases:
            if leg < phase.num_legs:
                return phase.mix
            leg -= phase.num_legs
        raise ValueError(f"leg {leg} is behind the end of the plan")

    def scale(self, step: int) -> float:
        """The factor on the learning rates at `step`."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        for (start, high), (end, low) in pairwise(self.knots):
            if start <= step < end:
                return warm * (high + (low - high) * (step - start) / (end - start))
        fall_start = self.flat_share * self.num_steps
        fall = max(0.0, (step - fall_start) / max(1.0, self.num_steps - fall_start))
        return warm * (1.0 - fall * (1.0 - self.last_scale))


@dataclass(frozen=True, slots=True)
class Machine:
    """Where to train."""

    device: torch.device
    dtype: torch.dtype
    is_compiled: bool
    team: Team

    @classmethod
    def detected(cls, *, is_compiled: bool, team: Team) -> "Machine":
        """CUDA where there is one; fast products, float32 weights beneath."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return cls(device, product_dtype(device), is_compiled, team)


LossOf = Callable[[Network, Rows], Tensor]


def train(
    plan: Plan,
    tokenizer: ChatTokenizer,
    folder: Path,
    machine: Machine,
    *,
    initial: Network | None = None,
    loss_of: LossOf | None = None,
) -> None:
    """Run the plan from the checkpoint in `folder`, or else from `initial` or random weights.

    Leaves the trained weights in `folder`. Each member of the team takes its share of every batch,
    and all end with the same weights.
    """
    team = machine.team
    network = Network(plan.geometry, plan.seed)
    if initial is not None:
        network.load_state_dict(initial.state_dict())
    network.to(machine.device)
    optimiser = Optimiser(network, plan.rates)
    start = load_checkpoint(folder, network, optimiser)
    if machine.is_compiled:
        network.compile_parts()
    measured = loss_of or (lambda net, rows: net.loss(rows, machine.dtype))
    progress = Progress(plan, start)
    for leg in range(start.next_leg, plan.num_legs):
        for step, rows in _numbered(plan, tokenizer, leg, team):
            loss = measured(network, rows.to(machine.device))
            loss.backward()
            team.average(weight.grad for weight in network.parameters() if weight.grad is not None)
            norm = optimiser.step(plan.scale(step))
            if team.is_leader:
                progress.note(step, float(loss.detach()), norm)
        if team.is_leader:
            save_checkpoint(folder, network, optimiser, Reached(leg + 1, progress.seconds))
        team.wait()


def _numbered(
    plan: Plan, tokenizer: ChatTokenizer, leg: int, team: Team
) -> Iterator[tuple[int, Rows]]:
    """The steps of a leg, each with this member's share of the batch."""
    share = plan.batch_tokens // team.size
    stream = Leg(tokenizer, plan.mix_of(leg), seed=plan.seed, leg=leg, batch_tokens=share)
    groups = islice(alike(stream.batches(), team.size), plan.leg_steps)
    yield from enumerate((group[team.rank] for group in groups), start=leg * plan.leg_steps)


def alike(batches: Iterable[Rows], size: int) -> Iterator[list[Rows]]:
    """Groups of `size` batches of one row length, in the order in which they become complete.

    Long rows take several times as long as short ones, and a team waits for its slowest member.
    """
    waiting: dict[int, list[Rows]] = defaultdict(list)
    for rows in batches:
        group = waiting[rows.ids.shape[1]]
        group.append(rows)
        if len(group) == size:
            yield waiting.pop(rows.ids.shape[1])


class Progress:
    """One line on stderr every few steps: loss, speed, time left."""

    def __init__(self, plan: Plan, start: Reached) -> None:
        self._plan, self._start = plan, start
        self._first = start.next_leg * plan.leg_steps
        self._began = time.monotonic()
        self._loss: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds of training so far, earlier runs included."""
        return self._start.seconds + time.monotonic() - self._began

    def note(self, step: int, loss: float, norm: float) -> None:
        """Take one step's numbers; print now and then."""
        self._loss = loss if self._loss is None else 0.95 * self._loss + 0.05 * loss
        if not math.isfinite(loss):
            raise FloatingPointError(f"loss {loss} at step {step}")
        if (step + 1) % STEPS_PER_LINE == 0:
            sys.stderr.write(self._line(step + 1, norm) + "\n")
            sys.stderr.flush()

    def _line(self, done: int, norm: float) -> str:
        seconds = time.monotonic() - self._began
        per_step = seconds / (done - self._first)
        left = (self._plan.num_steps - done) * per_step
        return (
            f"{self._plan.name} step {done}/{self._plan.num_steps} loss {self._loss:.4f} "
            f"norm {norm:.2f} {self._plan.batch_tokens / per_step:.0f} tokens/s "
            f"left {left / 60:.0f} min"
        )

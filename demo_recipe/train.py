"""The training loop of target and draft: legs, a rate schedule, checkpoints, progress lines.

Fixed seed and step counts decide everything; time decides nothing. Knows rows and networks; knows
no dialogue.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path

from torch import Tensor

from demo_recipe.checkpoint import Reached, load_checkpoint, save_checkpoint
from demo_recipe.network import Geometry, Network, Rows
from demo_recipe.optimiser import Optimiser, Rates, best_device
from demo_recipe.stream import Leg, Mix
from demo_recipe.tokenizer import ChatTokenizer

STEPS_PER_LINE = 10


Knots = tuple[tuple[int, float], ...]


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
    knots: Knots = ()

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


LossOf = Callable[[Network, Rows], Tensor]


def train(
    plan: Plan, tokenizer: ChatTokenizer, folder: Path, initial: Network | None, loss_of: LossOf
) -> None:
    """Run the plan from the checkpoint in `folder`, or else from `initial` or random weights.

    Leaves the trained weights in `folder`.
    """
    device = best_device()
    network = Network(plan.geometry, plan.seed)
    if initial is not None:
        network.load_state_dict(initial.state_dict())
    network.to(device)
    optimiser = Optimiser(network, plan.rates)
    start = load_checkpoint(folder, network, optimiser)
    began = time.monotonic() - start.seconds
    for leg in range(start.next_leg, plan.num_legs):
        stream = Leg(
            tokenizer, plan.mix_of(leg), seed=plan.seed, leg=leg, batch_tokens=plan.batch_tokens
        )
        steps = islice(stream.batches(), plan.leg_steps)
        for step, rows in enumerate(steps, start=leg * plan.leg_steps):
            loss = loss_of(network, rows.to(device))
            loss.backward()
            norm = optimiser.step(plan.scale(step))
            if not math.isfinite(loss.detach()):
                raise FloatingPointError(f"loss {loss} at step {step}")
            if (step + 1) % STEPS_PER_LINE == 0:
                note(f"{plan.name} {step + 1}/{plan.num_steps} loss {loss:.4f} norm {norm:.2f}")
        save_checkpoint(folder, network, optimiser, Reached(leg + 1, time.monotonic() - began))


def note(text: str) -> None:
    """One line of progress on stderr."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()

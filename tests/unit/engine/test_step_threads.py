"""The threads of steps: what is quickest is found, and found again when it changes."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from kvchat.engine.runner import Runner
from kvchat.engine.step_threads import MOST_ROWS, SELDOM, SOON, TRIED, StepThreads
from kvchat.model.batch import SequencePiece


@dataclass
class Machine:
    """A clock that goes on by what a step takes on the threads that are set."""

    seconds: Callable[[int], float]
    most: int = 8
    now_s: float = 0.0
    set_to: int = 8
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.set_to = self.most
        self.threads = StepThreads(self.most, self._set, lambda: self.now_s)

    def _set(self, count: int) -> None:
        assert 1 <= count <= self.most
        self.set_to = count

    def _step(self) -> str:
        self.counts.append(self.set_to)
        self.now_s += self.seconds(self.set_to)
        return "logits"

    def steps(self, count: int, num_rows: int = 1) -> list[int]:
        """Run steps; return on how many threads each of them ran."""
        start = len(self.counts)
        for _ in range(count):
            assert self.threads.run(num_rows, self._step) == "logits"
            assert self.set_to == self.most, "other work has all threads"
        return self.counts[start:]


def with_best(best: int) -> Callable[[int], float]:
    return lambda count: 1.0 + abs(count - best)


@pytest.mark.parametrize("most", [2, 3, 4, 8, 12])
@pytest.mark.parametrize("best", [1, 2, 4, 8])
def test_the_quickest_count_is_found_and_kept(best: int, most: int) -> None:
    quickest = min((count for count in (1, 2, 4, 8, most) if count <= most), key=with_best(best))
    machine = Machine(with_best(best), most)
    machine.steps(40 * TRIED)
    assert machine.threads.num_threads() == quickest

    kept = machine.steps(20 * SELDOM)
    assert kept.count(quickest) > 0.97 * len(kept)


def test_one_thread_is_never_raced() -> None:
    machine = Machine(lambda count: 1.0, most=1)
    assert set(machine.steps(100)) == {1}


def test_large_steps_take_all_threads() -> None:
    machine = Machine(with_best(1))
    machine.steps(100)
    assert set(machine.steps(50, MOST_ROWS + 1)) == {8}


def test_a_machine_that_becomes_busy_is_noticed_within_a_few_steps() -> None:
    """One more busy process made two threads wait for each other at every product: a third of the
    speed, for as long as it ran.
    """
    is_busy = False

    def seconds(count: int) -> float:
        return (10.0 if is_busy else 1.0) if count > 1 else 1.6

    machine = Machine(seconds, most=2)
    machine.steps(4 * SELDOM)
    assert machine.threads.num_threads() == 2

    is_busy = True
    machine.steps(6 * TRIED)
    assert machine.threads.num_threads() == 1
    assert machine.steps(SOON).count(1) > SOON / 2

    is_busy = False
    machine.steps(2 * SELDOM)
    assert machine.threads.num_threads() == 2


def test_a_growing_context_makes_no_count_look_worse() -> None:
    """Counts are compared in turn, and what all of them take longer for is no news."""
    taken = 0

    def seconds(count: int) -> float:
        nonlocal taken
        taken += 1
        return (1.0 + abs(count - 2)) * (1.0 + taken / 300)

    machine = Machine(seconds, most=4)
    machine.steps(5000)
    assert machine.threads.num_threads() == 2
    assert machine.counts[500:].count(2) > 0.85 * 4500


def test_numbers_of_rows_are_raced_apart_and_begin_with_what_their_neighbours_found() -> None:
    machine = Machine(with_best(1))
    machine.steps(60)

    assert machine.steps(1, num_rows=5) == [1]
    assert machine.threads.num_threads(5) == 1


def test_a_step_that_fails_leaves_all_threads_to_the_next() -> None:
    machine = Machine(with_best(1))
    machine.steps(60)

    def fail() -> None:
        assert machine.set_to == 1
        raise RuntimeError("a step failed")

    with pytest.raises(RuntimeError):
        machine.threads.run(1, fail)
    assert machine.set_to == 8


@pytest.mark.parametrize("seed", range(5))
def test_whatever_steps_take_every_count_is_one_there_is(seed: int) -> None:
    rng = random.Random(seed)
    machine = Machine(lambda count: rng.choice((0.0, 0.1, 1.0, 30.0)), most=rng.randrange(2, 17))
    for _ in range(300):
        machine.steps(rng.randrange(1, 8), rng.randrange(1, MOST_ROWS + 3))


class BusyMachine:
    """Two cores, of which another program may use one: two threads then take turns on the other.

    Each product of a large step takes 10 ms of processor time. It asks before.
    """

    def __init__(self, most: int = 2) -> None:
        self.now_s = self.cpu_s = 0.0
        self.is_busy = False
        self.most = self.set_to = most
        self.counts: list[int] = []
        self._threads = StepThreads(most, self._set, lambda: self.now_s, lambda: self.cpu_s)
        self._ask = self._threads.watching(lambda: False)

    def _set(self, count: int) -> None:
        assert 1 <= count <= self.most
        self.set_to = count

    def step(self, num_products: int = 100) -> list[int]:
        """Return on how many threads each product ran."""
        self.counts = []
        self._threads.run(MOST_ROWS + 1, lambda: [self._product() for _ in range(num_products)])
        assert self.set_to == self.most, "other work has all threads"
        return self.counts

    def _product(self) -> None:
        assert not self._ask()
        self.counts.append(self.set_to)
        can_run = 1 if self.is_busy else self.set_to
        waste_s = 0.05 if self.set_to > 1 and self.is_busy else 0.0  # until the other has its turn
        self.now_s += 0.01 / can_run + waste_s
        self.cpu_s += 0.01 + waste_s


def test_a_large_step_has_all_threads_while_they_can_run() -> None:
    machine = BusyMachine()
    assert set(machine.step(1000)) == {2}


def test_a_large_step_goes_on_with_one_thread_beside_a_busy_program() -> None:
    """A prompt of 64 tokens took 14 s instead of 1.4: each product waited for the other thread."""
    machine = BusyMachine()
    machine.is_busy = True
    assert machine.step(50).count(2) == 1, "one look was enough"
    assert machine.step(30).count(2) == 0, "the next step begins as this one went on"
    assert 1 <= machine.step(1000).count(2) <= 11, "two are tried again, once a second"


def test_a_large_step_has_all_threads_again_once_they_can_run() -> None:
    machine = BusyMachine()
    machine.is_busy = True
    machine.step()
    machine.is_busy = False
    machine.step(200)
    assert set(machine.step(1000)) == {2}


def test_a_step_that_nothing_watches_has_all_threads() -> None:
    machine = BusyMachine()
    machine.step()
    assert machine._threads.run(MOST_ROWS + 1, lambda: machine.set_to) == 2


def test_logits_do_not_depend_on_the_threads() -> None:
    """A runner that races, beside one that does not."""
    model = Summing()
    counts: list[int] = []
    threads = StepThreads(2, counts.append)
    racing, plain = Runner(model, 16, threads=threads), Runner(model, 16)  # type: ignore[arg-type]
    for position in range(40):
        pieces = [SequencePiece([position + 1], position, [1, 2, 3], 1)]
        assert torch.equal(racing.run_pieces(pieces), plain.run_pieces(pieces))
    assert {1, 2} == set(counts)


class Summing:
    """As much of a model as a runner asks for: its logits are the token and the position."""

    device = torch.device("cpu")
    dtype = torch.float32

    def forward(self, batch) -> torch.Tensor:  # type: ignore[no-untyped-def]
        return torch.stack([batch.token_ids, batch.positions], 1)[batch.logit_rows].float()

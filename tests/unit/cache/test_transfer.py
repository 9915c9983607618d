"""TransferThread: what waits for the tier and what does not, what goes first, and how it ends."""

import threading
from collections import deque
from collections.abc import Iterator

import pytest

from kvchat.cache.tier import Tier
from kvchat.cache.transfer import TransferThread, _Kind, _Queued
from support.memory_tier import MemoryTier

PATIENCE_S = 60.0


class Opening:
    """A tier that is opened once it may be."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.tier = MemoryTier(4, 32)

    def __call__(self) -> Tier | None:
        self.may_end.wait(PATIENCE_S)
        return self.tier


@pytest.fixture
def opening() -> Iterator[Opening]:
    made = Opening()
    yield made
    made.may_end.set()


def test_copies_do_not_wait_for_the_tier_and_the_rest_does(opening: Opening) -> None:
    """Host memory once would have waited until gigabytes of weights were read for their digest."""
    thread = TransferThread(opening, 1 << 20)
    done: list[str] = []
    is_copied, is_saved = threading.Event(), threading.Event()
    thread.restore(lambda _: done.append("restore"))
    thread.save(lambda _: (done.append("save"), is_saved.set()), 1)
    thread.copy(lambda: (done.append("copy"), is_copied.set()))

    assert is_copied.wait(PATIENCE_S)
    assert done == ["copy"]
    assert thread.tier is None
    opening.may_end.set()

    assert is_saved.wait(PATIENCE_S)
    assert done == ["copy", "restore", "save"]
    assert thread.tier is opening.tier
    thread.close(PATIENCE_S)
    assert opening.tier.is_closed


def test_copies_go_before_restores_and_restores_before_saves(opening: Opening) -> None:
    opening.may_end.set()
    thread = TransferThread(opening, 1 << 20)
    may_go_on, is_held = threading.Event(), threading.Event()
    done: list[str] = []
    thread.copy(lambda: (is_held.set(), may_go_on.wait(PATIENCE_S)))
    assert is_held.wait(PATIENCE_S)
    for name in ("first", "second"):
        thread.save(lambda _, name=name: done.append(f"{name} save"), 1)
        thread.restore(lambda _, name=name: done.append(f"{name} restore"))
        thread.copy(lambda name=name: done.append(f"{name} copy"))
    may_go_on.set()

    assert thread.flush(PATIENCE_S)
    assert done == [
        f"{n} {what}" for what in ("copy", "restore", "save") for n in ("first", "second")
    ]
    thread.close(PATIENCE_S)


def test_what_is_wrong_is_gone_before_anything_is_read_and_before_the_thread_ends(opening):
    """A wrong chain that the last step had found stayed on disk: it was queued with the restores,
    and the end does not wait for those.
    """
    opening.may_end.set()
    thread = TransferThread(opening, 1 << 20)
    may_go_on, is_held = threading.Event(), threading.Event()
    done: list[str] = []
    thread.copy(lambda: (is_held.set(), may_go_on.wait(PATIENCE_S)))
    assert is_held.wait(PATIENCE_S)
    for name in ("first", "second"):
        thread.save(lambda _, name=name: done.append(f"{name} save"), 1)
        thread.restore(lambda _, name=name: done.append(f"{name} restore"))
        thread.quarantine(lambda _, name=name: done.append(f"{name} quarantine"))

    class Restores(deque[_Queued]):
        def clear(self) -> None:
            super().clear()
            may_go_on.set()

    thread._queues[_Kind.RESTORE] = Restores(thread._queues[_Kind.RESTORE])
    thread.close(PATIENCE_S)

    assert done == [f"{n} {what}" for what in ("quarantine", "save") for n in ("first", "second")]


def test_a_tier_that_was_opened_too_late_is_closed_again(opening: Opening) -> None:
    thread = TransferThread(opening, 1 << 20)
    thread.close(PATIENCE_S)
    is_closed = threading.Event()
    opening.tier.close = is_closed.set  # type: ignore[method-assign]

    opening.may_end.set()

    assert is_closed.wait(PATIENCE_S)


def test_saves_are_taken_within_the_budget_and_again_once_there_is_room(opening: Opening) -> None:
    thread = TransferThread(opening, 10)
    assert thread.save(lambda _: None, 6)
    assert not thread.save(lambda _: None, 5)
    assert not thread.has_room(5, 0.0)
    assert thread.save(lambda _: None, 4)

    opening.may_end.set()

    assert thread.has_room(10, PATIENCE_S)
    thread.close(PATIENCE_S)
    assert not thread.save(lambda _: None, 1)


def test_a_job_that_fails_ends_nothing(opening: Opening) -> None:
    opening.may_end.set()
    thread = TransferThread(opening, 1 << 20)

    def fail(*_: object) -> None:
        raise RuntimeError("boom")

    thread.copy(fail)
    thread.restore(fail)
    thread.save(fail, 1)
    done = threading.Event()
    thread.save(lambda _: done.set(), 1)

    assert done.wait(PATIENCE_S)
    thread.close(PATIENCE_S)


def test_without_a_tier_copies_are_made_all_the_same() -> None:
    thread = TransferThread(lambda: None, 1 << 20)
    done = threading.Event()
    assert thread.flush(PATIENCE_S)
    assert thread.is_without_tier

    thread.copy(lambda: done.set())

    assert done.wait(PATIENCE_S)
    thread.close(PATIENCE_S)


@pytest.mark.parametrize("ending", ["it opens", "it does not", "the thread ends before"])
def test_who_waits_for_what_was_to_be_written_hears_of_it_whatever_becomes_of_it(opening, ending):
    """A pin asked for while the tier was being opened was never answered where it could not be."""
    tier = opening.tier if ending == "it opens" else None
    opening.tier = tier  # type: ignore[assignment]
    thread = TransferThread(opening, 1 << 20)
    done: list[object] = []
    is_done = threading.Event()
    thread.save(lambda _: done.append("save"), 1)
    thread.afterwards(lambda tier: (done.append(tier), is_done.set()))

    if ending == "the thread ends before":
        thread.close(0.1)
    else:
        opening.may_end.set()

    assert is_done.wait(PATIENCE_S)
    assert done == (["save", tier] if tier is not None else [None])
    opening.may_end.set()
    thread.close(PATIENCE_S)
    thread.afterwards(done.append)
    assert done[-1] is None, "and at once when it has ended"


class Untidy(MemoryTier):
    """Has so many tasks to tidy up, and says when none is left."""

    def __init__(self, num_tasks: int) -> None:
        super().__init__(4, 32)
        self.num_tasks = num_tasks
        self.is_tidy = threading.Event()

    def tidy(self) -> bool:
        self.num_tasks -= 1
        if self.num_tasks < 0:
            self.is_tidy.set()
        return self.num_tasks >= 0


def test_a_tier_without_jobs_tidies_up_until_nothing_is_left() -> None:
    tier = Untidy(3)
    thread = TransferThread(lambda: tier, 1 << 20, tier, idle_s=0.001)
    assert tier.is_tidy.wait(PATIENCE_S)

    tier.is_tidy.clear()
    thread.afterwards(lambda _: None)  # after a job there may be something again

    assert tier.is_tidy.wait(PATIENCE_S)
    thread.close(PATIENCE_S)
    assert tier.num_tasks == -2

"""A store whose file calls fail: every call in turn, with every error a disk can return.

In the first run call 0 fails, in the next call 1, and so on to the last. In every case nothing is
raised, restored KV is right, an answer equals a cold run's, and the next run on the same directory
works normally.
"""

import errno
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvchat.cache.disk import table
from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.tier import DamagedRecord, Layout
from kvchat.core.errors import StoreError
from support.failing_files import CODES, Faults
from support.pack_chains import open_tier, restored, save, used_bytes
from support.restarts import HISTORY, Processes, alone, spec
from support.soak_sizes import short_and_long

LIMIT = 4 << 20
THREAD = "kvchat-transfer"


@dataclass(frozen=True)
class Walk:
    """Which calls fail: each `stride`-th, and whether with every error or one after another."""

    stride: int
    has_all_codes: bool

    def steps(self, num_calls: int) -> Iterator[tuple[int, int, bool]]:
        """Yield which call fails, with which error, and whether all after it fail too."""
        for number in range(0, num_calls, self.stride):
            first = number // self.stride
            codes = CODES if self.has_all_codes else CODES[first % len(CODES) :][:1]
            for code in codes:
                yield number, code, (first + CODES.index(code)) % 4 == 3


def walk(
    size: Walk, faults: Faults, live: Callable[[], None], check: Callable[[], None]
) -> tuple[int, int]:
    """Live once for every fault; return how many lives there were, and how many calls failed."""
    with faults.armed():
        live()
    num_calls, num_lives, num_failed = faults.num_calls, 0, 0
    for fail_at, code, lasting in size.steps(num_calls):
        try:
            with faults.armed(fail_at, code, lasting):
                live()
            check()
        except BaseException as error:
            error.add_note(f"after call {fail_at} failed, {errno.errorcode[code]}, {lasting=}")
            raise
        num_lives, num_failed = num_lives + 1, num_failed + faults.num_failed
    return num_lives, num_failed


def use_tier(directory: Path, numbers: Iterable[int]) -> None:
    """Save, restore, evict and collect, as the transfer thread does."""
    try:
        tier = open_tier(directory, LIMIT)
    except (OSError, StoreError, sqlite3.Error):
        return  # the transfer thread goes on without a tier
    for number in numbers:
        save(tier, [number, 1, 2, 3, 4, 5, 6, 7])
        with suppress(DamagedRecord):
            restored(tier, [number, 1, 2, 3, 4, 5, 6, 7])
        with suppress(DamagedRecord):
            restored(tier, [0, 1, 2, 3, 9, 9])
    tier.status()
    tier.gc()
    tier.verify()
    tier.close()


def report(counts: tuple[int, int], faults: Faults, at_least: int, totals: Counter[str]) -> None:
    num_lives, num_failed = counts
    totals.update({f"faults: {kind}": count for kind, count in faults.kinds.items()})
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(faults.kinds.items()))
    print(f"\n{num_lives} lives, {num_failed} calls failed: {kinds}")  # noqa: T201
    assert num_lives >= at_least


@short_and_long(Walk(41, has_all_codes=False), Walk(1, has_all_codes=True))
def test_no_failing_call_of_a_tier_raises_or_gives_wrong_kv(tmp_path, monkeypatch, totals, size):
    original, directory = tmp_path / "original", tmp_path / "kv"
    use_tier(original, range(14))
    faults = Faults()
    faults.install(monkeypatch)

    def live() -> None:
        with faults.disarmed():
            shutil.rmtree(directory, ignore_errors=True)
            shutil.copytree(original, directory)
        use_tier(directory, range(20, 23))

    def check() -> None:
        assert used_bytes(directory) <= LIMIT
        tier = open_tier(directory, LIMIT)
        assert save(tier, [9, 9, 9, 9])
        assert restored(tier, [9, 9, 9, 9]) == 2
        assert tier.verify()[1] == 0
        assert used_bytes(directory) <= LIMIT
        tier.close()

    report(walk(size, faults, live, check), faults, 1000 if size.stride == 1 else 10, totals)


@short_and_long(Walk(71, has_all_codes=False), Walk(1, has_all_codes=False))
def test_an_engine_on_a_failing_store_answers_as_one_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, totals: Counter[str], size: Walk
) -> None:
    monkeypatch.setattr(table, "MIN_FILE_BYTES", 64)
    directory = tmp_path / "kv"
    faults = Faults(THREAD)
    faults.install(monkeypatch)
    layout = Layout(b"remembering one.", 4, 32)
    branches = [HISTORY[:30], (*HISTORY[:21], 7, 8), HISTORY, (*HISTORY, 9, 9, 9, 9, 9)]
    expected = [alone(spec(branch)) for branch in branches]

    def lives() -> Processes:
        return Processes(lambda: DiskTier(directory, layout, LIMIT, min_free_bytes=0))

    def live() -> None:
        with faults.disarmed():
            shutil.rmtree(directory, ignore_errors=True)
        for _ in range(2):
            process = lives().start()
            answers = [process.answer(spec(branch))[0] for branch in branches]
            process.end()
            assert answers == expected

    def check() -> None:
        for _ in range(2):
            process = lives().start()
            answer, finished = process.answer(spec(branches[-1]))
            process.end()
            assert answer == expected[-1]
        assert finished.usage.cached.disk == (len(branches[-1]) - 1) // 4 * 4

    report(walk(size, faults, live, check), faults, 300 if size.stride == 1 else 5, totals)

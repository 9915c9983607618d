"""The race of vectors of 512 bits with those of 256, by a stand-in for the clock."""

from pathlib import Path

import pytest

from kvchat_kernels.cpu import widths
from kvchat_kernels.cpu.block_rows import Place
from kvchat_kernels.cpu.object_cache import ObjectCache
from kvchat_kernels.cpu.widths import RaceTask, is_wide_faster

TASK = RaceTask({Place.NUM_OUT: 4}, (Place.X, Place.OUT))


class Runners:
    """Stands in for what runs a kernel: `wide_s` and `narrow_s` are the times of both."""

    def __init__(self, wide_s: float, narrow_s: float) -> None:
        self.times = {True: wide_s, False: narrow_s}
        self.num_runs = 0

    def __call__(
        self, name: str, forms: object, write: object, task: object, is_wide: bool
    ) -> "_Of":
        return _Of(self, self.times[is_wide])


class _Of:
    def __init__(self, runners: Runners, seconds: float) -> None:
        self._runners, self._seconds = runners, seconds

    def seconds(self) -> float:
        self._runners.num_runs += 1
        return self._seconds


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectCache:
    cache = ObjectCache(tmp_path / "kernels")
    monkeypatch.setattr(widths, "object_cache", lambda: cache)
    monkeypatch.setattr(widths, "has_512_bits", lambda: True)
    return cache


def raced(runners: Runners, monkeypatch: pytest.MonkeyPatch, name: str = "product") -> bool:
    monkeypatch.setattr(widths, "_Runner", runners)
    return is_wide_faster(name, (4,), lambda code, is_wide: None, TASK)


@pytest.mark.usefixtures("cache")
def test_the_faster_width_is_taken_and_kept_for_later_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A list of names left the prompts of a Zen 4 to code of a quarter of the speed."""
    first = Runners(wide_s=2.0, narrow_s=1.0)
    assert not raced(first, monkeypatch)
    assert first.num_runs > 2

    later = Runners(wide_s=1.0, narrow_s=2.0)
    assert not raced(later, monkeypatch)
    assert later.num_runs == 0
    assert raced(later, monkeypatch, name="another format")


def test_a_damaged_verdict_is_a_new_race(
    cache: ObjectCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    raced(Runners(1.0, 2.0), monkeypatch)
    [verdict] = cache.directory.iterdir()
    verdict.write_bytes(b"wider")

    assert not raced(Runners(2.0, 1.0), monkeypatch)


def test_without_vectors_of_512_bits_there_is_no_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widths, "has_512_bits", lambda: False)
    runners = Runners(1.0, 2.0)

    assert not raced(runners, monkeypatch)
    assert runners.num_runs == 0

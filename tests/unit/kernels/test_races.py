"""The race of two forms of a kernel, by a stand-in for the clock."""

from pathlib import Path

import pytest

from kvchat_kernels.cpu import block_products, features, products, races
from kvchat_kernels.cpu.maths import Stored
from kvchat_kernels.cpu.object_cache import ObjectCache
from kvchat_kernels.cpu.races import is_second_faster
from kvchat_kernels.cpu.task import Task
from support.no_races import RACE


class Runners:
    """Stands in for what runs a kernel: `second_s` and `first_s` are the times of both."""

    def __init__(self, second_s: float, first_s: float) -> None:
        self.times = {True: second_s, False: first_s}
        self.num_runs = 0

    def __call__(
        self, name: str, forms: object, write: object, task: object, is_second: bool
    ) -> "_Of":
        return _Of(self, self.times[is_second])


class _Of:
    def __init__(self, runners: Runners, seconds: float) -> None:
        self._runners, self._seconds = runners, seconds

    def seconds(self) -> float:
        self._runners.num_runs += 1
        return self._seconds


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectCache:
    cache = ObjectCache(tmp_path / "kernels")
    monkeypatch.setattr(races, "object_cache", lambda: cache)
    return cache


def raced(runners: Runners, monkeypatch: pytest.MonkeyPatch, name: str = "product") -> bool:
    monkeypatch.setattr(races, "_race", RACE)
    monkeypatch.setattr(races, "_Runner", runners)
    return is_second_faster(name, (4,), lambda code, is_second: None, (Task, {}))


@pytest.mark.usefixtures("cache")
def test_the_faster_form_is_taken_and_kept_for_later_starts(monkeypatch):
    """A list of names left the prompts of a Zen 4 to code of a quarter of the speed."""
    first = Runners(second_s=2.0, first_s=1.0)
    assert not raced(first, monkeypatch)
    assert first.num_runs > 2

    later = Runners(second_s=1.0, first_s=2.0)
    assert not raced(later, monkeypatch)
    assert later.num_runs == 0
    assert raced(later, monkeypatch, name="another format")


def test_a_damaged_verdict_is_a_new_race(cache, monkeypatch):
    raced(Runners(1.0, 2.0), monkeypatch)
    [verdict] = cache.directory.iterdir()
    verdict.write_bytes(b"seconds")

    assert not raced(Runners(2.0, 1.0), monkeypatch)


@pytest.mark.skipif(not features.has_512_bits(), reason="the processor has no vectors of 512 bits")
def test_both_forms_of_a_kernel_are_compiled_and_run(cache, monkeypatch):
    """In all other tests the form is chosen by its name."""
    monkeypatch.setattr(races, "_race", RACE)

    is_second = products.are_wide_floats_faster.__wrapped__(Stored.HALF)

    [verdict] = cache.directory.iterdir()
    assert verdict.read_bytes().endswith(b"second" if is_second else b"first")


def test_without_vectors_of_512_bits_there_is_no_race(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_race(*_: object) -> bool:
        raise AssertionError("there is one form alone")

    for module in (block_products, products):
        monkeypatch.setattr(module, "has_512_bits", lambda: False)
        monkeypatch.setattr(module, "is_second_faster", no_race)

    assert not block_products._is_wide_faster.__wrapped__(are_bytes=False)
    assert not products.are_wide_floats_faster.__wrapped__(Stored.HALF)

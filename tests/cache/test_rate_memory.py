"""Rates kept between runs: a round trip, a file of the user's own, and nothing that breaks it."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kvchat.cache.rates import PrefillRate, RateMemory, kept_prefill_rate
from kvchat.core.cost import KvPlaces, ReadRates
from kvchat.core.types import CachedTokens

RATES = {"prefill": 500.0, "read": 3e9}


def test_what_was_written_is_there_for_the_next_run(tmp_path: Path) -> None:
    RateMemory(tmp_path / "state", "model on cpu").write(RATES)

    assert RateMemory(tmp_path / "state", "model on cpu").read() == RATES
    assert RateMemory(tmp_path / "state", "another").read() == {}


def test_the_file_is_the_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        RateMemory(tmp_path / "state", "model").write(RATES)
    finally:
        os.umask(before)
    [path] = (tmp_path / "state").iterdir()

    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 100_000,
        b'{"version": 2, "rates": {"model": {"read": 1.0}}}',
        b'{"version": 1}',
        b'{"version": 1, "rates": 7}',
        b'{"version": 1, "rates": {"model": 7}}',
        b'{"version": 1, "rates": {"model": {"read": "fast", "prefill": -1, "up": NaN}}}',
        b"\xff\xfe",
    ],
)
def test_a_broken_file_is_as_good_as_none_and_is_mended(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rates.json").write_bytes(content)
    memory = RateMemory(tmp_path, "model")

    assert memory.read() == {}
    memory.write(RATES)
    assert RateMemory(tmp_path, "model").read() == RATES


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"version": 1, "rates": {"model": RATES}}))
    (tmp_path / "rates.json").symlink_to(other)

    assert RateMemory(tmp_path, "model").read() == {}


def test_a_directory_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    memory = RateMemory(tmp_path / "file" / "state", "model")

    memory.write(RATES)

    assert memory.read() == {}


def test_the_newest_subjects_are_kept(tmp_path: Path) -> None:
    for number in range(70):
        RateMemory(tmp_path, f"model {number}").write(RATES)

    assert RateMemory(tmp_path, "model 5").read() == {}
    assert RateMemory(tmp_path, "model 69").read() == RATES


def test_who_measures_other_rates_leaves_these_alone(tmp_path: Path) -> None:
    """Only the rates of the process that wrote last were kept."""
    disk, host = RateMemory(tmp_path, "model"), RateMemory(tmp_path, "model")
    disk.write(RATES)
    host.write({"prefill": 900.0, "up": 8e9})
    disk.write({"prefill": 500.0, "read": 1e9})

    assert RateMemory(tmp_path, "model").read() == {"prefill": 500.0, "read": 1e9, "up": 8e9}


def test_what_is_no_news_is_not_written(tmp_path: Path) -> None:
    memory = RateMemory(tmp_path, "model")
    memory.write(RATES)
    written = (tmp_path / "rates.json").stat().st_ino
    memory.write({"prefill": 505.0, "read": 3e9})
    assert (tmp_path / "rates.json").stat().st_ino == written

    memory.write({"prefill": 700.0, "read": 3e9})
    assert RateMemory(tmp_path, "model").read()["prefill"] == 700.0


def test_two_threads_that_write_at_once_leave_a_file_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's and its draft's rates went through one file, and what came of it was neither's."""
    dump = json.dump

    def meanwhile(*arguments: Any, **settings: Any) -> None:
        monkeypatch.undo()
        draft_rates = {**RATES, "down": 4e9, "up": 8e9}
        other = threading.Thread(target=RateMemory(tmp_path, "draft").write, args=(draft_rates,))
        other.start()
        other.join()
        dump(*arguments, **settings)

    monkeypatch.setattr(json, "dump", meanwhile)
    RateMemory(tmp_path, "model").write(RATES)

    assert RateMemory(tmp_path, "model").read() == RATES
    assert [path.name for path in tmp_path.iterdir()] == ["rates.json"]


def test_later_tokens_of_a_context_are_told_as_slower(tmp_path: Path) -> None:
    """The end of a long prompt made the rate for all: /edit of an early message was told as 113 s,
    and took 65.
    """
    memory = RateMemory(tmp_path, "model")
    rate = PrefillRate(memory, half_context=1000.0)
    rate.note([(1000, 1250)], 5.3125)  # 100 tokens a second at the beginning

    assert rate.tokens_per_s == pytest.approx(100.0)
    assert rate.seconds_of(0, 1000) == pytest.approx(15.0)
    assert rate.tokens_within(1.0) == 100
    assert rate.tokens_within(1.0, start=1000) == 50
    computed, half_context = kept_prefill_rate(memory.read())
    rates = ReadRates(computed, half_context=half_context)
    places = KvPlaces(2000, CachedTokens(device=1000), rates)
    assert places.cost().seconds == pytest.approx(25.0)
    assert rate.seconds_of(1000, 2000) == pytest.approx(25.0)
    assert places.cost(1000).seconds == 0.0


def test_the_first_short_prompt_of_a_process_sets_no_price_for_long() -> None:
    """It waits for weights and kernels: /retry of 12 tokens was told as 1.8 s, and took 0.5."""
    rate = PrefillRate(None)
    rate.note([(0, 41)], 6.0)
    assert not rate.is_measured, "the engine measures by itself, before it tells a price"

    rate.note([(0, 256)], 2.56)
    assert rate.seconds_of(32, 44) == pytest.approx(0.12)

    slow = PrefillRate(None)
    slow.note([(0, 100)], 10.0)  # another program had the processor
    slow.note([(0, 100)], 4.0)
    assert slow.seconds_of(0, 100) == pytest.approx(4.0), "nothing makes a step quick for once"

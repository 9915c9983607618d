"""Rates kept between runs: a round trip, and nothing that breaks it."""

import math

import pytest

from kvchat.cache.planner import PrefillRate, RateMemory, known_prefill_rate
from kvchat.core.stats import KvPlaces, ReadRates
from kvchat.core.types import CachedTokens, Fact
from support.fact_memory import FactMemory

RATES = {"prefill": 500.0, "read": 3e9}


def test_what_was_written_is_there_for_the_next_run(memory: FactMemory) -> None:
    RateMemory(memory, "model on cpu").write(RATES)

    assert RateMemory(memory, "model on cpu").read() == RATES
    assert RateMemory(memory, "another").read() == {}


def test_who_measures_other_rates_leaves_these_alone(memory: FactMemory) -> None:
    """Only the rates of the process that wrote last were kept."""
    disk, host = RateMemory(memory, "model"), RateMemory(memory, "model")
    disk.write(RATES)
    host.write({"prefill": 900.0, "up": 8e9})
    disk.write({"prefill": 500.0, "read": 1e9})

    assert RateMemory(memory, "model").read() == {"prefill": 500.0, "read": 1e9, "up": 8e9}


@pytest.mark.parametrize("fact", [[], 7, "fast", {"read": "fast", "prefill": -1, "up": math.nan}])
def test_rates_that_cannot_be_are_none_and_are_replaced(fact: Fact, memory: FactMemory) -> None:
    memory.set("rates", "model", fact)
    rates = RateMemory(memory, "model")

    assert rates.read() == {}
    rates.write(RATES)
    assert RateMemory(memory, "model").read() == RATES


def test_what_is_no_news_is_not_written(memory: FactMemory) -> None:
    rates = RateMemory(memory, "model")
    rates.write(RATES)
    rates.write({"prefill": 505.0, "read": 3e9})
    assert RateMemory(memory, "model").read() == RATES

    rates.write({"prefill": 700.0, "read": 3e9})
    assert RateMemory(memory, "model").read()["prefill"] == 700.0


def test_later_tokens_of_a_context_are_told_as_slower(memory: FactMemory) -> None:
    """The end of a long prompt made the rate for all: /edit of an early message was told as 113 s,
    and took 65.
    """
    known = RateMemory(memory, "model")
    rate = PrefillRate(known, half_context=1000.0)
    rate.note([(1000, 1250)], 5.3125)  # 100 tokens a second at the beginning

    assert rate.tokens_per_s == pytest.approx(100.0)
    assert rate.seconds_of(0, 1000) == pytest.approx(15.0)
    assert rate.tokens_within(1.0) == 100
    assert rate.tokens_within(1.0, start=1000) == 50
    computed, half_context = known_prefill_rate(known.read())
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

"""Restore, recompute, or both at once: decided by measured rates, and by nothing without them."""

import random

import pytest

from kvchat.cache.planner import Planner, PrefillRate, RateMemory
from support.fact_memory import FactMemory

MIB = 1 << 20


DISK = "from disk"


def planner(prefill: float, read: float) -> Planner:
    made = Planner()
    made.prefill.of_long, made.rates[DISK] = prefill, read
    return made


def test_without_measurements_a_restore_is_tried_and_waited_for() -> None:
    fresh = Planner()

    assert fresh.is_worth_reading(DISK, 16, 1 << 40)
    assert 1.0 < fresh.patience_s(DISK, 4096, 48 * MIB) < 10.0


@pytest.mark.parametrize("num_tokens", [16, 32, 63])
def test_a_short_context_is_read_from_disk_where_that_is_quicker(num_tokens: int) -> None:
    """The 64 tokens limit what is measured and where a front may end, not what is restored."""
    known = planner(prefill=500.0, read=1000.0 * MIB)
    assert known.front(DISK, num_tokens, num_tokens * 12_000) == 0
    assert known.first_worth(DISK, [(16, 200_000), (num_tokens - 15, 200_000)]) == 0

    fresh = Planner()
    for _ in range(20):
        fresh.prefill.note([(0, num_tokens)], 0.001)  # a chat of short messages measures no rate
    fresh.note_copy(DISK, MIB, 0.001)
    assert fresh.is_worth_reading(DISK, num_tokens, num_tokens * 12_000)


def test_a_quick_disk_beats_a_slow_processor_and_a_slow_disk_does_not() -> None:
    rates = Planner()
    rates.prefill.note([(0, 1000)], 2.0)  # 500 tokens a second

    rates.note_copy(DISK, 1000 * MIB, 1.0)
    assert rates.front(DISK, 1000, 12 * MIB) == 0

    for _ in range(40):
        rates.note_copy(DISK, MIB, 10.0)  # throttled to a tenth of a MiB a second
    assert not rates.is_worth_reading(DISK, 1000, 12 * MIB)


def test_where_both_are_as_fast_each_does_half() -> None:
    rates = planner(prefill=1000.0, read=1000 * 1000.0)

    assert 480 < rates.front(DISK, 1000, 1000 * 1000) < 520


def test_no_other_cut_would_be_quicker() -> None:
    """Against trying every one; what is within the tenth that risks are worth is as good."""
    rng = random.Random(0)
    num_cut = 0
    for _ in range(300):
        num_tokens = rng.randrange(65, 2000)
        token_bytes = rng.choice([500, 12_000, 150_000])
        rates = planner(10 ** rng.uniform(1, 5), 10 ** rng.uniform(5, 10))
        compute_s = 1 / rates.prefill.of_long  # type: ignore[operator]
        read_s = token_bytes / rates.rates[DISK]  # type: ignore[operator]

        def seconds(
            front: int, n: int = num_tokens, c: float = compute_s, r: float = read_s
        ) -> float:
            return max(front * c, 0.002 + (n - front) * r if front < n else 0.0)

        front = rates.front(DISK, num_tokens, num_tokens * token_bytes)
        best_s = min(seconds(k) for k in (0, *range(64, num_tokens + 1)))

        assert seconds(front) <= best_s / 0.9 / 0.9 + compute_s + read_s
        assert seconds(front) <= num_tokens * compute_s
        num_cut += 0 < front < num_tokens
    assert num_cut > 20


def test_packs_are_cut_where_it_is_quickest() -> None:
    """Against trying every pack."""
    rng = random.Random(1)
    num_cut = 0
    for _ in range(300):
        runs = [(16 * rng.randrange(1, 30), 1 << rng.randrange(10, 22)) for _ in range(8)]
        rates = planner(10 ** rng.uniform(1, 4), 10 ** rng.uniform(5, 9))

        def seconds(
            first: int, rates: Planner = rates, runs: list[tuple[int, int]] = runs
        ) -> float:
            compute_s = sum(n for n, _ in runs[:first]) / rates.prefill.of_long  # type: ignore[operator]
            num_bytes = sum(size for _, size in runs[first:])
            return max(compute_s, 0.002 + num_bytes / rates.rates[DISK] if num_bytes else 0.0)  # type: ignore[operator]

        first = rates.first_worth(DISK, runs)
        allowed = [k for k in range(9) if not 0 < sum(n for n, _ in runs[:k]) < 64]

        assert first in allowed
        assert seconds(first) <= min(seconds(k) for k in allowed) / 0.9 / 0.9
        assert seconds(first) <= seconds(8)
        num_cut += 0 < first < 8
    assert num_cut > 20


@pytest.mark.parametrize("prefill", [10.0, 1e3, 1e6])
@pytest.mark.parametrize("read", [1e4, 1e6, 1e9])
def test_waiting_in_vain_costs_a_part_of_computing(prefill: float, read: float) -> None:
    patience_s = planner(prefill, read).patience_s(DISK, 4096, 4 * MIB)

    assert patience_s == pytest.approx(4 * MIB / read + max(0.1, 4096 / prefill / 20))


def test_what_is_too_small_to_tell_anything_is_not_measured() -> None:
    rates = Planner()

    rates.prefill.note([(0, 1)], 0.001)
    rates.note_copy(DISK, 100, 10.0)
    rates.prefill.note([(0, 1000)], 0.0)

    assert rates.rates == {}
    assert rates.prefill.tokens_per_s is None


def test_rates_follow_a_machine_that_changes_its_mind() -> None:
    rates = Planner()
    rates.prefill.note([(0, 1000)], 1.0)
    for _ in range(20):
        rates.prefill.note([(0, 1000)], 4.0)

    assert rates.prefill.of_long is not None
    assert 250 <= rates.prefill.of_long < 255


def test_a_step_that_compiled_its_kernels_is_forgotten_with_the_next() -> None:
    """A GPU's first prompt took seconds for compiling, and its rate weighed for a dozen prompts."""
    rates = Planner()
    rates.prefill.note([(0, 2048)], 9.0)
    rates.prefill.note([(0, 2048)], 0.04)

    assert rates.prefill.of_long == pytest.approx(2048 / 0.04)

    rates.prefill.note([(0, 2048)], 9.0)  # another kernel's turn

    assert rates.prefill.of_long is not None
    assert rates.prefill.of_long > 0.6 * 2048 / 0.04


def test_nobody_waits_long_where_no_rate_is_known() -> None:
    """A first question waited until gigabytes of weights were read, to learn whose KV to use."""
    assert Planner().patience_s(DISK, 20, MIB, is_opening=True) < 1.0


def test_a_disk_that_was_slow_once_is_tried_again() -> None:
    """What is not read is not measured: after one stall nothing was ever restored again."""
    rates = Planner()
    rates.prefill.note([(0, 1000)], 1.0)
    rates.note_copy(DISK, 1 << 20, 10.0)
    num_refused = 0
    while not rates.is_worth_reading(DISK, 1000, 1 << 20):
        num_refused += 1

    assert 0 < num_refused < 50


def test_what_an_earlier_process_measured_is_begun_with() -> None:
    facts = FactMemory()
    RateMemory(facts, "model").write({"first tokens": 500.0, DISK: 1e9, "half context": 1e4})

    memory = RateMemory(facts, "model")
    after = Planner(PrefillRate(memory), memory)

    assert after.rates == {DISK: 1e9}
    assert after.prefill.of_long == 500.0


def test_computing_late_in_a_context_takes_longer() -> None:
    """Half a long context was read at a rate at which its beginning would have been computed."""
    made = planner(prefill=1000.0, read=1e6)
    made.prefill.half_context = 1000.0

    assert not made.is_worth_reading(DISK, 60, 60 * 2000)
    assert made.is_worth_reading(DISK, 60, 60 * 2000, start=3000)

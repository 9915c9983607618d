"""The words for what the next message costs."""

import pytest

from kvchat.core.stats import Cost, KvPlaces, ReadRates
from kvchat.core.types import CachedTokens, Tier
from kvchat.terminal import warmth

READY = Cost(766, CachedTokens(disk=752), 0.03)
COLD = Cost(4110, CachedTokens(), 14.2)
PARTLY = Cost(4110, CachedTokens(device=16, disk=2000), 7.26)


@pytest.mark.parametrize(
    ("cost", "sentence", "toolbar", "listed"),
    [
        (
            READY,
            "ready: 752 of 766 tokens on disk, about 0.1 s",
            "ready: 752 of 766 on disk",
            "ready in 0.1 s",
        ),
        (COLD, "cold: 4,110 tokens to read, about 14 s", "cold, about 14 s", "cold, about 14 s"),
        (
            PARTLY,
            "partly ready: 2,016 of 4,110 tokens on device and disk, 2,094 to read, about 7.3 s",
            "2,016 of 4,110 on device and disk, about 7.3 s",
            "partly ready, about 7.3 s",
        ),
        (
            Cost(12, CachedTokens(), 0.01),
            "cold: 12 tokens to read, about 0.1 s",
            "cold, about 0.1 s",
            "cold, about 0.1 s",
        ),
        (
            Cost(4110, CachedTokens(disk=4096), None),
            "ready: 4,096 of 4,110 tokens on disk",
            "ready: 4,096 of 4,110 on disk",
            "ready",
        ),
    ],
)
def test_every_screen_tells_the_same_in_its_own_length(cost, sentence, toolbar, listed):
    assert warmth.sentence(cost) == sentence
    assert warmth.for_toolbar(cost) == toolbar
    assert warmth.for_list(cost) == listed


def test_a_short_context_with_little_cached_is_not_ready() -> None:
    cost = Cost(66, CachedTokens(disk=16), 0.05)

    assert warmth.for_toolbar(cost) == "16 of 66 on disk, about 0.1 s"


def test_a_price_is_told_in_tokens_and_seconds() -> None:
    cost = Cost(9812, CachedTokens(device=8572), 0.9)

    assert warmth.price(cost, "/edit 3") == "/edit 3 re-reads 1,240 of 9,812 tokens, about 0.9 s"
    # What a model or a pin has never read is not read again.
    assert warmth.price(cost, "/pin", "reads").startswith("/pin reads 1,240 of 9,812 tokens")


def test_a_context_with_most_of_its_kv_on_disk_is_never_cold() -> None:
    """A resumed chat whose answer took 752 of 766 tokens from the disk was labelled cold: only
    memory was looked at.
    """
    places = KvPlaces(766, CachedTokens(disk=752), ReadRates(100.0, 1e5))

    assert places.cost().is_ready
    assert not places.cost().is_cold
    assert places.cost().seconds == pytest.approx(0.14, rel=0.1)


def test_the_costs_of_the_turns_of_a_path_come_from_one_lookup() -> None:
    places = KvPlaces(400, CachedTokens(device=100, host=100, disk=100), ReadRates(100.0))

    assert places.cost(50) == Cost(50, CachedTokens(50), 0.0)
    assert places.cost(150) == Cost(150, CachedTokens(100, 50), 0.0)
    assert places.cost(350) == Cost(350, CachedTokens(100, 100, 100), 0.5)
    assert places.cost() == Cost(400, CachedTokens(100, 100, 100), 1.0)
    tiers = [places.tier_of(end - 100, end) for end in (100, 200, 300, 400)]
    assert tiers == [Tier.DEVICE, Tier.HOST, Tier.DISK, None]


def test_a_turn_in_the_partial_block_at_the_end_is_where_the_block_before_it_is() -> None:
    """/tree called an answer of three tokens cold that Esc had just stopped."""
    places = KvPlaces(100, CachedTokens(device=96), block_size=16)

    assert places.tier_of(97, 100) is Tier.DEVICE
    assert KvPlaces(120, CachedTokens(device=96), block_size=16).tier_of(97, 120) is None
    assert KvPlaces(12, CachedTokens(), block_size=16).tier_of(0, 12) is None, "nothing is cached"


def test_what_takes_longer_to_read_than_to_compute_is_priced_as_computed() -> None:
    places = KvPlaces(1000, CachedTokens(disk=1000), ReadRates(100.0, 10.0))

    assert places.cost().seconds == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("cost", "is_low", "is_high"),
    [
        (Cost(5000, CachedTokens(4900)), True, False),
        (Cost(5000, CachedTokens(4000)), False, False),
        (Cost(50000), False, True),
        (Cost(5000, seconds=0.25), True, False),
        (Cost(5000, seconds=5.0), False, False),
        (Cost(5000, seconds=50.0), False, True),
    ],
)
def test_low_costs_are_not_worth_a_word_and_high_ones_are_asked(cost, is_low, is_high):
    assert (cost.is_low, cost.is_high) == (is_low, is_high)

"""What pays best, by arithmetic: against all lengths tried one by one, and as texts change."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from operator import mul

import pytest

from kvchat.core.types import SamplingParams
from kvchat.engine.draft_policy import (
    MAX_DRAFTED,
    Acceptance,
    Chance,
    CostCurve,
    DraftPolicy,
    RequestOffers,
    choose_lengths,
)
from kvchat.engine.drafters import Offer
from kvchat.engine.request import Request, RequestSpec


def linear(slope: float, first: float = 1.0) -> Callable[[int], float]:
    return lambda count: first * (1 + slope * (count - 1))


def geometric(likely: float, count: int = 8) -> list[float]:
    return [likely**place for place in range(1, count + 1)]


def gain_of(likely: float, length: int, row: float, draft: float) -> float:
    expected = 1 + sum(geometric(likely, length))
    return expected / (1 + row * length + draft * length)


def test_one_request_gets_the_best_length_there_is() -> None:
    for costs in product([0.1, 0.3, 0.5, 0.7, 0.9], [0.01, 0.1, 0.5], [0.0, 0.1, 0.3]):
        likely, row, draft = costs
        chance = Chance(geometric(likely), is_free=draft == 0.0)

        choice = choose_lengths([chance], 1, 0, linear(row), partial(mul, draft))

        gains = {length: gain_of(likely, length, row, draft) for length in range(9)}
        best = max(gains, key=lambda length: gains[length])
        if gains[best] > 1.031:
            assert choice.gain == pytest.approx(gains[best]), costs
            assert choice.lengths == (best,), costs
        else:
            assert choice.lengths == (0,), costs


@pytest.mark.parametrize("seed", range(20))
def test_of_several_requests_none_is_slowed_for_the_others(seed: int) -> None:
    rng = random.Random(seed)
    chances = [Chance(geometric(rng.random(), 3), rng.random() < 0.5) for _ in range(3)]
    verify, draft = linear(rng.choice((0.02, 0.3, 0.9))), lambda n: rng_cost * n
    rng_cost = rng.choice((0.05, 0.4))
    num_others = rng.choice((0, 0, 1))

    choice = choose_lengths(chances, 3 + num_others, num_others, verify, draft)

    def outcome(lengths: Sequence[int]) -> tuple[float, float]:
        expected = [1 + sum(c.survival[:n]) for c, n in zip(chances, lengths, strict=True)]
        paid = [n for c, n in zip(chances, lengths, strict=True) if not c.is_free]
        seconds = verify(3 + num_others + sum(lengths)) + (draft(max(paid)) if any(paid) else 0.0)
        slowest = 1.0 if num_others else min(expected)
        plain = verify(3 + num_others)
        gain = (sum(expected) + num_others) / (3 + num_others) * plain / seconds
        return gain, slowest * plain / seconds

    gain, fairness = outcome(choice.lengths)
    assert choice.gain == pytest.approx(gain)
    assert fairness >= 0.95 - 1e-9 or choice.lengths == (0, 0, 0)
    fair = [outcome(lengths) for lengths in product(range(4), repeat=3)]
    best = max(gain for gain, fairness in fair if fairness >= 0.95)
    assert gain > 0.8 * best, "far from the best there is"


def to_the_end(
    chances: Sequence[Chance],
    num_others: int,
    verify_s: Callable[[int], float],
    draft_s: Callable[[int], float],
) -> float:
    """Return the best gain of all prefixes of the drafts, the likeliest first."""
    num_rows = len(chances) + num_others
    left = [list(chance.survival) for chance in chances]
    depths, expected = [0] * len(chances), [1.0] * len(chances)
    best = 1.0
    while any(left):
        likeliest = max((i for i, rest in enumerate(left) if rest), key=lambda i: left[i][0])
        expected[likeliest] += left[likeliest].pop(0)
        depths[likeliest] += 1
        dear = [d for d, chance in zip(depths, chances, strict=True) if d and not chance.is_free]
        seconds = verify_s(num_rows + sum(depths)) + (draft_s(max(dear)) if dear else 0.0)
        slowest = 1.0 if num_others else min(expected)
        if slowest * verify_s(num_rows) >= 0.95 * seconds:
            gain = (sum(expected) + num_others) / seconds / (num_rows / verify_s(num_rows))
            best = max(best, gain if gain > 1.03 else 1.0)
    return best


def test_nothing_is_missed_by_looking_no_further() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        chances = [
            Chance(geometric(rng.random(), rng.randint(1, 16)), rng.random() < 0.4)
            for _ in range(rng.randint(1, 4))
        ]
        num_others = rng.choice((0, 0, 1, 3))
        verify_s = linear(rng.choice((0.0, 0.02, 0.1, 0.4)), rng.uniform(0.5, 2.0))
        draft_s = linear(rng.choice((0.5, 1.0)), rng.choice((0.05, 0.2, 0.6)))

        choice = choose_lengths(chances, len(chances) + num_others, num_others, verify_s, draft_s)

        best = to_the_end(chances, num_others, verify_s, draft_s)
        assert choice.gain == pytest.approx(best), seed


def test_a_curve_learns_what_is_measured_and_guesses_between() -> None:
    curve = CostCurve(slope=0.05)
    for _ in range(10):
        curve.note(1, 1.0)
        curve.note(5, 2.0)

    assert curve.seconds(1) == pytest.approx(1.0, rel=0.1)
    assert curve.seconds(5) == pytest.approx(2.0, rel=0.1)
    assert 1.2 < curve.seconds(3) < 1.8
    assert curve.seconds(9) > curve.seconds(5)
    assert curve.num_measured(1) == 10
    assert curve.num_measured(3) == 0


def test_a_curve_never_falls() -> None:
    curve, rng = CostCurve(0.05), random.Random(2)
    for _ in range(300):
        rows = rng.randrange(1, 200)
        curve.note(rows, rng.random() * rows)
        costs = [curve.seconds(count) for count in range(1, 220)]
        assert all(more >= fewer * (1 - 1e-9) for fewer, more in pairwise(costs))


def test_a_curve_forgets_a_hiccup_and_follows_a_growing_context() -> None:
    curve = CostCurve(0.05)
    for _ in range(20):
        curve.note(1, 1.0)
        curve.note(4, 1.2)
    curve.note(4, 50.0)
    assert curve.seconds(4) < 1.6
    for _ in range(40):
        curve.note(4, 2.4)

    assert curve.seconds(4) == pytest.approx(2.4, rel=0.1)
    assert curve.seconds(1) > 1.2, "one row costs more in a longer context too"


def test_acceptance_is_remembered_by_position() -> None:
    acceptance = Acceptance(0.5)
    for _ in range(200):
        acceptance.note(num_drafted=4, num_accepted=2)

    first, second, third, fourth = acceptance.survival(4)
    assert first > 0.95
    assert second > 0.9
    assert third < 0.05
    assert fourth <= third
    assert len(acceptance.survival(100)) == MAX_DRAFTED


def asking(request: Request, source: str, is_free: bool, most: int = 8) -> RequestOffers:
    return RequestOffers(request, (Offer(source, most, is_free),))


def new_request() -> Request:
    return Request.from_spec(1, RequestSpec((1, 2), SamplingParams()), 0.0)


def run_text(
    policy: DraftPolicy,
    request: Request,
    likely: Callable[[int], float],
    row: float,
    draft: float,
    steps: int,
    seed: int = 0,
) -> tuple[float, list[int]]:
    """Decode with guesses that come true with `likely(step)`; return the gain and the lengths."""
    rng, tokens, seconds, lengths = random.Random(seed), 0, 0.0, []
    for step in range(steps):
        taken = None
        if policy.is_to_ask(request):
            [taken] = policy.choose([asking(request, "draft", is_free=draft == 0.0)], 1, 0)
        length = taken.num_tokens if taken is not None else 0
        lengths.append(length)
        accepted = 0
        while accepted < length and rng.random() < likely(step):
            accepted += 1
        if length:
            seconds += draft * length
            if draft:
                policy.note_drafting(1, length, draft * length)
            policy.note_verified(request, "draft", length, accepted)
        policy.note_step(1, 1 + length, 1 + row * length)
        seconds += 1 + row * length
        tokens += 1 + accepted
    return tokens / seconds, lengths


def test_guessable_text_is_drafted_nearly_as_well_as_can_be() -> None:
    gain, _ = run_text(DraftPolicy(), new_request(), lambda step: 0.8, 0.03, 0.15, 400)

    assert gain > 0.9 * max(gain_of(0.8, length, 0.03, 0.15) for length in range(9))


@pytest.mark.parametrize("draft", [0.0, 0.2, 0.5])
def test_text_nobody_can_guess_costs_next_to_nothing(draft: float) -> None:
    policy = DraftPolicy()
    run_text(policy, new_request(), lambda step: 0.05, 0.05, draft, 100)

    gain, lengths = run_text(policy, new_request(), lambda step: 0.05, 0.05, draft, 400, seed=1)

    assert gain > 0.98
    assert lengths.count(0) > 380
    assert any(lengths), "it does not even try any more"


def test_whoever_is_refused_again_and_again_is_asked_less_often() -> None:
    """Asking took a twentieth of a step of the demo model, at every token of an answer."""
    policy, request = DraftPolicy(), new_request()
    run_text(policy, request, lambda step: 0.0, 0.05, 0.5, 60)

    asked = []
    for _ in range(40):
        asked.append(policy.is_to_ask(request))
        if asked[-1]:
            policy.choose([asking(request, "draft", is_free=False)], 1, 0)
        policy.note_step(1, 1, 1.0)

    assert asked.count(True) == 10
    assert policy.is_to_ask(new_request()), "another request has its own chances"


def test_whoever_is_given_drafts_is_asked_in_every_step() -> None:
    policy, request = DraftPolicy(), new_request()
    for _ in range(2 * 64):
        assert policy.is_to_ask(request)
        [taken] = policy.choose([asking(request, "draft", is_free=True)], 1, 0)
        if taken is not None:
            policy.note_verified(request, "draft", taken.num_tokens, taken.num_tokens)
        policy.note_step(1, 1 + (taken.num_tokens if taken is not None else 0), 1.0)


def test_a_text_that_becomes_guessable_is_noticed() -> None:
    policy, request = DraftPolicy(), new_request()
    run_text(policy, request, lambda step: 0.0, 0.05, 0.1, 60)
    assert "too dear for guesses" in policy.why_plain(request)

    gain, _ = run_text(policy, request, lambda step: 0.95, 0.05, 0.1, 400)

    assert gain > 1.8
    assert policy.why_plain(request) == ""


def test_the_first_drafts_of_a_process_are_not_what_drafting_costs() -> None:
    """The first took three times as long as all later ones; it was too dear for 32 tokens more."""
    policy, request = DraftPolicy(), new_request()
    for _ in range(2):
        assert policy.choose([asking(request, "draft", is_free=False)], 1, 0) == [None]
        policy.note_step(1, 1, 1.0)

    lengths = []
    for drafting_s in (3.0, 1.5, 0.4, 0.4, 0.4, 0.4):
        [taken] = policy.choose([asking(request, "draft", is_free=False)], 1, 0)
        assert taken is not None
        lengths.append(taken.num_tokens)
        policy.note_drafting(1, taken.num_tokens, drafting_s * taken.num_tokens / 2)
        policy.note_verified(request, "draft", taken.num_tokens, taken.num_tokens)
        policy.note_step(1, 1 + taken.num_tokens, 1.1)

    assert lengths[:3] == [2, 2, 2], "little is asked for while the cost is not known"
    assert all(lengths)


def test_plain_steps_are_taken_now_and_then_to_compare_with() -> None:
    _, lengths = run_text(DraftPolicy(), new_request(), lambda step: 0.99, 0.01, 0.0, 400)

    plain = [step for step, length in enumerate(lengths) if length == 0]
    assert plain[:2] == [0, 1]
    assert 4 <= len(plain) <= 12


def test_the_better_of_two_offers_is_taken() -> None:
    policy, request = DraftPolicy(), new_request()
    offers = (Offer("ngram 3", 8, is_free=True), Offer("draft", 8, is_free=False))
    for _ in range(3):
        policy.note_step(1, 1, 1.0)
    policy.note_drafting(1, 2, 0.2)
    for _ in range(30):
        policy.note_verified(request, "ngram 3", 4, 0)
        policy.note_verified(request, "draft", 4, 4)

    [taken] = policy.choose([RequestOffers(request, offers)], 1, 0)

    assert taken is not None
    assert taken.offer.source == "draft"


def test_drafts_yield_where_a_batch_is_bound_by_arithmetic() -> None:
    """Eight requests whose rows each cost as much as the first: nothing is to be gained."""
    policy, requests = DraftPolicy(), [new_request() for _ in range(8)]
    for _ in range(4):
        policy.note_step(8, 8, 8.0)
        policy.note_step(8, 24, 24.0)
    asked = [asking(request, "ngram 3", is_free=True) for request in requests]

    assert policy.choose(asked, 8, 0) == [None] * 8


def test_requests_that_have_left_are_forgotten() -> None:
    policy, request = DraftPolicy(), new_request()
    run_text(policy, request, lambda step: 0.5, 0.05, 0.1, 20)
    policy.settle([])

    assert not policy._records


def test_a_first_step_with_other_things_to_do_is_no_measure_of_its_cost() -> None:
    """A model's first verify proves its scripts: five times as dear, it was never tried again."""
    curve = CostCurve(0.1)
    curve.note(1, 1.0)
    for seconds in (10.0, 5.0, 2.0):
        curve.note(5, seconds)
    assert curve.seconds(5) == 2.0


def test_a_heads_first_wrong_guesses_do_not_end_its_drafts() -> None:
    """Two wrong ones were the end of its drafts once, however good the head is."""
    head, other = (Acceptance(*prior) for prior in ((0.75, 6), (0.6, 1)))
    for acceptance in (head, other):
        acceptance.note(1, 0)
        acceptance.note(1, 0)
    assert head.survival(1)[0] > 0.5 > other.survival(1)[0]
    assert head.renewed().survival(1) == head.survival(1)


def test_rows_again_are_those_that_a_wrong_draft_leaves_to_the_next_step() -> None:
    """Against a sum over all places at which the first wrong draft may be."""
    likely, num_again = 0.7, 2
    chance = Chance(geometric(likely, 4), is_free=True, num_again=num_again)
    for count in range(1, 5):
        expected = sum(likely**j * (1 - likely) * (num_again + j) for j in range(count))
        assert chance.rows_again(count) == pytest.approx(expected)
    assert Chance(geometric(likely, 4), is_free=True).rows_again(4) == 0.0

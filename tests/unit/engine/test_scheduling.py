"""Who runs when: budgets, order, ageing, waiting for a shared prefix, preemption, cancellation."""

from dataclasses import replace

import pytest

from kvchat.core.errors import ContextTooLong, GenerationError
from kvchat.core.events import PrefillProgress
from kvchat.core.types import FinishReason
from kvchat.engine.request import RequestSpec
from support.engine_harness import EngineHarness
from support.remembering_model import GREEDY, VOCAB_SIZE


def greedy(*prompt: int, max_tokens: int = 4, num_samples: int = 1) -> RequestSpec:
    return RequestSpec(tuple(prompt), GREEDY, max_tokens=max_tokens, num_samples=num_samples)


def run_of(start: int, length: int) -> list[int]:
    return [(start + 3 * i) % VOCAB_SIZE for i in range(length)]


def test_a_long_prompt_is_read_in_chunks_of_the_budget() -> None:
    engine = EngineHarness(max_step_tokens=10)
    request_id = engine.submit(greedy(*run_of(0, 35)))

    engine.run()

    assert [tokens for [(_, tokens)] in engine.steps] == [10, 10, 10, 5, 1, 1, 1]
    assert [p.done for p in engine.progress(request_id)] == [10, 20, 30, 35]


def test_a_prompt_that_takes_long_is_told_of_before_its_first_step() -> None:
    """Nothing was told before the first step had ended: a 0.4 B model shows nothing for seconds."""
    now_s = 0.0

    def a_pass() -> None:
        nonlocal now_s
        now_s += 0.5

    engine = EngineHarness(max_step_tokens=64, clock=lambda: now_s, fails=a_pass)
    engine.submit(greedy(*run_of(0, 64), max_tokens=1))  # 128 tokens a second from now on
    engine.run()
    long, short = greedy(*run_of(5, 110)), greedy(*run_of(1, 50))
    long_id, num_before = engine.submit(long), len(engine.steps)

    [first] = engine.step()
    assert isinstance(first, PrefillProgress)
    assert len(engine.steps) == num_before
    assert (first.done, first.total, first.cached.device) == (0, 110, 0)
    assert first.left_s == 110 / 128
    engine.run()
    assert [p.done for p in engine.progress(long_id)] == [0, 64, 110]
    short_id = engine.submit(short)
    engine.run()
    assert [p.done for p in engine.progress(short_id)] == [50]


def test_decodes_go_on_beside_a_prompt_that_is_being_read() -> None:
    engine = EngineHarness(max_step_tokens=6)
    first = engine.submit(greedy(1, 2, 3, max_tokens=20))
    engine.step()
    second = engine.submit(greedy(*run_of(7, 22)))

    engine.run()

    reading = [dict(step) for step in engine.steps if dict(step).get(second, 0) > 1]
    assert [step[second] for step in reading] == [5, 5, 5, 5, 2]
    assert all(step[first] == 1 for step in reading)


def test_a_prompt_beside_an_answer_is_read_in_steps_of_less_than_half_a_second() -> None:
    """Beside a prompt of 64 tokens a step, a 0.4 B model gave a token in 1.4 s."""
    now_s = 0.0

    def a_pass() -> None:
        nonlocal now_s
        now_s += 0.5

    engine = EngineHarness(max_step_tokens=64, clock=lambda: now_s, fails=a_pass)
    first = engine.submit(greedy(*run_of(0, 64), max_tokens=20))  # 128 tokens a second
    engine.step()
    second = engine.submit(greedy(*run_of(7, 80), max_tokens=1))
    engine.run()

    reading = [dict(step) for step in engine.steps if second in dict(step)]
    assert [step[second] for step in reading] == [48, 32]
    assert all(step[first] == 1 for step in reading)


def test_a_prompt_is_read_in_half_steps_beside_many_decodes() -> None:
    """Beside seven answers of eight a prompt got one token a step, so 24 steps for this one."""
    engine = EngineHarness(max_step_tokens=8, max_running=8)
    for number in range(7):
        engine.submit(greedy(number, number + 1, max_tokens=40))
    for _ in range(3):
        engine.step()
    late = engine.submit(greedy(*run_of(7, 24)))

    engine.run()

    reading = [dict(step) for step in engine.steps if dict(step).get(late, 0) > 1]
    assert [step[late] for step in reading] == [4] * 6
    assert all(len(step) == 8 for step in reading), "every answer got its token too"


def test_a_long_prompt_leaves_half_of_each_step_to_a_short_one() -> None:
    """A short request once waited until the whole long prompt was read."""
    engine = EngineHarness(max_step_tokens=10)
    long = engine.submit(greedy(*run_of(0, 65), max_tokens=1))
    engine.step()
    short = engine.submit(greedy(*run_of(7, 12), max_tokens=2))

    engine.run()

    assert [dict(step) for step in engine.steps[:5]] == [
        {long: 10},
        {long: 5, short: 5},
        {long: 5, short: 5},
        {long: 8, short: 2},
        {long: 9, short: 1},
    ]
    assert [dict(step).get(long) for step in engine.steps[5:]] == [10, 10, 8]


def test_a_prompt_leaves_nothing_to_one_that_waits_for_what_it_reads() -> None:
    """Half of each step would be lost: the second prompt begins as the first does."""
    engine = EngineHarness(max_step_tokens=10)
    engine.submit(greedy(*run_of(0, 40), max_tokens=1))
    engine.step()
    engine.submit(greedy(*run_of(0, 40), 1, 2, max_tokens=1))

    engine.run()

    assert [sum(tokens for _, tokens in step) for step in engine.steps[:4]] == [10, 10, 10, 10]


def test_no_step_exceeds_its_budget_however_many_samples_fork() -> None:
    """OutputProcessor of one request once all ran at once, past both limits of a step."""
    engine = EngineHarness(max_step_tokens=4, max_running=16)
    request_id = engine.submit(greedy(*run_of(0, 9), num_samples=9))

    engine.run()  # the harness holds each step to its budget

    engine.assert_complete(request_id)
    assert max(len(step) for step in engine.steps) == 4


def test_no_more_requests_hold_blocks_than_may_run() -> None:
    engine = EngineHarness(max_running=2)
    ids = [engine.submit(greedy(i, i + 1, i + 2, num_samples=3)) for i in range(4)]

    engine.run()  # the harness counts the running requests after each step

    for request_id in ids:
        engine.assert_complete(request_id)


def test_a_request_of_many_samples_gives_places_to_others() -> None:
    """One of 64 samples took all 64 places: others waited for 40 seconds, till it had ended."""
    engine = EngineHarness(max_step_tokens=32, max_running=8)
    many = engine.submit(greedy(1, 2, 3, max_tokens=60, num_samples=12))
    for _ in range(5):
        engine.step()
    others = [engine.submit(greedy(*run_of(number, 9), max_tokens=4)) for number in (4, 5)]
    start = len(engine.steps)

    engine.run()

    ran = [{request_id for request_id, _ in step} for step in engine.steps[start:]]
    for request_id in others:
        engine.assert_complete(request_id)
        last = max(number for number, step in enumerate(ran) if request_id in step)
        assert last < 10, "it waited"
    engine.assert_complete(many)


def test_two_requests_of_many_samples_have_half_of_the_places_each() -> None:
    engine = EngineHarness(max_step_tokens=32, max_running=8)
    first = engine.submit(greedy(1, 2, 3, max_tokens=80, num_samples=12))
    for _ in range(5):
        engine.step()
    second = engine.submit(greedy(*run_of(4, 9), max_tokens=80, num_samples=12))

    for _ in range(15):
        engine.step()

    shares = [sum(r == wanted for r, _ in engine.steps[-1]) for wanted in (first, second)]
    assert shares == [4, 4]
    engine.run()
    engine.assert_complete(first)
    engine.assert_complete(second)


def test_of_those_waiting_the_one_with_most_cached_goes_first() -> None:
    engine = EngineHarness(max_running=1)
    engine.complete(greedy(*run_of(5, 40), max_tokens=1))
    cold = engine.submit(greedy(*run_of(1, 30)))
    warm = engine.submit(greedy(*run_of(5, 40), 9, 9))

    engine.step()

    assert [request_id for request_id, _ in engine.steps[-1]] == [warm]
    engine.run()
    assert engine.ending(warm).usage.cached.device == 40
    assert engine.ending(cold).usage.cached.device == 0


def test_a_long_cold_prompt_is_not_overtaken_for_ever() -> None:
    engine = EngineHarness(max_running=1, max_step_tokens=8)
    engine.submit(greedy(1, 2))
    long = engine.submit(greedy(*run_of(3, 100), max_tokens=1))
    for turn in range(60):
        engine.submit(greedy(turn % VOCAB_SIZE, (turn * 7) % VOCAB_SIZE, max_tokens=2))
        engine.step()

    assert any(request_id == long for step in engine.steps for request_id, _ in step)


def test_a_request_that_could_not_begin_after_all_keeps_its_age(monkeypatch):
    """Its waiting was once forgotten before its blocks were there: it began to wait anew."""
    engine = EngineHarness(max_running=1)
    first = engine.submit(greedy(1, 2, max_tokens=6))
    engine.step()
    second = engine.submit(greedy(3, 4, 5, max_tokens=2))
    [_, waiting] = engine.live()
    while not engine.failures(first) and engine.live()[0] is not waiting:
        engine.step()
    age = waiting.steps_waited
    assert age > 3

    reserve = engine.cache.reserve
    monkeypatch.setattr(engine.cache, "reserve", lambda *_: False)
    plan = engine.engine._scheduler.schedule()
    monkeypatch.setattr(engine.cache, "reserve", reserve)

    assert plan == []
    assert waiting.steps_waited == age + 1
    engine.step()
    assert waiting.steps_waited == 0
    engine.run()
    engine.assert_complete(second)


def test_a_request_waits_for_a_prefix_that_another_is_computing() -> None:
    prompt = run_of(2, 48)
    engine = EngineHarness(max_step_tokens=16)
    first = engine.submit(greedy(*prompt, 1))
    second = engine.submit(greedy(*prompt, 2))

    engine.run()

    assert engine.ending(first).usage.cached.device == 0
    assert engine.ending(second).usage.cached.device == 48
    assert engine.engine.status().num_tokens_computed == 49 + 1 + 2 * 3
    engine.assert_complete(second)


def test_a_request_does_not_wait_where_nothing_is_shared() -> None:
    engine = EngineHarness(max_step_tokens=16)
    engine.submit(greedy(*run_of(2, 30)))
    other = engine.submit(greedy(9, 8, 7))
    engine.step()
    engine.step()

    assert other in [request_id for step in engine.steps for request_id, _ in step]


def test_the_youngest_gives_way_when_blocks_run_out_and_resumes_unchanged() -> None:
    engine = EngineHarness(num_blocks=13, max_context=40)
    old = engine.submit(greedy(*run_of(0, 17), max_tokens=20))
    engine.step()
    engine.step()
    young = engine.submit(greedy(*run_of(1, 17), max_tokens=20))

    engine.run()

    assert engine.engine.status().num_preempted > 0
    in_plan = [dict(step) for step in engine.steps]
    first_without_young = next(
        i for i, step in enumerate(in_plan) if i > 3 and young not in step and old in step
    )
    assert all(old in step for step in in_plan[: first_without_young + 1])
    for request_id in (old, young):
        engine.assert_complete(request_id)


def test_a_request_as_long_as_the_whole_cache_runs_alone_to_its_end() -> None:
    engine = EngineHarness(num_blocks=11, max_context=1000)
    assert engine.engine.max_context == 40
    request_id = engine.submit(greedy(*run_of(0, 30), max_tokens=100))

    engine.run()

    assert engine.ending(request_id).reason is FinishReason.LENGTH
    assert len(engine.generated(request_id)) == 10
    engine.assert_complete(request_id)


def test_samples_that_do_not_fit_together_run_one_after_another() -> None:
    engine = EngineHarness(num_blocks=7, max_context=24)
    request_id = engine.submit(greedy(*run_of(0, 18), max_tokens=6, num_samples=3))

    engine.run()

    assert not engine.failures(request_id)
    engine.assert_complete(request_id)


def test_a_prompt_that_leaves_no_room_is_refused_and_the_longest_that_does_is_not() -> None:
    engine = EngineHarness(max_context=20)
    with pytest.raises(ContextTooLong, match="20 tokens, and the context holds 20"):
        engine.submit(greedy(*run_of(0, 20)))

    longest = engine.submit(greedy(*run_of(0, 19)))
    engine.run()

    assert len(engine.generated(longest)) == 1
    assert engine.ending(longest).reason is FinishReason.LENGTH


@pytest.mark.parametrize("stranger", [VOCAB_SIZE, -1, 1 << 40])
def test_a_token_the_model_does_not_have_is_refused_at_the_door(stranger: int) -> None:
    """Such an id once failed in the embedding, with an IndexError that was not caught: the engine
    stopped for good, and every other conversation with it."""
    engine = EngineHarness()
    with pytest.raises(GenerationError, match="do not belong together"):
        engine.submit(greedy(1, 2, stranger))

    assert engine.complete(greedy(1, 2)) != [[]]


def test_a_cancelled_request_ends_at_the_next_step_and_keeps_what_it_has() -> None:
    engine = EngineHarness()
    cancelled = engine.submit(greedy(1, 2, 3, max_tokens=50))
    other = engine.submit(greedy(4, 5, 6, max_tokens=8))
    for _ in range(3):
        engine.step()
    before = engine.generated(cancelled)

    engine.engine.cancel(cancelled)
    engine.step()

    assert engine.ending(cancelled).reason is FinishReason.CANCELLED
    assert engine.generated(cancelled) == before
    engine.step()
    assert cancelled not in dict(engine.steps[-1])
    engine.run()
    engine.assert_complete(other)


def test_cancelling_a_waiting_request_needs_no_forward_pass() -> None:
    engine = EngineHarness()
    request_id = engine.submit(greedy(1, 2, 3))
    engine.engine.cancel(request_id, FinishReason.TIMEOUT)

    engine.step()

    assert engine.steps == []
    assert engine.ending(request_id).reason is FinishReason.TIMEOUT
    assert not engine.engine.has_work


def test_cancelling_while_the_prompt_is_read_ends_every_sample() -> None:
    """OutputProcessor fork after the prompt; cancelled before that, only the first one once
    ended, and callers waited for the others for ever.
    """
    engine = EngineHarness(max_step_tokens=8)
    request_id = engine.submit(greedy(*run_of(0, 50), num_samples=3))
    engine.step()

    engine.engine.cancel(request_id)
    engine.step()

    assert {engine.ending(request_id, sample).reason for sample in range(3)} == {
        FinishReason.CANCELLED
    }
    assert not engine.engine.has_work


def test_cancelling_after_the_fork_ends_every_sample_once() -> None:
    engine = EngineHarness()
    request_id = engine.submit(greedy(1, 2, 3, num_samples=3, max_tokens=30))
    engine.step()
    engine.step()

    engine.engine.cancel(request_id)
    engine.run()

    for sample in range(3):
        assert engine.ending(request_id, sample).usage.completion_tokens == 2


def of_client(name: str, *prompt: int, max_tokens: int = 60) -> RequestSpec:
    return replace(greedy(*prompt, max_tokens=max_tokens), client=name)


def running(engine: EngineHarness, request_ids: list[int]) -> int:
    """Return how many of these requests the last step had."""
    return sum(request_id in request_ids for request_id, _ in engine.steps[-1])


def test_a_client_of_many_requests_gives_places_to_others() -> None:
    """Each request counted as much as another: who opened 40 had all places but a few."""
    engine = EngineHarness(max_step_tokens=32, max_running=8)
    many = [engine.submit(of_client("many", *run_of(n, 9))) for n in range(20)]
    for _ in range(20):
        engine.step()
    assert running(engine, many) == 8
    few = [engine.submit(of_client("few", *run_of(n, 7), max_tokens=20)) for n in (3, 11)]
    one = engine.submit(of_client("one", *run_of(5, 8), max_tokens=20))

    for _ in range(12):
        engine.step()

    assert (running(engine, few), running(engine, [one]), running(engine, many)) == (2, 1, 5)
    engine.run()
    for request_id in (*many, *few, one):
        engine.assert_complete(request_id)


def test_two_clients_have_half_of_the_places_each_however_many_requests_they_have() -> None:
    engine = EngineHarness(max_step_tokens=32, max_running=8)
    many = [engine.submit(of_client("many", *run_of(n, 9))) for n in range(20)]
    for _ in range(20):
        engine.step()
    others = [engine.submit(of_client("other", *run_of(n, 7))) for n in range(5)]

    for _ in range(15):
        engine.step()

    assert (running(engine, many), running(engine, others)) == (4, 4)


def test_a_client_whose_requests_fill_the_cache_gives_room_to_another() -> None:
    """It waited until one of them had ended."""
    engine = EngineHarness(num_blocks=31, max_context=100)  # of 4 tokens; one is kept free
    many = [engine.submit(of_client("many", *run_of(n, 20), max_tokens=70)) for n in range(5)]
    for _ in range(10):
        engine.step()
    other = engine.submit(of_client("other", *run_of(3, 30), max_tokens=3))
    start = len(engine.steps)

    engine.run()

    steps = [dict(step) for step in engine.steps[start:]]
    assert max(number for number, step in enumerate(steps) if other in step) < 12
    for request_id in (*many, other):
        engine.assert_complete(request_id)


def test_a_client_that_needs_more_room_than_others_have_takes_none_from_them() -> None:
    engine = EngineHarness(num_blocks=31, max_context=100)
    many = [engine.submit(of_client("many", *run_of(n, 20), max_tokens=16)) for n in range(3)]
    for _ in range(5):
        engine.step()
    large = engine.submit(of_client("large", *run_of(3, 95), max_tokens=3))

    engine.step()
    assert running(engine, many) == 3
    engine.run()

    for request_id in (*many, large):
        engine.assert_complete(request_id)

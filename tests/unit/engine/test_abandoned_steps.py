"""Steps of prefill that are given up between two products, and how large such steps are."""

import json
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from kvchat.core.events import ModelReady, RequestEvent, SampleFinished
from kvchat.core.stats import KvPlaces
from kvchat.core.types import FinishReason
from kvchat.engine.request import RequestSpec
from kvchat.engine.thread import EngineThread
from support.assembled import assemble
from support.checkpoints import save_checkpoint, tiny_model
from support.engine_harness import EngineHarness
from support.greedy_answer import greedy_answer
from support.memory_tier import MemoryTier
from support.remembering_model import GREEDY, VOCAB_SIZE
from support.stateful_models import Chat, load_stateful, open_engine, words

WAIT_S = 60.0


def long_prompt(length: int = 60) -> tuple[int, ...]:
    return tuple((7 * i + 3) % VOCAB_SIZE for i in range(length))


def greedy(*prompt: int, max_tokens: int = 4) -> RequestSpec:
    return RequestSpec(prompt, GREEDY, max_tokens=max_tokens)


def test_a_step_is_large_only_where_no_answer_waits_for_it() -> None:
    engine = EngineHarness(max_step_tokens=8, max_prefill_tokens=24)
    first = engine.submit(greedy(*long_prompt(50), max_tokens=9))
    for _ in range(3):
        engine.step()
    second = engine.submit(greedy(*long_prompt(50)[::-1], max_tokens=1))
    engine.run()

    assert [dict(step)[first] for step in engine.steps[:3]] == [24, 24, 2]
    beside = [dict(step)[second] for step in engine.steps if second in dict(step)]
    assert max(beside) == 7, "it decoded beside"
    engine.assert_complete(first)
    engine.assert_complete(second)


def test_a_step_is_smaller_where_the_context_is_long() -> None:
    """Attention in one layer of a large step took a second, and Esc waited for its end."""
    engine = EngineHarness(max_step_tokens=8, max_prefill_tokens=48, max_pairs=900)
    number = engine.submit(greedy(*long_prompt(110), max_tokens=1))
    engine.run()

    assert [dict(step)[number] for step in engine.steps] == [48, 16, 8, 8, 8, 8, 8, 6]
    engine.assert_complete(number)


def test_a_read_ahead_is_read_in_short_steps() -> None:
    engine = EngineHarness(max_step_tokens=8, max_prefill_tokens=48)
    engine.engine.read_ahead(long_prompt(40))
    engine.run()

    assert max(tokens for step in engine.steps for _, tokens in step) == 8


def test_nothing_of_an_abandoned_step_counts() -> None:
    engine = EngineHarness(max_prefill_tokens=48)
    request_id = engine.submit(greedy(*long_prompt()))
    asked: list[frozenset[int]] = []

    def is_unwanted(request_ids: frozenset[int]) -> bool:
        asked.append(request_ids)
        return len(asked) == 1

    engine.engine.abandon_steps(is_unwanted)

    assert engine.step() == []
    assert asked == [frozenset({request_id})]
    [request] = engine.live()
    assert request.num_computed == 0
    engine.run()
    engine.assert_complete(request_id)


def test_a_cancelled_request_ends_though_its_step_was_abandoned() -> None:
    engine = EngineHarness(max_prefill_tokens=48)
    spec = greedy(*long_prompt())
    request_id = engine.submit(spec)
    engine.engine.abandon_steps(lambda request_ids: True)
    engine.step()
    engine.engine.cancel(request_id)
    engine.run()

    assert engine.ending(request_id).reason is FinishReason.CANCELLED
    engine.engine.abandon_steps(lambda request_ids: False)
    again = engine.submit(spec)
    engine.run()
    engine.assert_complete(again)


@pytest.mark.parametrize("gives_up", ["the end", "a request"])
def test_the_measuring_of_a_new_model_is_given_up(gives_up: str) -> None:
    """Leaving a model's first chat waited for it: one of 51 took 526 ms."""
    engine = EngineHarness(max_step_tokens=64)
    places: list[KvPlaces] = []
    asked: list[int] = []

    def once(*request_ids: object) -> bool:
        asked.append(1)
        return len(asked) == 1

    if gives_up == "the end":
        engine.engine.abandon_steps(once)
    else:
        engine.engine.abandon_steps(lambda request_ids: False, once)
    engine.engine.locate([long_prompt()], places.extend)
    assert asked
    assert not engine.engine.has_work
    assert places[0].rates.computed is None
    engine.engine.locate([long_prompt()], places.extend)
    assert places[1].rates.computed is not None
    assert places[1].cached.total == 0, "what was measured is found by none"


def test_a_long_step_is_given_up_for_a_new_request() -> None:
    """A short request once waited for the end of the step, several seconds in a large model."""
    engine = EngineHarness(max_step_tokens=8, max_prefill_tokens=20)
    engine.engine.abandon_steps(lambda request_ids: False, lambda: True)
    long = engine.submit(greedy(*long_prompt(110), max_tokens=1))

    assert engine.step() == []
    short = engine.submit(greedy(*long_prompt(3)[::-1], max_tokens=1))
    engine.run()

    steps = [dict(step) for step in engine.steps]
    assert steps[1] == {long: 5, short: 3}, "it is answered after one short step"
    engine.assert_complete(long)
    engine.assert_complete(short)


def test_a_prompt_loses_one_long_step_of_five_however_many_requests_come() -> None:
    engine = EngineHarness(max_step_tokens=8, max_prefill_tokens=20)
    engine.engine.abandon_steps(lambda request_ids: False, lambda: True)
    number = engine.submit(greedy(*long_prompt(110), max_tokens=1))
    engine.run()

    tokens = [dict(step)[number] for step in engine.steps]
    assert tokens == [20, 8, 20, 20, 20, 20, 20, 8, 14], "lost at first, and after four kept"
    engine.assert_complete(number)


def test_a_step_beside_an_answer_is_not_given_up_for_a_new_request() -> None:
    engine = EngineHarness(max_step_tokens=17, max_prefill_tokens=48)
    answer = engine.submit(greedy(1, 2, 3, max_tokens=9))
    engine.step()
    engine.engine.abandon_steps(lambda request_ids: False, lambda: True)
    engine.submit(greedy(*long_prompt(90), max_tokens=1))

    engine.step()

    assert len(engine.generated(answer)) == 2


@dataclass
class Slow:
    """A clock by which each forward pass takes some seconds."""

    step_s: float
    now_s: float = 0.0

    def harness(self) -> EngineHarness:
        return EngineHarness(clock=lambda: self.now_s, fails=self._pass)

    def _pass(self) -> None:
        self.now_s += self.step_s


def test_a_slow_decode_step_is_given_up_for_a_cancel() -> None:
    """Esc waited for the end of the step, with a large model half a second and more."""
    engine = Slow(0.3).harness()
    number = engine.submit(greedy(1, 2, 3, max_tokens=9))
    while len(engine.generated(number)) < 2:
        engine.step()
    engine.engine.abandon_steps(lambda request_ids: True)

    assert engine.step() == []
    assert len(engine.generated(number)) == 2
    engine.engine.abandon_steps(lambda request_ids: False)
    engine.run()
    engine.assert_complete(number)


def test_a_slow_decode_step_of_several_requests_is_given_up_if_no_one_wants_it() -> None:
    """It was asked nothing at all: a program that was to end waited for the whole step."""
    engine = Slow(0.3).harness()
    numbers = [engine.submit(greedy(1, 2, start, max_tokens=9)) for start in (3, 4)]
    while not all(len(engine.generated(number)) == 2 for number in numbers):
        engine.step()
    engine.engine.abandon_steps(lambda request_ids: numbers[0] in request_ids)
    engine.step()
    assert all(len(engine.generated(number)) == 3 for number in numbers)

    engine.engine.abandon_steps(lambda request_ids: bool(request_ids & set(numbers)))
    engine.step()
    assert all(len(engine.generated(number)) == 3 for number in numbers)

    engine.engine.abandon_steps(lambda request_ids: False)
    engine.run()
    for number in numbers:
        engine.assert_complete(number)


def test_short_steps_are_never_asked() -> None:
    engine = Slow(0.01).harness()
    engine.engine.abandon_steps(lambda request_ids: pytest.fail("asked"))

    engine.complete(greedy(*long_prompt(16)))


def waiting_thread(
    is_asked: threading.Event, gives_way: bool = False, **limits: int
) -> EngineThread:
    """Start an engine whose steps wait until they are not wanted, or are to give way."""
    harness = EngineHarness(**limits)  # type: ignore[arg-type]
    abandon = harness.engine.abandon_steps

    def until(ended: Callable[..., bool], *asked: frozenset[int]) -> bool:
        is_asked.set()
        end_s = time.monotonic() + WAIT_S
        while not ended(*asked):
            assert time.monotonic() < end_s, "the step was not given up"
        return True

    def abandon_in_the_end(own: Callable[..., bool], is_awaited: Callable[[], bool]) -> None:
        if gives_way:
            abandon(lambda request_ids: False, partial(until, is_awaited))
        else:
            abandon(partial(until, own))

    harness.engine.abandon_steps = abandon_in_the_end  # type: ignore[method-assign, assignment]
    ready = ModelReady("fake", "s1-0", "cpu", "float32", 120, 0.0)
    return EngineThread(lambda _: (harness.engine, ready), lambda _: None)


@pytest.mark.parametrize("ending", ["cancel", "close"])
def test_a_cancel_and_a_close_give_up_the_step_that_runs(ending: str) -> None:
    """Esc in a long step had to wait for all of its layers."""
    is_asked = threading.Event()
    thread = waiting_thread(is_asked, max_prefill_tokens=48)
    ended, events = threading.Event(), list[RequestEvent]()

    def listen(event: RequestEvent) -> None:
        events.append(event)
        if isinstance(event, SampleFinished):
            ended.set()

    ticket = thread.submit(greedy(*long_prompt()), listen)
    assert is_asked.wait(WAIT_S)
    if ending == "cancel":
        thread.cancel(ticket)
        assert ended.wait(WAIT_S)
        assert [type(event) for event in events] == [SampleFinished]
    thread.close(WAIT_S)
    assert not thread._thread.is_alive()


def test_a_cancel_gives_up_a_step_that_reads_ahead() -> None:
    """Esc and leaving waited for its end, 0.5 to 5 s, before the request could begin and end."""
    is_asked = threading.Event()
    thread = waiting_thread(is_asked, max_step_tokens=48)
    ended, events = threading.Event(), list[RequestEvent]()

    def listen(event: RequestEvent) -> None:
        events.append(event)
        ended.set()

    thread.call(lambda engine: engine.read_ahead(long_prompt()))
    assert is_asked.wait(WAIT_S)
    thread.cancel(thread.submit(greedy(*long_prompt()), listen))

    assert ended.wait(WAIT_S)
    assert [type(event) for event in events] == [SampleFinished]
    thread.close(WAIT_S)


def test_a_new_request_gives_up_the_long_step_that_runs() -> None:
    is_asked = threading.Event()
    thread = waiting_thread(is_asked, gives_way=True, max_prefill_tokens=48)
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listener(name: str) -> Callable[[RequestEvent], None]:
        return lambda event: ended.put(name) if isinstance(event, SampleFinished) else None

    thread.submit(greedy(*long_prompt(90), max_tokens=1), listener("long"))
    assert is_asked.wait(WAIT_S)
    thread.submit(greedy(5, 6, 7, max_tokens=1), listener("short"))

    assert [ended.get(timeout=WAIT_S) for _ in range(2)] == ["short", "long"]
    thread.close(WAIT_S)


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1"])
def test_the_state_of_an_abandoned_step_is_that_before_it(name: str, tmp_path: Path) -> None:
    reference, loaded = load_stateful(name, tmp_path / "model")
    chat = Chat(reference, open_engine(loaded, tmp_path / "kv"))
    prompt = words(90, seed=3)
    num_asked = 0

    def is_unwanted(request_ids: frozenset[int]) -> bool:
        nonlocal num_asked
        num_asked += 1
        return num_asked % 3 == 0 and num_asked < 10

    chat.engine.abandon_steps(is_unwanted)
    [answer] = chat.ask(prompt)
    [again] = chat.ask([*prompt, *answer.ids, *words(40, seed=4)])
    chat.engine.close()

    assert num_asked > 3
    assert answer.ids == chat.right_answer(prompt, answer.ids)
    continued = [*prompt, *answer.ids, *words(40, seed=4)]
    assert again.ids == chat.right_answer(continued, again.ids)


def test_every_product_of_a_real_model_asks(tmp_path: Path) -> None:
    """Asked once a layer, 256 rows of a 0.4 B model took Esc 0.3 s on a slow processor."""
    checkpoint = save_checkpoint(tmp_path, tiny_model("llama"))
    engine = assemble(checkpoint).engine
    num_asked = 0

    def is_unwanted(request_ids: frozenset[int]) -> bool:
        nonlocal num_asked
        num_asked += 1
        return False

    engine.abandon_steps(is_unwanted)
    greedy_answer(engine, words(150, seed=1), 1)  # shorter ones are compiled
    engine.close()

    num_layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
    assert num_asked >= 7 * num_layers


def test_a_stopped_answer_ends_before_anything_else_is_computed() -> None:
    """Esc waited for one more forward pass: the fingerprint of the KV that is kept on the disk."""
    forwards: list[None] = []
    tier = MemoryTier(block_size=4, image_bytes=32)
    engine = EngineHarness(open_tier=lambda: tier, fails=lambda: forwards.append(None))
    number = engine.submit(greedy(*long_prompt(), max_tokens=29))
    while not engine.generated(number):
        engine.step()
    before = len(forwards)
    engine.engine.cancel(number)

    engine.step()

    assert engine.ending(number).reason is FinishReason.CANCELLED
    assert len(forwards) == before
    engine.run()
    engine.engine.close()
    assert tier.blocks, "its KV is kept all the same"

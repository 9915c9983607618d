"""Callers on many threads share one engine thread: each gets all events of its own requests only.

They submit, cancel at random moments, query the engine and abandon answers. The remembering model
computes the events that every request must get. At the end the engine closes while they run.
"""

import queue
import random
import threading
from dataclasses import dataclass, replace

import pytest

from kvchat.core.errors import KvchatError
from kvchat.core.events import ModelReady, RequestEvent, RequestFailed, SampleFinished
from kvchat.core.events import TokensGenerated as Tokens
from kvchat.core.types import FinishReason, SamplingParams
from kvchat.engine.request import RequestSpec
from kvchat.engine.thread import EngineThread
from support.engine_harness import EngineHarness
from support.remembering_model import VOCAB_SIZE, complete_without_cache
from support.soak_sizes import short_and_long

NUM_CALLERS = 6
WAIT_S = 60.0
MAX_CONTEXT = 48
READY = ModelReady("fake", "s1-0", "cpu", "float32", MAX_CONTEXT, 0.0)


@dataclass
class Heard:
    """Everything one request was told, in order."""

    spec: RequestSpec
    events: list[RequestEvent]

    def tokens(self, sample: int) -> list[int]:
        return [
            token
            for event in self.events
            if isinstance(event, Tokens) and event.sample == sample
            for token in event.token_ids
        ]


class Caller:
    """One thread's worth of requests, one at a time; `trouble` is what went wrong."""

    def __init__(self, seed: int, engine: EngineThread, num_requests: int) -> None:
        self._rng = random.Random(seed)
        self._engine = engine
        self._num_requests = num_requests
        self.heard: list[Heard] = []
        self.trouble: list[BaseException] = []
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            for _ in range(self._num_requests):
                self.heard.append(self._ask())
        except BaseException as error:
            self.trouble.append(error)

    def _ask(self) -> Heard:
        rng = self._rng
        inbox: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        spec = self._spec()
        ticket = self._engine.submit(spec, inbox.put)
        if rng.random() < 0.1:
            self._engine.call(lambda engine: engine.status()).cancel()
        patience = rng.choice([0, 1, 5, 10**9, 10**9, 10**9])
        heard, num_open = Heard(spec, []), spec.num_samples
        while num_open:
            if len(heard.events) == patience:
                self._engine.cancel(ticket)
            event = inbox.get(timeout=WAIT_S)
            heard.events.append(event)
            num_open -= isinstance(event, SampleFinished)
            if isinstance(event, RequestFailed):
                return heard
        return heard

    def _spec(self) -> RequestSpec:
        rng = self._rng
        length = rng.choice([1, 3, 9, 20, MAX_CONTEXT])
        return RequestSpec(
            tuple(rng.randrange(2) for _ in range(length)),
            replace(SamplingParams(), temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(9)),
            max_tokens=rng.choice([1, 4, 12]),
            stop_token_ids=frozenset(rng.sample(range(VOCAB_SIZE), 2)),
            num_samples=rng.choice([1, 1, 3]),
        )

    def assert_told_the_truth(self) -> None:
        assert not self.trouble, self.trouble
        assert len(self.heard) == self._num_requests
        for heard in self.heard:
            if isinstance(heard.events[-1], RequestFailed):
                assert len(heard.spec.prompt_ids) >= MAX_CONTEXT
                continue
            assert len({event.request_id for event in heard.events}) == 1, "another request's event"
            for ending in [e for e in heard.events if isinstance(e, SampleFinished)]:
                expected = complete_without_cache(heard.spec, ending.sample, MAX_CONTEXT)
                said = heard.tokens(ending.sample)
                whole = ending.reason is not FinishReason.CANCELLED
                assert said == (expected if whole else expected[: len(said)])


@short_and_long(12, 2000)
@pytest.mark.parametrize("num_blocks", [14, 60], ids=["tight", "roomy"])
def test_every_caller_hears_its_own_requests_to_their_end(size: int, num_blocks: int) -> None:
    harness = EngineHarness(num_blocks=num_blocks, max_context=MAX_CONTEXT, max_running=4)
    engine = EngineThread(lambda _: (harness.engine, READY), lambda _: None)
    callers = [Caller(seed, engine, size) for seed in range(NUM_CALLERS)]
    for caller in callers:
        caller.thread.start()
    for caller in callers:
        caller.thread.join()
    engine.call(lambda _: harness.check()).result(WAIT_S)
    engine.close(WAIT_S)

    for caller in callers:
        caller.assert_told_the_truth()
    assert not engine._running
    assert harness.cache.status().num_free + harness.cache.status().num_cached == num_blocks - 1


@short_and_long(5, 200)
def test_closing_while_others_ask_leaves_nobody_waiting(size: int) -> None:
    """What is asked from then on is refused; only answers that were under way end in silence."""
    for seed in range(size):
        harness = EngineHarness(max_context=MAX_CONTEXT)
        engine = EngineThread(lambda _, h=harness: (h.engine, READY), lambda _: None)
        closing = threading.Event()

        def ask_until_closed(engine: EngineThread = engine, closing: threading.Event = closing):  # type: ignore[no-untyped-def]
            while True:
                try:
                    engine.call(lambda engine: engine.status()).result(WAIT_S)
                except KvchatError:
                    return
                closing.set()

        askers = [threading.Thread(target=ask_until_closed) for _ in range(3)]
        for asker in askers:
            asker.start()
        closing.wait(WAIT_S)
        if seed % 2:
            engine.submit(RequestSpec((1, 2), SamplingParams(temperature=0.0)), lambda _: None)
        engine.close(WAIT_S)
        for asker in askers:
            asker.join(WAIT_S)
        assert not any(asker.is_alive() for asker in askers)
        assert not engine._thread.is_alive()

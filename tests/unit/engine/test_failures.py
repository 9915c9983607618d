"""What fails ends the request it belongs to and no other, and leaves the cache whole."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvchat.core.errors import GenerationError, UsageError
from kvchat.engine import runner
from kvchat.engine.request import RequestSpec
from kvchat.model.batch import ForwardBatch
from support.engine_harness import EngineHarness
from support.remembering_model import GREEDY, VOCAB_SIZE


class Saboteur:
    """Raises `error` in the steps whose numbers it is given."""

    def __init__(self, error: Exception, *steps: int) -> None:
        self._error, self._steps, self._num_steps = error, steps, 0

    def __call__(self) -> None:
        self._num_steps += 1
        if self._num_steps in self._steps:
            raise self._error


def spec(*prompt: int, max_tokens: int = 6) -> RequestSpec:
    return RequestSpec(tuple(prompt), GREEDY, max_tokens=max_tokens)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("mat1 and mat2\nshapes"), "The forward pass failed: mat1 and mat2."),
        (RuntimeError(), "The forward pass failed: RuntimeError."),
        (IndexError("index out of range in self"), "index out of range in self"),
        (ZeroDivisionError(), "ZeroDivisionError"),
        (KeyError("rope"), "rope"),
        (MemoryError(), "ran out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "ran out of memory"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_whatever_a_model_raises_becomes_one_sentence(error: Exception, message: str) -> None:
    """Only RuntimeError and MemoryError were caught, and one without a text failed in the naming of
    the failure: the engine stopped for good."""
    engine = EngineHarness(fails=Saboteur(error, 1))
    request_id = engine.submit(spec(1, 2, 3))

    engine.run()

    [failed] = engine.failures(request_id)
    assert isinstance(failed.error, GenerationError)
    assert message in failed.error.message


def test_no_memory_to_look_at_what_failed_ends_the_request_alone(monkeypatch):
    """What a step that ran out of memory had computed was looked at, which took memory: the engine
    stopped for good.
    """
    engine = EngineHarness(fails=Saboteur(MemoryError(), 3))

    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(engine.cache, "num_finite", no_memory)
    request_id = engine.submit(spec(*range(1, 39)))

    engine.run()

    assert len(engine.failures(request_id)) == 1
    assert engine.complete(spec(1, 2, 3)) == EngineHarness().complete(spec(1, 2, 3))


def test_keys_that_are_no_numbers_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt's chunks wrote NaN and failed nothing; its last one failed, and so did every
    prompt that began alike ever after."""
    engine = EngineHarness()
    prompt = tuple(range(1, 39))
    good = engine.complete(spec(*prompt[:16], max_tokens=1))
    forward, positions = engine.model.forward, engine.model._positions
    is_broken = True

    def break_positions(batch: ForwardBatch) -> torch.Tensor:
        logits = forward(batch)
        if is_broken and 20 in batch.positions.tolist():
            row = batch.positions.tolist().index(20)
            positions[batch.slot_mapping[row]] = float("nan")
        return logits

    monkeypatch.setattr(engine.model, "forward", break_positions)
    monkeypatch.setattr(engine, "check", lambda: None)  # the model itself notices what is broken
    request_id = engine.submit(spec(*prompt))
    engine.run()
    assert engine.failures(request_id)
    is_broken = False
    engine.model.broken_promises.clear()
    monkeypatch.undo()

    assert good == [engine.generated(1)]
    assert engine.cache.num_cached_tokens(prompt) == 20
    again = engine.submit(spec(*prompt))
    engine.run()
    engine.assert_complete(again)


@pytest.mark.parametrize("is_releasable", [True, False])
def test_a_step_that_cannot_be_planned_ends_its_requests_and_not_the_engine(
    is_releasable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception while planning went up through the engine's thread, and that was the end."""
    engine = EngineHarness()
    numbers = [engine.submit(spec(1, 2, 3, 4, 5)), engine.submit(spec(5, 4, 3, 2, 1))]
    engine.step()

    def fail(*_: object) -> None:
        raise RuntimeError("no such block")

    with monkeypatch.context() as broken:
        broken.setattr(engine.cache, "reserve", fail)
        if not is_releasable:
            broken.setattr(engine.cache, "release", fail)
            broken.setattr(engine, "check", lambda: None)
        engine.run()

    assert all("no such block" in str(engine.failures(number)[0].error) for number in numbers)
    assert not engine.live()
    if is_releasable:
        assert engine.complete(spec(7, 8, 9))
    else:
        engine.engine.submit(spec(7, 8, 9))  # the blocks are lost, and nothing else
        assert [event for _ in range(20) for event in engine.engine.step()]


def poison(engine: EngineHarness, token_id: int, act: Callable[[torch.Tensor], None]) -> None:
    """Have `act` change, or raise for, the logits of every step that computes `token_id`."""
    forward = engine.model.forward

    def poisoned(batch: ForwardBatch) -> torch.Tensor:
        logits = forward(batch)
        with torch.inference_mode():
            for row, place in enumerate(batch.logit_rows.tolist()):
                if batch.token_ids[place] == token_id:
                    act(logits[row])
        return logits

    engine.model.forward = poisoned  # type: ignore[method-assign]


def boom(_: torch.Tensor) -> None:
    raise RuntimeError("boom")


def test_a_batch_that_fails_once_is_computed_request_by_request() -> None:
    """A step's failure, running out of memory for one, once ended every request in it."""
    engine = EngineHarness(fails=Saboteur(torch.OutOfMemoryError("CUDA out of memory"), 3))
    ids = [engine.submit(spec(1, 2, 3)), engine.submit(spec(4, 5, 6)), engine.submit(spec(7, 8))]

    engine.run()

    for request_id in ids:
        engine.assert_complete(request_id)


@pytest.mark.parametrize(
    ("act", "message"),
    [(boom, "boom"), (lambda row: row.fill_(float("nan")), "not numbers")],
    ids=["raises", "gives no numbers"],
)
def test_a_request_that_cannot_be_answered_fails_alone(act, message):
    """One conversation with a NaN in its logits once ended all the others that were answering."""
    engine = EngineHarness()
    others = [
        engine.submit(spec(1, 2, 3)),
        engine.submit(RequestSpec((4, 5), GREEDY, 6, num_samples=2)),
    ]
    poison(engine, 39, act)
    engine.step()
    failing = engine.submit(RequestSpec((7, 8, 39), GREEDY, max_tokens=6, num_samples=3))

    engine.run()

    [failed] = engine.failures(failing)
    assert message in failed.error.message
    assert not any(39 in engine.generated(request_id) for request_id in others)
    for request_id in others:
        engine.assert_complete(request_id)


class FailingWatcher:
    """A stop watcher that fails at its n-th token."""

    def __init__(self, at: int) -> None:
        self._left = at

    def feed(self, token_id: int) -> bool:
        self._left -= 1
        if self._left == 0:
            raise ValueError("no such character")
        return False


@pytest.mark.parametrize("at", [1, 4])
def test_a_stop_watcher_that_fails_costs_its_own_request_only(at: int) -> None:
    """It once stopped the whole engine, for good."""
    engine = EngineHarness()
    other = engine.submit(spec(1, 2, 3, max_tokens=9))
    failing = engine.submit(
        RequestSpec(
            (4, 5, 6),
            GREEDY,
            max_tokens=9,
            num_samples=3,
            new_stop_watcher=lambda: FailingWatcher(at),
        )
    )

    engine.run()

    assert len(engine.failures(failing)) == 1
    engine.assert_complete(other)


def test_what_was_computed_before_the_failure_is_kept_and_right() -> None:
    engine = EngineHarness(max_step_tokens=8, fails=Saboteur(RuntimeError("boom"), 3))
    prompt = tuple(range(30))
    engine.submit(spec(*prompt))
    engine.run()

    again = engine.submit(spec(*prompt))
    engine.run()

    assert engine.ending(again).usage.cached.device == 16
    engine.assert_complete(again)


def test_a_failure_after_the_fork_ends_all_samples_with_one_event() -> None:
    engine = EngineHarness(fails=Saboteur(RuntimeError("boom"), *range(4, 99)))
    request_id = engine.submit(RequestSpec((1, 2, 3), GREEDY, max_tokens=9, num_samples=3))

    engine.run()

    assert len(engine.failures(request_id)) == 1
    assert not engine.engine.has_work


def test_a_sampler_that_fails_is_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineHarness()
    request_id = engine.submit(spec(1, 2, 3))

    def broken(*_: object) -> list[int]:
        raise ValueError("no such distribution")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "sample", broken)
        engine.run()

    assert "no such distribution" in engine.failures(request_id)[0].error.message
    assert engine.complete(spec(1, 2, 3)) != [[]]


def test_a_failure_leaves_its_stack_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    engine = EngineHarness(fails=Saboteur(RuntimeError("boom"), 1))
    engine.submit(spec(1, 2, 3))

    engine.run()

    [record] = [r for r in caplog.records if r.name == "kvchat.engine.engine"]
    assert "boom" in (record.exc_text or "")
    assert "requests=1" in record.getMessage()


def test_a_bias_of_a_token_the_model_lacks_is_refused_before_it_runs() -> None:
    biased = replace(GREEDY, logit_bias=((VOCAB_SIZE, 1.0),))
    engine = EngineHarness()

    with pytest.raises(UsageError, match=f"logit-bias names token {VOCAB_SIZE}"):
        engine.submit(RequestSpec((1, 2, 3), biased, max_tokens=2))

    assert not engine.engine.has_work

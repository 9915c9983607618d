"""A step that fails ends its own requests and nobody else's, and leaves the cache whole."""

import pytest
import torch

from kvchat.core.errors import GenerationError
from kvchat.engine import engine as engine_module
from kvchat.engine.request import RequestSpec
from support.engine_harness import EngineHarness
from support.remembering_model import GREEDY


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


def test_requests_that_were_not_in_the_failed_step_go_on() -> None:
    engine = EngineHarness(max_running=2, fails=Saboteur(RuntimeError("boom"), 3))
    failing = [engine.submit(spec(1, 2, 3)), engine.submit(spec(4, 5, 6))]
    waiting = engine.submit(spec(7, 8, 9))

    engine.run()

    assert all(len(engine.failures(request_id)) == 1 for request_id in failing)
    assert not engine.failures(waiting)
    engine.assert_complete(waiting)


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
    engine = EngineHarness(fails=Saboteur(RuntimeError("boom"), 4))
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
        patch.setattr(engine_module, "sample", broken)
        engine.run()

    assert "no such distribution" in engine.failures(request_id)[0].error.message
    assert engine.complete(spec(1, 2, 3)) != [[]]


def test_a_failure_leaves_its_stack_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    engine = EngineHarness(fails=Saboteur(RuntimeError("boom"), 1))
    engine.submit(spec(1, 2, 3))

    engine.run()

    [record] = caplog.records
    assert "boom" in (record.exc_text or "")
    assert "requests=1" in record.getMessage()

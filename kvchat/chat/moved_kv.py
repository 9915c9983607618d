"""Moves the KV of what stays in a context from which messages were left out, where it can be.

What the context begins with has its own KV: the system prompt, and a note that is read first. The
messages behind it have KV whose keys are turned to their new positions.
"""

from collections.abc import Sequence
from concurrent.futures import Future

from kvchat.chat.why import common_len
from kvchat.core.events import RequestEvent, RequestFailed, SampleFinished
from kvchat.core.types import FinishReason
from kvchat.engine.request import RequestSpec
from kvchat.engine.thread import EngineThread

# Fewer tokens are read again with the next message.
_LEAST_MOVED = 32


def move_kv(
    engine: EngineThread, sources: Sequence[int], targets: Sequence[int], name: str
) -> "Future[int]":
    """Move KV of the context `sources` to `targets`, which ends as it does.

    The result is how many tokens of `targets` requests of that name find then: 0 if none could be
    moved. It raises what ended the engine.
    """
    done: Future[int] = Future()
    done.set_running_or_notify_cancel()  # it cannot be cancelled: the engine sets it
    num_same = common_len(sources, targets)
    num_own = max(num_same, len(targets) - common_len(sources[::-1], targets[::-1]))
    if len(targets) - num_own < _LEAST_MOVED or len(targets) > len(sources):
        done.set_result(0)
        return done

    def move() -> None:
        moved = engine.call(
            lambda engine: engine.move_kv(sources, targets, num_own, name), is_awaited=True
        )
        moved.add_done_callback(lambda _: _settle(moved, done))

    def listen(event: RequestEvent) -> None:
        is_over = isinstance(event, RequestFailed | SampleFinished)
        if isinstance(event, SampleFinished) and event.reason is not FinishReason.CANCELLED:
            move()
        elif is_over:
            done.set_result(0)

    if num_own > num_same:
        engine.submit(RequestSpec(tuple(targets[:num_own]), max_tokens=0), listen)
    else:
        move()
    return done


def _settle(one: "Future[int]", other: "Future[int]") -> None:
    if (error := one.exception()) is not None:
        other.set_exception(error)
    else:
        other.set_result(one.result())

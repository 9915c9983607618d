"""Server-sent events: writes an answer in one interface's events while it is generated."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from starlette.responses import StreamingResponse

from kvchat.chat.events import AnswerCall, AnswerEnded, AnswerText, ReadingPrompt
from kvchat.server.answering import Answer
from kvchat.server.api_errors import ApiError

_PING = ": the prompt is being read\n\n"


class StreamWriter(Protocol):
    """Writes one answer's events as text of a stream; each call may return "" for nothing."""

    def begin(self) -> str: ...

    def text(self, event: AnswerText) -> str: ...

    def call(self, event: AnswerCall) -> str: ...

    def ended(self, event: AnswerEnded) -> str: ...

    def finish(self) -> str:
        """All samples have ended."""

    def fail(self, error: ApiError) -> str:
        """The request failed after the stream began."""


def sse(data: dict[str, Any], event: str | None = None) -> str:
    """Return one event with JSON data."""
    name = f"event: {event}\n" if event is not None else ""
    return f"{name}data: {json.dumps(data, separators=(',', ':'))}\n\n"


Progress = Callable[[ReadingPrompt], str]


def stream_response(
    answer: Answer, writer: StreamWriter, progress: Progress | None = None
) -> StreamingResponse:
    """Return a response that streams an answer; the answer is closed when the client goes.

    `progress` writes how much of the prompt is read; None if the client does not want to know.
    """
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(
        _written(answer, writer, progress), media_type="text/event-stream", headers=headers
    )


async def _written(
    answer: Answer, writer: StreamWriter, progress: Progress | None
) -> AsyncIterator[str]:
    try:
        yield writer.begin()
        async for event in answer.events():
            if event is None:
                yield _PING
            elif isinstance(event, ReadingPrompt):
                if progress is not None:
                    yield progress(event)
            elif isinstance(event, AnswerText):
                yield writer.text(event)
            elif isinstance(event, AnswerCall):
                yield writer.call(event)
            else:
                yield writer.ended(event)
        yield writer.finish()
    except ApiError as error:
        yield writer.fail(error)
    finally:
        answer.close()

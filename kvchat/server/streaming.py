"""Streams: writes an answer in one interface's events or lines while it is generated."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kvchat.chat.events import AnswerCall, AnswerEnded, AnswerText, ContextScored, ReadingPrompt
from kvchat.chat.fields import FieldFault
from kvchat.server import answering
from kvchat.server.answering import Answer, Told
from kvchat.server.api_errors import ApiError, as_api_error, ended_server, failed_server

_log = logging.getLogger(__name__)
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode
# Stands for a text in the frame around it. No name that comes before a text in an event ends so.
_MARK = "\0text\0"
_EVENTS = "text/event-stream"


class StreamWriter(Protocol):
    """Writes one answer's events as text of a stream; each call may return "" for nothing."""

    def begin(self) -> str:
        """The stream begins."""
        return ""

    def text(self, event: AnswerText) -> str: ...

    def call(self, event: AnswerCall) -> str: ...

    def ended(self, event: AnswerEnded) -> str: ...

    def ping(self) -> str:
        """Nothing was written for a while: return what clients take for a sign of life."""
        return ""

    def finish(self) -> str:
        """All samples have ended."""
        return ""

    def fail(self, error: ApiError) -> str:
        """The request failed after the stream began."""


def sse(data: dict[str, Any], event: str | None = None) -> str:
    """Return one event with JSON data."""
    name = f"event: {event}\n" if event is not None else ""
    return f"{name}data: {_ENCODE(data)}\n\n"


class TextFrame:
    """An event of which only one text changes: all around the text is written once.

    Writing an event as a whole, as `write` does, costs most of the time that a token takes here.
    """

    def __init__(self, write: Callable[[str], str]) -> None:
        self._before, mark, self._after = write(_MARK).rpartition(_ENCODE(_MARK))
        assert mark, "the event has its text"

    def around(self, text: str) -> str:
        """Return the event with this text."""
        return f"{self._before}{_ENCODE(text)}{self._after}"


Progress = Callable[[ReadingPrompt], str]
Scored = Callable[[ContextScored], str]
BeforeEnd = Callable[[], Awaitable[None]]


class EventStream(Response):
    """Writes an answer's events while they come, and closes the answer, whatever ends it.

    `progress` writes how much of the prompt is read, and `scored` the logprobs of the prompt; None
    if the client does not want to know. `before_end` is awaited before `finish` tells the end.

    Starlette's own streams take what they send from one more generator, and watch the client in a
    task group, which costs twice as much for each request.
    """

    def __init__(
        self,
        answer: Answer,
        writer: StreamWriter,
        progress: Progress | None = None,
        scored: Scored | None = None,
        before_end: BeforeEnd | None = None,
        media_type: str = _EVENTS,
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._answer = answer
        self._writer = writer
        self._progress = progress
        self._scored = scored
        self._before_end = before_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watching = asyncio.ensure_future(self._watch(receive))
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            await self._write(send)
            await send(_piece("", has_more=False))
        finally:
            watching.cancel()
            self._answer.close()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._answer.leave()

    async def _write(self, send: Send) -> None:
        """Send what there is to write: all events that have come together go out together."""
        writer, answer = self._writer, self._answer
        try:
            if begun := writer.begin():
                await send(_piece(begun))
                answer.note_written()
            async with aclosing(answer.events()) as events:  # type: ignore[type-var]
                async for told in events:
                    written = await self._written(told)
                    if answer.is_complete:
                        written = await self._settled(send, written) + writer.finish()
                    if not told:
                        written = writer.ping()
                    if written:
                        await send(_piece(written))
                        answer.note_written()
        except asyncio.CancelledError:  # the server ends
            await send(_piece(writer.fail(ended_server()), has_more=False))
            raise
        except (ApiError, FieldFault) as error:
            await send(_piece(writer.fail(as_api_error(error))))
        except Exception:
            _log.exception("a request failed")
            await send(_piece(writer.fail(failed_server())))

    async def _settled(self, send: Send, written: str) -> str:
        """Wait for what comes before the end; return what is to be sent then.

        While that takes long, `written` is sent, and then that the stream lives.
        """
        if self._before_end is None:
            return written
        settling = asyncio.ensure_future(self._before_end())
        try:
            while not (await asyncio.wait((settling,), timeout=answering.PING_INTERVAL_S))[0]:
                await send(_piece(written or self._writer.ping()))
                written = ""
            settling.result()
        finally:
            settling.cancel()
        return written

    async def _written(self, told: list[Told]) -> str:
        """Return events as text; the logprobs of a prompt, which are many, from another thread."""
        if self._scored is not None and any(isinstance(event, ContextScored) for event in told):
            return await asyncio.to_thread(self._events, told)
        return self._events(told)

    def _events(self, told: list[Told]) -> str:
        return "".join([self._event(event) for event in told])

    def _event(self, event: Told) -> str:
        if isinstance(event, AnswerText):
            return self._writer.text(event)
        if isinstance(event, ReadingPrompt):
            return self._progress(event) if self._progress is not None else ""
        if isinstance(event, ContextScored):
            return self._scored(event) if self._scored is not None else ""
        if isinstance(event, AnswerCall):
            return self._writer.call(event)
        return self._writer.ended(event)


def _piece(text: str, has_more: bool = True) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": has_more}

"""Responses over a WebSocket, as the Open Responses specification wants it.

Each message of the client begins a response, one after another; its events come back as messages.
All else, from the fields to the events, is what /v1/responses does over HTTP.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from kvchat.chat.fields import FieldFault
from kvchat.server.api_errors import ApiError, as_api_error, failed_server, response_to
from kvchat.server.bodies import Body, read_body
from kvchat.server.guard import client_of
from kvchat.server.responses_api import ResponsesApi
from kvchat.server.service import Service
from kvchat.server.stored_responses import HeldResponse

_log = logging.getLogger(__name__)

MOST_SOCKETS = 64
# The code of a socket that is closed because its server ends, or may start again.
SERVER_ENDS = 1012
# The specification's limit of a connection.
_MOST_S = 3600.0
# Messages that wait for the responses before theirs.
MOST_WAITING = 8
# What HTTP says in other ways.
_NOT_OVER_SOCKETS = ("stream", "stream_options", "background")


class ResponsesSockets:
    """All sockets of one service. `most_bytes` limits a message, and those that wait together."""

    def __init__(self, service: Service, responses: ResponsesApi, most_bytes: int) -> None:
        self._service = service
        self._responses = responses
        self._most_bytes = most_bytes
        self._num_open = 0

    async def serve(self, socket: WebSocket) -> None:
        """Serve one socket until its client goes, or refuse it where there are too many."""
        if self._num_open >= MOST_SOCKETS:
            sentence = f"At most {MOST_SOCKETS} sockets are open at once."
            error = ApiError(503, sentence, code="too_many_connections")
            await socket.send_denial_response(response_to(error, socket.url.path))
            return
        self._num_open += 1
        try:
            await socket.accept()
            connection = _Connection(socket, self._service, self._responses, self._most_bytes)
            await connection.serve()
        finally:
            self._num_open -= 1


class _Connection:
    """One socket: reads what comes, also while it answers, so that it sees its client go."""

    def __init__(
        self, socket: WebSocket, service: Service, responses: ResponsesApi, most_bytes: int
    ) -> None:
        self._socket = socket
        self._metrics = service.metrics
        self._responses = responses
        self._most_bytes = most_bytes
        self._held = HeldResponse(most_bytes)
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: the server ends
        self._num_waiting_bytes = 0
        self._has_failed = False  # the response that is being sent

    async def serve(self) -> None:
        tasks = [asyncio.ensure_future(work) for work in (self._read(), self._answer_all())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> None:
        """Take messages until the client goes, or the server ends: those are answered yet."""
        with suppress(WebSocketDisconnect):  # it went while it was sent an error
            while (message := await self._socket.receive())["type"] != "websocket.disconnect":
                text = message.get("text")
                data = text.encode() if text is not None else message["bytes"]
                if (error := self._refusal(len(data))) is not None:
                    await self._send_error(error)
                    continue
                self._num_waiting_bytes += len(data)
                self._waiting.put_nowait(data)
            if message.get("code") == SERVER_ENDS:
                self._waiting.put_nowait(None)
                await _never()

    def _refusal(self, num_bytes: int) -> ApiError | None:
        """Return the error for a message of so many bytes that is not kept until its turn."""
        if num_bytes > self._most_bytes:
            return ApiError(413, f"The message has more than {self._most_bytes:,} bytes.")
        if (
            self._waiting.qsize() >= MOST_WAITING
            or self._num_waiting_bytes + num_bytes > self._most_bytes
        ):
            return ApiError(429, "Too many messages wait for their turn.", code="too_many_messages")
        return None

    async def _answer_all(self) -> None:
        """Answer messages in their order until the connection is too old or the server ends, then
        close it.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _MOST_S
        with suppress(WebSocketDisconnect):
            with suppress(TimeoutError):
                while loop.time() < end_s:
                    async with asyncio.timeout_at(end_s):
                        data = await self._waiting.get()
                    if data is None:
                        await self._socket.close(SERVER_ENDS)
                        return
                    self._num_waiting_bytes -= len(data)
                    await self._answer(data)
            sentence = f"A connection ends after {_MOST_S / 60:.0f} minutes; open a new one."
            error = ApiError(400, sentence, code="websocket_connection_limit_reached")
            await self._send_error(error)
            await self._socket.close()

    async def _answer(self, data: bytes) -> None:
        """Send the events of the response to one message, or its error."""
        fields: Body | None = None
        error: ApiError | None = None
        self._has_failed = False
        try:
            fields = await read_body(data)
            if fields.text("type") != "response.create":
                raise fields.fault("type", "must be response.create")
            fields.refuse(*_NOT_OVER_SOCKETS)
            response = await self._responses.stream(fields, self._held, client_of(self._socket))
            await response(self._socket.scope, _never, self._send_events)
        except (ApiError, FieldFault) as refused:
            error = as_api_error(refused)
        except WebSocketDisconnect:
            raise
        except Exception:
            _log.exception("a request over a socket failed")
            error = failed_server()
        self._metrics.note_response(self._socket.url.path, 200 if error is None else error.status)
        if fields is not None and (self._has_failed or error is not None):
            self._held.drop(fields.raw("previous_response_id"))
        if error is not None:
            await self._send_error(error)

    async def _send_events(self, message: Message) -> None:
        """Send the events in a piece of an HTTP stream, each as a message."""
        for name, data in _events(message.get("body", b"").decode()):
            self._has_failed |= name == "response.failed"
            if name != "error":  # it says over HTTP alone what `response.failed` said
                await self._socket.send_text(data)

    async def _send_error(self, error: ApiError) -> None:
        told = {
            "type": error.openai_type,
            "code": error.code or error.openai_type,  # over sockets an error always has one
            "message": error.message,
            "param": error.param,
        }
        await self._socket.send_json({"type": "error", "status": error.status, "error": told})


async def _never() -> Message:
    """Stand for what an HTTP client sends after its request; the connection sees its client go."""
    return await asyncio.get_running_loop().create_future()


def _events(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the data of each server-sent event; comments are none."""
    for block in text.split("\n\n"):
        name, found, data = block.partition("\ndata: ")
        if found:
            yield name.removeprefix("event: "), data

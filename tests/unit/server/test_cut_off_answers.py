"""Answers that the end of the server cuts off: their clients are told so by each interface."""

import asyncio
import json
import threading
from typing import Any

import pytest
import uvicorn

from kvchat.server.guard import App
from kvchat.server.serving import bound_socket, configured
from support.scripted_engine import Script
from support.served import Serve

SENTENCE = "The server was stopped before the answer was complete."
MESSAGES = {"messages": [{"role": "user", "content": "Go on."}]}
OPENAI = {"error": {"message": SENTENCE, "type": "server_error", "param": None, "code": "stopped"}}
ANTHROPIC = {
    "type": "error",
    "error": {
        "type": "overloaded_error",
        "message": SENTENCE,
        "details": {"error_code": "stopped"},
    },
}
# By the path: a body, the error, and what stands before and behind it in a stream.
INTERFACES: dict[str, tuple[dict[str, Any], object, str, str]] = {
    "/v1/chat/completions": (MESSAGES, OPENAI, "data: ", "\n\ndata: [DONE]\n\n"),
    "/v1/completions": ({"prompt": "Go on."}, OPENAI, "data: ", "\n\ndata: [DONE]\n\n"),
    "/v1/responses": ({"input": "Go on."}, OPENAI, "event: error\ndata: ", "\n\n"),
    "/v1/messages": ({**MESSAGES, "max_tokens": 100}, ANTHROPIC, "event: error\ndata: ", "\n\n"),
    "/api/chat": (MESSAGES, {"error": SENTENCE}, "", "\n"),
}


async def cut_off(app: App, begun: threading.Event, path: str, body: dict[str, Any]) -> bytes:
    """Return all that a client gets of an answer in which the server has to end."""
    bound, server = bound_socket("127.0.0.1", 0), uvicorn.Server(configured(app))
    serving = asyncio.ensure_future(server.serve(sockets=[bound]))
    data = json.dumps({"model": "scripted", **body}).encode()
    head = f"POST {path} HTTP/1.0\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        writer.write(head.encode() + data)
        await asyncio.to_thread(begun.wait)
        first = await reader.readuntil(b"half") if body["stream"] else b""
        server.should_exit = True
        rest = await reader.read()
        await serving
    writer.close()
    return first + rest


@pytest.fixture
def begun() -> threading.Event:
    """Tells that the answer has begun."""
    return threading.Event()


@pytest.fixture
def app(serve: Serve, begun: threading.Event, tmp_path, monkeypatch) -> App:
    """A server of an answer that never comes to its end."""
    monkeypatch.setattr("kvchat.server.serving._GRACE_S", 0.01)

    def author(question: str, sample: int) -> Script:
        begun.set()
        return Script("half of it", tokens_per_step=5, until=tmp_path / "never")

    return serve(author)


@pytest.mark.parametrize("path", INTERFACES)
def test_a_stream_ends_with_an_error(app, begun, path, caplog):
    """It ended in the middle of its chunks, without a word, and forty lines of the log told where
    it stood."""
    body, error, before, behind = INTERFACES[path]

    got = asyncio.run(cut_off(app, begun, path, {**body, "stream": True})).decode()

    told = got.removesuffix(behind).rpartition("\n")[2].removeprefix(before.rpartition("\n")[2])
    assert got.endswith(behind)
    assert json.loads(told) == error
    assert before in got
    assert ["1 running task" in record.getMessage() for record in caplog.records] == [True]


def test_a_streamed_response_has_failed(app: App, begun: threading.Event) -> None:
    got = asyncio.run(cut_off(app, begun, "/v1/responses", {"input": "Go on.", "stream": True}))

    events = got.decode().split("\n\n")
    name, _, data = events[-3].partition("\ndata: ")
    assert name == "event: response.failed"
    assert json.loads(data)["response"]["error"] == {"code": "stopped", "message": SENTENCE}


@pytest.mark.parametrize("path", INTERFACES)
def test_a_whole_answer_is_refused(app, begun, path, caplog):
    """It was `Internal Server Error`, without a form that a client could read."""
    body, error, *_ = INTERFACES[path]

    got = asyncio.run(cut_off(app, begun, path, {**body, "stream": False}))

    head, _, told = got.partition(b"\r\n\r\n")
    assert head.split()[1] == b"503"
    assert json.loads(told) == error
    assert ["1 running task" in record.getMessage() for record in caplog.records] == [True]

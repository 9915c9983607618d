"""Signs of life: a stream says something at least once in a while, whatever the engine does."""

import asyncio
import json
import re
import threading
from typing import Any

import pytest

from kvchat.chat.answer_memory import ResponseMemory
from kvchat.chat.prefixes import ResentChats
from kvchat.core.errors import ContextTooLong
from support.asgi_client import Got, call
from support.scripted_engine import Author, Script
from support.served import Serve

_PATHS = {
    "/v1/chat/completions": b": still at work\n\n",
    "/v1/completions": b": still at work\n\n",
    "/v1/messages": b'event: ping\ndata: {"type":"ping"}\n\n',
    "/v1/responses": b"event: response.in_progress\n",
}
_TOOL = {"name": "save", "description": "", "parameters": {"type": "object"}}
_TOOLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"tools": [{"type": "function", "function": _TOOL}]},
    "/v1/messages": {"tools": [{"name": "save", "input_schema": {"type": "object"}}]},
    "/v1/responses": {"tools": [{"type": "function", **_TOOL}]},
}
_CALL = '<tool_call>\n{"name": "save", "arguments": {"text": "' + "x" * 2000 + '"}}\n</tool_call>'


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvchat.server.answering.PING_INTERVAL_S", 0.02)


def body_for(path: str, text: str) -> dict[str, Any]:
    fields = {"/v1/completions": "prompt", "/v1/responses": "input"}
    messages = [{"role": "user", "content": text}]
    asked = {fields[path]: text} if path in fields else {"messages": messages}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return {"model": "scripted", "stream": True, limit: 5000, **asked}


def until_third_sign(app: Any, path: str, text: str = "go", **others: Any) -> Got:
    """Return what came until the third sign of life, or until the end if there are fewer."""
    data = json.dumps({**body_for(path, text), **others}).encode()
    most = _PATHS[path]

    def has_enough(got: Got) -> bool:
        return got.body.count(most) >= 3

    return asyncio.run(call(app, "POST", path, data, leaves_after=has_enough))


def slow(text: str, **others: Any) -> Author:
    return lambda question, sample: Script(text, tokens_per_step=1, step_s=0.004, **others)


@pytest.mark.parametrize("path", _PATHS)
def test_a_prompt_that_is_read_in_many_steps(serve: Serve, path: str) -> None:
    """Each step was news of the engine, so no silence was seen, and nothing was written."""
    got = until_third_sign(serve(slow("done", prefill_per_step=1)), path, "word " * 100)

    assert got.status == 200
    assert got.body.count(_PATHS[path]) == 3
    assert b"done" not in got.body


@pytest.mark.parametrize("path", _TOOLS)
def test_a_call_that_is_written_when_it_is_whole(serve, tool_model, path):
    got = until_third_sign(serve(slow(_CALL), served=tool_model), path, **_TOOLS[path])

    assert got.body.count(_PATHS[path]) == 3
    assert b"xxx" not in got.body


@pytest.mark.parametrize("text", ["a" * 2000, "\n" * 2000], ids=["stop text", "new lines"])
def test_text_that_is_held_back(serve: Serve, text: str) -> None:
    chat = "/v1/chat/completions"

    got = until_third_sign(serve(slow(f"<think>x</think>{text}b")), chat, stop=["a" * 1999 + "c"])

    assert got.body.count(_PATHS[chat]) == 3


def test_every_event_of_a_response_has_the_next_number(serve: Serve) -> None:
    got = until_third_sign(serve(slow("done", prefill_per_step=1)), "/v1/responses", "x" * 500)

    numbers = re.findall(rb'"sequence_number":(\d+)', got.body)
    assert [int(number) for number in numbers] == list(range(len(numbers)))


@pytest.mark.parametrize("path", _PATHS)
@pytest.mark.parametrize("is_refused", [False, True])
def test_a_request_that_waits_for_its_turn_to_be_encoded(serve, monkeypatch, path, is_refused):
    """Other requests with large prompts are before it, and its template may be slow."""
    monkeypatch.setattr("kvchat.server.answering.ENCODING_S", 0.01)
    may_go = threading.Event()
    name = "complete" if path == "/v1/completions" else "ask"
    whole = getattr(ResentChats, name)

    def late(*args: Any) -> Any:
        may_go.wait(60.0)
        if is_refused:
            raise ContextTooLong("Too long.")
        return whole(*args)

    monkeypatch.setattr(ResentChats, name, late)
    app = serve(lambda question, sample: Script("done"))

    def release(got: Got) -> bool:
        if got.body.count(_PATHS[path]) >= 3:
            may_go.set()
        return False

    data = json.dumps(body_for(path, "go")).encode()
    got = asyncio.run(call(app, "POST", path, data, leaves_after=release))

    assert got.status == 200
    assert (b"Too long." in got.body) == is_refused
    assert (b"done" in got.body) != is_refused


def test_a_response_that_is_stored_slowly(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stored before its end is told, on a disk that may be slow."""
    path, seen, put = "/v1/responses", threading.Event(), ResponseMemory.put

    def late(*args: Any) -> None:
        seen.wait(60.0)
        put(*args)

    def release(got: Got) -> bool:
        if b"output_item.done" in got.body and got.body.count(_PATHS[path]) >= 4:
            seen.set()
        return False

    monkeypatch.setattr(ResponseMemory, "put", late)
    data = json.dumps(body_for(path, "go")).encode()
    app = serve(lambda question, sample: Script("done"))
    got = asyncio.run(call(app, "POST", path, data, leaves_after=release))

    assert seen.is_set()
    assert got.events[-1][0] == "response.completed"
    numbers = [data["sequence_number"] for _, data in got.events]
    assert numbers == list(range(len(numbers)))

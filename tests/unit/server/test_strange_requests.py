"""No request makes the server fail: every field of every interface takes every strange value.

A refusal is 4xx in the interface's own form; what is accepted is answered.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from kvchat.chat.chat_model import ChatModel
from kvchat.server.bodies import Body, read_body
from kvchat.server.guard import App
from support.asgi_client import Got, call, post
from support.served import Serve
from support.soak_sizes import short_and_long

MARK = {"type": "ephemeral", "ttl": "5m"}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}}
SAMPLING = {"temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 1}
PENALTIES = {"presence_penalty": 1, "frequency_penalty": 1, "logit_bias": {"5": 1}}
CHAT = {
    "model": "scripted",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": "a", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "r"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": True,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    "reasoning_effort": "low",
    "stop": ["x"],
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "n": 2,
    "logprobs": True,
    "top_logprobs": 2,
    "stream_options": {"include_usage": True},
    **SAMPLING,
    **PENALTIES,
}
TEXT = {
    "model": "scripted",
    "prompt": [1, 2],
    "echo": True,
    "logprobs": 2,
    "prompt_logprobs": 2,
    "max_tokens": 5,
    "n": 2,
    "stop": "x",
    "response_format": {"type": "json_object"},
    "stream_options": {"include_usage": True},
    **SAMPLING,
    **PENALTIES,
}
RESPONSE = {
    "model": "scripted",
    "instructions": "i",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
    ],
    "previous_response_id": None,
    "store": True,
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": "auto",
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    "reasoning": {"effort": "low"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 1,
    "max_output_tokens": 5,
    **SAMPLING,
    **PENALTIES,
}
MESSAGE = {
    "model": "scripted",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "s", "cache_control": MARK}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "u", "cache_control": MARK}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"n": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "r"}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "stop_sequences": ["x"],
    "cache_control": MARK,
    **SAMPLING,
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": MESSAGE,
}
STRANGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1e308,
    2**70,
    "",
    "\ud800\x00<|end|>",
    [],
    [None],
    [[1]],
    {},
    {"": None},
    {"type": {"a": []}},
    [{"type": "text"}],
    {"$ref": "#"},
)
_GONE = object()


def paths(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value within a value of JSON."""
    if before:
        yield before
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths(item, (*before, key))


def changed(body: dict[str, Any], path: tuple[Any, ...], value: object) -> dict[str, Any]:
    """Return a copy with another value at a place, or without it."""
    copy = deepcopy(body)
    holder: Any = copy
    for key in path[:-1]:
        holder = holder[key]
    if value is _GONE:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return copy


def check(path: str, got: Got, sent: object) -> None:
    assert got.status in (200, 400, 404), (got.status, sent)
    if got.status == 200:
        return
    error = got.json["error"]
    assert error["message"].endswith("."), (error, sent)
    assert "\n" not in error["message"]
    assert (got.json.get("type") == "error") == path.startswith("/v1/messages")


@pytest.fixture
def app(serve: Serve, tool_model: ChatModel) -> App:
    return serve(served=tool_model)


@short_and_long(1, 6)
@pytest.mark.parametrize("path", BODIES)
def test_every_field_takes_every_strange_value(app: App, path: str, size: int) -> None:
    """The short run takes every sixth pair of a field and a value."""
    body = BODIES[path]
    statuses = set()
    pairs = [(place, value) for place in paths(body) for value in (*STRANGE, _GONE)]
    for place, value in (pair for number, pair in enumerate(pairs) if number % 6 < size):
        got = post(app, path, changed(body, place, value))
        check(path, got, (place, value))
        statuses.add(got.status)

    assert statuses >= {200, 400}, "some are accepted and some refused"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        '{"model": "\ud800"}'.encode("utf-16", "surrogatepass"),
        b'{"model": "\xed\xa0\x80"}',
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b'{"a": NaN}',
        b"[" * 100_000,
        b"{}",
    ],
    ids=range(10),
)
def test_a_body_that_is_no_request_is_refused(app: App, path: str, body: bytes) -> None:
    got = post(app, path, body)

    check(path, got, body)
    assert got.status == 400


@pytest.mark.parametrize("path", [path for path in BODIES if "count" not in path])
def test_a_stream_of_the_whole_body_begins_as_one(app: App, path: str) -> None:
    got = post(app, path, json.loads(json.dumps(BODIES[path] | {"stream": True})))

    assert got.status in (200, 400)
    assert got.headers["content-type"].startswith("text/event-stream") == (got.status == 200)


def test_half_a_character_is_answered_and_told_as_a_question_mark(app: App) -> None:
    """JSON may spell it, UTF-8 may not: the response could not be written."""
    body = CHAT | {"messages": [{"role": "user", "content": "a\ud83d b \U0001f600"}]}

    got = post(app, "/v1/chat/completions", body | {"tool_choice": "none"})

    assert got.json["choices"][0]["message"]["content"] == "a? b "  # five tokens


@pytest.mark.parametrize("headers", [{"origin": "http://[::1"}, {"host": "[::1"}])
def test_a_header_that_names_no_host_is_refused(serve: Serve, headers: dict[str, str]) -> None:
    """Such an Origin or Host ended in an error of the server, without a word of ours."""
    got = asyncio.run(call(serve(), "GET", "/v1/models", headers=headers))

    assert got.status == 403
    assert got.json["error"]["type"] == "permission_error"


def test_a_conversation_is_encoded_no_further_than_the_context_reaches(serve: Serve) -> None:
    """10,000 short messages kept the requests of all clients waiting for a minute."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": f"message {n}"} for n in range(255)]
    given = {"model": "scripted", "messages": messages}

    got = post(serve(max_context=256), "/v1/chat/completions", given)

    assert got.status == 400
    assert got.json["error"]["code"] == "context_length_exceeded"
    assert "of 255 messages" in got.json["error"]["message"]


def test_tokens_are_counted_beyond_the_context_but_not_without_end(serve: Serve) -> None:
    """Counting 200,000 messages took minutes in which no other request could begin."""
    app = serve(max_context=100)
    turns = [{"role": ("user", "assistant")[n % 2], "content": "x" * 40} for n in range(9)]

    def count(num_messages: int) -> Got:
        body = {"model": "scripted", "messages": turns[:num_messages]}
        return post(app, "/v1/messages/count_tokens", body)

    assert count(3).json["input_tokens"] > 100
    assert count(9).status == 400
    assert "> 100 maximum" in count(9).json["error"]["message"]


@pytest.mark.parametrize(
    ("path", "name", "most"),
    [
        ("/v1/chat/completions", "messages", 100),
        ("/v1/messages", "messages", 100),
        ("/v1/messages/count_tokens", "messages", 200),
        ("/v1/responses", "input", 100),
        ("/v1/responses/compact", "input", 200),
    ],
)
def test_more_messages_than_the_context_has_tokens_are_not_looked_at(serve, path, name, most):
    """200,001 messages were read one by one for 4.5 to 9 s, in which no stream went on."""
    app = serve(max_context=100)
    body: dict[str, Any] = {"model": "scripted"}
    body |= {} if "responses" in path else {"max_tokens": 3}

    many = post(app, path, body | {name: [None] * (most + 1)})
    looked_at = post(app, path, body | {name: [None] * most})

    assert many.status == 400
    is_openai = not path.startswith("/v1/messages")
    words = f"There are {most + 1} messages" if is_openai else f"{most + 1} tokens > 100 maximum"
    assert words in many.json["error"]["message"]
    assert looked_at.status == 400
    assert looked_at.json["error"]["message"] == f"{name}[0] must be an object."


def test_a_large_body_is_read_while_the_event_loop_goes_on() -> None:
    """The reader waits for the loop: read by the loop's own thread, it would wait in vain."""
    went_on = threading.Event()

    def read(body: Body) -> bool:
        return went_on.wait(60.0)

    async def both(num_others: int, *padding: str) -> bool:
        body = await read_body(json.dumps({"model": "scripted", "padding": padding}).encode())
        reading = asyncio.create_task(body.read(read, num_others))
        asyncio.get_running_loop().call_later(0.0, went_on.set)
        return await reading

    assert asyncio.run(both(0, "x" * 200_000))
    went_on.clear()
    assert asyncio.run(both(200_000))
    went_on.clear()
    body = asyncio.run(read_body(b"{}"))
    assert asyncio.run(body.read(lambda body: threading.current_thread())) is (
        threading.current_thread()
    ), "a small one costs no thread"


def test_neighbouring_messages_are_joined(serve: Serve) -> None:
    app = serve()
    messages = [{"role": "user", "content": text} for text in ("one", "", "two", "three")]

    body = {"model": "scripted", "messages": messages}
    got = post(app, "/v1/chat/completions", body)

    assert got.json["choices"][0]["message"]["content"].startswith("one\n\ntwo\n\nthree")


_ASKED = {"role": "user", "content": "When?"}
_CALLED = {"role": "assistant", "function_call": {"name": "look", "arguments": '{"q": "x"}'}}
_RETURNED = {"role": "function", "name": "look", "content": "at noon"}


@pytest.mark.parametrize(
    ("messages", "question"),
    [
        ([_ASKED, {"role": "assistant", "content": ""}], "When?"),
        ([_ASKED, {"role": "assistant", "content": None}], "When?"),
        ([{"role": "system", "content": "Say when."}], "Say when."),
        ([_ASKED, _CALLED, _RETURNED, {"role": "user", "content": "Sure?"}], "Sure?"),
        ([_ASKED, _CALLED, _RETURNED], "<tool_response>\nat noon\n</tool_response>"),
    ],
    ids=["empty place", "null place", "system alone", "old call", "old result"],
)
def test_conversations_that_other_servers_take_are_answered(serve, tool_model, messages, question):
    """Each was refused, and as it stays in the conversation, so was all that came after it."""
    body = {"model": "scripted", "messages": messages}
    got = post(serve(served=tool_model), "/v1/chat/completions", body)

    assert got.status == 200, got.json
    assert got.json["choices"][0]["message"]["content"] == f"{question} 0"

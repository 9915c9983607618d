"""OpenAI's interface: what requests may hold, and what responses and streams hold."""

from typing import Any

import pytest

from server.conftest import Serve
from support.asgi_client import get, post
from support.scripted_engine import Script

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def asked(text: str, **others: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": [{"role": "user", "content": text}], **others}


def test_a_chat_completion_has_the_answer_and_its_usage(serve: Serve) -> None:
    got = post(serve(), CHAT, asked("hello"))

    assert got.status == 200
    [choice] = got.json["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello 0", "refusal": None}
    assert choice["finish_reason"] == "stop"
    usage = got.json["usage"]
    assert usage["completion_tokens"] == len("hello 0")
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert got.json["object"] == "chat.completion"
    assert got.json["model"] == "scripted"


def test_samples_come_in_their_order(serve: Serve) -> None:
    choices = post(serve(), CHAT, asked("x", n=3)).json["choices"]

    assert [(c["index"], c["message"]["content"]) for c in choices] == [
        (0, "x 0"),
        (1, "x 1"),
        (2, "x 2"),
    ]


def test_a_stream_has_a_role_the_text_an_end_and_the_usage(serve: Serve) -> None:
    got = post(serve(), CHAT, asked("abc", stream=True, stream_options={"include_usage": True}))

    assert got.headers["content-type"].startswith("text/event-stream")
    *chunks, (_, last) = got.events
    assert last == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for _, chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "abc 0"
    assert chunks[-2][1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1][1]["choices"] == []
    assert chunks[-1][1]["usage"]["completion_tokens"] == len("abc 0")
    assert len({chunk["id"] for _, chunk in chunks}) == 1


def test_thinking_is_reasoning_content(serve: Serve) -> None:
    app = serve(lambda question, sample: Script("<think>why</think>because"))

    message = post(app, CHAT, asked("x")).json["choices"][0]["message"]

    assert message["content"] == "because"
    assert message["reasoning_content"] == "why"


def test_an_answer_that_reaches_its_limit_says_so(serve: Serve) -> None:
    [choice] = post(serve(), CHAT, asked("a long question", max_tokens=3)).json["choices"]

    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["content"]) == 3


def test_a_stop_text_ends_the_answer(serve: Serve) -> None:
    [choice] = post(serve(), CHAT, asked("one two three", stop=[" two"])).json["choices"]

    assert choice["message"]["content"] == "one"
    assert choice["finish_reason"] == "stop"


def test_later_instructions_stand_where_they_came(serve: Serve) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}]},
        {"role": "system", "content": "two"},
    ]

    got = post(serve(), CHAT, {"model": "other", "messages": messages})

    assert got.json["choices"][0]["message"]["content"] == "one\n\ntwo 0"


def test_a_last_message_of_the_assistant_is_continued(serve: Serve) -> None:
    app = serve(lambda question, sample: Script("one two three"))
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "one two"}]

    got = post(app, CHAT, {"model": "scripted", "messages": messages})

    assert got.json["choices"][0]["message"]["content"] == " three"


def test_a_plain_completion_continues_text_and_ids(serve: Serve) -> None:
    app = serve(lambda question, sample: Script("!"))

    whole = post(app, TEXT, {"model": "scripted", "prompt": "Hi", "echo": True}).json
    by_ids = post(app, TEXT, {"model": "scripted", "prompt": [41, 73]}).json

    assert whole["choices"][0]["text"] == "Hi!"
    assert by_ids["choices"][0]["text"] == "!"
    assert by_ids["usage"]["prompt_tokens"] == 2


def test_a_streamed_completion_begins_with_what_it_echoes(serve: Serve) -> None:
    app = serve(lambda question, sample: Script("!"))
    body = {"model": "scripted", "prompt": "Hi", "echo": True, "stream": True}

    *chunks, (_, last) = post(app, TEXT, body).events

    assert "".join(chunk["choices"][0]["text"] for _, chunk in chunks) == "Hi!"
    assert last == "[DONE]"


def test_models_are_listed_and_found(serve: Serve) -> None:
    app = serve()

    assert [model["id"] for model in get(app, "/v1/models").json["data"]] == ["scripted", "other"]
    assert get(app, "/v1/models/other").json["context_length"] == 32768
    assert get(app, "/v1/models/none").status == 404


BAD: dict[str, tuple[Any, int, str | None]] = {
    "no JSON": (b"{", 400, None),
    "no object": (b"[]", 400, None),
    "deep JSON": (b"[" * 100_000, 400, None),
    "no model": ({"messages": []}, 400, "model"),
    "another model": ({"model": "gpt"}, 404, "model"),
    "no messages": ({"model": "scripted"}, 400, "messages"),
    "an empty message": (asked(" "), 400, "messages"),
    "an unknown role": (
        {"model": "scripted", "messages": [{"role": "robot", "content": "x"}]},
        400,
        "messages[0].role",
    ),
    "an image": (
        {
            "model": "scripted",
            "messages": [{"role": "user", "content": [{"type": "image_url"}]}],
        },
        400,
        "messages[0].content[0].type",
    ),
    "a word for a number": (asked("x", temperature="hot"), 400, "temperature"),
    "out of range": (asked("x", top_p=2), 400, "top_p"),
    "no number": (b'{"model":"scripted","messages":[{}],"top_k":NaN}', 400, None),
    "a fraction": (asked("x", seed=1.5), 400, "seed"),
    "no tokens": (asked("x", max_tokens=0), 400, "max_tokens"),
    "too many samples": (asked("x", n=1000), 400, "n"),
    "an empty stop": (asked("x", stop=[""]), 400, "stop"),
    "a tool without a name": (
        asked("x", tools=[{"type": "function"}]),
        400,
        "tools[0].function.name",
    ),
    "functions": (asked("x", functions=[{"name": "f"}]), 400, "functions"),
    "penalties": (asked("x", presence_penalty=5), 400, "presence_penalty"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_gets_one_sentence_and_the_field(serve: Serve, name: str) -> None:
    body, status, field = BAD[name]

    got = post(serve(), CHAT, body)

    assert got.status == status
    error = got.json["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].endswith(".")
    if field is not None:
        assert error["param"] == field


def test_what_only_describes_a_request_is_ignored(serve: Serve) -> None:
    body = asked("x", user="me", metadata={"a": 1}, tools=[], presence_penalty=0, store=True)

    assert post(serve(), CHAT, body).status == 200


def test_a_context_that_is_too_long_has_its_code_also_in_a_stream(serve: Serve) -> None:
    app = serve(max_context=64)

    for body in (asked("x" * 100), asked("x" * 100, stream=True)):
        got = post(app, CHAT, body)
        assert got.status == 400
        assert got.json["error"]["code"] == "context_length_exceeded"
        assert "maximum context length is 64 tokens" in got.json["error"]["message"]
        assert got.json["error"]["message"].endswith("reduce the length of the messages.")


def test_a_failure_of_the_engine_is_an_error_of_the_server(serve: Serve) -> None:
    app = serve(lambda question, sample: Script("text", error=RuntimeError("broken")))

    got = post(app, CHAT, asked("x", stream=True))

    assert got.status == 500
    assert got.json["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("path", "name", "change"),
    [(CHAT, "messages", 4), ("/v1/responses", "input", 3), ("/v1/messages", "messages", 3)],
)
def test_a_changed_message_is_named_by_its_index_in_the_request(
    serve: Serve, path: str, name: str, change: int
) -> None:
    """Two messages of the user, one after the other, counted as one."""
    app = serve()
    roles = ["user", "assistant", "user", "user", "assistant", "user"]
    if path == CHAT:
        roles[:2] = ["system", "user", "assistant"]
    messages = [{"role": role, "content": f"{role} {n}"} for n, role in enumerate(roles)]
    body = {"model": "scripted", "max_tokens": 9, name: messages}
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    first = post(app, path, body)
    messages[change]["content"] += ", changed"

    second = post(app, path, body)

    assert (first.status, second.status) == (200, 200), second.json
    assert first.json["usage"]["kvchat"]["changed"] is None
    changed = second.json["usage"]["kvchat"]["changed"]
    assert changed["message"] == change
    assert changed["now"].startswith(", changed")

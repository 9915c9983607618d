"""OpenAI's interface: what requests may hold, and what responses and streams hold."""

from datetime import datetime
from typing import Any

import pytest

from kvchat.chat.fields import FieldFault, Fields
from kvchat.server.openai_api import with_suffix
from support.asgi_client import get, post
from support.scripted_engine import Script
from support.served import Serve

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


def test_models_are_listed_as_anthropics_clients_read_them(serve: Serve) -> None:
    """Claude Code offers those whose `display_name` it reads; the list had OpenAI's fields only."""
    listed = get(serve(), "/v1/models", **{"anthropic-version": "2023-06-01"}).json
    first, last = listed["data"]

    assert {first["type"], last["type"]} == {"model"}
    assert (first["display_name"], last["display_name"]) == ("scripted", "other")
    assert datetime.fromisoformat(first["created_at"]).timestamp() == first["created"]
    assert listed["has_more"] is False
    assert (listed["first_id"], listed["last_id"]) == (first["id"], last["id"])


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
        {"model": "scripted", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages[0].content[0].type",
    ),
    "a word for a number": (asked("x", temperature="hot"), 400, "temperature"),
    "out of range": (asked("x", top_p=2), 400, "top_p"),
    "no number": (b'{"model":"scripted","messages":[{}],"top_k":NaN}', 400, None),
    "a fraction": (asked("x", seed=1.5), 400, "seed"),
    "no tokens": (asked("x", max_tokens=0), 400, "max_tokens"),
    "too many samples": (asked("x", n=1000), 400, "n"),
    "a number as a stop": (asked("x", stop=[5]), 400, "stop"),
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
        words = "prompt is too long: this model's maximum context length is 64 tokens."
        assert words in got.json["error"]["message"]
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
def test_a_changed_message_is_named_by_its_index_in_the_request(serve, path, name, change):
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


@pytest.mark.parametrize("name", ["claude-sonnet-4-5", "claude-", "other", "scripted"])
def test_names_with_an_asterisk_are_answered_too(serve: Serve, name: str) -> None:
    """Claude Code starts under names that begin so alone, and asks for two of them."""
    app = serve(names=("other", "claude-*"))

    assert post(app, CHAT, asked("x") | {"model": name}).json["model"] == "scripted"
    assert get(app, f"/v1/models/{name}").json["id"] == name
    assert [m["id"] for m in get(app, "/v1/models").json["data"]] == ["scripted", "other"]


def test_another_name_is_refused_in_a_sentence_with_the_served_ones(serve: Serve) -> None:
    app = serve(names=("claude-*",))

    for name in ("gpt-4", "a claude-x", "claude"):
        sentence = post(app, CHAT, asked("x") | {"model": name}).json["error"]["message"]
        assert "'scripted' and 'claude-*'" in sentence
        assert "--name '*'" in sentence
    assert post(serve(names=("*",)), CHAT, asked("x") | {"model": "gpt-4"}).status == 200


@pytest.mark.parametrize("path", ["/chat/completions", "//v1/chat/completions", f"{CHAT}/"])
def test_paths_as_clients_join_them_are_found(serve: Serve, path: str) -> None:
    assert post(serve(), path, asked("x")).status == 200


def test_the_root_says_how_the_server_is(serve: Serve) -> None:
    app = serve()

    assert get(app, "/").json["status"] == "ok"
    assert get(app, "/v2").status == 404
    assert "/v1/models" in get(app, "/v2").json["error"]["message"]


class Codec:
    """A tokenizer that knows some tokens."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def token_id(self, token: str) -> int | None:
        return self.tokens.index(token) if token in self.tokens else None


def test_a_suffix_is_put_behind_the_answer_in_the_tokens_of_the_model() -> None:
    """It was refused, though models of code are trained for nothing else."""
    codec: Any = Codec("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    fields = Fields({"suffix": "return x"})

    [prompt] = with_suffix(fields, ["def f(x):\n"], codec)

    assert prompt == "<|fim_prefix|>def f(x):\n<|fim_suffix|>return x<|fim_middle|>"
    assert with_suffix(Fields({"suffix": ""}), ["x"], codec) == ["x"]
    strange: Any = Codec()
    for prompts, given, known in (
        (["x"], {"suffix": "y"}, strange),
        ([(1, 2)], {"suffix": "y"}, codec),
        (["x"], {"suffix": "y", "echo": True}, codec),
    ):
        with pytest.raises(FieldFault):
            with_suffix(Fields(given), prompts, known)  # type: ignore[arg-type]


def test_tokens_of_thinking_are_counted(serve: Serve) -> None:
    """They were told as none, however long a model thought."""
    app = serve(lambda question, sample: Script("<think>why</think>because"))

    chat = post(app, CHAT, asked("x")).json["usage"]["completion_tokens_details"]
    response = post(app, "/v1/responses", {"model": "scripted", "input": "x"}).json["usage"]

    assert chat["reasoning_tokens"] == response["output_tokens_details"]["reasoning_tokens"]
    assert 3 < chat["reasoning_tokens"] < response["output_tokens"] - len("because") + 1

"""Answers that end within their thinking, and stop texts there: the client is told."""

from typing import Any

import pytest

from kvchat.chat.chat_model import ChatModel
from support.asgi_client import Got, post
from support.scripted_engine import Script
from support.served import Serve

_TOOL = {"name": "save", "input_schema": {"type": "object"}}
_CALL = '<tool_call>\n{"name": "save", "arguments": {"text": "one STOP two"}}\n</tool_call>'
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def ask(app: Any, path: str, **others: Any) -> Got:
    turns = [{"role": "user", "content": "x"}]
    asked = {"input": "x"} if path == RESPONSES else {"messages": turns}
    if path == MESSAGES:
        asked["max_tokens"] = 100
    return post(app, path, {"model": "scripted", **asked, **others})


def thinks(question: str, sample: int) -> Script:
    return Script("<think>so so")


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "names"),
    [
        (CHAT, ("finish_reason", "length", "stop")),
        (MESSAGES, ("stop_reason", "max_tokens", "end_turn")),
        (RESPONSES, ("status", "incomplete", "completed")),
    ],
)
def test_an_answer_that_ends_within_its_thinking_is_no_whole_answer(
    serve: Serve, path: str, names: tuple[str, str, str], is_streamed: bool
) -> None:
    """It was an empty text with the end of a whole answer: agents took it for the answer."""
    name, cut_off, whole = names
    options = {"stream_options": {"include_usage": True}} if is_streamed and path == CHAT else {}

    got = ask(serve(thinks), path, stream=is_streamed, **options)

    assert got.status == 200
    assert f'"{name}":"{cut_off}"'.encode() in got.body
    assert b'"ends_in_thinking":true' in got.body
    if path != RESPONSES:  # its thinking is a complete item
        assert f'"{whole}"'.encode() not in got.body


def test_an_answer_behind_thinking_is_whole(serve: Serve) -> None:
    answer = ask(serve(lambda *_: Script("<think>so</think>yes")), CHAT).json

    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["kvchat"]["ends_in_thinking"] is False


@pytest.mark.parametrize("stop", ["so", "\n", "\n\n", "think"])
def test_a_stop_text_ends_no_thinking(serve: Serve, stop: str) -> None:
    app = serve(lambda *_: Script("<think>\nso\n\nso think</think>\n\nyes"))

    chat = ask(app, CHAT, stop=[stop]).json["choices"][0]["message"]
    blocks = ask(app, MESSAGES, stop_sequences=[stop]).json["content"]

    assert (chat["reasoning_content"], chat["content"]) == ("so\n\nso think", "yes")
    assert [block.get("thinking") or block["text"] for block in blocks] == ["so\n\nso think", "yes"]


def test_a_stop_text_ends_no_call(serve: Serve, tool_model: ChatModel) -> None:
    """Half a call was a text, with the end of a whole answer."""
    app = serve(lambda *_: Script(f"I save.\n{_CALL}"), served=tool_model)

    got = ask(app, MESSAGES, tools=[_TOOL], stop_sequences=["STOP"]).json

    text, call = got["content"]
    assert text["text"] == "I save."
    assert call["input"] == {"text": "one STOP two"}
    assert got["stop_reason"] == "tool_use"


def test_a_plain_completion_is_told_as_it_is_and_ends_at_any_stop_text(serve: Serve) -> None:
    """There is no thinking apart in it: what ends it is what its client reads."""
    app = serve(lambda *_: Script("<think>one\ntwo</think>three"))

    def choice(**others: Any) -> tuple[str, str]:
        asked = {"model": "scripted", "prompt": "x", "max_tokens": 100, **others}
        [got] = post(app, "/v1/completions", asked).json["choices"]
        return got["text"], got["finish_reason"]

    assert choice() == ("<think>one\ntwo</think>three", "stop")
    assert choice(stop=["\n"]) == ("<think>one", "stop")
    assert choice(stop=["</think>"]) == ("<think>one\ntwo", "stop")

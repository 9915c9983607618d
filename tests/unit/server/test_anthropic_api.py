"""Anthropic's interface: messages, their events in order, and counting."""

import re
from typing import Any

import pytest

from support.asgi_client import post
from support.scripted_engine import Script
from support.served import Serve

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"


def asked(text: str, **others: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "scripted", "max_tokens": 100, "messages": messages, **others}


def test_a_message_has_its_text_and_counts_cached_tokens_apart(serve: Serve) -> None:
    app = serve()

    first, again = (post(app, MESSAGES, asked("hello there")).json for _ in range(2))

    assert first["content"] == [{"type": "text", "text": "hello there 0"}]
    assert first["stop_reason"] == "end_turn"
    counts = first["usage"]
    assert counts["cache_read_input_tokens"] == 0
    read = again["usage"]["cache_read_input_tokens"]
    assert read > 0
    assert again["usage"]["input_tokens"] + read == counts["input_tokens"]


def test_events_come_in_anthropics_order(serve: Serve) -> None:
    app = serve(lambda question, sample: Script("<think>why</think>because"))

    events = post(app, MESSAGES, asked("x", stream=True)).events

    names = [name for name, _ in events]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    blocks = [(name, data["index"]) for name, data in events if name and "block" in name]
    starts = [place for place in blocks if place[0] != "content_block_delta"]
    assert starts == [
        ("content_block_start", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_stop", 1),
    ]
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "why"
    assert "".join(delta.get("text", "") for delta in deltas) == "because"
    assert all(data["type"] == name for name, data in events)


def test_an_answer_without_text_still_has_a_block(serve: Serve) -> None:
    events = post(serve(lambda *_: Script("")), MESSAGES, asked("x", stream=True)).events

    assert [name for name, _ in events][1:3] == ["content_block_start", "content_block_stop"]


def test_counting_counts_what_asking_feeds(serve: Serve) -> None:
    app = serve()
    body = asked("how long?", system=[{"type": "text", "text": "Be brief."}])

    counted = post(app, COUNT, {**body, "max_tokens": None}).json["input_tokens"]

    assert counted == post(app, MESSAGES, body).json["usage"]["input_tokens"]


def test_thinking_that_is_sent_back_is_left_out(serve: Serve) -> None:
    thought = [{"type": "thinking", "thinking": "why", "signature": ""}]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [*thought, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
    ]

    got = post(serve(), MESSAGES, asked("", messages=messages))

    assert got.json["content"][0]["text"] == "c 0"


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (b"{", 400, "invalid_request_error"),
        (asked("x", max_tokens=None), 400, "invalid_request_error"),
        (asked("x", model="claude"), 404, "not_found_error"),
        (asked("x", tools=[{}]), 400, "invalid_request_error"),
        (asked("x", messages=[{"role": "robot", "content": "x"}]), 400, "invalid_request_error"),
    ],
)
def test_errors_have_anthropics_form(serve: Serve, body: Any, status: int, kind: str) -> None:
    got = post(serve(), MESSAGES, body)

    assert got.status == status
    assert got.json["type"] == "error"
    assert got.json["error"]["type"] == kind


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("stops", "text", "stop"),
    [(["X", "STOP"], "say A ", "STOP"), (["B", "A"], "say ", "A"), (["Q"], None, None)],
)
def test_the_stop_sequence_that_ended_the_answer_is_told(serve, stops, text, stop, is_streamed):
    """It was told as the end of the turn, so programs took a cut answer for a whole one."""
    app = serve(lambda question, sample: Script("say A STOP B"))

    got = post(app, MESSAGES, asked("x", stop_sequences=stops, stream=is_streamed))

    if is_streamed:
        [ending] = [data["delta"] for name, data in got.events if name == "message_delta"]
    else:
        ending = got.json
        assert ending["content"][0]["text"] == (text or "say A STOP B")
    assert ending["stop_sequence"] == stop
    assert ending["stop_reason"] == ("stop_sequence" if stop else "end_turn")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x" * 500}],
        [{"role": ("user", "assistant")[n % 2], "content": "x"} for n in range(201)],
    ],
    ids=["one long message", "many messages"],
)
def test_a_prompt_that_is_too_long_is_refused_in_words_at_which_clients_compact(serve, messages):
    """Claude Code gave up: it looks for Anthropic's sentence and for both numbers in it."""
    got = post(serve(max_context=200), MESSAGES, asked("x") | {"messages": messages})

    found = re.fullmatch(
        r"prompt is too long: (\d+) tokens > 200 maximum", got.json["error"]["message"]
    )
    assert got.status == 400
    assert found is not None
    assert int(found[1]) > 200

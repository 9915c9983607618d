"""Odd JSON requests: each costs a sentence of its own, and keeps no other from its answer."""

import io
import queue
import threading
from collections.abc import Iterator

import pytest

from kvchat.chat.json_requests import BadRequest, JsonRequest, parse_request
from kvchat.cli.batch import _queue_requests, read_requests
from kvchat.core.errors import UsageError


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"prompt": "x", "top_k": 1e400}', "Line 1 of the input is not JSON."),
        ('{"prompt": "x", "top_k": NaN}', "Line 1 of the input is not JSON."),
        ('{"prompt": "x", "top_k": 2.5}', "top_k of line 1 is 2.5, but must be a whole number."),
        ('{"id": NaN, "prompt": "x"}', "Line 1 of the input is not JSON."),
        ('{"id": [[1]], "prompt": "x"}', "id of line 1 must be a text or a number."),
        ('{"prompt": " "}', "Line 1 of the input: The last message is empty."),
        ('{"prompt": "x", "temperature": 1' + 400 * "0" + "}", "must be nearer to 0"),
        ('{"prompt": "x", "system": 5}', "system of line 1 is 5, but must be a text."),
    ],
)
def test_a_value_that_is_none_is_named(line: str, sentence: str) -> None:
    """One of these ended the thread that reads, and the batch waited for its next request."""
    content = f'{line}\n{{"prompt": "next"}}\n'.encode()
    first, second = read_requests(io.BytesIO(content))

    assert isinstance(first, BadRequest)
    assert isinstance(first.error, UsageError)
    assert sentence in first.error.message
    assert isinstance(second, JsonRequest)


@pytest.mark.parametrize(
    ("line", "label"),
    [
        ('{"id": 7, "prompt": 5}', {"id": 7}),
        ('{"id": "a", "prompt": "x", "max_tokens": 0}', {"id": "a"}),
        ('{"prompt": 5}', {"line": 2}),
        ('["id"]', {"line": 2}),
        ('{"id": 7, "prompt": "x"', {"line": 2}),
    ],
)
def test_whoever_sent_what_is_no_request_can_tell_which(line, label):
    """The error object had no id, though only another field was wrong."""
    [bad] = read_requests(io.BytesIO(f"\n{line}".encode()))

    assert isinstance(bad, BadRequest)
    assert bad.label == label


CALL = {"id": "1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
CALLED = [{"role": "user", "content": "Read."}, {"role": "assistant", "tool_calls": [CALL]}]


@pytest.mark.parametrize(
    ("messages", "last"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "Hi"),
        ([{"role": "developer", "content": "x"}, {"role": "user", "content": "Hi"}], "Hi"),
        ([*CALLED, {"role": "tool", "tool_call_id": "1", "content": "red"}], "red"),
        ([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}], "Hel"),
    ],
)
def test_a_line_is_the_body_of_a_chat_completion(messages: list[object], last: str) -> None:
    """Lines had a reader of their own, which knew texts only, and no result at the end."""
    content = {"messages": messages, "tools": [{"type": "function", "function": {"name": "read"}}]}

    chat = parse_request(content, 1).chat

    assert chat.messages[-1].whole.strip() == last
    assert chat.tools is not None
    assert chat.tools.names == ["read"]


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"role": "bot", "content": "x"}, "messages[1].role is 'bot', but must be system, dev"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            "messages[1].content[0].type is 'image_url', but must",
        ),
        ({"role": "tool", "tool_call_id": "7", "content": "x"}, "tool_call_id names no call"),
    ],
)
def test_a_bad_message_is_named_as_over_http(message: object, sentence: str) -> None:
    with pytest.raises(UsageError, match="Line 3 of the input: ") as caught:
        parse_request({"messages": [{"role": "user", "content": "Hi"}, message]}, 3)
    assert sentence in caught.value.message


def test_input_that_cannot_be_read_is_an_end_too() -> None:
    def failing() -> Iterator[JsonRequest | BadRequest]:
        yield parse_request({"prompt": "one"}, 1)
        raise OSError(5, "Input/output error")

    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    _queue_requests(failing(), inbox, threading.Semaphore(5))  # type: ignore[arg-type]

    arrivals = [inbox.get(timeout=60.0) for _ in range(3)]
    assert isinstance(arrivals[0], JsonRequest)
    assert isinstance(arrivals[1], BadRequest)
    assert "Input/output error" in arrivals[1].error.message
    assert arrivals[2] is None

"""TextFrame: the quick way to write an event that differs in its text only."""

import json

import pytest

from kvchat.server.streaming import TextFrame, sse


@pytest.mark.parametrize("text", ["", "plain", 'a "quoted"\nline', "\0text\0", "é 😀 \u2028", "\\"])
@pytest.mark.parametrize("name", ["model", "\0text\0"])
def test_a_frame_gives_what_the_whole_event_gives(text: str, name: str) -> None:
    def write(said: str) -> str:
        return sse({"model": name, "choices": [{"delta": {"content": said}, "index": 0}]}, "delta")

    framed = TextFrame(write).around(text)

    assert framed == write(text)
    data = framed.split("data: ", 1)[1]
    assert json.loads(data)["choices"][0]["delta"]["content"] == text

"""The text side of a model that a server has: the same ids and texts as one that was read here."""

import json
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from kvchat.chat.chat_model import ChatModel
from kvchat.chat.fields import FieldFault
from kvchat.chat.served_text import TextQuestions, served_model, text_answer, text_facts
from kvchat.chat.template import NewTurn
from kvchat.chat.text_codec import Segment
from kvchat.chat.thinking import Think
from kvchat.chat.tokenizer import ChatTokenizer
from kvchat.chat.tools import ToolCall, ToolResult, ToolSet, ToolUse
from kvchat.core.errors import ModelError
from support.tokenizer_zoo import ZOO, text_files

CLOCK = datetime(2026, 1, 2, 3, 4)


class Server:
    """Answers as a server does: all comes and goes as JSON."""

    def __init__(self, model: ChatModel) -> None:
        self.model = model
        self.is_lost = False
        self.asked: list[str] = []

    def ask(self, name: str, given: Mapping[str, Any]) -> Any:
        if self.is_lost:
            raise OSError
        self.asked.append(name)
        return json.loads(json.dumps(text_answer(self.model, name, json.loads(json.dumps(given)))))

    def text_side(self) -> ChatModel:
        questions = TextQuestions(self.ask, lambda: None, lambda: self.model)
        facts = json.loads(json.dumps(text_facts(self.model)))
        return served_model(self.model.name, facts, questions)


@pytest.mark.parametrize("kind", ZOO)
def test_texts_and_ids_are_those_of_the_tokenizer(kind: str, model: ChatModel) -> None:
    """Bytes in a row are decoded here, by a page of tokens; other decoders are asked."""
    codec = ChatTokenizer(text_files(ZOO[kind]()))
    own = replace(model, tokenizer=codec)
    server = Server(own)
    theirs = server.text_side()

    def text_of(model: ChatModel, ids: list[int]) -> str:
        stream = model.tokenizer.new_stream(codec.encode_raw("so"))
        return "".join([*map(stream.feed, ids), stream.flush()])

    draw = random.Random(5)
    drawn = ["".join(draw.choice("aé日🙂 \n<") for _ in range(30)) for _ in range(20)]
    for text in ("Hello, Größe 日本 🙂!", "hello world", "", *drawn):
        ids = codec.encode([Segment(text, is_inert=True)])
        assert theirs.tokenizer.encode([Segment(text, is_inert=True)]) == ids
        assert theirs.tokenizer.encode_raw(text) == codec.encode_raw(text)
        assert text_of(theirs, ids) == text_of(own, ids)
        assert theirs.tokenizer.decode(ids) == codec.decode(ids)
    assert ("stream" in server.asked) is not codec.is_bytewise
    assert server.asked.count("bytes") <= 2
    facts = (theirs.stop_token_ids, theirs.vocab_size, theirs.max_context, theirs.tokenizer.digest)
    assert facts == (own.stop_token_ids, own.vocab_size, own.max_context, codec.digest)


def test_turns_are_those_of_the_template(tool_model: ChatModel) -> None:
    """With tools, results, given calls and thinking: all that a chat has a template write."""
    own = tool_model
    theirs = Server(own).text_side()
    tools = ToolSet([{"name": "add", "description": "adds", "parameters": {"type": "object"}}])
    calls = (ToolCall("add", {"a": 1, "b": "<|eos|>"}),)
    last = own.format.answer.closing_id
    turns = [
        NewTurn("Hi <|eos|>", CLOCK, "Be brief.", Think.OFF, tools=tools),
        NewTurn("And?", CLOCK, is_answered=True),
        NewTurn("", CLOCK, use=ToolUse(calls, (ToolResult("add", "3"),))),
    ]

    for turn in turns[:2]:
        assert theirs.format.opening(turn) == own.format.opening(turn)
    for turn in turns[1:]:
        assert theirs.format.following(turn, last) == own.format.following(turn, last)
    assert theirs.format.given_calls("So:", calls) == own.format.given_calls("So:", calls)
    assert theirs.format.tools == own.format.tools
    assert theirs.format.answer == own.format.answer
    assert theirs.format.switch == own.format.switch


def test_a_chat_whose_server_ends_reads_the_model_itself(model: ChatModel) -> None:
    server = Server(model)
    theirs = server.text_side()
    turn = NewTurn("Hi", CLOCK)
    before = theirs.format.opening(turn)

    server.is_lost = True

    assert theirs.format.opening(turn) == before
    server.is_lost = False
    theirs.tokenizer.encode_raw("x")
    assert server.asked == ["opening"]  # one that comes back may have another model


def test_a_failing_tokenizer_is_told_as_it_is_here(model: ChatModel) -> None:
    def ask(name: str, given: Mapping[str, Any]) -> Any:
        raise ModelError("The checkpoint's tokenizer cannot encode this text: too deep.")

    theirs = served_model("m", text_facts(model), TextQuestions(ask, lambda: None, lambda: model))

    with pytest.raises(ModelError, match="too deep"):
        theirs.tokenizer.encode_raw("x")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("exec", {}),
        ("opening", {}),
        ("bytes", {"start": "x"}),
        ("bytes", {"start": -5}),
        ("encode", {"segments": [1]}),
        ("exceeds", {"text": "x", "limit": math.inf}),
        ("stream", {"context": [], "ids": [-1], "is_last": True}),
    ],
)
def test_a_question_of_another_version_is_refused(name, given, model):
    with pytest.raises(FieldFault):
        text_answer(model, name, given)

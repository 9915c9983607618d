"""Answers of a chat in a format: of the model here, and of a server in its place."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvchat.chat.answer_format import with_grammar
from kvchat.chat.answer_settings import AskOptions, changed, describe
from kvchat.chat.events import AnswerEnded
from kvchat.chat.host import ChatHost
from kvchat.chat.json_requests import parse_request
from kvchat.chat.reply import Reply
from kvchat.chat.tools import ToolCall, ToolSet
from kvchat.core.errors import UsageError
from kvchat.core.types import SamplingParams
from support.checkpoints import save_checkpoint, tiny_model
from support.scripted_engine import text_model, write_text_checkpoint
from support.template_zoo import TOOLS_AS_JSON
from support.tiny_host import tiny_host

OPTIONS = AskOptions(sampling=SamplingParams(temperature=1.0), seed=3, max_tokens=60)
IN_FORMAT = changed(OPTIONS, "format", "kind: 'a' | 'b', count: 1 | 2")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatHost]:
    model = tiny_model("llama", max_position_embeddings=512)
    place = save_checkpoint(tmp_path_factory.mktemp("tiny"), model)
    host = tiny_host(place, None)
    host.wait_until_ready()
    yield host
    host.close()


def text_of(reply: Reply) -> str:
    [ended] = [event for event in reply if isinstance(event, AnswerEnded)]
    return ended.text


def test_an_answer_follows_its_schema_and_an_aside_does_not(host: ChatHost) -> None:
    """The summary of a full context is an aside: as JSON it would be no summary."""
    session = host.new_session(None)

    answer = json.loads(text_of(session.ask("x", IN_FORMAT)))
    aside = text_of(session.ask_aside("x", IN_FORMAT))

    assert answer["kind"] in ("a", "b")
    assert answer["count"] in (1, 2)
    with pytest.raises(ValueError, match=r"Expecting|Extra"):
        json.loads(aside)


def test_an_answer_that_was_cut_off_goes_on_in_its_format(host: ChatHost) -> None:
    session = host.new_session(None)
    first = text_of(session.ask("x", replace(IN_FORMAT, max_tokens=4)))

    rest = text_of(session.continue_answer(IN_FORMAT))

    assert json.loads(first + rest)["count"] in (1, 2)


def test_an_answer_with_tools_is_a_call_or_in_the_format(tmp_path: Path) -> None:
    model = text_model(write_text_checkpoint(tmp_path, TOOLS_AS_JSON.replace("<|im_", "<|")))
    tools = ToolSet([{"name": "look", "parameters": {"type": "object"}}])
    segments = model.format.given_calls("", [ToolCall("look", {"x": 1})])
    call = "".join(segment.text for segment in segments)

    free = with_grammar(IN_FORMAT, model, tools).grammar
    without_calls = with_grammar(replace(IN_FORMAT, max_calls=0), model, tools).grammar

    assert free is not None
    assert without_calls is not None
    for text in (call[:30], '{"kind": "a"'):
        free.begun(text)
    without_calls.begun('{"kind": "a"')
    with pytest.raises(UsageError, match="does not match the format"):
        without_calls.begun(call[:30])


def test_a_schema_that_nothing_can_follow_is_refused(host: ChatHost) -> None:
    bad = changed(OPTIONS, "format", '{"type": "nothing"}')
    with pytest.raises(UsageError, match="The format cannot be used"):
        host.new_session(None).ask("x", bad)


def test_a_line_of_json_takes_the_format_in_both_spellings() -> None:
    schema = {"type": "string"}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    for given in ({"format": schema}, {"format": "string | 'x'"}, {"response_format": asked}):
        parse_request({"prompt": "x", **given}, 1)
    by_field = parse_request({"prompt": "x", "response_format": asked}, 1).options(OPTIONS)

    assert json.loads(by_field.format) == schema
    with pytest.raises(UsageError, match=r"Line 1 of the input: response_format\.type"):
        parse_request({"prompt": "x", "response_format": {"type": "xml"}}, 1)


def test_settings_show_a_schema_in_one_line() -> None:
    [shown] = [value for name, value in describe(IN_FORMAT) if name == "format"]

    assert shown.startswith('a schema, {"type": "object"')
    assert len(shown) < 120
    assert dict(describe(changed(IN_FORMAT, "format", "text")))["format"] == "text"

"""An answer that has to call a tool calls one, and one with a format follows it or calls a tool.

Random weights, a real engine, all interfaces.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvchat.server.guard import App
from support import template_zoo as zoo
from support.asgi_client import Got, post
from unit.server.test_logprobs_and_formats import served

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
NAMES = ("first", "second")
FUNCTIONS = [{"name": name, "description": "x", "parameters": SCHEMA} for name in NAMES]
ASKED = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    template = zoo.TOOLS_AS_JSON.replace("<|im_", "<|")
    yield from served(tmp_path_factory.mktemp("required"), template, 2048)


@pytest.fixture(scope="module")
def element_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    template = zoo.TOOLS_AS_ELEMENTS.replace("<|im_", "<|")
    yield from served(tmp_path_factory.mktemp("elements"), template, 2048)


def chat(app: App, choice: object, **others: Any) -> Got:
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    body = {"model": "tiny", "messages": ASKED, "tools": tools, "tool_choice": choice}
    return post(app, CHAT, {**body, "max_tokens": 400, **others})


def block_of_message(app: App, **fields: Any) -> dict[str, Any]:
    """Return the only block of an answer to a request of Anthropic's form."""
    tools = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
    body = {"model": "tiny", "max_tokens": 400, "messages": ASKED, "tools": tools, **fields}
    [block] = post(app, MESSAGES, body).json["content"]
    return dict(block)


def item_of_response(app: App, **fields: Any) -> dict[str, Any]:
    """Return the only item of a response."""
    tools = [{"type": "function", **function} for function in FUNCTIONS]
    body = {"model": "tiny", "max_output_tokens": 400, "input": "x", "tools": tools, **fields}
    [item] = post(app, RESPONSES, body).json["output"]
    return dict(item)


@pytest.mark.parametrize("seed", range(5))
def test_a_required_call_is_made_and_follows_its_schema(app: App, seed: int) -> None:
    [choice] = chat(app, "required", seed=seed).json["choices"]

    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] in NAMES
    arguments = json.loads(call["function"]["arguments"])
    assert set(arguments) == {"n"}
    assert 0 <= arguments["n"] <= 9


@pytest.mark.parametrize("name", NAMES)
def test_the_tool_that_is_named_is_called(app: App, name: str) -> None:
    named = {"type": "function", "function": {"name": name}}
    [call] = chat(app, named).json["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == name

    block = block_of_message(app, tool_choice={"type": "tool", "name": name})
    assert (block["type"], block["name"]) == ("tool_use", name)

    item = item_of_response(app, tool_choice={"type": "function", "name": name})
    assert (item["type"], item["name"]) == ("function_call", name)


def test_where_arguments_are_no_json_the_call_at_least_begins(element_app: App) -> None:
    named = {"type": "function", "function": {"name": "second"}}
    message = chat(element_app, named, max_tokens=80).json["choices"][0]["message"]

    calls = message.get("tool_calls", [])
    text = (message["content"] or "").replace(" ", "")
    assert [call["function"]["name"] for call in calls] == ["second"] or "=second>" in text


BAD: dict[str, tuple[object, str]] = {
    "an unknown tool": ({"type": "function", "function": {"name": "third"}}, "tool_choice"),
    "no name": ({"type": "function", "function": {}}, "tool_choice.function.name"),
    "an unknown type": ({"type": "x"}, "tool_choice.type"),
    "an unknown word": ("perhaps", "tool_choice"),
    "a number": (3, "tool_choice"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_choice_names_its_field(app: App, name: str) -> None:
    choice, field = BAD[name]

    got = chat(app, choice)

    assert got.status == 400
    assert got.json["error"]["param"] == field


def test_a_call_cannot_be_required_without_tools(app: App) -> None:
    body = {"model": "tiny", "messages": ASKED, "tool_choice": "required"}

    got = post(app, CHAT, body)

    assert (got.status, got.json["error"]["param"]) == (400, "tool_choice")


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
BRACE, OPENER = str(ord("{") - 33), str(ord("<") - 33)  # the tokens are bytes in GPT-2's order


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_with_tools_and_a_format_is_in_the_format_or_a_call(app: App, seed: int) -> None:
    fields: dict[str, Any] = {"response_format": FORMAT, "seed": seed, "logprobs": True}

    text, call = (
        chat(app, "auto", **fields, logit_bias={first: 60}).json["choices"][0]
        for first in (BRACE, OPENER)
    )

    assert text["finish_reason"] == "stop"
    assert set(json.loads(text["message"]["content"])) == {"n"}
    told = b"".join(bytes(entry["bytes"]) for entry in text["logprobs"]["content"])
    assert told.decode() == text["message"]["content"]
    assert call["finish_reason"] == "tool_calls"
    [made] = call["message"]["tool_calls"]
    assert made["function"]["name"] in NAMES
    assert set(json.loads(made["function"]["arguments"])) == {"n"}
    assert call["logprobs"]["content"] == [], "a call is no text"


def test_a_format_without_calls_is_followed(app: App) -> None:
    [choice] = chat(app, "none", response_format=FORMAT, logit_bias={OPENER: 60}).json["choices"]

    assert set(json.loads(choice["message"]["content"])) == {"n"}


def test_a_format_and_tools_go_together_in_the_other_interfaces(app: App) -> None:
    wanted = {"type": "json_schema", "schema": SCHEMA}

    block = block_of_message(app, seed=1, output_config={"format": wanted})
    item = item_of_response(app, seed=1, text={"format": {"name": "x", **wanted}})

    assert block["type"] == "tool_use" or json.loads(block["text"])
    assert item["type"] == "function_call" or json.loads(item["content"][0]["text"])


def test_a_schema_of_a_tool_that_is_nested_too_deeply_is_refused(app: App) -> None:
    deep: dict[str, Any] = {}
    for _ in range(400):
        deep = {"items": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}

    got = chat(app, "required", tools=[tool])

    assert (got.status, got.json["error"]["param"]) == (400, "tools")

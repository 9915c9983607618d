"""An answer that has to call a tool calls one: random weights, real engine, all interfaces."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvchat.server.guard import App
from server.test_logprobs_and_formats import served
from support import template_zoo as zoo
from support.asgi_client import Got, post

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

    messages = {
        "model": "tiny",
        "max_tokens": 400,
        "messages": ASKED,
        "tools": [{"name": n, "input_schema": SCHEMA} for n in NAMES],
        "tool_choice": {"type": "tool", "name": name},
    }
    [block] = post(app, MESSAGES, messages).json["content"]
    assert (block["type"], block["name"]) == ("tool_use", name)

    response = {
        "model": "tiny",
        "input": "x",
        "tools": [{"type": "function", **function} for function in FUNCTIONS],
        "tool_choice": {"type": "function", "name": name},
    }
    [item] = post(app, RESPONSES, {**response, "max_output_tokens": 400}).json["output"]
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

"""Calls and results that clients send again: nothing is lost, and no old mistake ends a chat."""

from typing import Any

import pytest

from kvchat.chat.chat_model import ChatModel
from kvchat.server.guard import App
from support.asgi_client import Got, post
from support.scripted_engine import Reader
from support.served import Serve

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
FUNCTION = {"name": "find", "description": "Finds.", "parameters": SCHEMA}
IMAGE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}


@pytest.fixture
def reader() -> Reader:
    return Reader()


@pytest.fixture
def app(serve: Serve, tool_model: ChatModel, reader: Reader) -> App:
    return serve(reader, served=tool_model)


def chat_call(call_id: str, arguments: object) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "find", "arguments": arguments}}


def chat_with(calls: list[Any], results: list[tuple[str, object]]) -> dict[str, Any]:
    given = [{"role": "tool", "tool_call_id": name, "content": text} for name, text in results]
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *given,
    ]
    tools = [{"type": "function", "function": FUNCTION}]
    return {"model": "scripted", "messages": messages, "tools": tools}


def message_with(uses: list[Any], results: list[Any], **others: Any) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": uses},
        {"role": "user", "content": results},
    ]
    tools = [{"name": "find", "description": "Finds.", "input_schema": SCHEMA}]
    given = {"model": "scripted", "max_tokens": 50, "messages": messages, "tools": tools}
    return given | others


def response_with(*items: Any) -> dict[str, Any]:
    tools = [{"type": "function", **FUNCTION}]
    return {"model": "scripted", "input": [{"role": "user", "content": "look"}, *items]} | {
        "tools": tools
    }


def use(call_id: str, arguments: object) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "find", "input": arguments}


def result(call_id: str, content: object, **others: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **others}


def item(call_id: str, arguments: object) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "find", "arguments": arguments}


def output(call_id: str, content: object) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": content}


def prompt(app: App, path: str, body: dict[str, Any]) -> Got:
    got = post(app, path, body)
    assert got.status == 200, got.body
    return got


@pytest.mark.parametrize("call_id", ["i", ""])
def test_calls_with_equal_ids_get_their_results_by_order(app, reader, call_id):
    """The second call took the place of the first, and so did its result, without a word."""
    calls = [chat_call(call_id, '{"q": "red"}'), chat_call(call_id, '{"q": "sea"}')]
    uses = [use(call_id, {"q": "red"}), use(call_id, {"q": "sea"})]
    items = [item(call_id, '{"q": "red"}'), item(call_id, '{"q": "sea"}')]
    two = [(call_id, "apples"), (call_id, "whales")]
    for path, body in (
        (CHAT, chat_with(calls, list(two))),
        (MESSAGES, message_with(uses, [result(*each) for each in two])),
        (RESPONSES, response_with(*items, *(output(*each) for each in two))),
    ):
        prompt(app, path, body)

        assert reader.read.index("apples") < reader.read.index("whales")


def test_two_results_of_one_call_are_both_read(app: App, reader: Reader) -> None:
    prompt(app, CHAT, chat_with([chat_call("c", "{}")], [("c", "one"), ("c", "two")]))

    assert "one\ntwo" in reader.read


ODD_ARGUMENTS: dict[str, object] = {
    "cut off": '{"q": ',
    "a list": "[1]",
    "null": "null",
    "a text": '"text"',
    "plain words": "find the cat",
    "two objects": '{"q": "a"}{"q": "b"}',
    "a line end in a text": '{"q": "a\nb"}',
    "an object": {"q": "a"},
    "no number": '{"q": NaN}',
    "nothing": "",
    "missing": None,
}


@pytest.mark.parametrize("name", ODD_ARGUMENTS)
def test_old_arguments_never_end_a_conversation(app: App, name: str) -> None:
    """The model's own mistake was a 400 for every request that followed it."""
    arguments = ODD_ARGUMENTS[name]

    prompt(app, CHAT, chat_with([chat_call("c", arguments)], [("c", "not run")]))
    prompt(app, RESPONSES, response_with(item("c", arguments), output("c", "not run")))
    prompt(app, MESSAGES, message_with([use("c", arguments)], [result("c", "not run")]))


def test_empty_contents_are_empty_texts(app: App) -> None:
    prompt(app, CHAT, chat_with([chat_call("c", "{}")], [("c", [])]))
    prompt(app, MESSAGES, message_with([use("c", {})], [result("c", [])]))
    prompt(app, RESPONSES, response_with(item("c", "{}"), output("c", [])))
    body = chat_with([chat_call("c", "{}")], [("c", "x")])
    body["messages"][1]["content"] = []
    prompt(app, CHAT, body)


PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "an image": ({"type": "image", "source": IMAGE}, "[An image (image/png)"),
    "a PDF": (
        {"type": "document", "title": "a.pdf", "source": {**IMAGE, "media_type": "x/pdf"}},
        "[A document (a.pdf, x/pdf)",
    ),
    "a text document": (
        {"type": "document", "source": {"type": "text", "data": "all of it"}},
        "all of it",
    ),
    "a search result": (
        {
            "type": "search_result",
            "title": "Cats",
            "source": "https://cats",
            "content": [{"type": "text", "text": "They purr."}],
        },
        "Cats\nhttps://cats\nThey purr.",
    ),
    "a reference to no tool": (
        {"type": "tool_reference", "tool_name": "dig"},
        '[The tool "dig" is not offered]',
    ),
    "a reference to a tool": (
        {"type": "tool_reference", "tool_name": "find"},
        '[The tool "find" can be called]',
    ),
    "a part to come": ({"type": "hologram"}, '[A part of the type "hologram"'),
}


@pytest.mark.parametrize("name", PARTS)
def test_what_a_tool_returned_is_read_or_noted_in_its_place(app, reader, name):
    """It was a 400, and the same for every later request of the conversation."""
    part, read = PARTS[name]
    around = [{"type": "text", "text": "before"}, part, {"type": "text", "text": "after"}]

    prompt(app, MESSAGES, message_with([use("c", {})], [result("c", around)]))

    assert "before\n" in reader.read
    assert "\nafter" in reader.read
    assert read in reader.read


def test_images_of_tools_are_noted_in_openais_forms_too(app: App, reader: Reader) -> None:
    url = "data:image/png;base64,iVBORw0KGgo="
    shown = [{"type": "image_url", "image_url": {"url": url}}]
    file = [{"type": "file", "file": {"file_data": "x"}}]
    for path, body in (
        (CHAT, chat_with([chat_call("c", "{}")], [("c", shown)])),
        (CHAT, chat_with([chat_call("c", "{}")], [("c", file)])),
        (RESPONSES, response_with(item("c", "{}"), output("c", [{"type": "input_image"}]))),
    ):
        prompt(app, path, body)

        assert "which this model cannot read]" in reader.read
        assert "base64" not in reader.read


def test_what_the_user_sends_and_the_model_cannot_read_is_refused(app: App) -> None:
    content = [{"type": "image", "source": IMAGE}]
    body = {"model": "scripted", "max_tokens": 9}

    got = post(app, MESSAGES, body | {"messages": [{"role": "user", "content": content}]})

    assert got.status == 400
    assert got.json["error"]["message"].startswith("messages[0].content[0].type ")


def test_a_call_that_failed_says_so(app: App, reader: Reader) -> None:
    prompt(app, MESSAGES, message_with([use("c", {})], [result("c", "no file", is_error=True)]))

    assert "The tool failed.\nno file" in reader.read


def test_blocks_of_another_servers_tools_are_left_out_and_named(app: App) -> None:
    blocks = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "cats"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "mcp_tool_use", "id": "m", "name": "x", "server_name": "y", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "m", "content": []},
        {"type": "text", "text": "Cats purr."},
    ]
    got = prompt(app, MESSAGES, message_with(blocks, [{"type": "text", "text": "More."}]))

    told = got.headers["x-kvchat-left-out"].split(", ")
    assert told == ["mcp_tool_result", "mcp_tool_use", "server_tool_use", "web_search_tool_result"]


def test_a_refusal_is_the_text_of_its_message(app: App) -> None:
    """It was dropped, and the model read an empty answer."""
    asked = {"role": "user", "content": "look"}
    refused = {"role": "assistant", "content": None, "refusal": "I do not look."}
    parts = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I do not look."}]}
    said = {"role": "assistant", "content": "I do not look."}

    sizes = [
        prompt(app, CHAT, {"model": "scripted", "messages": [asked, each, asked]}).json["usage"]
        for each in (refused, parts, said)
    ]

    assert len({usage["prompt_tokens"] for usage in sizes}) == 1

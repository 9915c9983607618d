"""Requests as agents send them: each is answered, and its tools come back in the client's form.

The bodies have the shape of what Claude Code, Codex and the SDKs were seen to send.
"""

import json
import time
from typing import Any

import pytest

from kvchat.chat.answer_memory import AnswerMemory
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.conversation import Role
from kvchat.chat.host import ChatHost
from kvchat.chat.prefixes import ResentChats
from kvchat.chat.resent_chat import Message, resent_chat
from kvchat.chat.tools import ToolSet
from kvchat.server.guard import App
from support.asgi_client import Got, post
from support.scripted_engine import Reader, Script, scripted_build
from support.served import Serve
from support.stabilisers import new_stabiliser
from support.tiny_host import answer_options, finish

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def schema(*names: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}}


def call_of(name: str, **arguments: Any) -> str:
    """Return a call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def user(text: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "role": "user", "content": content}


RUN = {"type": "function", "name": "run", "strict": False, "parameters": schema("cmd")}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE+"},
}
TEAM = {
    "type": "namespace",
    "name": "team",
    "description": "Other agents.",
    "tools": [
        {"type": "function", "name": "stop", "strict": False, "parameters": schema("who")},
        {"type": "custom", "name": "tell", "description": "Tells all."},
    ],
}
SEARCH = {"type": "tool_search", "execution": "client", "parameters": schema("query")}
CODEX = {
    "model": "scripted",
    "stream": False,
    "store": False,
    "instructions": "You are an agent.",
    "input": [user("go")],
    "tools": [RUN, PATCH, TEAM, {"type": "web_search", "external_web_access": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "max"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "text": {"verbosity": "low"},
    "client_metadata": {"a": "b"},
}


@pytest.fixture
def reader() -> Reader:
    return Reader()


@pytest.fixture
def app(serve: Serve, tool_model: ChatModel, reader: Reader) -> App:
    return serve(reader, served=tool_model)


def answered(app: App, path: str, body: dict[str, Any]) -> Got:
    got = post(app, path, body)
    assert got.status == 200, got.body
    return got


# Codex


def test_codex_is_answered_and_told_what_its_server_would_have_run(app, reader):
    """Its default tools were a 400: one of them is a namespace, and one a search of the web."""
    got = answered(app, RESPONSES, CODEX)

    assert got.headers["x-kvchat-left-out"] == "web_search"
    for name in ("run", "patch", "team__stop", "team__tell"):
        assert f'"name": "{name}"' in reader.read
    assert "start: LINE+" in reader.read, "the grammar of the input is described"
    assert "web_search" not in reader.read


CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "a function": (
        call_of("run", cmd="ls"),
        {"type": "function_call", "name": "run", "arguments": '{"cmd": "ls"}'},
    ),
    "a function in a namespace": (
        call_of("team__stop", who="a"),
        {"type": "function_call", "name": "stop", "namespace": "team", "arguments": '{"who": "a"}'},
    ),
    "its name alone": (
        call_of("stop", who="a"),
        {"type": "function_call", "name": "stop", "namespace": "team", "arguments": '{"who": "a"}'},
    ),
    "a custom tool": (
        call_of("patch", input="*** Begin\n+x"),
        {"type": "custom_tool_call", "name": "patch", "input": "*** Begin\n+x"},
    ),
    "a custom tool in a namespace": (
        call_of("team__tell", input="done"),
        {"type": "custom_tool_call", "name": "tell", "namespace": "team", "input": "done"},
    ),
    "a search for tools": (
        call_of("tool_search", query="mail"),
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "mail"}},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_the_form_of_its_tool_and_is_known_when_it_comes_back(app, reader, name):
    reader.answer, wanted = CALLS[name]
    body = CODEX | {"tools": [*CODEX["tools"], SEARCH]}

    [item] = answered(app, RESPONSES, body).json["output"]
    streamed = answered(app, RESPONSES, body | {"stream": True}).events

    ids = ("id", "call_id", "status")
    assert {key: value for key, value in item.items() if key not in ids} == wanted
    [done] = [data["item"] for kind, data in streamed if kind == "response.output_item.done"]
    assert {key: value for key, value in done.items() if key not in ids} == wanted
    said = [data.get("delta") for kind, data in streamed if kind and kind.endswith(".delta")]
    assert said == [
        wanted[key] for key in ("input", "arguments") if isinstance(wanted.get(key), str)
    ]

    kind = {"tool_search_call": "tool_search_output"}.get(item["type"], f"{item['type']}_output")
    returned = {"type": kind, "call_id": item["call_id"], "output": "it is done", "tools": []}
    reader.answer = "ok"
    again = answered(app, RESPONSES, body | {"input": [user("go"), item, returned]})
    usage = again.json["usage"]
    if name != "its name alone":  # the client knows another name than the model wrote
        assert usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"] < 120


def test_tools_that_a_search_found_are_written_where_they_were_found(app, reader):
    """The beginning of the prompt stays as it is, and so does its KV."""
    found = {"type": "function", "name": "send", "defer_loading": True, "parameters": schema("to")}
    items = [
        user("go"),
        {"type": "tool_search_call", "call_id": "s", "execution": "client", "arguments": {}},
        {"type": "tool_search_output", "call_id": "s", "tools": [found | {"namespace": "x"}]},
    ]
    body = CODEX | {"tools": [RUN, SEARCH], "input": items}
    reader.answer = call_of("send", to="you")

    [item] = answered(app, RESPONSES, body).json["output"]

    assert item["name"] == "send"
    opening, _, rest = reader.read.partition("<tool_response>")
    assert '"send"' not in opening
    assert '"name": "send"' in rest


def test_an_image_that_codex_views_is_a_note(app: App, reader: Reader) -> None:
    items = [
        user("Look at a.png."),
        {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_image", "image_url": "data:image/png;base64,aGk="}],
        },
        user("Go on."),
    ]
    answered(app, RESPONSES, CODEX | {"input": items})

    assert "[An image, which this model cannot read]" in reader.read


OLD_ITEMS: dict[str, list[dict[str, Any]]] = {
    "a custom tool": [
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "+x"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    ],
    "a shell": [
        {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c", "output": "done"},
    ],
    "a shell by the item's id": [
        {"type": "local_shell_call", "id": "c", "call_id": None, "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c", "output": "done"},
    ],
    "a web search": [{"type": "web_search_call", "id": "w", "status": "completed"}],
    "an item to come": [{"type": "telepathy_call", "id": "w"}],
    "a reasoning": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}],
    "tools that were added": [{"type": "additional_tools", "role": "developer", "tools": [RUN]}],
}


@pytest.mark.parametrize("name", OLD_ITEMS)
def test_items_of_other_servers_do_not_end_a_conversation(app: App, name: str) -> None:
    answered(app, RESPONSES, CODEX | {"input": [user("go"), *OLD_ITEMS[name], user("more")]})


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_limit_the_tools(app: App, reader: Reader, mode: str) -> None:
    allowed = [{"type": "function", "name": "run"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
    reader.answer = call_of("run", cmd="ls")

    [item] = answered(app, RESPONSES, CODEX | {"tool_choice": choice}).json["output"]

    assert item["name"] == "run"
    assert ('"name": "patch"' in reader.read) == (mode == "required")


# Chat completions


def test_custom_tools_of_a_chat_come_back_as_custom_calls(app: App, reader: Reader) -> None:
    tool = {"type": "custom", "custom": {"name": "patch", "description": "Changes files."}}
    body = {"model": "scripted", "messages": [{"role": "user", "content": "go"}], "tools": [tool]}
    reader.answer = call_of("patch", input="+x")

    message = answered(app, CHAT, body).json["choices"][0]["message"]
    [call] = message["tool_calls"]
    assert call["type"] == "custom"
    assert call["custom"] == {"name": "patch", "input": "+x"}

    result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    again = answered(app, CHAT, body | {"messages": [*body["messages"], message, result]})
    usage = again.json["usage"]
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] < 120


@pytest.mark.parametrize("word", ["auto", "none", "required"])
def test_a_choice_may_be_an_object_with_the_word(app: App, reader: Reader, word: str) -> None:
    tool = {"type": "function", "function": {"name": "run", "parameters": schema("cmd")}}
    body = {"model": "scripted", "messages": [{"role": "user", "content": "go"}], "tools": [tool]}
    reader.answer = call_of("run", cmd="ls")

    for choice in (word, {"type": word}):
        got = answered(app, CHAT, body | {"tool_choice": choice}).json["choices"][0]
        assert (got["finish_reason"] == "tool_calls") == (word != "none")


# Claude Code and Anthropic's SDK

READ = {"name": "Read", "description": "Reads a file.", "input_schema": schema("file_path")}


def message(*messages: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"model": "scripted", "max_tokens": 200, "messages": list(messages), **others}


def test_dated_tools_that_the_client_runs_are_functions(app: App, reader: Reader) -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "code_execution_20260120", "name": "code_execution"},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
    ]
    reader.answer = call_of("bash", command="ls")

    got = answered(app, MESSAGES, message({"role": "user", "content": "go"}, tools=tools))

    assert got.headers["x-kvchat-left-out"] == (
        "web_search_20250305, code_execution_20260120, mcp_toolset"
    )
    [use] = got.json["content"]
    assert use["name"] == "bash"
    assert use["input"] == {"command": "ls"}
    for name in ("bash", "str_replace_based_edit_tool", "memory"):
        assert f'"name": "{name}"' in reader.read


def deferred(*others: dict[str, Any]) -> list[dict[str, Any]]:
    mail = {"name": "mail", "input_schema": schema("to"), "defer_loading": True}
    return [READ, mail | {"description": "Sends mail."}, *others]


def test_a_deferred_tool_is_written_where_it_is_referred_to(app: App, reader: Reader) -> None:
    """It stood at the beginning, so that each tool that was found changed all of the prompt."""
    asked = {"role": "user", "content": "go"}
    use = {"type": "tool_use", "id": "s", "name": "Read", "input": {}}
    reference = [{"type": "tool_reference", "tool_name": "mail"}]
    result = {"type": "tool_result", "tool_use_id": "s", "content": reference}
    reader.answer = call_of("mail", to="you")

    answered(app, MESSAGES, message(asked, tools=deferred()))
    assert "Sends mail." not in reader.read

    found = ({"role": "assistant", "content": [use]}, {"role": "user", "content": [result]})
    got = answered(app, MESSAGES, message(asked, *found, tools=deferred()))
    opening, _, rest = reader.read.partition("<tool_response>")
    assert "Sends mail." not in opening
    assert "Sends mail." in rest
    assert got.json["content"][0]["input"] == {"to": "you"}


def test_deferred_tools_are_all_offered_where_the_server_would_search(app, reader):
    search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    asked = {"role": "user", "content": "go"}

    answered(app, MESSAGES, message(asked, tools=deferred(search)))

    assert "Sends mail." in reader.read


def test_tools_are_added_and_removed_in_a_conversation(app: App, reader: Reader) -> None:
    definition = {"name": "mail", "description": "Sends mail.", "input_schema": schema("to")}
    blocks = [
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": definition}},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "Read"}},
    ]
    asked = {"role": "user", "content": "go"}

    answered(app, MESSAGES, message(asked, {"role": "system", "content": blocks}, tools=[READ]))

    opening, _, rest = reader.read.partition("go")
    assert "Sends mail." not in opening
    assert "Sends mail." in rest
    assert '[The tool "Read" is not offered any more]' in rest


# Claude Code

LIST = "Available agent types: explore, plan."
CLAUDE = {
    "model": "scripted",
    "max_tokens": 50,
    "system": [{"type": "text", "text": "You are an agent."}],
    "tools": [{"name": "run", "input_schema": schema("cmd")}],
}


def asked(*messages: tuple[str, str], **others: Any) -> dict[str, Any]:
    given = [{"role": role, "content": text} for role, text in messages]
    return {**CLAUDE, "messages": given, **others}


def test_an_instruction_behind_the_first_message_stands_before_it(serve, tool_model, reader):
    """Claude Code's second message was read behind the user's words: 1,400 tokens of every new
    session were read again.
    """
    app = serve(reader, served=tool_model, stabiliser=new_stabiliser(is_for_all=False))
    turns = [("user", "Fix it."), ("system", LIST)]

    answered(app, MESSAGES, asked(*turns))
    first = reader.read
    answered(app, MESSAGES, asked(*turns, ("assistant", "ok"), ("user", "More."), ("system", "B")))

    assert first.index("You are an agent.") < first.index(LIST) < first.index("Fix it.")
    assert reader.read.startswith(first), "the conversation goes on from there"
    assert reader.read.index("More.") < reader.read.rindex("B"), "a later one stays where it came"


def test_without_tools_or_a_stabiliser_an_instruction_stays_where_it_came(
    app: App, serve: Serve, tool_model: ChatModel, reader: Reader
) -> None:
    turns = [("user", "Fix it."), ("system", LIST)]
    stable = serve(reader, served=tool_model, stabiliser=new_stabiliser(is_for_all=False))

    for served, tools in ((stable, []), (app, CLAUDE["tools"])):
        answered(served, MESSAGES, asked(*turns, tools=tools))
        assert reader.read.index("Fix it.") < reader.read.index(LIST)


def test_what_an_agent_begins_with_is_pinned_once(app: App) -> None:
    """`cache_creation_input_tokens` counts what is kept of the tokens that were computed."""
    first = answered(app, MESSAGES, asked(("user", "Fix it.")))
    again = answered(app, MESSAGES, asked(("user", "Do it.")))
    other = answered(app, MESSAGES, asked(("user", "Do it."), system="Another."))

    created = [got.json["usage"]["cache_creation_input_tokens"] for got in (first, again, other)]
    assert created[0] > 0
    assert created[1] == 0
    assert created[2] > 0


def test_a_beginning_is_pinned_once_an_answer_was_there_and_anew_each_day(tool_model, monkeypatch):
    """A first request that was cut off counted as pinned until the server's end."""
    host = ChatHost(tool_model, scripted_build(tool_model, lambda *_: Script("ok")), None)
    chats = ResentChats(host, AnswerMemory(None))
    agent = resent_chat("Be brief.", [Message(Role.USER, "go")], ToolSet([{"name": "f"}]))

    def is_pinned_by_next(is_whole: bool = True) -> bool:
        asked = chats.ask(agent, answer_options(1))
        ended = finish(asked.reply)
        if is_whole:
            chats.remember(asked, ended)
        return bool(asked.kept)

    assert is_pinned_by_next(is_whole=False)
    assert is_pinned_by_next()
    assert not is_pinned_by_next()
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 90_000)
    assert is_pinned_by_next()
    chats.close()
    host.close()

"""Tools over all three interfaces: definitions go in, calls come out, results are read.

The scripted engine answers with the calls; everything above it is real.
"""

import json
from typing import Any

import pytest

from kvchat.chat.chat_model import ChatModel
from kvchat.server.guard import App
from support.asgi_client import Got, post
from support.scripted_engine import Script
from support.served import Serve

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
FUNCTION = {
    "name": "find",
    "description": "Finds.",
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "cats"}}\n</tool_call>'


def helpful(question: str, sample: int) -> Script:
    """Call a tool when asked to find, or else repeat what was read last."""
    if "both" in question:
        return Script(f"I look. \n{CALL}\n{CALL}")
    return Script(f"I look. \n{CALL}" if question.startswith("find") else f"I read: {question}")


@pytest.fixture
def app(serve: Serve, tool_model: ChatModel) -> App:
    return serve(helpful, served=tool_model)


def chat_body(*messages: dict[str, Any], **others: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": FUNCTION}]
    return {"model": "scripted", "messages": list(messages), "tools": tools, **others}


ASKED = {"role": "user", "content": "find cats"}


def test_a_call_ends_a_chat_completion(app: App) -> None:
    choice = post(app, CHAT, chat_body(ASKED)).json["choices"][0]

    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    [call] = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"]
    assert call["function"]["name"] == "find"
    assert json.loads(call["function"]["arguments"]) == {"q": "cats"}


def test_a_stream_has_the_call_after_the_text(app: App) -> None:
    got = post(app, CHAT, chat_body(ASKED, stream=True))

    choices = [chunk["choices"][0] for _, chunk in got.events[:-1]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert text == "I look."
    [call] = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert call["index"] == 0
    assert json.loads(call["function"]["arguments"]) == {"q": "cats"}
    assert choices[-1]["finish_reason"] == "tool_calls"


HOSTILE = {
    "half a character": r'{"name": "find", "arguments": {"q": "\ud83d"}}',
    "half a character in the name": r'{"name": "\ud83d", "arguments": {}}',
    "no number": '{"name": "find", "arguments": {"q": NaN}}',
    "a long number": '{"name": "find", "arguments": {"q": ' + "9" * 5000 + "}}",
    "control characters": r'{"name": "find\n\u001b[2J", "arguments": {"q": "\u001b]0;x\u0007"}}',
    "deep": '{"name": "find", "arguments": ' + '{"a":' * 500 + "1" + "}" * 501,
    "a name that is none": '{"name": ["find"], "arguments": {}}',
    "two names": '{"name": "find", "arguments": {"q": 1, "q": 2}, "name": "remove"}',
}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_a_model_calls_is_a_call_or_text(serve, tool_model, name, is_streamed):
    """NaN and half a character were a status 500, and ended a stream without its end."""
    written = f"<tool_call>\n{HOSTILE[name]}\n</tool_call>"
    app = serve(lambda question, sample: Script(written), served=tool_model)
    settings = {"stream": is_streamed}
    for path, body in (
        (CHAT, chat_body(ASKED, max_tokens=9000, **settings)),
        (RESPONSES, response_body("find", max_output_tokens=9000, **settings)),
        (MESSAGES, message_body(ASKED, max_tokens=9000, **settings)),
    ):
        got = post(app, path, body)
        assert got.status == 200
        ending = (b"[DONE]", b"response.completed", b"message_stop")
        assert not is_streamed or any(mark in got.body for mark in ending)
        assert b"\x1b" not in got.body


def answered(app: App, *results: str) -> Got:
    """Send a call back with its results, under the ids that the server gave."""
    message = post(app, CHAT, chat_body(ASKED)).json["choices"][0]["message"]
    call_id = message["tool_calls"][0]["id"]
    given = [{"role": "tool", "tool_call_id": call_id, "content": text} for text in results]
    return post(app, CHAT, chat_body(ASKED, message, *given))


def test_a_result_is_read_and_the_calls_ids_are_those_that_were_generated(app: App) -> None:
    """The text of a call never comes back as the model wrote it: only the memory has its ids."""
    got = answered(app, "two cats")

    assert got.json["choices"][0]["message"]["content"].endswith("two cats\n</tool_response>")
    usage = got.json["usage"]
    reread = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    assert reread < len("<|start|>user\n<tool_response>\ntwo cats\n</tool_response>") + 40


def test_a_call_is_known_again_after_a_restart(serve, tool_model, tmp_path):
    first = serve(helpful, served=tool_model, memory=tmp_path / "answers.db")
    message = post(first, CHAT, chat_body(ASKED)).json["choices"][0]["message"]
    message["tool_calls"][0]["id"] = "of-the-client"
    result = {"role": "tool", "tool_call_id": "of-the-client", "content": "two cats"}
    later = chat_body(ASKED, message, result)
    once = post(first, CHAT, later).json["usage"]["prompt_tokens"]

    second = serve(helpful, served=tool_model, memory=tmp_path / "answers.db")
    stranger = serve(helpful, served=tool_model)

    assert post(second, CHAT, later).json["usage"]["prompt_tokens"] == once
    # The model wrote its text with other white space than the template would.
    assert post(stranger, CHAT, later).json["usage"]["prompt_tokens"] != once


def test_results_come_in_the_order_of_the_calls(app: App) -> None:
    asked = {"role": "user", "content": "find both"}
    message = post(app, CHAT, chat_body(asked)).json["choices"][0]["message"]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    results = [{"role": "tool", "tool_call_id": i, "content": f"of {n}"} for n, i in enumerate(ids)]

    orders = (results, results[::-1])
    totals = [
        post(app, CHAT, chat_body(asked, message, *order)).json["usage"]["prompt_tokens"]
        for order in orders
    ]
    cached = post(app, CHAT, chat_body(asked, message, *results[::-1])).json["usage"]

    assert totals[0] == totals[1]
    assert cached["prompt_tokens_details"]["cached_tokens"] > totals[0] - 20


def test_one_call_at_most_where_the_client_wants_no_more(app: App) -> None:
    asked = {"role": "user", "content": "find both"}
    message = post(app, CHAT, chat_body(asked, parallel_tool_calls=False)).json["choices"][0]

    assert len(message["message"]["tool_calls"]) == 1


def test_without_a_choice_of_tools_the_answer_is_text(app: App) -> None:
    message = post(app, CHAT, chat_body(ASKED, tool_choice="none")).json["choices"][0]["message"]

    assert "tool_calls" not in message
    assert message["content"].endswith("</tool_call>")


def test_a_changed_tool_is_named_as_the_reason_for_a_miss(app: App) -> None:
    first = post(app, CHAT, chat_body(ASKED)).json["choices"][0]["message"]
    call_id = first["tool_calls"][0]["id"]
    later = chat_body(ASKED, first, {"role": "tool", "tool_call_id": call_id, "content": "x"})
    later["tools"] = [{"type": "function", "function": {**FUNCTION, "description": "Looks."}}]

    changed = post(app, CHAT, later).json["usage"]["kvchat"]["changed"]

    assert changed["message"] == "tools"
    assert changed["now"].startswith("Looks.")


CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
BAD: dict[str, tuple[tuple[dict[str, Any], ...], str]] = {
    "a result of no call": (
        (ASKED, {"role": "tool", "tool_call_id": "zz", "content": "x"}),
        "messages[1].tool_call_id",
    ),
    "a call without a result": ((ASKED, CALLED, ASKED), "messages"),
    "a call at the end": ((ASKED, CALLED), "messages"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_conversation_with_tools_names_its_field(app: App, name: str) -> None:
    messages, field = BAD[name]

    got = post(app, CHAT, chat_body(*messages))

    assert got.status == 400
    assert got.json["error"]["param"] == field


def test_a_template_without_tools_refuses_them(serve: Serve) -> None:
    got = post(serve(), CHAT, chat_body(ASKED))

    assert got.status == 400
    assert got.json["error"]["message"].endswith("has no place for tools.")


# Anthropic's


def message_body(*messages: dict[str, Any], **others: Any) -> dict[str, Any]:
    tool = {"name": "find", "description": "Finds.", "input_schema": FUNCTION["parameters"]}
    base = {"model": "scripted", "max_tokens": 200, "tools": [tool]}
    return {**base, "messages": list(messages), **others}


def test_a_message_has_a_block_for_the_call_and_reads_its_result(app: App) -> None:
    got = post(app, MESSAGES, message_body(ASKED)).json

    text, call = got["content"]
    assert text == {"type": "text", "text": "I look."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "find", {"q": "cats"})
    assert got["stop_reason"] == "tool_use"

    said = {"role": "assistant", "content": got["content"]}
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "two cats"}
    more = {"type": "text", "text": "well"}
    later = message_body(ASKED, said, {"role": "user", "content": [result, more]})
    again = post(app, MESSAGES, later).json

    assert again["content"][0]["text"] == "I read: well"
    assert again["usage"]["input_tokens"] < 120
    counted = post(app, "/v1/messages/count_tokens", later).json["input_tokens"]
    usage = again["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_a_stream_of_messages_opens_and_closes_a_block_for_the_call(app: App) -> None:
    events = post(app, MESSAGES, message_body(ASKED, stream=True)).events

    kinds = [name for name, _ in events]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
    starts = [data["content_block"] for name, data in events if name == "content_block_start"]
    assert [block["type"] for block in starts] == ["text", "tool_use"]
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert json.loads(deltas[-1]["partial_json"]) == {"q": "cats"}
    [end] = [data["delta"] for name, data in events if name == "message_delta"]
    assert end["stop_reason"] == "tool_use"


# Responses


def response_body(given: object, **others: Any) -> dict[str, Any]:
    return {
        "model": "scripted",
        "input": given,
        "tools": [{"type": "function", **FUNCTION}],
        **others,
    }


def test_a_response_has_an_item_for_the_call_and_reads_its_output(app: App) -> None:
    got = post(app, RESPONSES, response_body("find cats")).json

    said, call = got["output"]
    assert said["content"][0]["text"] == "I look."
    assert (call["type"], call["name"]) == ("function_call", "find")
    assert json.loads(call["arguments"]) == {"q": "cats"}

    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "two cats"}
    again = post(app, RESPONSES, response_body([ASKED, said, call, output])).json

    assert again["output"][0]["content"][0]["text"].endswith("two cats\n</tool_response>")
    assert (
        again["usage"]["input_tokens"] - again["usage"]["input_tokens_details"]["cached_tokens"]
        < len("<|start|>user\n<tool_response>\ntwo cats\n</tool_response>") + 40
    )


def test_a_stream_of_a_response_has_the_arguments_of_the_call(app: App) -> None:
    events = post(app, RESPONSES, response_body("find cats", stream=True)).events

    kinds = [name for name, _ in events]
    assert kinds.count("response.output_item.added") == 2
    assert kinds.count("response.output_item.done") == 2
    [done] = [data for name, data in events if name == "response.function_call_arguments.done"]
    assert json.loads(done["arguments"]) == {"q": "cats"}
    whole = events[-1][1]["response"]
    assert [item["type"] for item in whole["output"]] == ["message", "function_call"]
    numbers = [data["sequence_number"] for _, data in events]
    assert numbers == list(range(len(events)))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return {"q": value}


@pytest.mark.parametrize(("depth", "status"), [(90, 200), (110, 400), (450, 400), (900, 400)])
def test_parameters_that_are_nested_too_deeply_are_refused_and_arguments_are_one_text(
    app: App, depth: int, status: int
) -> None:
    """Arguments of 900 levels were a 500: placeholders for reserved texts are put in level by
    level. A conversation that has them goes on.
    """
    arguments = json.dumps(nested(depth))
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "x"}
    called = [ASKED, {"role": "assistant", "tool_calls": [call]}, result]
    tool = {"type": "function", "function": {"name": "f", "parameters": nested(depth)}}
    use = {"type": "tool_use", "id": "c", "name": "find", "input": nested(depth)}
    used = [ASKED, {"role": "assistant", "content": [use]}]
    used.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]})
    item = {"type": "function_call", "call_id": "c", "name": "find", "arguments": arguments}
    items = [ASKED, item, {"type": "function_call_output", "call_id": "c", "output": "x"}]

    got = [
        post(app, CHAT, chat_body(*called)),
        post(app, CHAT, {**chat_body(ASKED), "tools": [tool]}),
        post(app, MESSAGES, {"model": "scripted", "max_tokens": 50, "messages": used}),
        post(app, RESPONSES, {"model": "scripted", "input": items}),
    ]

    assert [each.status for each in got] == [200, status, 200, 200]


def test_definitions_that_exceed_the_context_are_refused_as_such(app: App) -> None:
    """It was a 503 that blamed the checkpoint: its template may write 1 MiB."""
    tool = {"name": "find", "description": "a b " * 500_000}
    tools = [{"type": "function", "function": tool}]

    refused = post(app, CHAT, {**chat_body(ASKED), "tools": tools})

    assert refused.status == 400
    assert refused.json["error"]["code"] == "context_length_exceeded"

"""The Responses interface: the response object and its events."""

import base64
from typing import Any

import pytest

from kvchat.chat.compaction import LEFT_OUT
from support.asgi_client import post
from support.scripted_engine import Script
from support.served import Serve

PATH = "/v1/responses"


def asked(given: Any, **others: Any) -> dict[str, Any]:
    return {"model": "scripted", "input": given, **others}


def test_a_response_has_reasoning_and_a_message(serve: Serve) -> None:
    app = serve(lambda question, sample: Script("<think>why</think>because"))

    response = post(app, PATH, asked("x", instructions="Be brief.")).json

    reasoning, message = response["output"]
    assert reasoning["content"][0]["text"] == "why"
    assert message["content"][0]["text"] == "because"
    assert response["status"] == "completed"
    assert response["instructions"] == "Be brief."


@pytest.mark.parametrize("streams", [False, True])
def test_a_response_that_reaches_its_limit_is_incomplete(serve: Serve, streams: bool) -> None:
    got = post(serve(), PATH, asked("a long question", max_output_tokens=2, stream=streams))
    response = got.events[-1][1]["response"] if streams else got.json

    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    [item] = response["output"]
    assert item["status"] == "incomplete"
    assert item["content"][0]["text"] == "a "


def test_items_of_earlier_responses_are_the_history(serve: Serve) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "message", "role": "user", "content": "c"},
    ]

    response = post(serve(), PATH, asked(items)).json

    assert response["output"][0]["content"][0]["text"] == "c 0"


def test_events_are_numbered_and_end_with_the_whole_response(serve: Serve) -> None:
    events = post(serve(), PATH, asked("abc", stream=True)).events

    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    names = [name for name, _ in events]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [data["delta"] for name, data in events if name == "response.output_text.delta"]
    [item] = events[-1][1]["response"]["output"]
    assert "".join(deltas) == "abc 0" == item["content"][0]["text"]


@pytest.mark.parametrize(
    "others", [{"tools": [{}]}, {"conversation": "conv_1"}, {"text": {"format": {"type": "json"}}}]
)
def test_what_is_not_supported_is_refused(serve: Serve, others: dict[str, Any]) -> None:
    assert post(serve(), PATH, asked("x", **others)).status == 400


def test_a_response_says_again_what_the_request_said_of_itself(serve: Serve) -> None:
    said = {"metadata": {"a": "b"}, "user": "u", "prompt_cache_key": "k", "safety_identifier": "s"}
    given = {"model": "scripted", "input": "x", "truncation": "auto", "max_tool_calls": 3, **said}

    response = post(serve(), "/v1/responses", given).json

    assert {name: response[name] for name in said} == said
    assert response["truncation"] == "auto"
    assert response["max_tool_calls"] == 3
    assert response["background"] is False
    assert response["completed_at"] >= response["created_at"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("background", True),
        ("conversation", "conv_1"),
        ("prompt", {"id": "pmpt_1"}),
        ("truncation", "some"),
        ("max_tool_calls", 0),
        ("metadata", {"a": 1}),
        ("metadata", {str(n): "" for n in range(17)}),
        ("metadata", {"n" * 65: ""}),
        # One of 1 MB kept all other requests waiting for 0.8 s: the stored response repeats it.
        ("metadata", {"a": "x" * 513}),
        ("user", 5),
        ("user", "x" * 513),
    ],
)
def test_what_would_change_the_response_or_is_no_such_field_is_refused(serve, name, value):
    got = post(serve(), "/v1/responses", {"model": "scripted", "input": "x", name: value})

    assert got.status == 400
    assert got.json["error"]["param"].startswith(name)


def test_a_history_may_begin_with_the_assistant(serve: Serve) -> None:
    items = [
        {"role": "assistant", "content": "The number"},
        {"role": "assistant", "content": "is four."},
        {"role": "user", "content": "Which?"},
    ]

    response = post(serve(), PATH, asked(items)).json

    assert response["output"][0]["content"][0]["text"] == "Which? 0"


def compacted(app: Any) -> dict[str, Any]:
    items = [
        {"role": "user", "content": "We launch on Tuesday."},
        {"role": "assistant", "content": "Understood."},
    ]
    answer = post(app, f"{PATH}/compact", asked(items, prompt_cache_key="k"))
    assert answer.status == 200, answer.json
    return answer.json


def test_a_conversation_is_compacted_to_one_item(serve: Serve) -> None:
    app = serve(lambda question, sample: Script("The launch is on Tuesday."))

    compaction = compacted(app)

    [item] = compaction["output"]
    assert compaction["object"] == "response.compaction"
    assert item["type"] == "compaction"
    assert compaction["usage"]["output_tokens"] > 0
    assert "input_tokens_details" in compaction["usage"]


def test_a_compaction_item_stands_for_the_conversation(serve: Serve) -> None:
    heard: list[str] = []

    def author(question: str, sample: int) -> Script:
        heard.append(question)
        return Script("The launch is on Tuesday.")

    app = serve(author)
    [item] = compacted(app)["output"]
    follow_up = post(app, PATH, asked([item, {"role": "user", "content": "When?"}])).json
    again = post(app, PATH, asked([item])).json

    assert heard[0].startswith("Summarise")
    assert heard[1] == "When?"
    assert follow_up["usage"]["input_tokens"] > len("The launch is on Tuesday. When?")
    assert again["status"] == "completed"


def test_a_conversation_with_tools_is_compacted_from_the_cache(serve, tool_model):
    """Its definitions were left out, so the conversation was computed again."""
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    app = serve(lambda question, sample: Script("We launch on Tuesday."), served=tool_model)
    question = {"role": "user", "content": "When do we launch?"}

    usage = post(app, PATH, asked([question], tools=tools)).json["usage"]
    conversation = [question, {"role": "assistant", "content": "We launch on Tuesday."}]
    compaction = post(app, f"{PATH}/compact", asked(conversation, tools=tools)).json

    cached = compaction["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached >= usage["input_tokens"] > len("When do we launch?")


@pytest.mark.parametrize("held", ["", "no base64!", "aGVsbG8=", None])
def test_a_compaction_item_of_another_server_is_refused(serve: Serve, held: str | None) -> None:
    item = {"type": "compaction", "encrypted_content": held}
    refused = post(serve(), PATH, asked([item, {"role": "user", "content": "x"}]))

    assert refused.status == 400
    assert "encrypted_content" in refused.json["error"]["param"]


def shown(item: dict[str, Any]) -> str:
    return base64.b64decode(item["encrypted_content"]).decode().removeprefix("kvchat summary\n")


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        (
            "Ada looks for her dog Rex, seen at noon. He was " + "x" * 9000,
            "Ada looks for her dog Rex, seen at noon.",
        ),
        ("", None),
        ("   ", None),
        ("I cannot do that.", None),
    ],
    ids=["cut off", "empty", "blank", "a refusal"],
)
def test_compacting_ends_in_a_conversation_that_goes_on_whatever_the_model_writes(
    serve: Serve, text: str, summary: str | None
) -> None:
    """A summary that was cut off was refused, and an agent with a full context stood still."""
    app = serve(lambda question, sample: Script(text), max_context=4000)
    items = [
        {"role": "user", "content": "My dog Rex is gone."},
        {"role": "assistant", "content": "word " * 500},
        {"role": "user", "content": "I saw him at noon."},
    ]

    got = post(app, f"{PATH}/compact", asked(items))

    assert got.status == 200, got.json
    [item] = got.json["output"]
    if summary is not None:
        assert shown(item) == summary
    else:
        assert shown(item).startswith(LEFT_OUT)
        assert shown(item).endswith("User: I saw him at noon.")
    assert post(app, PATH, asked([item, {"role": "user", "content": "When?"}])).status == 200


def test_a_full_context_is_compacted_by_an_excerpt(serve: Serve) -> None:
    """It was refused as too long, by the advice that it should make room."""
    heard: list[str] = []

    def author(question: str, sample: int) -> Script:
        heard.append(question)
        return Script("Ada looks for her dog Rex, who was at the harbour at noon.")

    app = serve(author, max_context=1000)
    items = [{"role": "user", "content": "My dog is Rex. " + "word " * 300 + "Bye."}]
    refused = post(app, PATH, asked(items))

    got = post(app, f"{PATH}/compact", asked(items))

    assert refused.json["error"]["code"] == "context_length_exceeded"
    assert got.status == 200, got.json
    [item] = got.json["output"]
    assert shown(item).startswith("Ada looks for her dog")
    assert "My dog is Rex." in heard[-1]
    assert "Bye." in heard[-1]


@pytest.mark.parametrize(
    "body", [{"input": "x"}, {"model": "scripted"}, {"model": "scripted", "input": []}]
)
def test_a_bad_request_to_compact_is_refused(serve: Serve, body: dict[str, Any]) -> None:
    assert post(serve(), f"{PATH}/compact", body).status == 400

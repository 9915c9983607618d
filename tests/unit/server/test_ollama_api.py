"""Ollama's interface: its bodies are read, and its objects and lines come back."""

import json
from typing import Any

import pytest

from kvchat.chat.chat_model import ChatModel
from kvchat.server.guard import App
from support.asgi_client import Got, get, post
from support.scripted_engine import Script
from support.served import Serve

FUNCTION = {
    "name": "find",
    "description": "Finds.",
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "cats"}}\n</tool_call>'
ASKED = {"role": "user", "content": "find cats"}


def helpful(question: str, sample: int) -> Script:
    return Script(CALL if question.startswith("find") else f"I read: {question}")


@pytest.fixture
def app(serve: Serve, tool_model: ChatModel) -> App:
    return serve(helpful, served=tool_model)


def lines(got: Got) -> list[Any]:
    assert got.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in got.body.decode().splitlines()]


def chat(app: App, *messages: dict[str, Any], **others: Any) -> Got:
    return post(app, "/api/chat", {"model": "scripted", "messages": list(messages), **others})


def test_a_chat_streams_lines_unless_it_says_no(app: App) -> None:
    hello = {"role": "user", "content": "Hello"}

    *parts, last = lines(chat(app, hello))
    whole = chat(app, hello, stream=False).json

    assert "".join(part["message"]["content"] for part in parts) == "I read: Hello"
    assert not any(part["done"] for part in parts)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert whole["message"] == {"role": "assistant", "content": "I read: Hello"}
    counts = ("prompt_eval_count", "eval_count", "total_duration", "eval_duration")
    assert all(type(last[name]) is int and type(whole[name]) is int for name in counts)
    assert whole["created_at"].endswith("Z")


def test_a_call_comes_with_its_arguments_and_its_result_goes_back_by_its_name(app: App) -> None:
    called = chat(app, ASKED, tools=TOOLS, stream=False).json["message"]
    assert called["tool_calls"] == [{"function": {"name": "find", "arguments": {"q": "cats"}}}]
    [streamed] = [p["message"] for p in lines(chat(app, ASKED, tools=TOOLS)) if not p["done"]]
    assert streamed["tool_calls"] == called["tool_calls"]

    for result in ({"tool_name": "find"}, {"name": "find"}, {}):
        found = {"role": "tool", "content": "two cats", **result}
        answer = chat(app, ASKED, called, found, tools=TOOLS, stream=False)
        assert "two cats" in answer.json["message"]["content"], result

    stray = chat(app, ASKED, {"role": "tool", "content": "x"})
    assert stray.status == 400
    assert "names no call" in stray.json["error"]


def test_options_and_a_format_reach_the_engine(app: App, asked: list[Any]) -> None:
    options = {
        "temperature": 0.3,
        "top_k": 7,
        "repeat_penalty": 1.2,
        "num_predict": 9,
        "stop": ["\n"],
        "seed": 5,
        "num_ctx": 4096,
        "num_gpu": 99,
    }

    assert chat(app, ASKED, options=options, format="json", keep_alive="5m").status == 200

    [spec] = asked
    assert (spec.sampling.temperature, spec.sampling.top_k, spec.sampling.seed) == (0.3, 7, 5)
    assert (spec.sampling.repetition_penalty, spec.max_tokens) == (1.2, 9)
    assert spec.new_stop_watcher is not None
    assert spec.new_constraint is not None
    assert chat(app, ASKED, options={"num_predict": -1}).status == 200
    assert asked[-1].max_tokens != -1


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"options": {"mirostat": 2}}, "mirostat"),
        ({"options": {"num_predict": "x"}}, "options.num_predict"),
        ({"format": "xml"}, "format"),
        ({"format": {"type": "no such"}}, "response_format"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"logprobs": True, "top_logprobs": 2}, "logprobs"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images"),
    ],
)
def test_what_would_change_the_answer_and_is_not_known_is_refused(app, body, part):
    refused = (
        chat(app, ASKED, **{"stream": False, **body})
        if "messages" not in body
        else post(app, "/api/chat", {"model": "scripted", **body})
    )

    assert refused.status == 400
    assert part in refused.json["error"]


def test_generate_answers_a_prompt_or_continues_it_as_it_is(serve: Serve, asked: list[Any]) -> None:
    app = serve(lambda question, sample: Script(f"said {question}"))

    def generate(**body: Any) -> Got:
        return post(app, "/api/generate", {"model": "scripted", **body})

    *parts, last = lines(generate(prompt="Hi", system="Be brief."))
    assert "".join(part["response"] for part in parts) == "said Hi"
    assert last["done"]
    templated, raw = asked[-1].prompt_ids, generate(prompt="Hi", raw=True, stream=False)
    assert raw.status == 200
    assert len(asked[-1].prompt_ids) < len(templated)
    assert generate(prompt="Hi", context=[1, 2]).status == 400
    assert generate(prompt="Hi", images=["aGk="]).status == 400


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_request_without_a_message_only_loads(app: App, path: str, asked: list[Any]) -> None:
    got = post(app, path, {"model": "scripted:latest", "keep_alive": 0}).json

    assert (got["done"], got["done_reason"]) == (True, "load")
    assert asked == []


def test_the_lists_name_the_model_with_a_tag_and_say_what_it_can(app: App) -> None:
    [tagged, other] = get(app, "/api/tags").json["models"]
    [loaded] = get(app, "/api/ps").json["models"]
    shown = post(app, "/api/show", {"model": "scripted:latest"}).json

    assert (tagged["name"], other["name"]) == ("scripted:latest", "other:latest")
    assert len(tagged["digest"]) == 64
    assert tagged["details"]["quantization_level"] == "Q4_K_M"
    assert loaded["model"] == "scripted:latest"
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["kvchat.context_length"] == loaded["context_length"] == 32768
    assert get(app, "/api/version").json["version"]


def test_errors_are_a_sentence_alone(serve: Serve, tool_model: ChatModel) -> None:
    app = serve(lambda question, sample: Script("x", error=OSError("broken")), served=tool_model)

    assert post(app, "/api/chat", {"model": "llama3", "messages": [ASKED]}).status == 404
    assert isinstance(post(app, "/api/show", {"model": "llama3"}).json["error"], str)
    assert "missing" in post(app, "/api/chat", {}).json["error"]
    assert get(serve(api_key="sesame"), "/api/tags").json["error"].startswith("The API key")

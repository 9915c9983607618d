"""Logprobs and formats of a real engine with random weights, through all interfaces."""

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvchat.chat.answer_memory import AnswerMemory, ResponseMemory
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.grammar import Grammar, Grammars
from kvchat.chat.prefixes import ResentChats
from kvchat.core.types import SamplingParams
from kvchat.server import answering
from kvchat.server.answering import Answering
from kvchat.server.app import new_app
from kvchat.server.guard import App, Limits
from kvchat.server.metrics import Metrics
from kvchat.server.service import Service
from support.asgi_client import Got, call, post
from support.checkpoints import save_checkpoint, tiny_model
from support.template_zoo import TOOLS_AS_JSON
from support.tiny_host import tiny_host

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "x"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "word": {"type": "string", "maxLength": 4},
        "count": {"type": "integer", "minimum": -9, "maximum": 99},
        "kinds": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["word", "count", "kinds"],
    "additionalProperties": False,
}
CHAT_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
THINKING = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n<think>\n{% endif %}"
)


def served(directory: Path, template: str | None = None, max_tokens: int = 512) -> Iterator[App]:
    model = tiny_model("llama", max_position_embeddings=max_tokens)
    host = tiny_host(save_checkpoint(directory, model, *([template] if template else [])), None)
    host.wait_until_ready()
    answers = Answering(ResentChats(host, AnswerMemory(None)), Metrics())
    options = AskOptions(sampling=SamplingParams(temperature=1.0), max_tokens=12)
    responses = ResponseMemory(None, host.model.tokenizer)
    service = Service(host, answers, Metrics(), options, ("tiny",), responses)
    yield new_app(service, None, Limits())
    answers.close()
    host.close()


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    yield from served(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def thinking_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    yield from served(tmp_path_factory.mktemp("thinking"), THINKING)


@pytest.fixture(scope="module")
def tool_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    template = TOOLS_AS_JSON.replace("<|im_", "<|")
    yield from served(tmp_path_factory.mktemp("tools"), template)


def chat(app: App, **fields: Any) -> Got:
    return post(app, CHAT, {"model": "tiny", "messages": MESSAGES, "seed": 1, **fields})


def text(app: App, **fields: Any) -> Got:
    return post(app, TEXT, {"model": "tiny", "prompt": "x y", "seed": 1, **fields})


def respond(app: App, **fields: Any) -> Got:
    return post(app, RESPONSES, {"model": "tiny", "input": "x", "seed": 1, **fields})


def content_of(entries: list[dict[str, Any]]) -> str:
    return b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace")


def is_as_the_schema_says(answer: str) -> bool:
    value = json.loads(answer)
    return (
        list(value) == ["word", "count", "kinds"]
        and len(value["word"]) <= 4
        and type(value["count"]) is int
        and -9 <= value["count"] <= 99
        and len(value["kinds"]) <= 3
        and set(value["kinds"]) <= {"a", "b"}
    )


# Logprobs


def test_a_chat_completion_has_the_logprobs_of_its_tokens(app: App) -> None:
    [choice] = chat(app, logprobs=True, top_logprobs=5).json["choices"]

    entries = choice["logprobs"]["content"]
    assert len(entries) == 12
    assert content_of(entries) == choice["message"]["content"]
    for entry in entries:
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(tops) == 5
        assert tops == sorted(tops, reverse=True)
        assert entry["logprob"] <= tops[0] <= 0
        assert 0 < sum(map(math.exp, tops)) <= 1.0001


@pytest.mark.parametrize("fields", [{"stop": ["e"]}, {"n": 3}, {"frequency_penalty": 2.0}])
def test_a_stream_tells_the_logprobs_that_the_whole_answer_has(app, fields):
    fields = {"logprobs": True, "max_tokens": 40, **fields}
    whole = chat(app, **fields).json["choices"]
    *events, _ = chat(app, stream=True, **fields).events
    chunks = [data["choices"][0] for _, data in events]

    for choice in whole:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        told = [e for chunk in own if chunk["logprobs"] for e in chunk["logprobs"]["content"]]
        assert told == choice["logprobs"]["content"]
        assert content_of(told) == choice["message"]["content"]


def test_logprobs_are_those_of_the_model_and_not_of_the_sampler(app: App) -> None:
    plain = chat(app, logprobs=True, top_logprobs=3, temperature=0)
    changed = chat(app, logprobs=True, top_logprobs=3, temperature=2, logit_bias={"90": 50})
    [first], [other] = (
        got.json["choices"][0]["logprobs"]["content"][:1] for got in (plain, changed)
    )

    assert other["bytes"] != first["bytes"]
    assert other["top_logprobs"] == first["top_logprobs"]


def test_a_plain_completion_has_columns(app: App) -> None:
    [choice] = text(app, logprobs=2).json["choices"]
    columns = choice["logprobs"]

    assert len(columns["tokens"]) == len(columns["token_logprobs"]) == 12
    assert columns["text_offset"][0] == 0
    assert columns["text_offset"] == sorted(columns["text_offset"])
    assert columns["text_offset"][-1] < len(choice["text"])
    for token, offset in zip(columns["tokens"], columns["text_offset"], strict=True):
        is_part = token.startswith("bytes:\\x")
        assert is_part or choice["text"][offset : offset + len(token)] == token
    assert all(1 <= len(top) <= 2 for top in columns["top_logprobs"])


def test_a_streamed_completion_has_the_same_columns(app: App) -> None:
    [whole] = text(app, logprobs=1).json["choices"]
    *events, _ = text(app, logprobs=1, stream=True).events
    told: dict[str, list[Any]] = {name: [] for name in whole["logprobs"]}
    for _, data in events:
        for name, column in (data["choices"][0]["logprobs"] or {}).items():
            told[name] += column

    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert told[name] == whole["logprobs"][name]


def test_a_response_includes_logprobs_by_name(app: App) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    fields["max_output_tokens"] = 9
    [item] = respond(app, **fields).json["output"]
    [part] = item["content"]
    events = respond(app, stream=True, **fields).events

    assert content_of(part["logprobs"]) == part["text"]
    assert [len(entry["top_logprobs"]) for entry in part["logprobs"]] == [2] * 9
    deltas = [data for kind, data in events if kind == "response.output_text.delta"]
    assert [e for data in deltas for e in data["logprobs"]] == part["logprobs"]
    assert events[-1][1]["response"]["output"][0]["content"][0]["logprobs"] == part["logprobs"]


def test_logprobs_that_are_not_asked_for_are_not_told(app: App) -> None:
    assert chat(app).json["choices"][0]["logprobs"] is None
    assert chat(app, logprobs=False, top_logprobs=0).json["choices"][0]["logprobs"] is None
    assert text(app).json["choices"][0]["logprobs"] is None
    assert respond(app).json["output"][0]["content"][0]["logprobs"] == []


# Formats


@pytest.mark.parametrize("seed", range(6))
def test_an_answer_that_ends_by_itself_is_as_the_schema_says(app: App, seed: int) -> None:
    fields = {"response_format": CHAT_FORMAT, "max_tokens": 300, "n": 3, "seed": seed}

    choices = chat(app, **fields).json["choices"]

    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 3
    assert all(is_as_the_schema_says(choice["message"]["content"]) for choice in choices)


def test_a_stream_follows_the_schema_and_tells_logprobs_too(app: App) -> None:
    fields = {"response_format": CHAT_FORMAT, "max_tokens": 300, "logprobs": True}
    *events, _ = chat(app, stream=True, **fields).events
    chunks = [data["choices"][0] for _, data in events]
    answer = "".join(chunk["delta"].get("content", "") for chunk in chunks)

    assert is_as_the_schema_says(answer)
    told = [e for chunk in chunks if chunk["logprobs"] for e in chunk["logprobs"]["content"]]
    assert content_of(told) == answer


def test_a_response_follows_its_schema(app: App) -> None:
    wanted = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}

    response = respond(app, text={"format": wanted}, max_output_tokens=300).json

    assert response["status"] == "completed"
    assert response["text"]["format"] == wanted
    assert is_as_the_schema_says(response["output"][0]["content"][0]["text"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_follows_its_schema(app: App, stream: bool) -> None:
    wanted = {"type": "json_schema", "schema": SCHEMA}
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 300, "stream": stream}

    for fields in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        got = post(app, "/v1/messages", body | fields)
        if stream:
            deltas = [data["delta"] for name, data in got.events if name == "content_block_delta"]
            answer = "".join(delta["text"] for delta in deltas)
        else:
            [block] = got.json["content"]
            answer = block["text"]
        assert is_as_the_schema_says(answer)


def test_an_answer_cut_by_its_limit_says_so(app: App) -> None:
    [choice] = chat(app, response_format=CHAT_FORMAT, max_tokens=5).json["choices"]

    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("{")


def test_any_json_object_is_an_object(app: App) -> None:
    bias = {str(ord("}") - 33): 30}  # the tokens are bytes in GPT-2's order
    [choice] = chat(
        app, response_format={"type": "json_object"}, max_tokens=300, logit_bias=bias
    ).json["choices"]

    assert choice["finish_reason"] == "stop"
    assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_an_answer_that_a_client_began_is_completed(app: App) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": '{"word": "a'}]
    fields = {"response_format": CHAT_FORMAT, "max_tokens": 300, "messages": messages}

    [choice] = chat(app, **fields).json["choices"]

    assert is_as_the_schema_says('{"word": "a' + choice["message"]["content"])
    messages[-1]["content"] = "Sure:"
    refused = chat(app, **fields)
    assert refused.status == 400
    assert "does not match" in refused.json["error"]["message"]


def test_thinking_comes_before_the_format(thinking_app: App) -> None:
    ends_thinking = {"262": 25}  # </think>
    [choice] = chat(
        thinking_app, response_format=CHAT_FORMAT, max_tokens=400, logit_bias=ends_thinking
    ).json["choices"]

    assert choice["finish_reason"] == "stop"
    assert is_as_the_schema_says(choice["message"]["content"])


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "logprobs of a word": ({"logprobs": "yes"}, "logprobs"),
    "logprobs as too large a number": ({"logprobs": 21}, "logprobs"),
    "too many": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "below none": ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    "top without logprobs": ({"top_logprobs": 2}, "top_logprobs"),
    "no format": ({"response_format": "json"}, "response_format"),
    "an unknown format": ({"response_format": {"type": "xml"}}, "response_format.type"),
    "no schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    "a schema that is none": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
        "response_format.json_schema.schema",
    ),
    "a bad schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}},
        "response_format.json_schema.schema",
    ),
    "a word for strict": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"strict": "yes", "schema": {}},
            }
        },
        "response_format.json_schema.strict",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_refused_by_the_name_of_its_field(app: App, name: str) -> None:
    fields, param = BAD[name]

    got = chat(app, **fields)

    assert (got.status, got.json["error"]["param"]) == (400, param)
    assert "\n" not in got.json["error"]["message"]


def test_bad_values_of_the_other_interfaces_are_refused_too(app: App) -> None:
    bad_format = {"type": "json_schema", "schema": {"type": "foo"}}
    for got, param in (
        (text(app, logprobs=True), "logprobs"),
        (text(app, logprobs=99), "logprobs"),
        (respond(app, top_logprobs=21), "top_logprobs"),
        (respond(app, include="all"), "include"),
        (respond(app, text={"format": bad_format}), "text.format.schema"),
        (respond(app, text={"format": {"type": "json_schema"}}), "text.format.schema"),
    ):
        assert (got.status, got.json["error"]["param"]) == (400, param)


def test_a_schema_nested_too_deeply_is_refused(app: App) -> None:
    schema: dict[str, Any] = {}
    for _ in range(400):
        schema = {"items": schema}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}

    assert chat(app, response_format=wanted).status == 400


class _Slow:
    """Compiles grammars once it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        compile_ = Grammars.compile

        def compile_slowly(grammars: Grammars, grammar: str, stop_ids: frozenset[int]) -> Grammar:
            self.begun.set()
            assert self.may_go_on.wait(60.0)
            return compile_(grammars, grammar, stop_ids)

        monkeypatch.setattr(Grammars, "compile", compile_slowly)


def test_other_requests_are_answered_while_a_schema_is_compiled(app, monkeypatch):
    """The thread that encodes prompts compiled them too: all others waited a second and more."""
    slow = _Slow(monkeypatch)
    plain = {"model": "tiny", "messages": MESSAGES, "seed": 1}

    async def run() -> tuple[Got, Got]:
        asked = json.dumps({**plain, "response_format": CHAT_FORMAT}).encode()
        with_format = asyncio.ensure_future(call(app, "POST", CHAT, asked))
        assert await asyncio.to_thread(slow.begun.wait, 20.0)
        without = await call(app, "POST", CHAT, json.dumps(plain).encode())
        assert not with_format.done()
        slow.may_go_on.set()
        return without, await with_format

    without, with_format = asyncio.run(run())
    assert (without.status, with_format.status) == (200, 200)


def test_too_many_schemas_to_compile_are_refused(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = _Slow(monkeypatch)
    monkeypatch.setattr(answering, "MOST_GRAMMARS", 1)
    asked = {"model": "tiny", "messages": MESSAGES, "response_format": CHAT_FORMAT}

    async def run() -> list[Got]:
        body = json.dumps(asked).encode()
        first = asyncio.ensure_future(call(app, "POST", CHAT, body))
        assert await asyncio.to_thread(slow.begun.wait, 20.0)
        both = [asyncio.ensure_future(call(app, "POST", CHAT, body)) for _ in range(2)]
        [refused], _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        slow.may_go_on.set()
        return [refused.result(), *await asyncio.gather(first, *both)]

    refused, *all_ = asyncio.run(run())
    assert (refused.status, refused.json["error"]["code"]) == (503, "too_many_formats")
    assert sorted(got.status for got in all_) == [200, 200, 503]


def test_a_text_beside_tools_has_its_logprobs(tool_app: App) -> None:
    [choice] = chat(tool_app, tools=TOOLS, logprobs=True).json["choices"]

    assert content_of(choice["logprobs"]["content"]) == choice["message"]["content"]


@pytest.mark.parametrize("seed", range(3))
def test_a_plain_completion_follows_its_schema(app: App, seed: int) -> None:
    fields = {"response_format": CHAT_FORMAT, "max_tokens": 300, "seed": seed}

    [choice] = text(app, **fields).json["choices"]

    assert choice["finish_reason"] == "stop"
    assert is_as_the_schema_says(choice["text"])
    refused = text(app, response_format={"type": "xml"})
    assert (refused.status, refused.json["error"]["param"]) == (400, "response_format.type")

"""cache_control: the KV up to a marked block is pinned on disk for a while, and usage says so."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.chat.answer_memory import AnswerMemory, ResponseMemory
from kvchat.chat.prefixes import ResentChats
from kvchat.core.stats import StoredPin
from kvchat.server.answering import Answering
from kvchat.server.app import new_app
from kvchat.server.guard import App, Limits
from kvchat.server.metrics import Metrics
from kvchat.server.service import Service
from support.asgi_client import Got, post
from support.checkpoints import save_checkpoint, tiny_model
from support.served import Serve
from support.tiny_host import BLOCK_SIZE, answer_options, tiny_host

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
SHORT = {"type": "ephemeral"}
LONG = {"type": "ephemeral", "ttl": "1h"}
PATIENCE_S = 60.0

Pins = Callable[[], list[StoredPin]]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[App, Pins]]:
    """A server with a real cache below it, and what is pinned once all is written."""
    directory = tmp_path / "kv"
    source = save_checkpoint(tmp_path / "tiny", tiny_model("llama", max_position_embeddings=1024))
    host = tiny_host(source, None, kept=directory)
    host.wait_until_ready()
    answering = Answering(ResentChats(host, AnswerMemory(None)), Metrics())
    responses = ResponseMemory(None, host.model.tokenizer)
    service = Service(host, answering, Metrics(), answer_options(3), ("tiny",), responses)

    async def idle() -> None:
        await answering.on_encoder(lambda: None)

    def pins() -> list[StoredPin]:
        asyncio.run(idle())
        host.forget([]).result(PATIENCE_S)  # it waits for what was asked before it
        found = [pin for d in StoreAdmin(directory).status().model_dirs for pin in d.pins]
        return sorted(found, key=lambda pin: pin.num_tokens)

    yield new_app(service, None, Limits()), pins
    answering.close()
    host.close()


def block(text: str, mark: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": mark}


def body(system: Any, *messages: Any, **others: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    given = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    return {"model": "tiny", "max_tokens": 3, "system": system, "messages": given, **others}


def prompt_tokens(got: Got) -> int:
    usage = got.json["usage"]
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(int(usage[name]) for name in names)


def count(app: App, given: dict[str, Any]) -> int:
    return int(post(app, COUNT, given).json["input_tokens"])


def test_the_system_prompt_and_a_message_are_pinned_each_for_its_time(served):
    app, pins = served
    system, first = "You know the manual by heart. " * 4, "The first question, a long one. " * 4

    got = post(app, PATH, body([block(system, LONG)], [block(first, SHORT)], "yes", "second"))

    assert got.status == 200
    opening, message = pins()
    assert opening.num_tokens < message.num_tokens
    assert message.num_tokens <= count(app, body(system, first))
    assert message.num_tokens > count(app, body(system, first)) - 2 * BLOCK_SIZE
    assert opening.num_tokens > count(app, body(system, "x")) - 4 * BLOCK_SIZE
    assert opening.until_s - opening.made_s == pytest.approx(3600)
    assert message.until_s - message.made_s == pytest.approx(300)
    assert {pin.label.split()[0] for pin in (opening, message)} == {"cache_control"}


def test_a_mark_within_a_message_ends_with_its_block(served: tuple[App, Pins]) -> None:
    """It reached to the end of the message: a document was pinned with the question after it."""
    app, pins = served
    document, question = "What the document says. " * 6, "And what does it not say? " * 6
    blocks = [block(document, SHORT), block(question)]

    got = post(app, PATH, body("", blocks))

    assert got.status == 200, got.json
    [pin] = pins()
    whole, alone = count(app, body("", document + question)), count(app, body("", document))
    assert alone - 4 * BLOCK_SIZE < pin.num_tokens <= alone < whole - 4 * BLOCK_SIZE


def test_what_was_computed_up_to_the_last_mark_counts_as_created_once(served):
    app, _ = served
    asked = body([block("You know the manual by heart. " * 4, LONG)], [block("a", SHORT)])

    first, again = (post(app, PATH, asked) for _ in range(2))

    usage = first.json["usage"]
    created = usage["cache_creation_input_tokens"]
    assert prompt_tokens(first) == count(app, asked)
    assert created == prompt_tokens(first), "the last block is marked: all before it is created"
    assert usage["cache_creation"]["ephemeral_1h_input_tokens"] > created // 2
    assert sum(usage["cache_creation"].values()) == created
    assert again.json["usage"]["cache_creation_input_tokens"] <= BLOCK_SIZE
    assert prompt_tokens(again) == prompt_tokens(first)


def test_a_mark_of_the_request_marks_its_last_block(served: tuple[App, Pins]) -> None:
    app, pins = served

    post(app, PATH, body("Be brief. " * 4, "a", cache_control=LONG))

    [pin] = pins()
    assert pin.until_s - pin.made_s == pytest.approx(3600)


@pytest.mark.parametrize(
    ("marks", "word"),
    [
        ([{"type": "persistent"}], "type"),
        ([{}], "type"),
        ([{"type": "ephemeral", "ttl": "2h"}], "ttl"),
        ([{"type": "ephemeral", "ttl": 5}], "ttl"),
        (["ephemeral"], "object"),
        ([SHORT, LONG], "longer"),
        ([SHORT] * 5, "More than 4"),
    ],
)
@pytest.mark.parametrize("path", [PATH, COUNT])
def test_a_bad_mark_gets_anthropics_error(serve, path, marks, word):
    messages = [{"role": "user", "content": [block("a", mark) for mark in marks]}]

    got = post(serve(), path, {"model": "scripted", "max_tokens": 3, "messages": messages})

    assert got.status == 400
    assert got.json["type"] == "error"
    assert got.json["error"]["type"] == "invalid_request_error"
    assert word in got.json["error"]["message"]


def test_marks_on_tools_and_results_are_read(serve: Serve, tool_model: Any) -> None:
    tool = {"name": "find", "input_schema": {"type": "object"}, "cache_control": LONG}
    use = {"type": "tool_use", "id": "t1", "name": "find", "input": {}, "cache_control": SHORT}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "x", "cache_control": SHORT}
    messages = [
        {"role": "user", "content": "find"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    given = {"model": "scripted", "max_tokens": 9, "messages": messages, "tools": [tool]}

    got = post(serve(served=tool_model), PATH, given)

    usage = got.json["usage"]
    assert usage["input_tokens"] == 0
    assert usage["cache_creation"]["ephemeral_1h_input_tokens"] > 0
    assert usage["cache_creation"]["ephemeral_5m_input_tokens"] > 0

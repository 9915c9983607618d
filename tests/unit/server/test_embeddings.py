"""Embeddings over HTTP: the forms of OpenAI's and of ollama's interface, and what is refused."""

import asyncio
import base64
import json
import struct
from concurrent.futures import Future
from typing import Any

import pytest

from kvchat.chat.host import ChatHost
from kvchat.server.guard import App
from support.asgi_client import Got, call, post
from support.served import Serve

PATH = "/v1/embeddings"


@pytest.fixture
def app(serve: Serve) -> App:
    return serve(max_context=20)


def body(given: Any, **others: Any) -> dict[str, Any]:
    return {"model": "scripted", "input": given, **others}


def test_each_text_has_a_vector_in_its_place(app: App) -> None:
    got = post(app, PATH, body(["abc", [1, 2], "abcdef"])).json

    assert [item["index"] for item in got["data"]] == [0, 1, 2]
    vectors = [item["embedding"] for item in got["data"]]
    lengths = [vector[0] for vector in vectors]
    assert lengths[1] == 2
    assert lengths[0] < lengths[2]
    assert got["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
    assert post(app, PATH, body("abc")).json["data"][0]["embedding"] == vectors[0]
    assert post(app, PATH, body([1, 2])).json["data"][0]["embedding"] == vectors[1]


def test_base64_is_float32_in_little_endian_order(app: App) -> None:
    got = post(app, PATH, body([1, 2, 3], encoding_format="base64", pooling="last")).json

    data = base64.b64decode(got["data"][0]["embedding"])
    assert struct.unpack("<2f", data) == (3.0, 0.0)


def test_ollama_cuts_off_what_is_too_long_and_loads_for_nothing(app: App) -> None:
    """Its clients send whole files, and an empty text to have the model loaded."""

    def embed(**fields: Any) -> Any:
        return post(app, "/api/embed", {"model": "scripted", **fields})

    assert embed(input=["a" * 50]).json["embeddings"][0][0] == 20
    assert embed(input=["a" * 500_000]).json["embeddings"][0][0] == 20
    assert embed(input="a" * 50, truncate=False).status == 400
    assert embed(input="a" * 500_000, truncate=False).status == 400
    assert embed(input="a", dimensions=1).status == 400
    for nothing in ({}, {"input": ""}, {"input": []}):
        assert embed(**nothing).json == {
            "model": "scripted",
            "embeddings": [],
            "prompt_eval_count": 0,
        }
    assert post(app, "/api/embeddings", {"model": "scripted"}).json == {"embedding": []}


def test_one_text_after_another_is_computed(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV of three long texts at once left no room for answers, which failed."""
    sent = json.dumps(body("abc")).encode()
    running: list[int] = []
    embed = ChatHost.embed

    def counted(self: ChatHost, *given: Any) -> "Future[list[float]]":
        begun = embed(self, *given)
        running.append(sum(not each.done() for each in asked))
        asked.append(begun)
        return begun

    asked: list[Future[list[float]]] = []
    monkeypatch.setattr(ChatHost, "embed", counted)

    async def all_at_once() -> list[Got]:
        return await asyncio.gather(*(call(app, "POST", PATH, sent) for _ in range(5)))

    assert [got.status for got in asyncio.run(all_at_once())] == [200] * 5
    assert running == [0] * 5


def test_ollamas_paths_give_lists_of_numbers(app: App) -> None:
    many = post(app, "/api/embed", body(["abc", "abc"], model="scripted:latest")).json
    one = post(app, "/api/embeddings", {"model": "scripted", "prompt": "abc"}).json

    assert many["embeddings"] == [one["embedding"]] * 2
    assert many["prompt_eval_count"] == 2 * one["embedding"][0]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (body([]), "input"),
        (body(""), "input"),
        (body(["a", ""]), "input"),
        (body([1.5]), "input"),
        (body([[1], ["a"]]), "input"),
        (body([-1]), "input"),
        (body({"a": 1}), "input"),
        (body(["a"] * 2049), "input"),
        (body("a", pooling="cls"), "pooling"),
        (body("a", encoding_format="int8"), "encoding_format"),
        (body("a", dimensions=1), "dimensions"),
        (body([1] * 21), "input"),
    ],
)
def test_a_bad_request_names_its_field(app: App, given: dict[str, Any], field: str) -> None:
    refused = post(app, PATH, given)

    assert refused.status == 400
    assert refused.json["error"]["param"] == field
    assert post(app, PATH, body("a", dimensions=2)).status == 200

"""Stored responses: a client sends only what is new, and names the response that it continues."""

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from kvchat.chat.answer_memory import ResponseMemory
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.tokenizer import ChatTokenizer
from kvchat.server.guard import App
from support.asgi_client import Got, call, get, post
from support.scripted_engine import Script
from support.served import Serve
from support.tokenizer_zoo import ZOO, text_files

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "find", "parameters": {"type": "object", "properties": {}}}


def asked(given: Any, **others: Any) -> dict[str, Any]:
    return {"model": "scripted", "input": given, **others}


def delete(app: App, response_id: str) -> Got:
    return asyncio.run(call(app, "DELETE", f"{PATH}/{response_id}"))


def prompt_tokens(got: Got) -> int:
    return int(got.json["usage"]["input_tokens"])


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_continued_response_is_answered_as_if_all_had_been_sent(serve, is_streamed):
    app = serve()
    first = post(app, PATH, asked("one", stream=is_streamed))
    response = first.events[-1][1]["response"] if is_streamed else first.json

    second = post(app, PATH, asked("two", previous_response_id=response["id"]))

    items = [{"role": "user", "content": "one"}, *response["output"]]
    whole = post(app, PATH, asked([*items, {"role": "user", "content": "two"}]))
    assert second.json["output"][0]["content"][0]["text"] == "two 0"
    assert second.json["previous_response_id"] == response["id"]
    assert prompt_tokens(second) == prompt_tokens(whole)
    cached = second.json["usage"]["input_tokens_details"]["cached_tokens"]
    assert prompt_tokens(second) - cached < len("<|start|>user\ntwo<|end|>\n") + 20


def test_a_response_is_continued_after_a_restart_and_no_file_shows_its_words(serve, tmp_path):
    path = tmp_path / "answers.db"
    before = serve(memory=path)
    first = post(before, PATH, asked("a secret of Ada")).json
    given = asked("b", previous_response_id=first["id"])
    second = post(before, PATH, given).json
    assert get(before, f"{PATH}/{second['id']}").status == 200, "it is written by now"

    third = post(serve(memory=path), PATH, asked("c", previous_response_id=second["id"]))

    assert third.status == 200
    assert prompt_tokens(third) > second["usage"]["input_tokens"]
    for file in tmp_path.iterdir():
        assert b"secret" not in file.read_bytes()
        assert file.stat().st_mode & 0o77 == 0


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_response_is_on_the_disk_before_its_client_hears_of_its_end(
    serve: Serve,
    model: ChatModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_streamed: bool,
) -> None:
    """A server that was killed just then did not know the response that it had given."""
    path, put, is_told = tmp_path / "answers.db", ResponseMemory.put, threading.Event()

    def slow_put(memory: ResponseMemory, *args: Any) -> None:
        is_told.wait(0.2)
        put(memory, *args)

    monkeypatch.setattr(ResponseMemory, "put", slow_put)
    known: list[bool] = []

    def look(got: Got) -> bool:
        end = got.body.partition(b"response.completed")[2] if is_streamed else got.body
        if (named := re.search(rb"resp_\w+", end)) is not None and not known:
            is_told.set()
            after_a_crash = ResponseMemory(path, model.tokenizer)
            known.append(after_a_crash.find(named[0].decode()) is not None)
            after_a_crash.close()
        return False

    data = json.dumps(asked("hello", stream=is_streamed)).encode()
    asyncio.run(call(serve(memory=path), "POST", PATH, data, leaves_after=look))

    assert known == [True]


def test_instructions_of_the_earlier_response_do_not_count(serve: Serve) -> None:
    app = serve()
    first = post(app, PATH, asked("one", instructions="Speak like a pirate.")).json

    second = post(app, PATH, asked("two", previous_response_id=first["id"]))

    plain = [{"role": "user", "content": "one"}, *first["output"]]
    whole = post(app, PATH, asked([*plain, {"role": "user", "content": "two"}]))
    assert prompt_tokens(second) == prompt_tokens(whole)


def test_the_result_of_a_call_needs_only_the_id_of_the_response(serve, tool_model):
    written = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
    app = serve(
        lambda question, sample: Script(written if question == "find" else "found"),
        served=tool_model,
    )
    first = post(app, PATH, asked("find", tools=[TOOL])).json
    [item] = first["output"]

    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "two cats"}
    second = post(app, PATH, asked([result], tools=[TOOL], previous_response_id=first["id"]))

    assert second.json["output"][0]["content"][0]["text"] == "found"


def test_a_response_that_is_not_known_cannot_be_continued(serve: Serve) -> None:
    error = post(serve(), PATH, asked("x", previous_response_id="resp_1"))

    assert error.status == 400
    assert error.json["error"]["code"] == "previous_response_not_found"
    assert error.json["error"]["param"] == "previous_response_id"


def test_a_response_that_is_not_to_be_stored_is_not_known_later(serve: Serve) -> None:
    app = serve()
    response = post(app, PATH, asked("x", store=False)).json

    assert response["store"] is False
    assert get(app, f"{PATH}/{response['id']}").status == 404
    assert post(app, PATH, asked("y", previous_response_id=response["id"])).status == 400


def test_a_response_can_be_read_again_until_it_is_deleted(serve: Serve) -> None:
    app = serve()
    response = post(app, PATH, asked("x")).json
    path = f"{PATH}/{response['id']}"

    assert get(app, path).json == response
    assert delete(app, response["id"]).json["deleted"] is True
    assert get(app, path).status == 404
    assert delete(app, response["id"]).status == 404
    later = post(app, PATH, asked("y", previous_response_id=response["id"]))
    assert later.json["error"]["code"] == "previous_response_not_found"


def test_records_have_a_limit_of_bytes_and_the_oldest_go_first(model, tmp_path):
    record = {"text": "x" * 1000}
    memory = ResponseMemory(tmp_path / "answers.db", model.tokenizer, max_bytes=20_000)

    for number in range(20):
        memory.put(f"r{number}", record)
        memory.find("r0")

    known = [number for number in range(20) if memory.find(f"r{number}") is not None]
    assert 0 in known, "it was used all the time"
    assert 19 in known
    assert len(known) * 4000 <= 20_000
    memory.put("large", {"text": "x" * 6000})
    assert memory.find("large") is None
    memory.close()


def test_a_response_that_is_too_long_is_not_kept(model: ChatModel) -> None:
    """What a client may add to its items is no part of the context: only this limits it."""
    memory = ResponseMemory(None, model.tokenizer, max_characters=100)

    memory.put("short", {"input": "x" * 50})
    memory.put("long", {"input": "x" * 100})

    assert memory.find("short") == {"input": "x" * 50}
    assert memory.find("long") is None
    memory.close()


def test_a_record_of_another_tokenizer_is_not_known(model: ChatModel, tmp_path: Path) -> None:
    memory = ResponseMemory(tmp_path / "answers.db", model.tokenizer)
    memory.put("r", {"text": "a"})
    assert memory.find("r") is not None
    memory.close()

    other = ResponseMemory(tmp_path / "answers.db", ChatTokenizer(text_files(ZOO["byte level"]())))

    assert other.find("r") is None
    other.close()


@pytest.mark.parametrize("text", ["", "é好🙂\ud800 <|im_end|> <think>\n\t  x", "x y" * 25_000])
@pytest.mark.parametrize(
    ("kind", "is_exact"),
    [("byte level", True), ("byte fallback", True), ("unigram", True), ("lower case", False)],
)
def test_every_text_comes_back_as_it_was_or_is_not_kept(kind, is_exact, text):
    memory = ResponseMemory(None, ChatTokenizer(text_files(ZOO[kind]())))

    memory.put("r", {"Text": text})

    assert memory.find("r") == ({"Text": text} if is_exact else None)
    memory.close()


def test_the_items_that_a_response_answered_are_listed_in_pages(serve: Serve) -> None:
    app = serve()
    given = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}]
    given.append(
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "2"}]}
    )
    response_id = post(app, PATH, asked(given)).json["id"]
    path = f"{PATH}/{response_id}/input_items"

    newest, *_ = get(app, path).json["data"]
    first = get(app, f"{path}?order=asc&limit=2").json
    rest = get(app, f"{path}?order=asc&after={first['last_id']}").json

    assert newest["content"] == [{"type": "input_text", "text": "2"}]
    assert [item["content"][0]["text"] for item in first["data"]] == ["one", "1"]
    assert [item["content"][0]["type"] for item in first["data"]] == ["input_text", "output_text"]
    assert first["has_more"] is True
    assert rest["has_more"] is False
    assert [item["id"] for item in rest["data"]] == [newest["id"]]
    for query in ("limit=0", "limit=1000", "limit=x", "order=up", "after=nothing"):
        assert get(app, f"{path}?{query}").status == 400
    assert get(app, f"{PATH}/resp_none/input_items").status == 404


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("keys", [("type", "id"), ("id",)], ids=["typed", "by the id alone"])
def test_a_reference_to_an_item_stands_for_the_item(serve, tool_model, is_streamed, keys):
    """Vercel's SDK refers to what was answered before, and its second request was a 400."""
    call_text = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
    app = serve(lambda question, sample: Script(f"I look. {call_text}"), served=tool_model)
    body = asked("one", tools=[TOOL], stream=is_streamed)
    first = post(app, PATH, body)
    response = first.events[-1][1]["response"] if is_streamed else first.json
    output = response["output"]
    assert [item["type"] for item in output] == ["message", "function_call"]

    references = [{"type": "item_reference", "id": item["id"]} for item in output]
    references = [{key: reference[key] for key in keys} for reference in references]
    result = {"type": "function_call_output", "call_id": output[1]["call_id"], "output": "x"}
    user = {"role": "user", "content": "one"}
    second, whole = (
        post(app, PATH, asked([user, *items, result], tools=[TOOL]))
        for items in (references, output)
    )

    assert second.status == 200
    assert prompt_tokens(second) == prompt_tokens(whole)
    listed = get(app, f"{PATH}/{second.json['id']}/input_items").json["data"]
    again = post(app, PATH, asked([{"id": listed[-1]["id"]}], tools=[TOOL]))
    assert again.status == 200, "what the client sent has an id too"


def test_a_reference_to_what_is_continued_is_not_read_twice_and_an_unknown_one_is_refused(serve):
    app = serve()
    first = post(app, PATH, asked("one")).json
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    user = {"role": "user", "content": "two"}
    known = {"previous_response_id": first["id"]}

    both = post(app, PATH, asked([reference, user], **known))
    plain = post(app, PATH, asked([user], **known))

    assert prompt_tokens(both) == prompt_tokens(plain)
    for item_id in ("msg_" + "0" * 28, "x", None, 5):
        got = post(app, PATH, asked([{"type": "item_reference", "id": item_id}, user]))
        assert got.status == 404
        assert got.json["error"]["param"] == "input[0].id"

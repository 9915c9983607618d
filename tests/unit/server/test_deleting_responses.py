"""A response that a client deletes is nowhere: every byte of every directory is searched for it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.chat.answer_memory import Fed, ResponseMemory, open_private_database, stored_contexts
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.deletion import SavedPlaces
from kvchat.chat.host import ChatHost
from kvchat.chat.store import SessionStore
from kvchat.core.errors import StoreInUse
from kvchat.server.guard import App
from support.asgi_client import Got, call, get, post
from support.checkpoints import never_stopping, save_checkpoint, tiny_model
from support.served import served_by
from support.template_zoo import CHATML
from support.tiny_host import tiny_host
from support.traces import traces

PATH = "/v1/responses"
SECRET = "Grimstad is empty on Sundays, says the naïve café owner."


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    return save_checkpoint(directory, never_stopping(tiny_model("llama")), CHATML)


@pytest.fixture
def host(tiny: Path, tmp_path: Path) -> Iterator[ChatHost]:
    host = tiny_host(tiny, None, kept=tmp_path / "kv")
    host.wait_until_ready()
    yield host
    host.close()


@pytest.fixture
def app(host: ChatHost, tmp_path: Path) -> Iterator[App]:
    places = SavedPlaces(SessionStore(tmp_path / "sessions"), StoreAdmin(tmp_path / "kv"))
    with served_by(host, memory=tmp_path / "answers.db", places=places) as app:
        yield app


def respond(app: App, text: str, **others: object) -> str:
    body = {"model": "scripted", "input": text, "max_output_tokens": 24, "temperature": 0}
    got = post(app, PATH, {**body, **others})
    assert got.status == 200, got.json
    return str(got.json["id"])


def delete(app: App, response_id: str) -> Got:
    return asyncio.run(call(app, "DELETE", f"{PATH}/{response_id}"))


def secret_ids(host: ChatHost) -> list[int]:
    from kvchat.chat.text_codec import Segment

    return list(host.model.tokenizer.encode([Segment(SECRET, is_inert=True)]))[2:-2]


def settle(host: ChatHost) -> None:
    """Wait until what was asked before is written to the disk."""
    host.forget([]).result(10)


def test_a_deleted_response_is_nowhere(app: App, host: ChatHost, tmp_path: Path) -> None:
    """Its record went; the ids of the prompt stayed in cache.db, those of the answer in
    answers.db.
    """
    other = respond(app, "I like ships.")
    response_id = respond(app, SECRET)
    settle(host)
    ids = secret_ids(host)
    files = {line.split(":")[0].split("/")[-1] for line in traces(tmp_path, SECRET, ids)}
    assert any(name.startswith("answers.db") for name in files)
    assert any(name.startswith("cache.db") for name in files)

    assert delete(app, response_id).json["deleted"] is True

    assert traces(tmp_path, SECRET, ids) == []
    assert delete(app, response_id).status == 404
    assert get(app, f"{PATH}/{other}").status == 200
    asked = {"model": "scripted", "input": "I like ships.", "max_output_tokens": 1}
    usage = post(app, PATH, asked).json["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] >= usage["input_tokens"] - 8


def test_what_a_later_response_goes_on_from_goes_with_the_last_of_them(app, host, tmp_path):
    first = respond(app, SECRET)
    second = respond(app, "And on Mondays?", previous_response_id=first)
    settle(host)
    ids = secret_ids(host)

    delete(app, first)
    assert any("cache.db" in line for line in traces(tmp_path, SECRET, ids)), "the second has it"

    delete(app, second)
    assert traces(tmp_path, SECRET, ids) == []


def test_while_others_hold_the_kv_the_response_stays_to_delete_it_by(app, host, monkeypatch):
    response_id = respond(app, SECRET)

    def held(*_: object) -> int:
        raise StoreInUse("Another process holds the disk cache.")

    with monkeypatch.context() as patch:
        patch.setattr(StoreAdmin, "forget", held)
        assert delete(app, response_id).status >= 500
    assert get(app, f"{PATH}/{response_id}").status == 200
    assert delete(app, response_id).status == 200


def test_the_ids_of_a_response_go_with_its_record(model: ChatModel, tmp_path: Path) -> None:
    """Each had a limit of its own: a response outlived the ids of its KV, or they outlived it."""
    path = tmp_path / "answers.db"
    memory = ResponseMemory(path, model.tokenizer, max_bytes=40_000)

    for number in range(30):
        memory.put(f"r{number}", {"text": "x" * 400}, Fed([number] * 500, b"key"))
        memory.find("r0")

    known = [number for number in range(30) if memory.find(f"r{number}") is not None]
    assert {0, 29} < set(known)
    assert len(known) < 30
    assert [n for n in range(30) if memory.fed(f"r{n}") == Fed([n] * 500, b"key")] == known
    assert sorted(ids[0] for ids in stored_contexts(path)) == known
    assert memory.remove("r0")
    assert sorted(ids[0] for ids in memory.other_contexts("r29")) == known[1:-1]
    memory.close()


def test_a_file_of_an_earlier_version_goes_on(model: ChatModel, tmp_path: Path) -> None:
    path = tmp_path / "answers.db"
    columns = "(key BLOB PRIMARY KEY, ids BLOB, used_s REAL) WITHOUT ROWID"
    earlier = open_private_database(path, f"CREATE TABLE responses {columns}")
    earlier.execute("CREATE TABLE contexts (key TEXT PRIMARY KEY, ids BLOB)")
    earlier.close()

    memory = ResponseMemory(path, model.tokenizer)
    memory.put("r", {"text": "x"}, Fed([1, 2]))

    assert memory.fed("r") == Fed([1, 2])
    memory.close()
    later = ResponseMemory(path, model.tokenizer)
    assert later.find("r") == {"text": "x"}
    later.close()

"""`kvchat serve --role prefill` and the chat that asks it, over a real connection."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from kvchat.cache.keys import encode_ids
from kvchat.cache.shared.prefill_box import Offer, PrefillBox, PromptKey
from kvchat.cache.shared.store import StoreTrouble
from kvchat.chat.answer_memory import AnswerMemory, ResponseMemory
from kvchat.chat.host import ChatHost
from kvchat.chat.prefixes import ResentChats
from kvchat.core.config import SharedConfig
from kvchat.core.types import CachedTokens
from kvchat.server.answering import Answering
from kvchat.server.app import new_prefill_app
from kvchat.server.guard import App, Limits
from kvchat.server.metrics import Metrics
from kvchat.server.prefill_api import PrefillApi
from kvchat.server.service import Service
from kvchat.server.serving import HastyProtocol
from support.asgi_client import call
from support.chains import compute_at
from support.checkpoints import save_checkpoint, tiny_model
from support.tiny_host import TINY_KV, answer_options, finish, tiny_host

SECRET = "a secret of the team"
IDS = [7 * i % 200 + 1 for i in range(41)]  # five blocks of eight, and a token


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, whose `nas` is the store."""
    directory = tmp_path_factory.mktemp("box")
    save_checkpoint(directory / "tiny", tiny_model("llama"))
    return directory


@contextmanager
def machine(place: Path, prefill_at: str = "", kv_dtype: str = "auto") -> Iterator[ChatHost]:
    """Yield a host of the model whose tiers are open."""
    url = f"file://{place}/nas"
    shared = SharedConfig(url, SECRET, True, first_byte_s=10.0, prefill_at=prefill_at)
    host = tiny_host(
        place / "tiny", None, shared=shared, wanted=replace(TINY_KV, kv_dtype=kv_dtype)
    )
    host.wait_until_ready()
    assert host._engine.call(lambda engine: engine.chain.flush(30)).result()  # type: ignore[attr-defined]
    yield host
    host.close()


@pytest.fixture(scope="module")
def host(place: Path) -> Iterator[ChatHost]:
    with machine(place) as host:
        yield host


@pytest.fixture
def app(host: ChatHost) -> Iterator[App]:
    key = PromptKey(SECRET)
    answering = Answering(ResentChats(host, AnswerMemory(None)), Metrics(), None, None)
    responses = ResponseMemory(None, host.model.tokenizer)
    service = Service(host, answering, Metrics(), answer_options(), ("tiny",), responses)
    prefills = PrefillApi(service, key.opened)
    yield new_prefill_app(service, prefills, key.bearer, Limits())
    answering.close()
    responses.close()


def while_served(app: App, work: Callable[[str], Any]) -> Any:
    """Return what `work` returns on a thread, for the address at which the application is."""

    async def run() -> Any:
        config = uvicorn.Config(app, http=HastyProtocol, lifespan="off", log_config=None)
        config.load()
        loop, state = asyncio.get_running_loop(), ServerState()
        server = await loop.create_server(
            lambda: HastyProtocol(config, state, {}, loop), "127.0.0.1", 0
        )
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await asyncio.to_thread(work, f"http://127.0.0.1:{port}")

    return asyncio.run(run())


def test_a_box_offers_its_kv_and_puts_it_into_the_store(app, caplog):
    caplog.set_level(logging.DEBUG)

    def ask(url: str) -> tuple[Offer, int]:
        box = PrefillBox(url, SECRET)
        return box.offer(), box.prefill(encode_ids(IDS))

    offer, num_tokens = while_served(app, ask)

    assert offer.form == {
        "dtype": "float32",
        "KV dtype": "float32",
        "weights": "own",
        "block size": "8",
    }
    assert offer.seconds_for(1000)
    assert num_tokens == 40
    assert str(IDS[3]) not in caplog.text.split()


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_chat_goes_on_from_what_the_box_computed(app: App, place: Path, kv_dtype: str) -> None:
    """KV of more bits serves a chat of fewer: it is converted as it is read."""
    question = "Of the twelve ships in the harbour three are red. " + kv_dtype

    def ask(url: str) -> CachedTokens:
        with machine(place, url, kv_dtype) as chat:
            chat._engine.call(lambda engine: compute_at(engine.chain, 0.1)).result()  # type: ignore[attr-defined]
            return finish(chat.new_session().ask(question, answer_options(2))).usage.cached

    cached = while_served(app, ask)

    assert cached.places["elsewhere"] >= 40


def test_another_teams_chat_and_one_without_a_key_are_refused(app: App) -> None:
    with pytest.raises(StoreTrouble, match="it has another team's key"):
        while_served(app, lambda url: PrefillBox(url, "a secret of others").offer())
    for path, method in (("/kvchat/prefill", "GET"), ("/kvchat/prefill", "POST")):
        assert asyncio.run(call(app, method, path)).status == 401


def test_only_sealed_prompts_are_read(app: App) -> None:
    headers = {"authorization": f"Bearer {PromptKey(SECRET).bearer}"}
    replayed = PromptKey("a secret of others").seal(encode_ids(IDS))
    for body in (b"", b"[1, 2, 3]", encode_ids(IDS), replayed):
        got = asyncio.run(call(app, "POST", "/kvchat/prefill", body, headers))
        assert got.status == 400


def test_a_prompt_that_is_too_long_is_refused_in_one_sentence(app: App) -> None:
    ask = lambda url: PrefillBox(url, SECRET).prefill(encode_ids([1] * 100_000))  # noqa: E731
    with pytest.raises(StoreTrouble, match=r"it refuses: The prompt is longer than the context"):
        while_served(app, ask)


def test_a_box_answers_no_questions(app: App) -> None:
    headers = {"authorization": f"Bearer {PromptKey(SECRET).bearer}"}
    got = asyncio.run(call(app, "POST", "/v1/chat/completions", b"{}", headers))
    assert got.status == 404


@contextmanager
def answering_with(reply: bytes | None) -> Iterator[str]:
    """Yield the address of what answers one request with these bytes; with None it only listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                if reply is not None:
                    connection.sendall(reply)

        thread = threading.Thread(target=serve, daemon=True)
        if reply is not None:
            thread.start()
        yield f"http://127.0.0.1:{port}"


def of_body(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "it cannot be reached"),
        (of_body(b"no JSON"), "it does not prefill for others"),
        (of_body(b'{"root": "00", "form": {}}'), "it does not prefill for others"),
        (of_body(b"[" * 70_000), "it does not prefill for others"),
        (of_body(b"x", "502 Bad Gateway"), "it refuses with status 502"),
    ],
)
def test_what_is_no_box_is_one_reason(reply: bytes, told: str) -> None:
    with answering_with(reply) as url, pytest.raises(StoreTrouble, match=told):
        PrefillBox(url, SECRET).offer()


def test_waiting_for_a_box_that_says_nothing_can_be_interrupted() -> None:
    with answering_with(None) as url:
        box, troubles = PrefillBox(url, SECRET), list[str]()

        def ask() -> None:
            try:
                box.prefill(encode_ids(IDS))
            except StoreTrouble as error:
                troubles.append(str(error))

        thread = threading.Thread(target=ask)
        thread.start()
        while thread.is_alive():  # it may not have connected yet
            box.interrupt()
            thread.join(0.01)

    assert troubles[0] in ("it cannot be reached", "it was interrupted")

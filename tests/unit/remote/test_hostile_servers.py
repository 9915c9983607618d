"""Servers that send anything but what they should: each is one sentence, and no key leaves.

The servers are real ones on this machine; what they send is garbage, endless, slow or too large.
"""

import itertools
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any

import pytest

from kvchat.chat.events import AnswerEnded, AnswerFailed, ChatEvent
from kvchat.core.errors import GenerationError, ModelError
from kvchat.core.types import CachedTokens, FinishReason
from kvchat.remote import client, engine, servers
from kvchat.remote.address import Address, address_of
from kvchat.remote.kinds import Kind, Server
from kvchat.remote.servers import find_server
from kvchat.remote.wire import Reader
from support.fake_llm_server import Refusal, chunks, fake_server, models, raw_server
from unit.remote.test_remote_chat import answer_options, chat_with, ended, failed, host_of

SECRET = "sk-secret-of-the-user"
OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"


def nothing(path: str, body: object) -> object:
    return Refusal(404, {"error": "nothing here"})


def moved_to(url: str) -> Refusal:
    return Refusal(307, "", (("Location", f"{url}/v1/models\x1b[2J"),))


def test_a_key_does_not_follow_a_redirect() -> None:
    with fake_server(nothing) as other:
        gets: dict[str, object] = {"/v1/models": moved_to(other.url)}
        with (
            fake_server(nothing, gets) as fake,
            pytest.raises(ModelError, match="sends to another address") as caught,
        ):
            find_server(address_of(fake.url, SECRET))

    assert other.asked == []
    assert other.url in caught.value.message
    assert SECRET not in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_message_does_not_follow_a_redirect() -> None:
    with (
        fake_server(nothing) as other,
        chat_with(lambda path, body: moved_to(other.url)) as (session, _),
    ):
        told = failed(session.ask("a private word", answer_options())).error

    assert other.asked == []
    assert "sends to another address" in told.message
    assert session.conversation.path()[0].text == "a private word"


def test_a_service_may_list_very_many_models() -> None:
    """A list above 4 MB was "no model interface of a known form"."""
    entries = [{"id": f"org/model-{i}", "object": "model", "owned_by": "x"} for i in range(100_000)]
    with fake_server(nothing, {"/v1/models": {"data": entries}}) as fake:
        assert find_server(address_of(fake.url, model="org/model-99999")).model == "org/model-99999"
        with pytest.raises(ModelError, match="several models") as caught:
            find_server(address_of(fake.url))

    assert "and 99992 more" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_name_of_a_model_cannot_act_on_a_terminal() -> None:
    entries = [{"id": name, "owned_by": "x"} for name in ("a\x1b[2J", "b\r\nc")]
    with (
        fake_server(nothing, {"/v1/models": {"data": entries}}) as fake,
        pytest.raises(ModelError) as caught,
    ):
        find_server(address_of(fake.url))

    assert not {"\x1b", "\r", "\n"} & set(str(caught.value).removesuffix("\n"))


@pytest.mark.parametrize(
    "pieces",
    [
        lambda: [b"\x00\xff garbage \r\n\r\n"],
        list,
        lambda: [OK, b"X-Long: ", *repeat(b"x" * 65536, 64), b"\r\n\r\n{}"],
        lambda: [OK, *repeat(b"X-Many: 1\r\n", 100_000), b"\r\n{}"],
        lambda: [OK + b"Content-Length: 100\r\n\r\n{}"],
        lambda: [OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"],
    ],
    ids=["garbage", "nothing", "a long header", "many headers", "too short", "no chunk"],
)
def test_what_is_no_http_is_one_sentence(pieces: Callable[[], Iterable[bytes]]) -> None:
    with raw_server(pieces) as url, pytest.raises(ModelError, match="No server answers"):
        find_server(address_of(url))


@pytest.mark.parametrize(
    "content",
    [
        *(b"\r\n\xff\xfe\xfd", b"\r\n" + b"[" * 100_000, b"\r\n{"),
        b'\r\n{"data": ' + b"9" * 5000 + b"}",
        b"Content-Encoding: gzip\r\n\r\nno gzip",
    ],
    ids=["no UTF-8", "deep", "cut off", "a long number", "not packed"],
)
def test_what_is_no_json_is_no_model_interface(content: bytes) -> None:
    """Deep JSON ended kvchat with a RecursionError."""
    with (
        raw_server(lambda: [OK + content]) as url,
        pytest.raises(ModelError, match="no model interface"),
    ):
        find_server(address_of(url))


def test_a_server_that_sends_slow_bytes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte came in time, so that kvchat waited for the list of models for ever."""
    monkeypatch.setattr(servers, "_ASK_S", 0.2)

    def without_end() -> Iterator[bytes]:
        yield OK + b"\r\n"
        yield from repeat(b" ")

    with raw_server(without_end) as url, pytest.raises(ModelError, match="took too long"):
        find_server(address_of(url))


def slow_header() -> Iterator[bytes]:
    """Yield a header that comes byte by byte and has no end."""
    yield OK + b"X-Slow: "
    never = threading.Event()
    while not never.wait(0.01):
        yield b"x"


def test_headers_that_come_slowly_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit was on the time between two bytes: one every nine seconds was waited for."""
    monkeypatch.setattr(servers, "_ASK_S", 0.3)

    with raw_server(slow_header) as url, pytest.raises(ModelError, match="took too long"):
        find_server(address_of(url))


def test_ctrl_c_ends_the_wait_for_a_server_that_says_nothing(monkeypatch):
    """It took the ten seconds of a question: the thread that asked was waited for."""
    monkeypatch.setattr(servers, "_ASK_S", 3600.0)
    is_over = threading.Event()
    heard: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def nothing_at_all() -> Iterator[bytes]:
        os.kill(os.getpid(), signal.SIGINT)
        heard.put(is_over.wait(30.0))
        yield b""

    with raw_server(nothing_at_all) as url:
        with pytest.raises(KeyboardInterrupt):
            find_server(address_of(url))
        is_over.set()
        assert heard.get(), "the wait went on until the server hung up"


def test_an_answers_headers_that_come_slowly_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SILENCE_S", 0.3)

    with raw_server(slow_header) as url:
        server = Server(Address(url), Kind.OTHER, "m")
        with host_of(url, server=server) as host:
            told = failed(host.unsaved_session().ask("Hi", answer_options())).error

    assert "gave no answer: it took too long" in told.message


def test_plain_http_where_https_is_meant_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "CONNECT_S", 0.3)  # this one waits for the end of a line
    with (
        raw_server(lambda: [OK + b"\r\n{}"]) as url,
        pytest.raises(ModelError, match="No server answers") as caught,
    ):
        find_server(address_of(url.replace("http:", "https:"), SECRET))

    assert SECRET not in str(caught.value)


# Answers


def answer_of(content: bytes) -> ChatEvent:
    """Return the end of an answer for which a server sends these bytes after its status line."""
    with raw_server(lambda: [b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + content]) as url:
        server = Server(Address(url), Kind.OTHER, "m")
        with host_of(url, server=server) as host:
            return list(host.unsaved_session().ask("Go", answer_options()))[-1]


@pytest.mark.parametrize(
    "content",
    [
        b"\r\n\xff\xfe\x00 no events",
        b"\r\ndata: \xff\xfe\n\n",
        b"\r\ndata: " + b"[" * 100_000 + b"\n\n",
        b'\r\ndata: {"choices": [], "usage": {"prompt_tokens": 1e999}}\n',
        b"Content-Encoding: gzip\r\n\r\nno gzip",
        b"Content-Type: application/json\r\n\r\nno json",
        b": only\n: comments\n\n",
    ],
)
def test_an_answer_of_garbage_fails_with_one_sentence(content: bytes) -> None:
    last = answer_of(content)

    assert isinstance(last, AnswerFailed)
    assert isinstance(last.error, GenerationError)
    assert "\n" not in last.error.message
    assert "Error(" not in last.error.message


def test_an_answer_that_is_not_streamed_is_read_all_the_same() -> None:
    """Some servers and proxies do not stream. The answer was "broken off"."""
    whole = b'{"choices": [{"message": {"content": "Hello."}, "finish_reason": "stop"}]}'
    last = answer_of(b"Content-Type: application/json\r\n\r\n" + whole)

    assert isinstance(last, AnswerEnded)
    assert last.text == "Hello."


@pytest.mark.parametrize("reason", [b"[]", b'{"type": ["abort"]}', b"0"])
def test_a_reason_that_is_no_word_ends_an_answer(reason: bytes) -> None:
    """A list was looked up among the words for a failure: "unhashable type: 'list'"."""
    choice = b'{"delta": {"content": "Hello."}, "finish_reason": ' + reason + b"}"
    last = answer_of(b'\r\ndata: {"choices": [' + choice + b"]}\n\ndata: [DONE]\n\n")

    assert isinstance(last, AnswerEnded)
    assert last.text == "Hello."


def test_an_error_with_status_200_is_told() -> None:
    last = answer_of(b'Content-Type: application/json\r\n\r\n{"error": {"message": "no room"}}')

    assert isinstance(last, AnswerFailed)
    assert last.error.message == "The server says: no room."


def test_half_a_character_does_not_end_a_conversation() -> None:
    r"""A lone "\ud83d" was kept, and no later request could be encoded."""
    with chat_with(lambda path, body: chunks("Hi \ud83d there")) as (session, fake):
        assert ended(session.ask("One", answer_options())).text == "Hi \ufffd there"
        ended(session.ask("Two", answer_options()))

    assert fake.bodies[-1]["messages"][1]["content"] == "Hi \ufffd there"


@pytest.mark.parametrize(
    ("usage", "prompt", "cached"),
    [
        ({"prompt_tokens": -5, "completion_tokens": -1}, 0, None),
        ({"prompt_tokens": 10**30, "prompt_tokens_details": {"cached_tokens": -3}}, 1 << 40, 0),
        ({"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": True}}, 7, None),
    ],
)
def test_impossible_counts_are_bounded(usage: Any, prompt: int, cached: int | None) -> None:
    counts = Reader(Kind.OTHER, takes_ids=False).read({"choices": [], "usage": usage}).counts

    assert counts is not None
    assert (counts.prompt, counts.generated) == (prompt, 0)
    assert counts.cached == (None if cached is None else CachedTokens(device=cached))


def test_progress_stays_within_its_whole() -> None:
    told = {"cache": 9, "processed": -4, "total": 0}
    piece = Reader(Kind.KVCHAT, takes_ids=False).read({"choices": [], "prompt_progress": told})

    assert piece.progress == (1, 0, 1)


def test_a_wrong_number_of_the_context_is_not_believed() -> None:
    for limit in (True, -1, 0, "many", 1.5):
        gets: dict[str, object] = {"/v1/models": models("m", "vllm", max_model_len=limit)}
        with fake_server(nothing, gets) as fake:
            assert not find_server(address_of(fake.url)).knows_context


# Answers without an end


def _without_end(*texts: str) -> Iterator[object]:
    """Stream pieces of an answer for ever."""
    for text in itertools.cycle(texts):
        yield chunks(text)[0]


VARIED = [f"word{number} " for number in range(1000)]


@pytest.mark.parametrize(
    ("texts", "options", "reason", "most_chars"),
    [
        (VARIED, {"max_tokens": 20}, FinishReason.LENGTH, 400),
        (["x "], {"max_tokens": 20}, FinishReason.LENGTH, 400),
        (["# "], {"repetition_limit": 256}, FinishReason.REPETITION, 600),
        (VARIED, {}, FinishReason.LENGTH, 10_000),
    ],
    ids=["max_tokens", "max_tokens of letters", "repetition", "no limit"],
)
def test_an_answer_without_an_end_is_ended_here(monkeypatch, texts, options, reason, most_chars):
    """--max-tokens was the server's business, and a session's file grew to 80 MB."""
    monkeypatch.setattr(engine, "_MOST_IDS", 1500)
    with chat_with(lambda path, body: _without_end(*texts)) as (session, _):
        told = ended(session.ask("go", replace(answer_options(), **options)))

    assert told.reason is reason
    assert 40 <= len(told.text) <= most_chars


def test_a_server_that_sends_single_letters_may_say_all_that_it_is_allowed() -> None:
    """A limit of tokens is not one of pieces."""
    text = "All of these words are longer than one letter, but fewer than thirty tokens."
    with chat_with(lambda path, body: chunks(*text)) as (session, _):
        told = ended(session.ask("go", replace(answer_options(), max_tokens=30)))

    assert (told.text, told.reason) == (text, FinishReason.STOP)

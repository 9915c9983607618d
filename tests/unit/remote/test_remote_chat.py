"""A chat whose answers come from a server that takes messages: all that may happen on the way."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.events import AnswerCall, AnswerEnded, AnswerFailed, ChatEvent
from kvchat.chat.host import ChatHost
from kvchat.chat.message_model import message_model
from kvchat.chat.reply import Reply
from kvchat.chat.session import ChatSession
from kvchat.chat.store import SessionStore
from kvchat.chat.thinking import Think
from kvchat.chat.tools import ToolCall, ToolResult, ToolSet
from kvchat.core.errors import ContextTooLong, GenerationError
from kvchat.core.events import LoadProgress, ModelReady
from kvchat.core.types import CachedTokens, FinishReason, MissReason, SamplingParams
from kvchat.remote.address import address_of
from kvchat.remote.engine import RemoteEngine
from kvchat.remote.kinds import Kind, Server
from kvchat.remote.servers import find_server
from support.fake_llm_server import (
    Author,
    BrokenOff,
    FakeServer,
    Refusal,
    chunks,
    fake_server,
    models,
)

PATIENCE_S = 60.0


def answer_options(**others: Any) -> AskOptions:
    return AskOptions(sampling=SamplingParams(temperature=0.0), **others)


@contextmanager
def host_of(
    url: str, store: SessionStore | None = None, server: Server | None = None
) -> Iterator[ChatHost]:
    """Yield a host whose engine is the server at an address, asked what it is if not given."""
    server = server or find_server(address_of(url))

    def build(progress: Callable[[LoadProgress], None]) -> tuple[RemoteEngine, ModelReady]:
        ready = ModelReady(server.model, "x", "x", "x", server.max_context, 0.0)
        return RemoteEngine(server, None), ready

    host = ChatHost(message_model(server.model, server.max_context), build, store)
    host.wait_until_ready()
    try:
        yield host
    finally:
        host.close()


@contextmanager
def chat_with(author: Author) -> Iterator[tuple[ChatSession, FakeServer]]:
    """Yield a chat with a server that answers as an author says."""
    with fake_server(author) as fake, host_of(fake.url) as host:
        yield host.unsaved_session(), fake


def always(*texts: str, **others: Any) -> Author:
    return lambda path, body: chunks(*texts, **others)


def all_of(reply: Reply) -> list[ChatEvent]:
    return list(reply)


def ended(reply: Reply) -> AnswerEnded:
    last = all_of(reply)[-1]
    assert isinstance(last, AnswerEnded), last
    return last


def failed(reply: Reply) -> AnswerFailed:
    last = all_of(reply)[-1]
    assert isinstance(last, AnswerFailed), last
    return last


def test_a_chat_goes_on_with_all_that_was_said() -> None:
    with chat_with(always("He", "llo ", "🙂!")) as (session, fake):
        first = ended(session.ask("Hi", answer_options()))
        ended(session.ask("And?", answer_options()))

    assert (first.text, first.reason) == ("Hello 🙂!", FinishReason.STOP)
    assert [(m["role"], m["content"]) for m in fake.bodies[-1]["messages"]] == [
        ("user", "Hi"),
        ("assistant", "Hello 🙂!"),
        ("user", "And?"),
    ]


def test_figures_are_the_servers_own() -> None:
    usage = {
        "prompt_tokens": 70,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 64},
    }
    with chat_with(always("Hi.", usage=usage)) as (session, _):
        answer = ended(session.ask("Hello", answer_options()))

    assert answer.usage.prompt_tokens == 70
    assert answer.usage.cached == CachedTokens(device=64)
    assert answer.usage.completion_tokens == 3
    assert not answer.usage.is_estimate


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": 70}])
def test_figures_that_the_server_does_not_tell_are_estimates(usage: object) -> None:
    with chat_with(always("Hi.", usage=usage)) as (session, _):
        assert ended(session.ask("Hello", answer_options())).usage.is_estimate


def test_a_server_that_does_not_tell_what_it_cached_is_not_said_to_have_lost_it() -> None:
    with chat_with(always("Hi.", usage={"prompt_tokens": 70})) as (session, _):
        answer = ended(session.ask("Hello", answer_options()))

    assert answer.miss_reason is MissReason.NOT_TOLD


def test_thinking_is_shown_apart_and_not_sent_again() -> None:
    def author(path: str, body: Any) -> object:
        thought = [{"choices": [{"delta": {"reasoning_content": part}}]} for part in ("h", "m")]
        return [*thought, *chunks("Four.")]

    with chat_with(author) as (session, fake):
        answer = ended(session.ask("2+2?", answer_options(think=Think.HIGH)))
        ended(session.ask("Sure?", answer_options()))

    assert (answer.thinking, answer.text) == ("hm", "Four.")
    assert fake.bodies[0]["reasoning_effort"] == "high"
    assert "reasoning_effort" not in fake.bodies[1]
    assert fake.bodies[1]["messages"][1]["content"] == "Four."


def test_a_call_is_made_and_its_result_is_sent() -> None:
    def author(path: str, body: Any) -> object:
        if len(body["messages"]) > 1:
            return chunks("It is 3.")
        pieces = [{"name": "add", "arguments": ""}, {"arguments": '{"a": 1,'}, {"arguments": "}"}]
        pieces[2]["arguments"] = ' "b": "</tool_call>"}'
        deltas = [{"tool_calls": [{"index": 0, "function": piece}]} for piece in pieces]
        return [*({"choices": [{"delta": d}]} for d in deltas), *chunks(finish="tool_calls")]

    tools = ToolSet([{"name": "add"}])
    with fake_server(author) as fake, host_of(fake.url) as host:
        session = host.unsaved_session(tools=tools)
        events = all_of(session.ask("Add.", answer_options(max_calls=None)))
        answer = ended(session.ask("", answer_options(), results=(ToolResult("add", "3"),)))

    call = ToolCall("add", {"a": 1, "b": "</tool_call>"})
    assert AnswerCall(0, call) in events
    assert answer.text == "It is 3."
    assert fake.bodies[0]["tools"] == tools.definitions
    assert [m["role"] for m in fake.bodies[1]["messages"]] == ["user", "assistant", "tool"]


def test_several_samples_are_several_requests_with_other_seeds() -> None:
    with chat_with(always("Hi.")) as (session, fake):
        answers = all_of(session.ask("Hello", answer_options(num_samples=3)))

    assert sum(isinstance(event, AnswerEnded) for event in answers) == 3
    assert len({body["seed"] for body in fake.bodies}) == 3


def test_a_stop_text_ends_the_answer_and_the_request() -> None:
    def author(path: str, body: Any) -> Iterator[object]:
        yield from chunks("One. ", "Two. ", "Thr")[:3]
        while True:
            yield {"choices": [{"delta": {"content": "ee."}}]}
            time.sleep(0.01)

    with chat_with(author) as (session, fake):
        answer = ended(session.ask("Count", answer_options(stops=("Two",))))
        assert fake.is_abandoned.wait(PATIENCE_S)

    assert (answer.text, answer.reason) == ("One. ", FinishReason.STOP)


def test_a_cancelled_answer_ends_at_the_server_too() -> None:
    def author(path: str, body: Any) -> Iterator[object]:
        while True:
            yield {"choices": [{"delta": {"content": "on and "}}]}
            time.sleep(0.01)

    with chat_with(author) as (session, fake):
        reply = session.ask("Go", answer_options())
        began_s = time.monotonic()
        for event in reply:
            if not isinstance(event, AnswerEnded):
                reply.cancel()
        assert time.monotonic() - began_s < PATIENCE_S
        assert fake.is_abandoned.wait(PATIENCE_S)

    turn = session.conversation.path()[-1]
    assert turn.finish is FinishReason.CANCELLED
    assert turn.text.startswith("on and ")


def test_an_answer_that_has_not_begun_is_cancelled_at_once() -> None:
    is_over = threading.Event()

    def author(path: str, body: Any) -> Iterator[object]:
        is_over.wait(PATIENCE_S)
        yield from chunks("late")

    with chat_with(author) as (session, _):
        reply = session.ask("Go", answer_options())
        reply.cancel()
        assert ended(reply).reason is FinishReason.CANCELLED
        is_over.set()


@pytest.mark.parametrize("ending", [BrokenOff(), None])
def test_what_was_said_stays_if_the_server_dies(ending: Exception | None) -> None:
    def author(path: str, body: Any) -> Iterator[object]:
        yield from chunks("Half an ans")[:1]
        if ending is not None:
            raise ending

    with chat_with(author) as (session, _):
        error = failed(session.ask("Go", answer_options())).error

    assert isinstance(error, GenerationError)
    assert "broke off" in error.message
    assert session.conversation.path()[-1].text == "Half an ans"


def test_a_cut_off_answer_is_continued_where_the_server_can() -> None:
    said = iter((("One", "length"), (", two.", "stop")))

    def author(path: str, body: Any) -> object:
        text, finish = next(said)
        return chunks(text, finish=finish)

    gets: dict[str, object] = {"/v1/models": models("m", "vllm")}
    with fake_server(author, gets) as fake, host_of(fake.url) as host:
        session = host.unsaved_session()
        assert ended(session.ask("Count", answer_options())).reason is FinishReason.LENGTH
        ended(session.continue_answer(answer_options()))

    assert session.conversation.path()[-1].text == "One, two."
    assert fake.bodies[1]["messages"][-1] == {"role": "assistant", "content": "One"}
    assert fake.bodies[1]["continue_final_message"] is True


def test_nothing_is_sent_twice() -> None:
    """A request that failed after it was sent may have been answered."""
    with chat_with(lambda path, body: [BrokenOff]) as (session, fake):
        failed(session.ask("Go", answer_options()))
        assert len(fake.bodies) == 1


def test_a_server_that_is_away_is_said_and_asked_again_later() -> None:
    with fake_server(always("Hi.")) as fake:
        url = fake.url
        with host_of(url) as host:
            session = host.unsaved_session()
            fake.stop()
            error = failed(session.ask("Hello", answer_options())).error
            with fake_server(always("Here."), port=int(url.rpartition(":")[2])):
                answer = ended(session.retry(answer_options()))

    assert error.message.startswith("No server answers at 127.0.0.1")
    assert answer.text == "Here."


def test_a_prompt_that_is_too_long_is_told_from_other_refusals() -> None:
    error = {"error": {"code": "context_length_exceeded", "message": "Too many tokens"}}
    with chat_with(lambda path, body: Refusal(400, error)) as (session, _):
        told = failed(session.ask("Go", answer_options())).error

    assert isinstance(told, ContextTooLong)
    assert told.message == "The server says: Too many tokens."
    assert "/compact" in told.hint


@pytest.mark.parametrize(
    ("author", "sentence"),
    [
        (lambda path, body: Refusal(500, "broken"), "HTTP status 500"),
        (lambda path, body: Refusal(429, {"error": "slow down"}), "slow down"),
        (lambda path, body: Refusal(401, {"error": "key"}), "refuses this key"),
        (lambda path, body: ["no json"], "is not JSON"),
        (lambda path, body: ["[1]"], "no JSON object"),
        (lambda path, body: [{"error": {"message": "out of memory"}}], "out of memory"),
        (lambda path, body: ["x" * (17 << 20)], "more than 16 MB"),
        (lambda path, body: [{"choices": [{"delta": 3}]}], "unknown form"),
    ],
)
def test_a_bad_answer_is_one_sentence(author: Author, sentence: str) -> None:
    with chat_with(author) as (session, _):
        told = failed(session.ask("Go", answer_options())).error

    assert sentence in told.message


def test_other_answers_go_on_while_one_fails() -> None:
    is_released = threading.Event()

    def author(path: str, body: Any) -> Iterator[object]:
        if body["messages"][-1]["content"] == "bad":
            yield "no json"
            return
        yield {"choices": [{"delta": {"content": "Still "}}]}
        assert is_released.wait(PATIENCE_S)
        yield from chunks("here.")

    with fake_server(author) as fake, host_of(fake.url) as host:
        good = host.unsaved_session().ask("good", answer_options())
        failed(host.unsaved_session().ask("bad", answer_options()))
        is_released.set()
        assert ended(good).text == "Still here."


def test_a_conversation_moves_to_a_server_and_keeps_its_words(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    with fake_server(always("Hi.")) as fake:
        with host_of(fake.url, store) as host:
            session = host.new_session(system="Be brief.")
            ended(session.ask("Hello", answer_options()))
            session.close()
        with host_of(fake.url, store) as host:
            again = host.open_session(session.session_id)
            ended(again.ask("And?", answer_options()))
            again.close()

    assert [m["content"] for m in fake.bodies[-1]["messages"]] == [
        "Be brief.",
        "Hello",
        "Hi.",
        "And?",
    ]
    assert again.notes == ()


def test_where_kv_is_cannot_be_known() -> None:
    with fake_server(always("Hi.")) as fake, host_of(fake.url) as host:
        with pytest.raises(GenerationError):
            host.locate([[1, 2]]).result(PATIENCE_S)
        with pytest.raises(GenerationError):
            host.status().result(PATIENCE_S)
        host.forget([([1, 2], 0)]).result(PATIENCE_S)


@pytest.mark.parametrize(
    ("gets", "kind", "details", "cached"),
    [
        (
            {"/v1/models": models("m", "tensorrt_llm", object="model", created=1764200000)},
            Kind.TENSORRT_LLM,
            {"prompt_tokens_details": {"cached_tokens": 64}},
            64,
        ),
        (
            {
                "/v1/models": models("m", "m", object="model", created=0),
                "/info": {"model_id": "m", "max_total_tokens": 4096, "max_input_tokens": 4095},
            },
            Kind.TGI,
            {"total_tokens": 102},
            None,
        ),
    ],
    ids=["TensorRT-LLM", "TGI"],
)
def test_a_chat_with_a_server_that_never_ran_here(gets, kind, details, cached):
    """As the projects' sources have it: how each is known, and what its stream tells at the end."""
    usage = {"prompt_tokens": 100, "completion_tokens": 2, **details}
    with fake_server(always("He", "llo", usage=usage), gets) as fake, host_of(fake.url) as host:
        assert find_server(address_of(fake.url)).kind is kind
        done = ended(host.unsaved_session().ask("Hi", answer_options()))

        assert done.text == "Hello"
        assert done.usage.prompt_tokens == 100
        assert done.usage.cached.total == (cached or 0)
        assert (done.miss_reason is MissReason.NOT_TOLD) is (cached is None)

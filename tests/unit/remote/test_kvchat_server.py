"""A chat whose engine is in a `kvchat serve`: token ids, warmth, and text as a local chat has."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from kvchat.chat.answer_memory import AnswerMemory, ResponseMemory
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.events import AnswerEnded, ReadingPrompt
from kvchat.chat.host import ChatHost
from kvchat.chat.prefixes import ResentChats
from kvchat.chat.stabiliser import Stabiliser
from kvchat.chat.text_codec import Segment
from kvchat.core.errors import GenerationError, UsageError
from kvchat.core.events import LoadProgress, ModelReady, SampleFinished
from kvchat.core.stats import KvPlaces, ReadRates, SpeculationStatus
from kvchat.core.types import CachedTokens, DraftUse, KeptPositions, MissReason, SamplingParams
from kvchat.remote.address import address_of
from kvchat.remote.engine import RemoteEngine
from kvchat.remote.kinds import Kind
from kvchat.remote.servers import find_server
from kvchat.remote.wire import Reader
from kvchat.server.answering import Answering
from kvchat.server.app import new_app
from kvchat.server.guard import Limits
from kvchat.server.metrics import Metrics
from kvchat.server.service import Service
from support.http_servers import serving_app
from support.scripted_engine import Author, Script, ScriptedEngine, scripted_build

OPTIONS = AskOptions(sampling=SamplingParams(temperature=0.0))
PATIENCE_S = 60.0


def author(question: str, sample: int) -> Script:
    return Script(f"{question} Größe 🙂 {sample}")


@contextmanager
def served(
    model: ChatModel,
    author: Author = author,
    max_context: int = 32768,
    stabiliser: Stabiliser | None = None,
    is_private: bool = True,
) -> Iterator[str]:
    """Yield the address of a real server above a scripted engine, for one user's chats alone."""
    host = ChatHost(model, scripted_build(model, author, max_context=max_context), None)
    host.wait_until_ready()
    metrics = Metrics()
    answering = Answering(ResentChats(host, AnswerMemory(None), stabiliser), metrics)
    responses = ResponseMemory(None, model.tokenizer)
    names = ("scripted",)
    service = Service(host, answering, metrics, OPTIONS, names, responses, "/models/scripted")
    config = uvicorn.Config(
        new_app(service, None, Limits(), is_private=is_private),  # type: ignore[arg-type]
        log_config=None,
        lifespan="off",
    )
    with closing(host), closing(answering), serving_app(config) as (_, port):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def attached(url: str, model: ChatModel, is_own: bool = False) -> Iterator[ChatHost]:
    """Yield a host for a server that the user named, or for one that `is_own`."""
    server, has_ended = find_server(address_of(url)), (lambda: False) if is_own else None

    def spell(last_id: int, text: str) -> list[int]:
        return model.tokenizer.encode_after(last_id, [Segment(text, is_inert=True)])

    def build(progress: Callable[[LoadProgress], None]) -> tuple[RemoteEngine, ModelReady]:
        ready = ModelReady("scripted", "x", "x", "x", server.max_context, 0.0)
        return RemoteEngine(server, spell, has_ended), ready

    host = ChatHost(model, build, None)
    host.wait_until_ready()
    try:
        yield host
    finally:
        host.close()


@pytest.fixture
def host(model: ChatModel) -> Iterator[ChatHost]:
    with served(model) as url, attached(url, model) as host:
        yield host


def test_a_server_says_what_it_needs_to_get_token_ids(model: ChatModel) -> None:
    with served(model) as url:
        server = find_server(address_of(url))

    assert (server.kind, server.files) == (Kind.KVCHAT, "/models/scripted")
    assert server.tokenizer == model.tokenizer.digest
    assert server.max_context == 32768


def test_a_chat_has_the_same_ids_as_with_its_own_engine(host: ChatHost, model: ChatModel) -> None:
    own = ChatHost(model, scripted_build(model, author), None)
    own.wait_until_ready()
    sessions = [host.unsaved_session("Be brief."), own.unsaved_session("Be brief.")]
    for session in sessions:
        for question in ("Hello", "And?"):
            [*_, ended] = session.ask(question, OPTIONS)
            assert isinstance(ended, AnswerEnded)
            assert ended.text == f"{question} Größe 🙂 0"
    own.close()

    ours, theirs = (session.conversation.context_ids() for session in sessions)
    # The last answer's closing token comes with the next message: the server does not tell it.
    assert [*ours, model.format.answer.closing_id] == theirs


def test_what_the_server_cached_is_told_by_tier(host: ChatHost) -> None:
    session = host.unsaved_session()
    list(session.ask("A long first message. " * 10, OPTIONS))
    [*_, ended] = session.ask("And?", OPTIONS)

    assert isinstance(ended, AnswerEnded)
    assert ended.usage.cached.device > 200


@pytest.mark.parametrize("reason", [*MissReason, None])
def test_why_the_server_had_no_more_is_told(host, monkeypatch, reason):
    """An attached chat said "evicted" whatever had happened: the server did not tell."""
    finished = ScriptedEngine._finish

    def with_reason(*given: Any) -> SampleFinished:
        return replace(finished(*given), miss_reason=reason)

    monkeypatch.setattr(ScriptedEngine, "_finish", with_reason)
    [*_, ended] = host.unsaved_session().ask("Hello", OPTIONS)

    assert isinstance(ended, AnswerEnded)
    assert ended.miss_reason is reason


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({}, MissReason.NOT_KEPT),  # an older server
        ({"miss_reason": "of_a_later_release"}, MissReason.NOT_KEPT),
        ({"miss_reason": ["?"]}, MissReason.NOT_KEPT),
        ({"miss_reason": None}, None),
    ],
)
def test_a_reason_that_is_not_known_breaks_no_answer(told, reason):
    usage = {"prompt_tokens": 9, "kvchat": told}
    counts = Reader(Kind.KVCHAT, takes_ids=True).read({"choices": [], "usage": usage}).counts

    assert counts is not None
    assert counts.miss_reason is reason


def test_a_long_prompt_is_told_while_it_is_read(host: ChatHost) -> None:
    session = host.unsaved_session()
    list(session.ask("A first message. " * 20, OPTIONS))
    read = [e for e in session.ask("x" * 9000, OPTIONS) if isinstance(e, ReadingPrompt)]

    assert len(read) > 1
    assert read[0].cached.device > 200
    assert read[0].done < read[-1].done == read[-1].total


def test_warmth_is_known_as_in_a_chat_of_its_own(host: ChatHost) -> None:
    session = host.unsaved_session()
    list(session.ask("A long first message. " * 10, OPTIONS))
    context = session.conversation.context_ids()

    [here, unknown] = host.locate([context, [1] * 100]).result(PATIENCE_S)

    assert here.num_tokens == len(context)
    assert here.cached.device > 200
    assert here.rates.computed == 1000.0
    assert unknown.cached.total == 0


def test_places_keep_the_size_of_blocks(host: ChatHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat took 16 for granted: /tree showed the end of a turn as cold, or as warm."""
    told = KvPlaces(100, CachedTokens(device=64), ReadRates(1000.0), block_size=64)
    monkeypatch.setattr(ScriptedEngine, "locate", lambda _, contexts, done: done([told]))

    assert host.locate([[1] * 100]).result(PATIENCE_S) == [told]


def test_text_is_read_before_it_is_sent(host: ChatHost) -> None:
    context = [65] * 200
    host.read_ahead(context)
    host.end_read_ahead()
    host.prefetch(context)

    until_s = time.monotonic() + PATIENCE_S
    while not host.locate([context]).result(PATIENCE_S)[0].cached.device:
        assert time.monotonic() < until_s


def test_pins_and_forgetting_reach_the_engine(host: ChatHost) -> None:
    """The scripted engine has no disk, so it pins nothing."""
    assert host.pin([1, 2, 3], "label").result(PATIENCE_S) == 0
    assert host.pin([1, 2, 3], "label", 60.0).result(PATIENCE_S) == 0
    session = host.unsaved_session()
    list(session.ask("A long first message. " * 10, OPTIONS))
    context = session.conversation.context_ids()
    host.forget([(context, 16)]).result(PATIENCE_S)
    assert host.locate([context]).result(PATIENCE_S)[0].cached.device == 16


def test_a_server_of_this_user_tells_its_status_and_drafts_as_it_is_told(model: ChatModel) -> None:
    """/spec and the engine's figures of /stats were missing in a chat on a background server."""
    with served(model) as url, attached(url, model, is_own=True) as host:
        host.speculate("ngram").result(PATIENCE_S)
        status = host.status().result(PATIENCE_S)
        with pytest.raises(UsageError, match="draft"):
            host.speculate("draft").result(PATIENCE_S)

    assert status.speculation == SpeculationStatus("ngram", ("ngram",), DraftUse())
    assert [tier.name for tier in status.tiers] == ["disk"]


def test_a_server_of_this_user_scores_and_thins_pins(model, monkeypatch):
    thinned: list[Sequence[KeptPositions]] = []
    scored = {"repeat_scores": lambda _, ids, part: [0.5] * len(ids) if part == [7] else None}
    scored["thin_beginnings"] = lambda _, kept: thinned.append(kept)
    for name, function in scored.items():
        monkeypatch.setattr(ScriptedEngine, name, function, raising=False)
    kept = [KeptPositions("ab" * 16, 3, (0, 2), "KVzip")]
    with served(model) as url, attached(url, model, is_own=True) as host:
        assert host.repeat_scores([1, 2, 3], [7]).result(PATIENCE_S) == [0.5] * 3
        assert host.repeat_scores([1, 2, 3], [8]).result(PATIENCE_S) is None
        host.thin_beginnings(kept)
        host.status().result(PATIENCE_S)

    assert thinned == [kept]


def test_a_server_that_the_user_named_is_changed_in_nothing(host: ChatHost) -> None:
    with pytest.raises(GenerationError):
        host.status().result(PATIENCE_S)
    for asked in (host.speculate("ngram"), host.repeat_scores([1], [2])):
        with pytest.raises(UsageError, match="server"):
            asked.result(PATIENCE_S)


@pytest.mark.parametrize("path", ["speculate", "thin_beginnings"])
def test_a_server_for_many_lets_no_client_change_others_requests(model, path):
    import httpx2

    with served(model, is_private=False) as url:
        answer = httpx2.post(f"{url}/kvchat/{path}", json={"mode": "off", "kept": []})

    assert answer.status_code == 404


def test_ids_that_the_model_does_not_have_are_refused(model: ChatModel) -> None:
    """The engine failed with an index that is out of range."""
    import httpx2

    with served(replace(model, vocab_size=300)) as url:
        body = {"token_ids": [1], "part": [300]}
        answer = httpx2.post(f"{url}/kvchat/repeat_scores", json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "part"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("speculate", {}),
        ("repeat_scores", {"token_ids": [1]}),
        ("repeat_scores", {"token_ids": [], "part": [1]}),
        ("repeat_scores", {"token_ids": [1], "part": [1] * (1 << 16)}),
        ("thin_beginnings", {"kept": [{"positions": [-1]}]}),
        ("thin_beginnings", {"kept": [{"num_tokens": 3, "positions": []}]}),
        ("thin_beginnings", {"kept": [{"num_tokens": 3, "positions": [1, 3]}]}),
        ("thin_beginnings", {"kept": [{"num_tokens": 3, "positions": [2, 1]}]}),
        ("locate", {"contexts": "x"}),
        ("locate", {"contexts": [[1, "x"]]}),
        ("locate", {"contexts": [[-1]]}),
        ("forget", {"contexts": [[1]], "kept": []}),
        ("forget", {"contexts": [[1]], "kept": [-1]}),
        ("pin", {"token_ids": None}),
        ("prefetch", {}),
        ("read_ahead", {"token_ids": [1 << 40]}),
    ],
)
def test_a_bad_body_is_refused(model: ChatModel, path: str, body: object, tmp_path: Path) -> None:
    import httpx2

    with served(model) as url:
        answer = httpx2.post(f"{url}/kvchat/{path}", json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"]

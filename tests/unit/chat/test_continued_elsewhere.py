"""An answer that one model began and another goes on with is read back as the other knows it."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvchat.chat.host import ChatHost
from kvchat.chat.session import ChatSession
from kvchat.chat.store import SessionStore
from kvchat.core.types import FinishReason
from support.checkpoints import never_stopping, save_checkpoint, tiny_model
from support.saved_sessions import assert_saved, saved_turns
from support.template_zoo import CHATML
from support.tiny_host import answer_options, ask, finish, tiny_host
from support.tokenizer_zoo import byte_fallback


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, store: SessionStore) -> Iterator[ChatHost]:
    """A model with another tokenizer, on the same store."""
    directory = tmp_path_factory.mktemp("other")
    save_checkpoint(directory, never_stopping(tiny_model("llama", seed=5, vocab_size=400)), CHATML)
    byte_fallback().save(str(directory / "tokenizer.json"))
    started = tiny_host(directory, store)
    yield started
    started.close()


def test_an_answer_gone_on_with_by_another_model_is_that_models(store, session, other):
    """/continue after /model put the ids of two tokenizers into one turn of the file, and later
    answers on that branch failed or were nonsense.
    """
    ask(session, "Hello")
    session.close()
    taken = other.open_session(session.session_id)
    before = taken.conversation.turn(2)
    for _ in range(2):
        finish(taken.continue_answer(answer_options()))
    taken.close()

    answer = taken.conversation.turn(2)
    saved = saved_turns(store, session)[1]
    assert saved.tokenizer == answer.tokenizer == other.model.tokenizer.digest
    assert saved.token_ids == answer.token_ids
    assert saved.token_ids[: len(before.token_ids)] == before.token_ids
    assert len(saved.token_ids) == len(before.token_ids) + 24
    assert saved.text == answer.text
    again = other.open_session(session.session_id)
    assert again.conversation.context_ids() == taken.conversation.context_ids()
    again.close()


def test_the_first_model_gets_the_answer_back_as_text(host, store, session, other):
    ask(session, "Hello")
    session.close()
    taken = other.open_session(session.session_id)
    finish(taken.continue_answer(answer_options()))
    taken.close()

    back = host.open_session(session.session_id)
    answer = back.conversation.turn(2)
    assert answer.is_adopted
    assert answer.text == taken.conversation.turn(2).text
    assert answer.token_ids == host.model.answer_ids(back.conversation, answer)
    finish(back.continue_answer(answer_options()))
    assert saved_turns(store, back)[1].token_ids == back.conversation.turn(2).token_ids
    back.close()


def test_of_a_tokenizer_that_changed_no_other_model_is_told(host, store, session):
    """ "Another model wrote this conversation", it said of a file's tokenizer after an update."""
    ask(session, "Hello")
    session.close()
    path = store.directory / f"{session.session_id}.jsonl"
    path.write_text(path.read_text().replace(host.model.tokenizer.digest, "t1-of-before"))

    again = host.open_session(session.session_id)

    assert again.notes == (
        "Another tokenizer made the tokens of this conversation; it is read again once.",
    )
    again.close()


def test_the_model_that_wrote_the_last_answers_is_named_with_what_to_type(
    host: ChatHost, store: SessionStore, session: ChatSession, other: ChatHost
) -> None:
    """`-c` after /model began with the first model and named no other; where both have one
    tokenizer, it said nothing.
    """
    ask(session, "Hello")
    session.close()
    before = (store.directory / f"{session.session_id}.jsonl").read_bytes()
    other.open_session(session.session_id).close()  # it only looked
    assert (store.directory / f"{session.session_id}.jsonl").read_bytes() == before
    taken = other.open_session(session.session_id)
    assert taken.notes == (_wrote(host),)
    ask(taken, "And on")
    taken.close()

    assert store.read(session.session_id).model == other.model.name
    again = other.open_session(session.session_id)
    assert again.notes == ()
    again.close()
    back = host.open_session(session.session_id)
    assert back.notes == (_wrote(other),)
    back.close()
    [summary] = [s for s in store.summaries() if s.session_id == session.session_id]
    assert summary.num_turns == 2


def test_the_same_model_under_another_path_is_no_other_model(host, store, session, other, tmp_path):
    """Only names were compared: a link, or ./model, was told of as another model."""
    ask(session, "Hello")
    session.close()
    link = tmp_path / "link"
    link.symlink_to(host.model.name)
    engine = host._engine

    opened = ChatSession.open(
        replace(host.model, name=str(link)), engine, store, session.session_id
    )
    assert opened.notes == ()
    ask(opened, "And on")
    opened.close()
    assert store.read(session.session_id).model == str(link)  # lists look its KV up by this name


def test_a_model_that_was_stopped_before_its_first_token_has_written_nothing(
    host: ChatHost, store: SessionStore, session: ChatSession, other: ChatHost
) -> None:
    """It was named as the one that wrote the last answers."""
    ask(session, "Hello")
    session.close()
    never = threading.Event()
    waiting = ChatHost(other.model, lambda _: never.wait(), store)  # type: ignore[arg-type]
    opened = waiting.open_session(session.session_id)
    reply = opened.ask("And on", answer_options())
    reply.cancel()
    assert finish(reply).reason is FinishReason.CANCELLED
    opened.close()

    assert store.read(session.session_id).model == host.model.name
    again = other.open_session(session.session_id)
    assert again.notes == (_wrote(host),)
    finish(again.continue_answer(answer_options()))
    again.close()
    assert store.read(session.session_id).model == other.model.name
    never.set()


def _wrote(host: ChatHost) -> str:
    name = host.model.name
    return f"{name} wrote the last answers here; /model {name} goes on with it."


def test_the_models_own_answer_grows_by_what_is_new_only(store, session):
    ask(session, "Hello")
    finish(session.continue_answer(answer_options()))

    assert_saved(store, session)
    text = (store.directory / f"{session.session_id}.jsonl").read_text()
    more = [line for line in text.splitlines() if '"type":"more"' in line]
    assert more
    assert not any("tokenizer" in line for line in more)

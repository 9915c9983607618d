"""An answer asked for once more that never begins leaves the conversation where it was."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvchat.chat.chat_model import ChatModel
from kvchat.chat.events import AnswerEnded, AnswerFailed
from kvchat.chat.host import ChatHost
from kvchat.chat.session import ChatSession
from kvchat.chat.store import SessionStore
from kvchat.core.errors import ModelError
from kvchat.core.events import LoadProgress
from support.saved_sessions import assert_saved
from support.scripted_engine import Script, scripted_build
from support.tiny_host import answer_options, finish


class SlowHost:
    """A host whose engine begins, or fails to, only when `go` is set; questions wait."""

    def __init__(self, model: ChatModel, store: SessionStore, failure: Exception | None) -> None:
        self.go = threading.Event()
        script = scripted_build(model, lambda *_: Script("Yes."), failure=failure)

        def build(progress: Callable[[LoadProgress], None]) -> object:
            self.go.wait(60.0)
            return script(progress)

        self.host = ChatHost(model, build, store)  # type: ignore[arg-type]

    def conversation(self) -> ChatSession:
        """Begin one whose question has been answered."""
        session = self.host.new_session()
        session.add_user_turn("Well?")
        session.add_answer("No.")
        return session


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path)


@pytest.fixture(params=[None, ModelError("The weights are broken.")], ids=["stopped", "failed"])
def slow(request, model: ChatModel, store: SessionStore) -> Iterator[SlowHost]:
    started = SlowHost(model, store, request.param)
    yield started
    started.go.set()
    started.host.close()


@pytest.mark.parametrize("num_samples", [1, 3])
def test_without_a_new_answer_the_old_one_is_what_the_model_goes_on_from(slow, store, num_samples):
    """/retry stopped before its first token left the answer on the screen, and the model without
    it.
    """
    session = slow.conversation()
    context = session.conversation.context_ids()

    reply = session.retry(answer_options(num_samples=num_samples))
    reply.cancel()
    slow.go.set()
    events = list(reply)

    assert {type(event) for event in events} in ({AnswerEnded}, {AnswerFailed})
    assert session.conversation.tip_id == 2
    assert session.conversation.context_ids() == context
    assert_saved(store, session)
    session.close()


def test_a_question_that_had_no_answer_still_waits_for_one(slow: SlowHost) -> None:
    session = slow.conversation()
    question = session.add_user_turn("And now?")

    reply = session.retry(answer_options())
    reply.cancel()
    slow.go.set()
    list(reply)

    assert session.conversation.tip_id == question.turn_id
    session.close()


def test_an_answer_that_begins_is_gone_on_from(model: ChatModel, store: SessionStore) -> None:
    slow = SlowHost(model, store, None)
    session = slow.conversation()
    slow.go.set()

    ended = finish(session.retry(answer_options()))

    assert session.conversation.tip_id == ended.turn_id == 3
    session.close()
    slow.host.close()

"""What a conversation's file has not got is not lost on the way to another, and is not promised."""

import asyncio
import errno
import io
import os
import pty
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.controller import ChatController
from kvchat.chat.conversation import Role
from kvchat.chat.events import AnswerEnded, AnswerFailed, AnswerText, SavingFailed
from kvchat.chat.host import ChatHost
from kvchat.chat.saved_chats import read_chats
from kvchat.chat.store import SessionStore
from kvchat.chat.turn_loop import LoadRelay
from kvchat.core.errors import ContextTooLong, ModelError, StoreError
from kvchat.core.types import FinishReason, Timing, Usage
from kvchat.terminal import repl
from kvchat.terminal.answer_view import AnswerView
from kvchat.terminal.command_runner import build_registry
from kvchat.terminal.commands_conversation import SessionPicker
from kvchat.terminal.dialogue import Dialogue
from kvchat.terminal.line_view import LineView
from kvchat.terminal.paint import Painter
from kvchat.terminal.repl import ReplSetup, run_repl
from kvchat.terminal.status import StatsLevel
from kvchat.terminal.theme import Look
from support.script_commands import SureCommands, carry_out
from support.scripted_engine import Script, scripted_build
from support.tiny_host import finish

PLAIN = Look(has_colour=False, is_plain=True)
NewHost = Callable[..., ChatHost]


@pytest.fixture
def new_host(model: ChatModel, store: SessionStore) -> Iterator[NewHost]:
    hosts: list[ChatHost] = []

    def begin(*_: object) -> ChatHost:
        build = scripted_build(model, lambda question, _: Script(f"You said {question}."))
        hosts.append(ChatHost(model, build, store))  # type: ignore[arg-type]
        return hosts[-1]

    yield begin
    for host in hosts:
        host.close()


@pytest.fixture
def controller(new_host: NewHost) -> Iterator[ChatController]:
    controller = ChatController(new_host(), new_host, None, AskOptions())
    yield controller
    controller.close_session()


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no session file grow; everything else is written as ever."""
    write = os.write

    def refuse(descriptor: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".jsonl"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", refuse)
        yield


@pytest.mark.parametrize("has_file", [True, False])
def test_another_model_waits_until_all_of_the_conversation_is_in_its_file(
    controller: ChatController, new_host: NewHost, store: SessionStore, has_file: bool
) -> None:
    """On a full disk the turns that were not written yet were gone after /model, and where the
    file had no line at all, the conversation went on without one.
    """
    if has_file:
        finish(controller.ask("on disk"))
    with full_disk():
        finish(controller.ask("in memory"))
        old, session = controller.host, controller.require_session()
        with pytest.raises(StoreError, match=r"cannot be saved \(No space left"):
            controller.change_host(new_host())

    assert controller.host is old
    assert controller.session is session
    before = [turn.text for turn in session.conversation.turns()]
    assert controller.change_host(new_host()) is old
    assert [turn.text for turn in controller.require_conversation().turns()] == before
    finish(controller.ask("and on"))
    saved = store.read(session.session_id).conversation
    assert list(saved.turns()) == list(controller.require_conversation().turns())


def test_what_could_not_be_saved_is_said_as_the_conversation_is_let_go(controller):
    """The sentence of the session was dropped."""
    finish(controller.ask("on disk"))
    with full_disk():
        finish(controller.ask("in memory"))
        problem = controller.close_session()

    assert problem is not None
    assert problem.endswith(".jsonl cannot be saved (No space left on device).")
    assert controller.close_session() is None


@pytest.mark.parametrize("command", ["/new", "/resume first", "/fork"])
def test_going_on_in_another_says_what_of_the_last_is_not_saved(controller, command):
    """/new promised that the last one was kept, though the disk was full; the others left a
    conversation behind whose end was nowhere, without a word.
    """
    finish(controller.ask("first"))
    assert "The last one is kept" in carry_out(controller, "/new")
    finish(controller.ask("second"))
    with full_disk():
        finish(controller.ask("in memory"))
        said = carry_out(controller, command)

    assert "is kept" not in said
    assert "cannot be saved (No space left on device)." in said


def test_that_nothing_is_saved_is_said_behind_the_answer() -> None:
    """It stood in the middle of a sentence, in which the disk had become full."""
    view = LineView(io.StringIO(), io.StringIO(), Painter(PLAIN), 60, "vi")
    answer = AnswerView(view, lambda: None, StatsLevel.OFF)
    begun, rest = (AnswerText(0, text) for text in ("A word of ", "an answer.\n\n"))
    full = SavingFailed("The disk is full.")
    ended = AnswerEnded(0, 2, "", "", FinishReason.STOP, Usage(), Timing())

    rows = answer.take([begun, full, rest, full, ended])

    assert [row.plain for row in rows] == ["A word of an answer.", full.message, full.message, ""]
    assert [row.plain for row in answer.take([full])] == [full.message, ""]


@pytest.mark.parametrize("command", ["/delete", "/forget yes", "/new", "/fork"])
def test_only_what_was_to_be_kept_counts_as_lost(controller: ChatController, command: str) -> None:
    """A script's exit code is 6 if a conversation that it left could not be saved, which one that
    it threw away on purpose does not have to be.
    """
    finish(controller.ask("on disk"))
    with full_disk():
        finish(controller.ask("in memory"))
        carry_out(controller, command, SureCommands)
        assert controller.has_lost is (command in ("/new", "/fork"))
        if not controller.has_lost:
            assert controller.close_session() is None


def leave_at_once(controller: ChatController, patch: pytest.MonkeyPatch) -> int:
    """Run the chat with an input that has ended."""
    outlet, inlet = os.pipe()
    os.close(inlet)
    with os.fdopen(outlet) as stdin:
        patch.setattr(repl.sys, "stdin", stdin)  # type: ignore[attr-defined]
        return asyncio.run(run_repl(ReplSetup(controller, LoadRelay(), look=PLAIN)))


@pytest.mark.parametrize("is_full", [True, False])
def test_the_farewell_promises_only_what_is_saved(controller, is_full, monkeypatch, capfd):
    """Leaving on a full disk said "This conversation is kept" before it was found not to be, and
    the exit code was that of a chat that is saved.
    """
    finish(controller.ask("on disk"))
    if is_full:
        with full_disk():
            finish(controller.ask("in memory"))
            code = leave_at_once(controller, monkeypatch)
    else:
        code = leave_at_once(controller, monkeypatch)

    last_words = capfd.readouterr().err
    assert code == (6 if is_full else 0)
    assert ("This conversation is kept" in last_words) is not is_full
    assert ("cannot be saved (No space left on device)." in last_words) is is_full


@pytest.mark.parametrize("is_full", [True, False])
def test_leaving_asks_once_if_the_conversation_cannot_be_saved(
    controller: ChatController,
    is_full: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """/exit left at once with a conversation that was nowhere. A script, as below, is not asked."""
    finish(controller.ask("on disk"))
    terminal, stdin = pty.openpty()
    os.write(terminal, b"/exit\n/stats off\n/exit\n/stats on\n")
    with os.fdopen(stdin) as lines, full_disk() if is_full else nullcontext():
        finish(controller.ask("in memory"))
        monkeypatch.setattr(repl.sys, "stdin", lines)  # type: ignore[attr-defined]
        code = asyncio.run(run_repl(ReplSetup(controller, LoadRelay(), look=PLAIN)))
    os.close(terminal)

    said = " ".join(capfd.readouterr().out.split())
    assert code == (6 if is_full else 0)
    assert ("Leave again to lose what is not saved" in said) is is_full
    assert said.count("Leave again") <= 1


@pytest.mark.parametrize("is_open", [True, False])
def test_a_title_that_a_full_disk_has_no_room_for_is_not_promised(controller, store, is_open):
    """The list showed the new title, and the next chat the old one."""
    finish(controller.ask("on disk"))
    session_id = controller.require_session().session_id
    if not is_open:
        controller.close_session()
    notices: list[str] = []
    context = cast(Any, SimpleNamespace(controller=controller, notice=notices.append))
    picker = SessionPicker(context, store, read_chats(store, store.summaries()))
    with full_disk():
        picker.rename(0, "a new title")

    assert "cannot be saved (No space left on device)." in notices[0]
    assert store.read(session_id).conversation.title == ""
    assert (picker._choices[0].label == "a new title") is is_open  # this chat saves it later
    if is_open:
        with full_disk():
            assert "cannot be saved" in carry_out(controller, "/rename third")
        assert controller.saving_problem() is None
        assert store.read(session_id).conversation.title == "third"


def test_a_key_pressed_while_the_chat_ends_loses_nothing(controller: ChatController) -> None:
    """Esc, Up or Enter in the two seconds that an answer has to stop emptied what was saved."""
    view = LineView(sys.stdin, io.StringIO(), Painter(PLAIN), 80, "vi")

    async def leave() -> None:
        dialogue = Dialogue(controller, view, build_registry(), StatsLevel.OFF)
        dialogue.accept("sent at once")
        dialogue.accept("typed ahead")
        await dialogue.settle()
        dialogue.stop_editing()
        assert dialogue.num_kept == dialogue.num_unsent == 2

    asyncio.run(leave())
    store, session = controller.host.store, controller.session
    assert store is not None
    assert session is not None
    waiting = store.read(session.session_id).conversation.waiting
    assert waiting == ("sent at once", "typed ahead")


def test_a_warning_holds_until_the_next_line(controller: ChatController) -> None:
    """Else a Ctrl-C an hour later left at once."""
    view = LineView(sys.stdin, io.StringIO(), Painter(PLAIN), 80, "vi")

    async def leave_twice() -> None:
        dialogue = Dialogue(controller, view, build_registry(), StatsLevel.OFF)
        assert not dialogue.has_warned
        dialogue.leave(130)
        assert dialogue.has_warned
        dialogue.accept("/stats off")
        assert not dialogue.has_warned

    finish(controller.ask("on disk"))
    with full_disk():
        finish(controller.ask("in memory"))
        asyncio.run(leave_twice())


def test_a_script_leaves_an_unsaved_conversation_without_a_question(controller):
    finish(controller.ask("on disk"))
    with full_disk():
        finish(controller.ask("in memory"))
        assert carry_out(controller, "/exit") == ""


def test_a_copy_that_a_full_disk_does_not_take_is_said_not_to_be_saved(controller):
    """/fork said "This is a copy now", and that it is not saved came with the next answer."""
    finish(controller.ask("on disk"))
    with full_disk():
        said = carry_out(controller, "/fork")

    assert "This is a copy now" in said
    assert "cannot be saved" in said
    assert controller.saving_problem() is None, "there is room again"


def test_a_refused_first_message_leaves_no_file(controller, store):
    """A file without a message stayed behind."""
    controller.host.model = replace(controller.host.model, max_context=1024)
    with pytest.raises(ContextTooLong):
        controller.ask("x" * 70_000)

    assert controller.session is None
    assert list(store.directory.iterdir()) == []


def test_a_first_message_that_the_engine_refuses_leaves_no_file(controller, store):
    *_, failed = controller.ask("x" * 33_000)
    assert isinstance(failed, AnswerFailed)
    controller.drop_refused()

    assert controller.session is None
    assert list(store.directory.iterdir()) == []


def test_only_a_conversation_without_answers_is_dropped(controller, store):
    finish(controller.ask("Hello"))
    controller.place.undo()
    list(controller.ask("x" * 33_000))
    controller.drop_refused()

    assert len(store.ids()) == 1
    assert controller.session is not None


def test_a_message_that_is_found_too_long_later_takes_no_number(controller, store):
    """Sent before the model was loaded, it stayed as message 2, in the file too."""
    finish(controller.ask("one"))
    controller.keep_waiting(("two",))
    list(controller.ask("x" * 33_000))
    controller.drop_refused(is_given_back=True)
    read = store.read(controller.require_session().session_id).conversation
    assert [turn.text for turn in read.turns() if turn.is_message] == ["one"]
    assert read.waiting == ("two",)
    assert read.tip_id == controller.require_conversation().tip_id
    finish(controller.ask("two"))

    assert "2 you: two" in carry_out(controller, "/tree")


def test_a_message_that_no_model_was_there_to_read_is_taken_back(controller, store):
    finish(controller.ask("one"))
    model, session_id = controller.host.model, controller.require_session().session_id
    build = scripted_build(model, lambda *_: Script("ok"), failure=ModelError("It is broken."))
    controller.change_host(ChatHost(model, build, store)).close()  # type: ignore[arg-type]
    *_, failed = controller.ask("two")
    assert isinstance(failed, AnswerFailed)
    controller.drop_refused(is_given_back=True)

    read = store.read(session_id).conversation
    assert [turn.text for turn in read.turns() if turn.is_message] == ["one"]
    assert read.path()[-1].role is Role.ASSISTANT


def test_an_earlier_message_that_is_found_too_long_now_stays(controller: ChatController) -> None:
    """A model with a shorter context may be asked to answer what another one has not."""
    finish(controller.ask("one"))
    list(controller.ask("x" * 33_000))
    [*_, unanswered] = controller.require_conversation().turns()
    controller.place.move(unanswered.turn_id)
    *_, failed = controller.continue_answer()
    assert isinstance(failed, AnswerFailed)
    controller.drop_refused(is_given_back=True)

    assert controller.require_conversation().has(unanswered.turn_id)


def test_another_program_s_file_at_the_same_place_stays(controller, store):
    list(controller.ask("x" * 33_000))
    path = store.directory / f"{controller.require_session().session_id}.jsonl"
    path.unlink()
    path.write_text("not ours")
    controller.drop_refused()

    assert path.read_text() == "not ours"

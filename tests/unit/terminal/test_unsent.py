"""What is typed and not sent goes where its user goes, and is saved in one conversation only."""

import asyncio
import errno
import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvchat.chat.controller import ChatController
from kvchat.chat.store import SessionStore
from kvchat.terminal.command_runner import build_registry
from kvchat.terminal.dialogue import Dialogue
from kvchat.terminal.line_view import LineView
from kvchat.terminal.paint import Painter
from kvchat.terminal.status import StatsLevel
from kvchat.terminal.theme import Look
from kvchat.terminal.unsent import MessageQueue, Unsent
from kvchat.terminal.view import View
from support.tiny_host import finish


class Prompt:
    """Of a view, the prompt's text."""

    def __init__(self) -> None:
        self.painter = SimpleNamespace(look=SimpleNamespace(is_plain=False))
        self.prompt_text = ""

    def put_back(self, text: str, gives_way: bool = False) -> None:
        self.prompt_text = text


@pytest.fixture(autouse=True)
def _one_answer(controller: ChatController) -> None:
    finish(controller.ask("hello"))


def _id(controller: ChatController) -> str:
    return controller.require_session().session_id


def _offered(controller: ChatController) -> tuple[Unsent, Prompt]:
    """Two messages that an earlier process did not send, the first of them in the prompt."""
    controller.keep_waiting(("next", "and then"))
    controller.require_conversation().waiting = ("next", "and then")
    prompt = Prompt()
    unsent = Unsent(controller, MessageQueue(), cast(View, prompt), lambda *_: None)
    unsent.take()
    unsent.offer()
    assert prompt.prompt_text == "next"
    return unsent, prompt


def _waiting(store: SessionStore, session_id: str) -> tuple[str, ...]:
    return store.read(session_id).conversation.waiting


def test_a_copy_takes_along_what_is_offered(controller, store):
    """After /fork it was gone from the prompt, and came again in the original only."""
    unsent, prompt = _offered(controller)
    original = _id(controller)
    controller.fork()
    unsent.take()

    assert prompt.prompt_text == "next"
    assert _waiting(store, original) == ()
    assert _waiting(store, _id(controller)) == ("next", "and then")


def test_elsewhere_it_is_not_offered_and_stays_saved(controller, store):
    unsent, prompt = _offered(controller)
    original = _id(controller)
    controller.begin_new()
    unsent.take()

    assert prompt.prompt_text == ""
    assert _waiting(store, original) == ("next", "and then")


def test_what_plain_lines_have_only_shown_stays_saved(controller, store):
    controller.keep_waiting(("next",))
    controller.require_conversation().waiting = ("next",)
    original = _id(controller)
    view = LineView(sys.stdin, io.StringIO(), Painter(Look(is_plain=True)), 80, "vi")
    unsent = Unsent(controller, MessageQueue(), view, lambda *_: None)
    unsent.take()
    controller.fork()
    unsent.take()

    assert _waiting(store, original) == ("next",)


async def _type_behind_new(controller: ChatController, *typed: str) -> None:
    """Type lines while another command keeps /new waiting, and let /new run; nothing is sent."""
    view = LineView(sys.stdin, io.StringIO(), Painter(Look(is_plain=True)), 80, "vi")
    dialogue = Dialogue(controller, view, build_registry(), StatsLevel.OFF)
    runner: Any = dialogue._runner
    async with runner.turn_lock:
        dialogue.accept("/new")
        await asyncio.sleep(0)
        for text in typed:
            dialogue.accept(text)
    while runner.is_running:
        await asyncio.sleep(0)


def test_what_is_typed_behind_a_waiting_new_is_saved_in_the_new_one_only(controller, store):
    """It was saved in both, and `kvchat -c` offered it in the old one too."""
    old = _id(controller)
    asyncio.run(_type_behind_new(controller, "one", "two"))

    new = controller.session
    assert new is not None
    assert new.session_id != old
    assert _waiting(store, old) == ()
    assert _waiting(store, new.session_id) == ("one", "two")


def test_on_a_full_disk_it_stays_where_it_could_be_saved(controller, store, monkeypatch):
    """The old file had room for the line that took it off, and the new one none to have it."""
    old, write = _id(controller), os.write

    def refuse(descriptor: int, data: bytes) -> int:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.suffix == ".jsonl" and path.stem != old:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", refuse)
    asyncio.run(_type_behind_new(controller, "one"))

    assert _waiting(store, old) == ("one",)


def test_a_conversation_begun_for_it_alone_does_not_stay(controller, store):
    controller.begin_new()
    asyncio.run(_type_behind_new(controller, "one"))

    assert controller.session is not None
    waiting = {each: _waiting(store, each) for each in store.ids()}
    assert list(waiting.values()).count(("one",)) == 1
    assert len(waiting) == 2, "the one with hello, and the new one"


def test_a_word_that_asks_for_help_is_answered_with_the_command(controller):
    """The model got it, and answered something."""
    shown = io.StringIO()
    view = LineView(sys.stdin, shown, Painter(Look(is_plain=True)), 80, "vi")

    async def ask_for_help() -> None:
        dialogue = Dialogue(controller, view, build_registry(), StatsLevel.OFF)
        view._listener = dialogue
        dialogue.accept("help")
        assert "/help lists the commands. Enter again sends the word." in shown.getvalue()
        assert not dialogue.has_queue
        dialogue.accept("help")
        assert dialogue.has_queue

    asyncio.run(ask_for_help())


def test_one_that_is_dropped_says_when_the_next_one_comes(controller: ChatController) -> None:
    """The prompt stayed empty, and the next one was not to be seen."""
    shown = io.StringIO()
    view = LineView(sys.stdin, shown, Painter(Look(is_plain=True)), 80, "vi")

    async def drop() -> None:
        dialogue = Dialogue(controller, view, build_registry(), StatsLevel.OFF)
        view._listener = dialogue
        dialogue._queue.offer(["one", "two"])
        dialogue._queue.next_offer()
        dialogue.stop_editing()
        dialogue._queue.next_offer()
        dialogue.stop_editing()

    asyncio.run(drop())
    assert shown.getvalue().count("Dropped. 1 more message after your next line.") == 1


def test_what_is_typed_behind_a_resume_goes_with_what_waits_there(controller, store):
    """It took the place of what waited there, of which a kill then left nothing."""
    controller.keep_waiting(("earlier",))
    there = _id(controller)
    controller.begin_new()
    finish(controller.ask("another"))
    here = _id(controller)
    queue = MessageQueue()
    unsent = Unsent(controller, queue, cast(View, Prompt()), lambda *_: None)
    queue.add("typed")
    unsent.keep()
    assert _waiting(store, here) == ("typed",)

    controller.open(there)
    unsent.take()

    assert _waiting(store, there) == ("earlier", "typed")
    assert _waiting(store, here) == ()

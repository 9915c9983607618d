"""/pin, /unpin and /forget on a real engine: what stays, and what is nowhere any more."""

import fcntl
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.cache.disk.db import LOCK_NAME
from kvchat.cache.keys import encode_ids
from kvchat.chat.controller import ChatController
from kvchat.chat.keeping import keep_project
from kvchat.chat.project_file import ProjectFile
from kvchat.chat.store import SessionStore
from kvchat.core.errors import StoreError, StoreInUse, UsageError
from kvchat.core.stats import Cost
from kvchat.core.types import CachedTokens, Usage
from kvchat.terminal import cache_lines
from support.script_commands import carry_out
from support.tiny_host import BLOCK_SIZE, answer_options, finish
from unit.terminal.conftest import BeginHost

SYSTEM = "You count the ships of the harbour."
MANUAL = "Of the twelve ships in the harbour three are red and nine are blue.\n"
SECRET = "Grimstad is empty on Sundays."


@dataclass
class Chat:
    """A process's life with one controller."""

    controller: ChatController
    kept: StoreAdmin

    def ask(self, text: str) -> Usage:
        ended = finish(self.controller.ask(text))
        return ended.usage

    def do(self, line: str) -> str:
        """Carry out a command; return what it said."""
        return carry_out(self.controller, line)

    def pins(self) -> dict[str, int]:
        status = self.kept.status()
        return {pin.label: pin.num_tokens for g in status.model_dirs for pin in g.pins}


NewChat = Callable[..., Chat]


@pytest.fixture
def new_chat(begin_host: BeginHost, tiny: Path, tmp_path: Path) -> NewChat:
    store, directory = SessionStore(tmp_path / "sessions"), tmp_path / "kv"

    def begin(session_id: str | None = None, model: Path = tiny) -> Chat:
        """Begin another life of the program, after the one before has ended."""
        host = begin_host(model, store, kept=directory)
        session = host.open_session(session_id) if session_id is not None else None
        kept = StoreAdmin(directory)
        controller = ChatController(
            host, lambda *_: host, session, answer_options(), SYSTEM, kept=kept
        )
        return Chat(controller, kept)

    return begin


def is_anywhere(directory: Path, needle: bytes) -> bool:
    return any(needle in path.read_bytes() for path in directory.rglob("*") if path.is_file())


def test_a_pin_that_takes_long_says_so_first(new_chat, tmp_path, monkeypatch):
    """/pin of a file of 3,500 tokens showed nothing for minutes, and what came next waited."""
    chat = new_chat()
    (tmp_path / "long.txt").write_text("words " * 20)

    async def cost(token_ids: list[int]) -> Cost:
        return Cost(len(token_ids), CachedTokens(), 40.0)

    monkeypatch.setattr(chat.controller.engine, "cost", cost)
    said = chat.do(f"/pin {tmp_path}/long.txt")
    price = re.search(r"/pin reads (\d+) of (\d+) tokens, about 40 s\.", said)
    assert price is not None
    assert price[1] == price[2]
    assert said.index("Pinned") > price.start()


def test_why_speaks_of_this_run(new_chat: NewChat) -> None:
    """In a conversation with answers it said "Nothing has been answered here yet."."""
    chat = new_chat()
    with pytest.raises(UsageError, match="answered here yet"):
        chat.do("/cache why")
    chat.ask("My name is Ada.")
    session_id = chat.controller.require_session().session_id
    chat.controller.close_session()

    again = new_chat(session_id)
    with pytest.raises(UsageError, match="answered since this conversation was opened"):
        again.do("/cache why")


def test_a_pinned_conversation_is_shown_and_survives_until_it_is_let_go(new_chat: NewChat) -> None:
    chat = new_chat()
    chat.ask("My name is Ada.")
    assert "tokens stay on disk." in chat.do("/pin")
    session_id = chat.controller.require_session().session_id
    num_tokens = len(chat.controller.context_ids)
    assert chat.do("/pin list").startswith("pinned: My name is Ada., ")
    assert ", pinned" in chat.do("/cache tree")
    chat.controller.close_session()

    again = new_chat(session_id)

    assert again.pins() == {session_id: (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE}
    assert "1 pin removed" in again.do("/unpin")
    assert again.pins() == {}
    assert again.do("/pin list") == "Nothing is pinned.\n"


def test_the_statistics_say_of_the_disk_what_cache_says(new_chat: NewChat) -> None:
    """A pin, and what others have written, was in one of the two only."""
    chat = new_chat()
    chat.ask("My name is Ada.")
    chat.do("/pin")
    used = cache_lines.used_of_limit(chat.kept.status()).split(" of ")[0]

    assert f"; {used} of " in chat.do("/stats")
    assert used in chat.do("/cache")


def test_of_an_answer_that_is_gone_nothing_is_said(new_chat: NewChat) -> None:
    """An answer that ended as its conversation was put away took the answering down with it."""
    chat = new_chat()
    chat.ask("My name is Ada.")
    ended = finish(chat.controller.ask("I live in Grimstad."))
    chat.controller.note_ended(ended)
    chat.controller.begin_new()
    chat.ask("My name is Bob.")

    assert chat.controller.why_so_much(ended) == ""


def test_any_chat_starts_warm_from_a_pinned_file(new_chat: NewChat, tmp_path: Path) -> None:
    manual = tmp_path / "manual.txt"
    manual.write_text(MANUAL * 2)
    chat = new_chat()

    assert "starts warm" in chat.do(f"/pin 'the manual' {tmp_path}/man*.txt")
    chat.do(f"/file {manual}")
    usage = chat.ask("How many are red?")

    assert usage.cached.total > len(MANUAL * 2)
    assert usage.prefilled_tokens < 40
    assert chat.pins()["the manual"] > len(MANUAL * 2)
    chat.do("/unpin all")
    assert chat.pins() == {}


def test_a_pin_says_under_which_system_prompt_it_is_warm(new_chat: NewChat, tmp_path: Path) -> None:
    """A pin made with a system prompt was cold in other chats, which nothing said."""
    (tmp_path / "manual.txt").write_text(MANUAL)
    chat = new_chat()
    pin = f"/pin {tmp_path}/manual.txt"
    assert f'A new chat with the system prompt "{SYSTEM}" that begins' in chat.do(pin)

    chat.do("/system clear")

    assert "A new chat without a system prompt that begins with the same files" in chat.do(pin)


def test_clearing_has_another_name(new_chat: NewChat) -> None:
    chat = new_chat()
    chat.ask("My name is Ada.")
    chat.do("/pin")  # waits until it is written
    assert chat.kept.status().num_packs > 0

    assert chat.do("/cache drop --yes").endswith("deleted.\n")

    assert chat.kept.status().num_packs == 0


def test_a_pinned_file_stands_behind_the_date_of_today(new_chat, tiny, tmp_path):
    """What was pinned began with 1 January 1970 where a template writes the date: no chat met it.

    The day here has a length of a thousand years, so that none ends while the test runs.
    """
    dated = shutil.copytree(tiny, tmp_path / "dated")
    template = dated / "chat_template.jinja"
    template.write_text("{{ strftime_now('%Y')[:1] }} thousand" + template.read_text())
    (tmp_path / "manual.txt").write_text(MANUAL * 2)
    chat = new_chat(model=dated)

    told = chat.do(f"/pin {tmp_path}/manual.txt")
    chat.do(f"/file {tmp_path}/manual.txt")

    assert "starts warm" in told
    assert chat.ask("How many are red?").cached.total > len(MANUAL * 2)
    template.write_text("{{ strftime_now('%d') }}" + template.read_text())
    assert "writes the date" in new_chat(model=dated).do(f"/pin {tmp_path}/manual.txt")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/pin", "The conversation is empty."),
        ("/pin missing.txt", "There is no file missing.txt, and no pin of that name."),
        ("/pin two missing.txt", "missing.txt cannot be read"),
        ("/unpin x", "There is no such pin."),
        ("/unpin", "The conversation is empty."),
        ("/forget", "The conversation is empty."),
        ("/forget everything", "everything is unknown here."),
    ],
)
def test_what_cannot_be_done_is_a_sentence(new_chat: NewChat, line: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        new_chat().do(line)


def test_a_forgotten_conversation_is_nowhere_and_what_others_share_stays(new_chat, tmp_path):
    chat = new_chat()
    chat.ask("I like ships.")
    other = chat.controller.require_session()
    shared = other.conversation.context_ids()
    chat.controller.begin_new()
    chat.ask(SECRET)
    chat.ask("And on Mondays?")
    chat.do("/pin")
    ids = chat.controller.context_ids
    needle = encode_ids(ids[len(ids) // 2 :][:BLOCK_SIZE])
    assert is_anywhere(tmp_path, needle)
    with pytest.raises(UsageError, match="/forget yes"):
        chat.do("/forget")

    told = chat.do("/forget yes")

    assert "Forgotten: the conversation, and " in told
    assert chat.controller.session is None
    assert not is_anywhere(tmp_path, SECRET.encode())
    assert not is_anywhere(tmp_path, needle)
    assert chat.pins() == {}
    assert chat.controller.host.locate([ids]).result(10)[0].cached.total < len(ids) // 2
    [stays] = chat.controller.host.locate([shared]).result(10)
    assert stays.cached.total >= len(shared) - BLOCK_SIZE
    assert chat.kept.verify().is_sound
    assert chat.kept.status().num_tokens >= len(shared) - BLOCK_SIZE
    chat.controller.open(other.session_id)
    assert chat.ask("And boats?").cached.total >= len(shared) - BLOCK_SIZE


@pytest.mark.parametrize("what", ["", "last "])
def test_the_words_go_where_the_kv_cannot_be_reached(new_chat, tmp_path, what):
    """A cache directory that was no directory kept every word of what was to be forgotten."""
    (tmp_path / "kv").write_text("no directory")
    chat = new_chat()
    chat.ask(SECRET)
    assert is_anywhere(tmp_path, SECRET.encode())

    with pytest.raises(StoreError, match=r"but not all .* kept of it\. Cannot use") as told:
        chat.do(f"/forget {what}yes")

    assert told.value.message.startswith("Forgotten: the ")
    assert not is_anywhere(tmp_path, SECRET.encode())
    assert not chat.controller.context_ids
    chat.ask("I like ships.")


def test_the_words_stay_while_others_hold_the_kv(new_chat: NewChat, tmp_path: Path) -> None:
    """They are what it can be done again by, in a moment."""
    chat = new_chat()
    chat.ask(SECRET)
    chat.do("/pin")  # waits until it is written

    with (tmp_path / "kv" / LOCK_NAME).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreInUse):
            chat.do("/forget yes")

    assert is_anywhere(tmp_path / "sessions", SECRET.encode())
    assert "Forgotten: the conversation, and " in chat.do("/forget yes")
    assert not is_anywhere(tmp_path, SECRET.encode())


def test_forgetting_the_last_turn_leaves_the_turns_before(new_chat, tmp_path):
    chat = new_chat()
    chat.ask("I like ships.")
    chat.ask(SECRET)
    session = chat.controller.require_session()
    before = session.conversation.path()
    needle = encode_ids(
        [token for turn in before[2:] for token in turn.token_ids][8 : 8 + BLOCK_SIZE]
    )
    chat.do("/undo")
    chat.do("/redo")

    assert "Forgotten: the last turn, and " in chat.do("/forget last yes")

    assert not is_anywhere(tmp_path, SECRET.encode())
    assert not is_anywhere(tmp_path, needle)
    session.conversation.check()
    assert session.conversation.path() == before[:2]
    num_before = sum(len(turn.token_ids) for turn in before[:2])
    assert chat.ask("What do I like?").cached.total >= num_before - BLOCK_SIZE
    read = chat.controller.host.store.read(session.session_id)  # type: ignore[union-attr]
    assert read.notes == ()
    assert read.conversation.path() == session.conversation.path()
    chat.do("/forget last yes")
    chat.do("/forget last yes")
    assert "Forgotten: the conversation" in chat.do("/forget yes")


def test_files_that_do_not_fit_are_no_pin_and_the_error_speaks_of_files(new_chat, tmp_path):
    """It said "The prompt has 16,926 tokens ... start a new conversation", of a pin."""
    chat = new_chat()
    chat.controller.host.wait_until_ready()
    limit = chat.controller.host.ready.context_limit  # type: ignore[union-attr]
    (tmp_path / "long.txt").write_text("ship " * limit)

    with pytest.raises(UsageError, match=f"These files have .* the context holds {limit:,}"):
        chat.do(f"/pin {tmp_path}/long.txt")

    assert chat.pins() == {}


def test_what_chats_with_the_projects_file_begin_with_is_pinned(new_chat, tmp_path):
    (tmp_path / "AGENTS.md").write_text(MANUAL * 2)
    project = ProjectFile(tmp_path, None)
    project.use(True)
    chat = new_chat()
    controller = chat.controller
    controller.surroundings = replace(controller.surroundings, project=project)

    controller.set_system("Be brief.")
    chat.ask("Which ships are red?")
    keep_project(controller)
    controller.host.forget([]).result()
    assert not chat.pins(), "the file is not in this system prompt"

    controller.begin_new()
    controller.set_system(project.joined("Be brief."))
    for question in ("Which ships are red?", "And blue?"):
        chat.ask(question)
        keep_project(controller)
    controller.host.forget([]).result()  # it waits for what was asked before it
    [(label, num_tokens)] = chat.pins().items()
    assert label.startswith("project ")
    assert num_tokens > len(MANUAL) // BLOCK_SIZE

"""A pin can be attached by its name, in any later chat, and is read from the cache there."""

from collections.abc import Callable
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.chat.attachment import PinFiles, mentioned_files, mentioned_pins, unattached
from kvchat.chat.controller import ChatController
from kvchat.chat.host import ChatHost
from kvchat.chat.store import SessionStore
from kvchat.core.errors import UsageError
from kvchat.core.types import Usage
from kvchat.terminal.command_runner import build_registry
from kvchat.terminal.commands import Argument
from kvchat.terminal.completion import LineCompleter
from support.script_commands import carry_out
from support.tiny_host import BLOCK_SIZE, answer_options, finish
from unit.terminal.conftest import BeginHost

MANUAL = "Of the twelve ships in the harbour three are red and nine are blue.\n"


class Chat:
    """One life of the program on a store that survives it."""

    def __init__(self, host: ChatHost, kept: StoreAdmin | None, pins: PinFiles) -> None:
        self.controller = ChatController(
            host, lambda *_: host, None, answer_options(), kept=kept, pins=pins
        )

    def do(self, line: str) -> str:
        return carry_out(self.controller, line)

    def ask(self, text: str) -> tuple[Usage, list[str]]:
        """Send a message as the prompt does, @names included; also return what was said."""
        notes = self.controller.attach_mentioned(text)
        return finish(self.controller.ask(text)).usage, notes


NewChat = Callable[..., Chat]


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    for name in ("a.md", "b.md"):
        (tmp_path / "docs" / name).write_text(f"{name}: {MANUAL}")
    return tmp_path / "docs"


@pytest.fixture
def new_chat(begin_host: BeginHost, tiny: Path, tmp_path: Path) -> NewChat:
    def begin(is_incognito: bool = False) -> Chat:
        kept = None if is_incognito else tmp_path / "kv"
        store = None if is_incognito else SessionStore(tmp_path / "sessions")
        admin = StoreAdmin(kept) if kept is not None else None
        host = begin_host(tiny, store, kept=kept)
        return Chat(host, admin, PinFiles(tmp_path / "state" / "pins.json"))

    return begin


@pytest.mark.parametrize("way", ["/file", "@"])
def test_a_new_process_attaches_a_pin_by_its_name_and_reads_it_from_the_disk(new_chat, docs, way):
    told = new_chat().do(f"/pin manual {docs}/*.md")
    assert "/file manual attaches it." in told
    again = new_chat()

    if way == "/file":
        assert again.do("/file manual").startswith("Attached manual, 2 files, ")
        usage, notes = again.ask("How many are red?")
    else:
        usage, notes = again.ask("How many are red in @manual?")

    assert notes == []
    num_pinned = sum(len(f"a.md: {MANUAL}") for _ in range(2)) // BLOCK_SIZE * BLOCK_SIZE
    assert usage.cached.disk >= num_pinned
    assert usage.prefilled_tokens < 60
    text = again.controller.place.user_turns[0].text
    assert text.startswith("a.md:\n```\n")
    assert "\nb.md:\n```\n" in text


def test_a_file_that_is_attached_twice_is_sent_once(new_chat: NewChat, docs: Path) -> None:
    """/file notes.md, and then @notes.md in the message, sent the file twice."""
    chat = new_chat()
    chat.do(f"/file {docs}/*.md")
    chat.do(f"/file {docs}/a.md")
    chat.ask(f"Which are red in @{docs}/b.md?")

    text = chat.controller.place.user_turns[0].text
    assert [text.count(f"{name}:\n") for name in ("a.md", "b.md")] == [1, 1]


def test_a_file_that_changed_since_is_said_and_only_what_follows_is_read_again(new_chat, docs):
    new_chat().do(f"/pin manual {docs}/*.md")
    (docs / "b.md").write_text("All of them are green.")

    usage, [note] = new_chat().ask("Which are red in @manual?")

    assert note.startswith("Since it was pinned, b.md changed: it is read again from there on.")
    assert usage.cached.disk >= len(MANUAL) // BLOCK_SIZE * BLOCK_SIZE


def test_a_file_that_vanished_since_is_one_sentence_and_nothing_is_attached(new_chat, docs):
    new_chat().do(f"/pin manual {docs}/*.md")
    (docs / "b.md").unlink()
    chat = new_chat()

    for attach in (lambda: chat.do("/file manual"), lambda: chat.ask("What says @manual?")):
        with pytest.raises(UsageError, match=r"The pin manual needs all its files: .*b\.md cannot"):
            attach()
        assert chat.controller.attached == ()
        assert chat.controller.session is None


def test_unpin_removes_the_name_and_the_list_is_private(new_chat, docs, tmp_path):
    chat = new_chat()
    chat.do(f"/pin manual {docs}/*.md")
    listed = tmp_path / "state" / "pins.json"
    assert listed.stat().st_mode & 0o777 == 0o600
    assert MANUAL.strip() not in listed.read_text()

    chat.do("/unpin manual")

    assert "manual" not in listed.read_text()
    with pytest.raises(UsageError, match="manual cannot be read"):
        chat.do("/file manual")


def test_a_pin_whose_kv_was_deleted_is_listed_and_can_still_be_attached(new_chat, docs):
    chat = new_chat()
    chat.do(f"/pin manual {docs}/*.md")
    chat.do("/cache clear --yes")

    assert chat.do("/pin list") == (
        "manual: 2 files, without KV on disk: it can be attached, and is read again\n"
    )
    assert chat.do("/file manual").startswith("Attached manual, 2 files, ")
    assert chat.do("/unpin manual").startswith("1 pin removed.")
    assert chat.do("/pin list") == "Nothing is pinned.\n"


def test_incognito_attaches_a_pin_and_writes_nothing(new_chat, docs, tmp_path):
    new_chat().do(f"/pin manual {docs}/*.md")
    before = (tmp_path / "state" / "pins.json").read_bytes()
    chat = new_chat(is_incognito=True)

    assert chat.do("/file manual").startswith("Attached manual, 2 files, ")
    with pytest.raises(UsageError, match="keeps no KV on disk"):
        chat.do(f"/pin other {docs}/*.md")
    assert (tmp_path / "state" / "pins.json").read_bytes() == before


def test_a_file_comes_before_a_pin_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pins = {"manual": [Path("/x/a.md"), Path("/x/b.md")], "the book": [Path("/x/c.md")]}
    text = 'Compare @manual, @"the book" and @manual.'

    assert mentioned_files(text, pins) == [Path("/x/a.md"), Path("/x/b.md"), Path("/x/c.md")]
    assert mentioned_pins(text, pins) == ["manual", "the book"]
    assert unattached("@notes.md and @manual.md", {"manual.md"}) == ["There is no file notes.md"]
    Path("manual").write_text("a file")
    assert mentioned_files(text, pins) == [Path("manual"), Path("/x/c.md")]
    assert mentioned_pins(text, pins) == ["the book"]


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("see @man", "see @manual"),
        ('see @"the', 'see @"the book"'),
        ("see @the", 'see @"the book"'),
        ("/file man", "/file manual"),
        ("/unpin man", "/unpin manual"),
        ("/unpin the b", "/unpin the book"),
    ],
)
def test_the_names_of_pins_complete(line, completed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pins = (("manual", "pinned, 2 files"), ("the book", "pinned, 1 file"))
    completer = LineCompleter(build_registry(), {Argument.PIN: lambda: pins})

    [found] = completer.get_completions(Document(line), CompleteEvent())

    assert line[: len(line) + found.start_position] + found.text == completed


def test_a_damaged_list_is_no_pin(tmp_path: Path) -> None:
    (tmp_path / "pins.json").write_text('{"version": 1, "pins": {"a": 3, "b": [], "c": {}}}')
    pins = PinFiles(tmp_path / "pins.json")

    assert pins.paths() == {}
    pins.put("manual", [])
    assert pins.paths() == {}

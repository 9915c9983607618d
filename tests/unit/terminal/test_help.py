"""/help, the first screen, completion, and what small commands say."""

import asyncio
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from rich.cells import cell_len

from kvchat.chat.attachment import matching_files, unattached
from kvchat.chat.conversation import Conversation, Role, Turn
from kvchat.chat.documents import to_markdown
from kvchat.core.errors import UsageError
from kvchat.core.types import FinishReason
from kvchat.terminal.command_runner import build_registry
from kvchat.terminal.commands import DAILY, Argument, Invocation
from kvchat.terminal.commands_help import EXAMPLES, help_
from kvchat.terminal.completion import LineCompleter
from kvchat.terminal.paint import Painter, Row
from kvchat.terminal.pickers import Picker
from kvchat.terminal.script_commands import ScriptCommands, ScriptPage
from kvchat.terminal.status import StatsLevel
from kvchat.terminal.theme import Glyphs, Look
from kvchat.terminal.view import Choice
from support.chat_screen import ChatScreen

PLAIN = Look(has_colour=False, is_plain=True)
SPOKEN = Look(has_colour=False, is_plain=True, is_spoken=True)
StartChat = Callable[..., ChatScreen]


def test_every_command_has_two_examples_that_are_typed_as_they_stand() -> None:
    registry = build_registry()
    for command in registry.commands:
        name = command.name
        assert len(EXAMPLES[name]) == 2, name
        typed = [registry.parse(line, is_typed=True) for line, _ in EXAMPLES[name]]
        assert all(isinstance(line, Invocation) for line in typed), name
        assert any(isinstance(line, Invocation) and line.command.name == name for line in typed)


def test_no_example_is_of_a_command_that_does_not_exist() -> None:
    assert set(EXAMPLES) == {command.name for command in build_registry().commands}


class _Screen(ScriptPage):
    """A page on a screen of so many rows."""

    num_screen_rows = math.inf

    def has_room(self, rows: Sequence[Row]) -> bool:
        return len(rows) + 4 <= self.num_screen_rows


def _helped(arguments: str, columns: int, look: Look, num_rows: float = math.inf) -> list[str]:
    """Return the rows that /help writes in a width."""
    said: list[str] = []
    page = _Screen(said.append, Painter(look), columns)
    page.num_screen_rows = num_rows
    # /help asks nothing of the conversation.
    commands = ScriptCommands(None, page, build_registry(), StatsLevel.OFF)  # type: ignore[arg-type]
    asyncio.run(help_(commands, arguments))
    return "".join(said).splitlines()


@pytest.mark.parametrize("look", [PLAIN, SPOKEN], ids=["plain", "spoken"])
def test_help_fits_on_a_screen_and_names_every_command(look: Look) -> None:
    """It had 58 rows on a screen of 30: the first half was gone at once."""
    for columns in (80, 100, 200):
        rows = _helped("", columns, look)
        assert len(rows) <= 21  # 24 less the prompt and the toolbar
        assert all(cell_len(row) <= columns for row in rows)
    words = set(" ".join(rows).replace(",", " ").replace(":", " ").split())
    assert {f"/{command.name}" for command in build_registry().commands} <= words
    assert len(_helped("", 40, look)) <= 37


@pytest.mark.parametrize(
    ("columns", "num_rows"), [(100, 30), (80, 24), (60, 20), (40, 12), (30, 12)]
)
def test_help_scrolls_nothing_away_on_a_small_screen(columns: int, num_rows: int) -> None:
    """At 30 columns it had twice the rows of the screen, and there is no pager."""
    rows = _helped("", columns, PLAIN, num_rows)

    assert len(rows) + 3 <= num_rows  # what was typed, the prompt, the toolbar
    assert all(f"/{name}" in "\n".join(rows) for name in DAILY)
    assert "/help all" in " ".join(rows)


@pytest.mark.parametrize(
    ("columns", "explained"), [(100, "beside the answers there are"), (80, "/retry")]
)
def test_help_during_an_answer_is_shown_whole(start_chat, tmp_path, columns, explained):
    """At 100 by 30 its last rows were "… 4 more rows, after the answer"."""
    chat = start_chat("--gate", str(tmp_path / "never"), columns=columns, rows=30)
    chat.enter("gated 60").wait_for("word20")
    chat.enter("/help").wait_for_shown("every day").wait_for_shown("/help all")
    chat.wait_for_shown(explained)
    assert "more rows" not in chat.shown


@pytest.mark.parametrize("look", [PLAIN, SPOKEN], ids=["plain", "spoken"])
def test_all_commands_are_explained_when_asked_for(look: Look) -> None:
    *rows, _ = _helped("all", 240, look)
    for command in build_registry().commands:
        [row] = [row for row in rows if row.split(":")[0].split()[:1] == [f"/{command.name}"]]
        assert command.help in row
        if look.is_spoken:  # a reader hears no columns
            assert "  " not in row


def _completed(line: str) -> list[str]:
    completer = LineCompleter(build_registry(), {})
    found = completer.get_completions(Document(line), CompleteEvent())
    return [completion.text for completion in found]


def test_saved_conversations_are_read_on_another_thread() -> None:
    """Tab after /resume read every session file on the loop that draws the screen."""
    threads: list[int] = []

    def sessions() -> Iterator[tuple[str, str]]:
        threads.append(threading.get_ident())
        yield "20261126-101500-abcd", "Holiday plans"

    async def completed(line: str) -> list[str]:
        completer = LineCompleter(build_registry(), {Argument.SESSION: sessions})
        found = completer.get_completions_async(Document(line), CompleteEvent())
        return [completion.text async for completion in found]

    assert asyncio.run(completed("/resume 2026")) == ["20261126-101500-abcd"]
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
    assert asyncio.run(completed("/cache v")) == ["verify"]
    assert len(threads) == 1


def test_completion_goes_by_use_ends_with_exit_and_knows_subcommands() -> None:
    names = _completed("/")
    assert names[:3] == ["help", "retry", "edit"]
    assert names[-1] == "exit"
    assert len(names) == len(build_registry().commands)
    assert _completed("/cache v") == ["verify"]
    assert _completed("/stats ") == ["on", "off", "full"]
    assert _completed("/think o") == ["on", "off"]


def line_after(line: str) -> str:
    """Return a line with its only completion."""
    [found] = LineCompleter(build_registry(), {}).get_completions(Document(line), CompleteEvent())
    return line[: len(line) + found.start_position] + found.text


def test_a_file_that_is_completed_after_an_at_is_a_word_of_its_own(tmp_path, monkeypatch):
    """`@notes.txt`, completed, and then "what" was the file notes.txtwhat."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    for name in ("notes.txt", "my list.txt", "docs/one.md"):
        (tmp_path / name).write_text("x")

    assert line_after("see @no") == "see @notes.txt "
    assert line_after("@my") == '@"my list.txt" '
    assert line_after('@"no') == '@"notes.txt" '
    assert line_after("@do") == "@docs/"
    assert line_after("@docs/o") == "@docs/one.md "


def test_a_name_with_spaces_completes_to_its_end(tmp_path, monkeypatch):
    """Within the quotation marks that a directory was completed with, nothing completed; what /file
    completed without any was two names to it.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my docs").mkdir()
    for name in ("my docs/one two.md", "it's.txt"):
        (tmp_path / name).write_text("x")

    assert line_after("see @my") == 'see @"my docs/'
    assert line_after('see @"my docs/') == 'see @"my docs/one two.md" '
    assert line_after('see @"my docs/one t') == 'see @"my docs/one two.md" '
    assert line_after('"Look at @it') == '"Look at @"it\'s.txt" '
    assert line_after("/file my") == '/file "my docs/'
    assert line_after('/file it.txt "my docs/one t') == '/file it.txt "my docs/one two.md" '
    assert line_after("/file it") == '/file "it\'s.txt" '
    assert _completed('see @"my docs/one two.md" ') == []


def test_a_name_that_neither_a_file_nor_a_pin_has_is_said_in_one_line(tmp_path: Path) -> None:
    """`@manual` without such a pin was sent as text, and nothing said so."""
    there = tmp_path / "notes.txt"
    there.write_text("x")
    text = f"@{there} and @ntoes.txt, @docs/nothing, me@example.org, @ntoes.txt"
    assert unattached(text) == ["There is no file ntoes.txt or docs/nothing"]
    assert unattached("@manual, how do I pin?") == ["There is no file or pin manual"]
    near = "There is no file or pin manaul (there is a pin manual)"
    assert unattached("@manaul", {"manual"}) == [near]
    many = "There is no file or pin a or b or c or 2 more"
    assert unattached("@a @b @c @d @e") == [many]


def test_decorators_in_a_pasted_text_are_no_files() -> None:
    code = "What does this do?\n@property\ndef f(self): ..."
    assert unattached(code) == []
    assert unattached(f"{code}\n@notes.txt") == ["There is no file notes.txt"]


def test_what_is_no_file_is_not_called_missing(tmp_path, monkeypatch):
    """A directory went out as text in silence, and "there is no file /dev/zero" was not true."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert unattached("@docs, @docs/ @pipe @docs/*.md") == [
        "docs is a directory",
        "docs/ is a directory",
        "pipe is not a regular file",
        "@ takes one file, /file docs/*.md all that match",
    ]


def test_a_pattern_names_the_files_that_match(tmp_path: Path) -> None:
    for name in ("b.md", "a.md", "c.txt"):
        (tmp_path / name).write_text("x")
    assert matching_files(f"{tmp_path}/*.md").paths == (tmp_path / "a.md", tmp_path / "b.md")
    assert matching_files(f"{tmp_path}/none.md").paths == (tmp_path / "none.md",)
    with pytest.raises(UsageError, match="No file is named "):
        matching_files(f"{tmp_path}/none*")


def test_an_exported_fence_stands_on_its_own_line() -> None:
    conversation = Conversation("20260101-120000-abcd", 0.0)
    for number, (role, text) in enumerate(
        [(Role.USER, "Code?"), (Role.ASSISTANT, "```python\nx = 1\n```")], start=1
    ):
        end = FinishReason.STOP if role is Role.ASSISTANT else None
        conversation.add(Turn(number, number - 1, role, text, (1,), "t", float(number), finish=end))
    assert "**You:** Code?\n" in to_markdown(conversation)
    assert "**Assistant:**\n\n```python\nx = 1\n```\n" in to_markdown(conversation)


def test_a_long_question_is_wrapped_and_not_clipped() -> None:
    question = "Forget this conversation for good, text and KV? KV that others share stays."
    picker = Picker(question, [Choice("no"), Choice("yes")])
    text = "".join(part for _, part, *_ in picker.fragments(12, 40, Glyphs()))
    assert " ".join(text.split()).startswith(question)
    assert all(len(row) <= 40 for row in text.split("\n"))


@pytest.mark.parametrize(("columns", "rows"), [(100, 30), (40, 12)])
def test_the_first_screen_says_what_the_model_is_and_what_to_try(start_chat, columns, rows):
    chat = start_chat(columns=columns, rows=rows)
    chat.wait_for_shown("❯")
    first, second, third, *_ = chat.lines
    assert first.startswith("kvchat ")
    tries = " · /file PATH · /help keys" if columns == 100 else ""
    assert second == f"a model on this machine; try: a question{tries}"
    assert third == ""


def test_small_commands_say_what_they_did_and_undo_is_taken_back_whole(start_chat, tmp_path):
    chat = start_chat(columns=100, rows=40)
    for number, text in enumerate(("one", "two", "three"), start=1):
        chat.enter(text).wait_for(lambda shown, n=number: shown.count("first token") == n)  # type: ignore[misc]
    chat.enter("/undo 3").wait_for("Back before: one").enter("/redo")
    chat.wait_for("Back after: three, the last of 3 messages  (/undo steps back)")
    chat.enter("/think on").wait_for(
        lambda text: "no switch for thinking; on changes nothing." in " ".join(text.split())
    )
    chat.enter("/think hide").wait_for("Thinking is hidden.")
    chat.enter("/stats full").wait_for("Statistics after answers: all figures.")
    chat.enter("/export pdf").wait_for("pdf is no format of /export.")
    chat.enter("/model").wait_for("On this machine:").wait_for("shipped with kvchat")
    chat.enter("/edit 9").wait_for("9 is no message; on this branch they are numbered 1 to 3.")
    chat.enter("/hlep").wait_for("There is no command /hlep. Did you mean /help?")
    chat.wait_for_shown("❯ /hlep").type("\x15").enter("think").wait_for("thinking; /think show")
    chat.wait_for("The answer is 42.")
    assert "Let me see." not in chat.text
    chat.enter("/help undo").wait_for("/undo 3").wait_for("before the last three")
    chat.enter("What is in @nothing.txt?").wait_for("There is no file nothing.txt: sent as text.")

"""What a newcomer stumbled over in the first hour: each test tells what it was."""

import io
from collections.abc import Callable
from pathlib import Path

from prompt_toolkit.data_structures import Size

from kvchat.terminal.terminal_io import HeldOutput
from support.chat_screen import ChatScreen

StartChat = Callable[..., ChatScreen]


def test_the_toolbar_tells_of_the_loading_from_the_start(start_chat, tmp_path):
    """It was empty until the first news came: nothing told why there was no answer."""
    chat = start_chat("--loading", str(tmp_path / "never"), "--silent")
    chat.wait_for("scripted · loading the model")


def test_any_key_makes_room_for_the_toolbar_again(start_chat: StartChat) -> None:
    """Notices stayed until Enter, in the place of the toolbar."""
    chat = start_chat()
    chat.type("\x03").wait_for("Ctrl-C again leaves.")
    chat.type("x").wait_for(lambda _: "Ctrl-C again leaves." not in chat.shown)


def test_the_toolbar_says_how_to_give_up_an_edit(start_chat: StartChat) -> None:
    chat = start_chat()
    chat.enter("one").wait_for("tokens, ")
    chat.enter("/edit").wait_for("Editing message 1").type("x")
    chat.wait_for_shown("❯ onex").wait_for_shown("editing 1 · Esc twice gives it up")
    chat.type("\x1b").type("\x1b")
    # A toolbar that is half redrawn says nothing of it either; the prompt is cleared by Esc alone.
    chat.wait_for(lambda _: not any(words in chat.shown for words in ("editing 1", "onex")))
    chat.enter("two").wait_for("You said 'two' (0).").enter("/tree").wait_for("2 you: two")


def test_help_keeps_names_and_meanings_apart(start_chat: StartChat) -> None:
    """The longest usage ran into what the command does."""
    chat = start_chat(columns=100, rows=60)
    chat.enter("/help all").wait_for("/help COMMAND says more.")
    assert "/export [md|html|json|jsonl] [PATH]  write the conversation" in chat.text
    assert "/cache [tree|why|verify|gc|clear]  KV kept on disk" in chat.text
    chat.enter("/help keys").wait_for("one line, all figures, none")
    assert "Alt-Enter, Ctrl-J, \\ Enter         a new line" in chat.text


def test_help_is_readable_on_a_narrow_screen(start_chat: StartChat) -> None:
    chat = start_chat(columns=40, rows=60)
    chat.enter("/help keys").wait_for("none")
    assert "  Esc Esc\n      clear the prompt; on an empty one," in chat.text


def test_a_conversation_is_exported_into_a_directory(start_chat: StartChat, tmp_path: Path) -> None:
    """A directory was refused as a file that exists already."""
    directory = tmp_path / "exports"
    directory.mkdir()
    chat = start_chat(columns=200)
    chat.enter("hello").wait_for("tokens, ")
    chat.enter(f"/export json {directory}").wait_for("Written to")

    [written] = directory.iterdir()
    assert written.suffix == ".json"


def test_a_written_conversation_is_imported_and_gone_on_with(start_chat, tmp_path):
    """What /export wrote could only be read back from the shell."""
    path = tmp_path / "a chat.json"
    chat = start_chat(columns=200)
    chat.enter("hello").wait_for("tokens, ")
    chat.enter(f"/export {path}").wait_for("Written to")
    chat.enter("/new").wait_for("A new conversation")

    chat.enter(f"/import {path}").wait_for(
        lambda text: "is saved and open." in " ".join(text.split())  # the path may wrap the line
    )
    chat.enter("/tree").wait_for("you: hello")

    chat.enter(f"/import {tmp_path / 'nothing'}").wait_for("cannot be read")
    chat.enter("/import").wait_for("needs a file")


def test_erasing_from_the_top_left_corner_is_no_clearing_of_the_screen() -> None:
    """tmux keeps a cleared screen in its scrollback: after Ctrl-L every message was there twice."""
    stdout = io.StringIO()
    stdout.fileno = lambda: 1  # type: ignore[method-assign]
    output = HeldOutput(stdout, lambda: Size(24, 80), "xterm", lambda: None)
    output.erase_down()
    output.flush()

    assert stdout.getvalue() == "\x1b[K\x1b[C\x1b[J\x1b[D"


def test_ctrl_c_clears_what_was_typed_since_the_last_one(start_chat: StartChat) -> None:
    """Two within two seconds left, though a new line had been begun in between."""
    chat = start_chat()
    chat.type("one\x03").wait_for("Ctrl-C again leaves.").type("two").wait_for("❯ two")
    chat.type("\x03").wait_for("Ctrl-C again leaves.").enter("three").wait_for("said 'three' (0)")


def test_a_command_typed_on_the_heels_of_another_waits_for_it(start_chat: StartChat) -> None:
    """It was refused, and put into the prompt again, while the one before was at work."""
    chat = start_chat()
    chat.enter("one").wait_for("tokens, ")
    chat.enter("/retry -n 2").wait_for("Go on from").type("\r/undo\r")
    chat.wait_for("Back before: one")

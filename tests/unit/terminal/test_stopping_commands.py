"""Esc stops what takes long, not answers alone; the words say what is left of it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.chat_screen import ChatScreen

StartChat = Callable[..., ChatScreen]


def test_esc_stops_a_pin_that_is_read(start_chat: StartChat, tmp_path: Path) -> None:
    """It read on for minutes, and only leaving ended it."""
    (tmp_path / "read").write_text("a line of the manual\n" * 400)
    chat = start_chat("--kept", str(tmp_path / "kv"), columns=100)
    chat.enter(f"/pin {tmp_path / 'read'}").wait_for("for the pin · Esc stops")
    chat.type("\x04").wait_for("Esc stops /pin, /exit leaves.")
    chat.enter("/tree").enter("/cache").wait_for_shown("waiting: /cache")
    chat.type("\x1b").wait_for("Stopped: nothing is pinned. What was read stays cached.")
    chat.wait_for("❯ /cache")
    chat.enter("/pin list").wait_for("Nothing is pinned.")
    chat.enter("hello").wait_for("You said 'hello' (0).")


def test_esc_stops_a_pin_that_waits_for_the_model(start_chat: StartChat, tmp_path: Path) -> None:
    """A thread waited with it, and leaving waited for the thread."""
    (tmp_path / "manual").write_text("a line of the manual\n")
    chat = start_chat("--kept", str(tmp_path / "kv"), "--loading", str(tmp_path / "never"))
    chat.enter(f"/pin {tmp_path / 'manual'}").wait_for("waiting for the model · Esc stops")
    chat.type("\x1b").wait_for("Stopped: nothing is pinned.")
    chat.enter(f"/pin {tmp_path / 'manual'}")
    chat.wait_for(lambda _: "waiting for the model · Esc stops" in chat.shown).enter("/exit")
    assert chat.finish() == 0


@pytest.fixture
def loading(start_chat: StartChat, tmp_path: Path) -> tuple[ChatScreen, Path]:
    """A chat that loads another model, until the file is there."""
    loaded = tmp_path / "loaded"
    loaded.touch()
    chat = start_chat("--loading", str(loaded), columns=100)
    chat.enter("hello").wait_for("You said 'hello' (0).").wait_for("on device")
    loaded.unlink()
    return chat.enter("/model another").wait_for("reading weights · Esc stops"), loaded


def test_esc_stops_the_loading_of_another_model(loading: tuple[ChatScreen, Path]) -> None:
    chat, _ = loading
    chat.type("\x1b").wait_for("Stopped: scripted goes on.")
    chat.enter("again").wait_for("You said 'again' (0).")


def test_a_load_that_was_stopped_shows_nothing_any_more(loading: tuple[ChatScreen, Path]) -> None:
    """It loaded on to the end of its step, and its stage stayed in the toolbar for good."""
    chat, loaded = loading
    chat.type("\x1b").wait_for("Stopped: scripted goes on.").wait_until_quiet(0.2)
    size = len(chat.raw)
    loaded.touch()
    chat.wait_until_quiet(0.5)
    chat.enter("again").wait_for("You said 'again' (0).").wait_for("on device")
    assert b"checking the weights" not in chat.raw[size:]

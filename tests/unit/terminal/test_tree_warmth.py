"""`/tree` tells of every turn where its KV is and how long continuing from there takes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvchat.chat.conversation import Conversation, Role, Turn
from kvchat.chat.store import SessionStore
from kvchat.core.types import FinishReason
from kvchat.terminal.history_view import tree_rows
from kvchat.terminal.paint import Painter, RenderContext
from kvchat.terminal.theme import Look
from support.chat_screen import ChatScreen
from support.saved_sessions import save_chat

StartChat = Callable[..., ChatScreen]


def test_every_turn_is_marked(start_chat: StartChat, tmp_path: Path) -> None:
    save_chat(SessionStore(tmp_path / "sessions"), "a long question " * 90, "a long answer " * 90)
    chat = start_chat("--continue", columns=100, rows=30)
    chat.wait_for("cold: ").wait_for("tokens to read, about 2.7 s")
    chat.enter("/tree").wait_for("1 you: ").wait_for("· cold 1.5 s").wait_for("· cold 2.7 s ●")
    chat.enter("lines 3").wait_for("first token")
    chat.enter("/tree").wait_for("2 you: lines 3").wait_for(
        lambda text: text.count("· device 0.1 s") == 4
    )


def _turn(turn_id: int, parent_id: int, role: Role) -> Turn:
    finish = FinishReason.STOP if role is Role.ASSISTANT else None
    return Turn(turn_id, parent_id, role, "words " * 30, (1,), "", 0.0, finish=finish)


def test_rows_of_the_tree_keep_to_a_narrow_screen() -> None:
    conversation = Conversation("", 0.0)
    for number in range(1, 5):
        role = Role.USER if number % 2 else Role.ASSISTANT
        conversation.add(
            Turn(number, number - 1, role, "words " * 30, (1,), "", 0.0, finish=FinishReason.STOP)
        )
    conversation.add(Turn(5, 2, Role.USER, "words " * 30, (1,), "", 0.0, finish=FinishReason.STOP))
    painter = Painter(Look(has_colour=False))

    rows = tree_rows(
        conversation, RenderContext(painter, 40), dict.fromkeys(range(6), "disk 0.1 s")
    )

    assert all(row.cell_len <= 40 for row in rows)
    assert all("disk 0.1 s" in row.plain for row in rows)


def test_an_answer_that_was_cut_off_keeps_to_one_row_too() -> None:
    """At 40 columns "(cut off)" pushed the last letters of the warmth into a second row."""
    conversation = Conversation("", 0.0)
    conversation.add(_turn(1, 0, Role.USER))
    conversation.add(replace(_turn(2, 1, Role.ASSISTANT), finish=FinishReason.CANCELLED))
    painter, marks = Painter(Look(has_colour=False)), dict.fromkeys(range(3), "device 0.1 s")

    narrow = tree_rows(conversation, RenderContext(painter, 40), marks)
    wide = tree_rows(conversation, RenderContext(painter, 80), marks)
    smallest = tree_rows(conversation, RenderContext(painter, 24), marks)

    assert all(row.cell_len <= 40 for row in narrow)
    assert "device 0.1 s" in narrow[-1].plain
    assert "(cut off) · device 0.1 s" in wide[-1].plain
    assert all(row.cell_len <= 24 for row in smallest)


def test_a_branch_under_another_system_prompt_keeps_its_own_price() -> None:
    """After /system the old branch, whose KV is there, was "cold": the price of its copy."""
    conversation = Conversation("", 0.0)
    conversation.add(_turn(1, 0, Role.USER))
    conversation.add(_turn(2, 1, Role.ASSISTANT))
    conversation.add(replace(_turn(3, 0, Role.USER), system="Be brief.", copy_of=1))
    conversation.add(replace(_turn(4, 3, Role.ASSISTANT), copy_of=2))
    marks = {1: "device 0.1 s", 2: "device 0.2 s", 3: "cold 1.0 s", 4: "cold 2.0 s"}

    rows = tree_rows(conversation, RenderContext(Painter(Look(has_colour=False)), 60), marks)

    assert [row.plain.partition(" · ")[2] for row in rows] == [
        "device 0.1 s",
        "device 0.2 s",
        "cold 2.0 s ●",
    ]
    assert rows[2].plain.startswith("system: Be brief.")

"""The commands that move about, name, switch and show, as a person uses them."""

from collections.abc import Callable
from pathlib import Path

from kvchat.chat.conversation import Role
from kvchat.chat.store import SessionStore
from support.chat_screen import ChatScreen

StartChat = Callable[..., ChatScreen]


def _after(text: str, mark: str) -> str:
    return text.rpartition(mark)[2]


def test_going_back_and_forth_in_the_tree_loses_nothing(start_chat: StartChat) -> None:
    chat = start_chat(rows=50)
    chat.enter("one").wait_for("You said 'one' (0).").wait_for("tokens, ")
    chat.enter("two").wait_for("You said 'two' (0).")
    chat.wait_for(lambda text: text.count("tokens, ") == 2)
    chat.enter("/undo").wait_for("Back before: two")
    chat.enter("/redo").wait_for("Back after: two  (/undo steps back)")
    chat.enter("/retry -n 2").wait_for("Go on from").type("\r")
    chat.wait_for("answer 2/3")
    chat.enter("/edit 1").wait_for("Editing message 1").enter(" more")
    chat.wait_for("You said 'one more' (0).").wait_for(lambda text: text.count("tokens, ") == 5)
    chat.enter("/tree").wait_for("3 you: one more")

    tree = _after(chat.text, "/tree")
    for expected in ("├─ 1 you: one", "│  ├─ 2.1 model:", "│  └─ 2.3 model:", "└─ 3 you: one more"):
        assert expected in tree
    chat.enter("/switch 2").wait_for(lambda text: "❯ two" in _after(text, "/switch 2"))


def test_any_blank_ends_the_number_of_an_edited_message(start_chat: StartChat) -> None:
    """A tab, as pasted from a table, was taken for a part of the number."""
    chat = start_chat()
    chat.enter("one").wait_for("tokens, ")
    chat.enter("\x1b[200~/edit 1\ttwo\x1b[201~").wait_for("You said 'two' (0).")


def test_siblings_are_flipped_with_alt_and_the_arrows(start_chat: StartChat) -> None:
    chat = start_chat()
    chat.enter("one").wait_for("tokens, ")
    chat.enter("/retry").wait_for(lambda text: text.count("tokens, ") == 2).wait_for("answer 2/2")
    chat.type("\x1b[1;3D").wait_for("Answer 1 of 2").wait_for("answer 1/2")


def test_rewinding_puts_the_message_into_the_prompt(start_chat: StartChat) -> None:
    chat = start_chat()
    chat.enter("first").wait_for("tokens, ")
    chat.enter("second").wait_for(lambda text: text.count("tokens, ") == 2)
    chat.type("\x1b").type("\x1b").wait_for("Go back before").type("\x1b[A").type("\r")
    chat.wait_for("Back before: first")
    chat.wait_for(lambda text: _after(text, "❯").startswith(" first"))


def test_a_conversation_is_resumed_where_it_was(start_chat: StartChat, tmp_path: Path) -> None:
    chat = start_chat()
    chat.enter("remember this").wait_for("tokens, ")
    chat.enter("/rename Of memory").wait_for("is called: Of memory")
    chat.enter("/exit")
    assert chat.finish() == 0
    assert "kvchat -c" in chat.text

    again = start_chat("--continue")
    again.wait_for("❯ remember this").wait_for("You said 'remember this' (0).")
    again.wait_for("Of memory")
    again.enter("/new").wait_for("A new conversation.")
    again.enter("other").wait_for("You said 'other' (0).").wait_for("tokens, ")
    again.enter("/resume memory").wait_for(lambda t: "remember this" in _after(t, "/resume memory"))
    again.enter("/fork Copy").wait_for("This is a copy now: Copy")
    again.enter("/exit")
    assert again.finish() == 0
    titles = {summary.title for summary in SessionStore(tmp_path / "sessions").summaries()}
    assert titles == {"Of memory", "other", "Copy"}


def test_leaving_at_once_leaves_no_file(start_chat: StartChat, tmp_path: Path) -> None:
    chat = start_chat()
    chat.type("\x04")

    assert chat.finish() == 0
    assert SessionStore(tmp_path / "sessions").ids() == []


def test_a_conversation_is_deleted_only_after_a_yes(start_chat: StartChat, tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "sessions")
    chat = start_chat()
    chat.enter("secret").wait_for("tokens, ")
    chat.enter("/delete").wait_for("for good?").type("\r").wait_for("Kept: secret")
    assert len(store.ids()) == 1
    chat.enter("/delete").wait_for("for good?").type("yes").type("\r").wait_for("Deleted: secret")

    assert store.ids() == []


def test_a_conversation_is_written_to_a_file_once(start_chat: StartChat, tmp_path: Path) -> None:
    path = tmp_path / "out.md"
    chat = start_chat(columns=200)
    chat.enter("hello").wait_for("tokens, ")
    chat.enter(f"/export {path}").wait_for("Written to")
    assert "You said 'hello' (0)." in path.read_text()
    chat.enter(f"/export {path}").wait_for(lambda text: "exists already" in text.replace("\n", " "))


def test_files_go_with_the_next_message(start_chat: StartChat, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("forty-two\n")
    chat = start_chat(columns=120)
    chat.enter(f"/file {notes}").wait_for("Attached notes.txt")
    chat.enter("what is in it?").wait_for("with notes.txt").wait_for("tokens, ")
    chat.enter(f"and in @{notes}?").wait_for(lambda text: text.count("with notes.txt") == 2)
    chat.wait_for(lambda text: text.count("tokens, ") == 2)

    chat.enter("/tree").wait_for("1 you: what is in it?").wait_for("2 you: and in @")
    chat.enter("/show chat").wait_for("❯ what is in it?\n  with notes.txt")
    texts = [turn.text for turn in _conversation(tmp_path).turns()]
    assert "notes.txt:\n```\nforty-two\n```" in texts[0]
    assert texts[0].endswith("what is in it?")
    assert "forty-two" in texts[2]


def test_files_can_be_taken_away_again(start_chat: StartChat, tmp_path: Path) -> None:
    """A file once attached, by mistake or too long to be answered, went with every message."""
    notes = tmp_path / "notes.txt"
    notes.write_text("forty-two\n")
    chat = start_chat(columns=120)
    chat.enter(f"/file {notes}").wait_for("Attached notes.txt")
    chat.enter("/file").wait_for("Attached for your next message: notes.txt.")
    chat.enter("/file clear").wait_for("No file is attached any more.")
    chat.enter(f"/file {notes}").wait_for(lambda text: text.count("Attached notes.txt") == 2)
    chat.enter("/new").wait_for("A new conversation.")
    chat.enter("/file clear").wait_for("No file was attached.")
    chat.enter("hello").wait_for("You said 'hello' (0).")

    assert "with notes.txt" not in chat.text


def test_a_file_longer_than_the_context_is_refused_at_once(start_chat, tmp_path):
    long = tmp_path / "long.txt"
    long.write_text("forty-two " * 20_000)
    chat = start_chat(columns=200)
    chat.enter("hello").wait_for("tokens, ")
    chat.enter(f"/file {long}").wait_for("Attach a part of it.")
    chat.enter("/file clear").wait_for("No file was attached.")


def test_a_file_that_cannot_be_attached_loses_no_message(start_chat, tmp_path):
    binary = tmp_path / "image.bin"
    binary.write_bytes(b"\0\1")
    chat = start_chat(columns=200)
    chat.enter(f"look at @{binary}").wait_for(
        lambda text: "is not a text file" in " ".join(text.split())  # the path may wrap the line
    )

    chat.wait_for_shown(f"❯ look at @{binary}")
    chat.type("\x03").enter("/file /no/such/file").wait_for("cannot be read")


def test_settings_are_shown_and_changed(start_chat: StartChat) -> None:
    chat = start_chat()
    chat.enter("/set max-tokens 10").wait_for("max-tokens is 10.")
    chat.enter("lines 5").wait_for("cut off at the limit")
    chat.enter("/set temperature -1").wait_for("must be 0 to 100")
    chat.enter("/set").wait_for("repetition-penalty")
    chat.enter("/system Be brief.").wait_for("The system prompt is set.")
    chat.enter("/system").wait_for("System prompt: Be brief.")
    chat.enter("/stats").wait_for("engine:").wait_for("blocks hold KV")
    chat.enter("/context").wait_for("tokens:").wait_for("% of 32k")
    chat.enter("/model").wait_for("append-safe")


def test_the_statistics_line_can_be_switched_off(start_chat: StartChat) -> None:
    chat = start_chat()
    chat.type("\x1bOQ").wait_for("Statistics after answers: all figures.")
    chat.type("\x1bOQ").wait_for("Statistics after answers: off.")
    chat.enter("hello").wait_for("You said 'hello' (0).")
    chat.enter("again").wait_for("You said 'again' (0).")

    assert "tokens, " not in chat.text


def test_dear_changes_say_their_price(start_chat: StartChat) -> None:
    chat = start_chat()
    chat.enter("lines 60").wait_for("tokens, ")
    chat.enter("/system Be brief.").wait_for("/system re-reads 1,").wait_for("prompt is set")


def test_another_model_takes_over_and_a_bad_one_does_not(start_chat: StartChat) -> None:
    chat = start_chat()
    chat.enter("hello").wait_for("tokens, ")
    chat.enter("/model missing").wait_for("There is no model missing.")
    chat.enter("/model broken").wait_for("The weights are broken.")
    chat.enter("/model other").wait_for("Now with scripted, cpu, float32.")
    chat.enter("still you?").wait_for("You said 'still you?' (0).")


def test_commands_that_must_not_meet_an_answer_are_put_off(start_chat: StartChat) -> None:
    chat = start_chat()
    chat.enter("slow 400").wait_for("line-0001")
    chat.enter("/undo").wait_for("/undo waits for the answer. Esc stops it.")
    chat.wait_for_shown("❯ /undo")
    chat.type("\x1b").wait_for("stopped").type("\r").wait_for("Back before: slow 400")


def test_the_editor_gets_the_prompt_and_gives_it_back(start_chat, tmp_path):
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nprintf " and more\\nlines" >> "$1"\n')
    editor.chmod(0o755)
    chat = start_chat("--editor", str(editor))
    chat.type("typed").wait_for("❯ typed").type("\x07").wait_for("and more").type("\r")
    chat.wait_for("You said 'typed and more\\nlines' (0).")


def test_an_answer_that_was_cut_off_goes_on_in_its_own_turn(start_chat, tmp_path):
    chat = start_chat()
    chat.enter("/set max-tokens 60").wait_for("max-tokens is 60.")
    chat.enter("lines 4").wait_for("cut off at the limit")
    cut = list(_conversation(tmp_path).turns())[-1]
    chat.enter("/set max-tokens none").wait_for("as many as fit")
    chat.enter("/continue").wait_for("line-0003 of the answer")
    chat.wait_for(lambda text: text.count("tokens, ") == 2)

    whole = list(_conversation(tmp_path).turns())[-1]
    assert whole.text == "\n".join(f"line-{number:04} of the answer" for number in range(4))
    assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids
    assert whole.turn_id == cut.turn_id
    assert "line-0002 of the answer" in chat.text, "the torn line is shown whole"
    chat.enter("/continue").wait_for("❯ /continue\nThe last answer is complete.")


def _conversation(tmp_path: Path):  # type: ignore[no-untyped-def]
    store = SessionStore(tmp_path / "sessions")
    return store.read(store.latest()).conversation


def test_an_edit_that_cannot_be_sent_goes_back_into_the_prompt(start_chat, tmp_path):
    """The tip stayed before the message, and whatever was sent next replaced it."""
    binary = tmp_path / "b"
    binary.write_bytes(b"\0\1")
    chat = start_chat(columns=200)
    chat.enter("one").wait_for("tokens, ")
    chat.enter("two").wait_for(lambda text: text.count("tokens, ") == 2)
    chat.enter(f"/edit 1 see @{binary}").wait_for("is not a text file")
    chat.wait_for_shown(f"❯ see @{binary}").wait_for_shown("editing 1")
    # "editing" also goes for a moment when the rows are drawn again. A key that comes too early
    # after an Esc is Alt and that key.
    chat.type("\x1b").type("\x1b").wait_for(
        lambda _: _is_empty(chat.shown) and "editing" not in chat.shown
    )
    chat.enter("three").wait_for(lambda text: text.count("tokens, ") == 3)

    said = [turn.text for turn in _conversation(tmp_path).path() if turn.role is Role.USER]
    assert said == ["one", "two", "three"]


def test_a_command_takes_the_place_of_a_message_that_does_not_fit(start_chat: StartChat) -> None:
    """/compact was typed behind the refused message, and went to the model with it, again and
    again.
    """
    chat = start_chat("--context", "400", columns=100, rows=40)
    chat.enter("hello").wait_for("tokens, ")
    chat.enter("x" * 500).wait_for("Your message alone has ").wait_for("Typing replaces it")
    chat.wait_for_shown("❯ xxx")
    chat.enter("/context").wait_for(" asked, ").wait_for("% of 400")
    chat.type("\x1b[A").wait_for_shown("❯ /context").type("\x1b[A").wait_for_shown("❯ xxx")


def test_no_command_takes_the_place_of_a_message_that_may_be_amended(start_chat, tmp_path):
    binary = tmp_path / "b"
    binary.write_bytes(b"\0\1")
    chat = start_chat(columns=200)
    chat.enter(f"see @{binary}").wait_for("is not a text file").wait_for_shown(f"❯ see @{binary}")
    chat.type("/x").wait_for_shown(f"❯ see @{binary}/x")


def test_figures_keep_to_a_narrow_screen(start_chat: StartChat) -> None:
    """At 40 columns the bar filled the row, and the figure beside it was on the next."""
    chat = start_chat(columns=40, rows=30)
    chat.enter("hello").wait_for("first token")
    chat.enter("/context").wait_for(
        lambda text: any(
            line.startswith("▱") and line.endswith("left") for line in text.split("\n")
        )
    )
    chat.enter("/help retry").wait_for("  answer the last message again, beside\n  the answers")


def test_a_dear_change_that_is_declined_says_so(start_chat: StartChat) -> None:
    """After a "no" nothing was said."""
    chat = start_chat()
    chat.enter("lines 450").wait_for("tokens, ")
    chat.enter("/system Be brief.").wait_for("Do it all the same?")
    assert "type to search" not in chat.shown
    chat.type("\r").wait_for("Nothing is changed.")
    chat.enter("/system").wait_for("There is no system prompt.")


def test_a_command_that_comes_while_the_model_loads_says_so(start_chat, tmp_path):
    """It said that it waited for an answer, and that Esc would stop that."""
    chat = start_chat("--loading", str(tmp_path / "never"), columns=100)
    chat.enter("hello").wait_for("Esc stops")
    chat.enter("/undo").wait_for("/undo waits for the model, which is loading")


def _is_empty(shown: str) -> bool:
    """Return whether the prompt has no text: its row stands right above the toolbar."""
    return "\n❯\nscripted" in "\n".join(row.rstrip() for row in shown.splitlines())

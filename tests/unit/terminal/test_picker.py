"""The list of saved conversations: told apart, searched inside, renamed, deleted, prefetched."""

from collections.abc import Callable
from pathlib import Path

from kvchat.chat.saved_chats import read_chats
from kvchat.chat.store import SessionStore
from kvchat.terminal.pickers import PAGE_ROWS, Picker
from kvchat.terminal.theme import Glyphs
from kvchat.terminal.view import Choice
from support.chat_screen import ChatScreen
from support.saved_sessions import save_chat

StartChat = Callable[..., ChatScreen]
_CTRL_O, _CTRL_R, _CTRL_X, _DOWN = "\x0f", "\x12", "\x18", "\x1b[B"


class _Actions:
    """Notes what the picker asks for."""

    def __init__(self) -> None:
        self.done: list[tuple[object, ...]] = []

    def highlighted(self, index: int | None) -> None:
        self.done.append(("highlighted", index))

    def rename(self, index: int, title: str) -> None:
        self.done.append(("rename", index, title))

    def delete(self, index: int) -> None:
        self.done.append(("delete", index))


def _drawn(picker: Picker, rows: int, columns: int) -> list[str]:
    text = "".join(fragment[1] for fragment in picker.fragments(rows, columns, Glyphs()))
    return text.split("\n")


def _fill(tmp_path: Path) -> SessionStore:
    store = SessionStore(tmp_path / "sessions")
    save_chat(store, "hello", "Hello to you.", "what is a radix tree", "A tree of prefixes.")
    save_chat(store, "hello", "Hello again.", "my cat is Mia", "A cat named Mia.")
    save_chat(store, "hello", "Hello, script.", is_one_shot=True)
    return store


def test_equal_titles_are_told_apart_by_the_last_words_or_the_time(tmp_path: Path) -> None:
    """Seven rows called hello looked the same."""
    store = _fill(tmp_path)
    for _ in range(2):
        save_chat(store, "hello", "Hello.")

    labels = [chat.label for chat in read_chats(store, store.summaries())]

    assert len(set(labels)) == 5
    assert "hello · what is a radix tree" in labels
    assert "hello · my cat is Mia" in labels


def test_the_highlight_is_told_once_for_every_choice_it_comes_to() -> None:
    actions = _Actions()
    picker = Picker("Go on with", [Choice("a"), Choice("b")], 0, actions)
    picker.move(+1)
    picker.refresh()
    picker.type("no one has it")

    assert actions.done == [("highlighted", 0), ("highlighted", 1), ("highlighted", None)]


def test_a_search_that_finds_hidden_choices_alone_shows_them() -> None:
    """A chat of one prompt was hidden, and a search for its words found nothing."""
    choices = [Choice("ships"), Choice("hello", searched="my name is ada", is_hidden=True)]
    picker = Picker("Go on with", choices, 0, _Actions())
    assert "hello" not in "".join(_drawn(picker, 9, 60))

    picker.type("ada")
    assert picker.result == 1
    picker.type("x")
    assert picker.result is None
    for _ in "adax":
        picker.erase()
    assert "hello" not in "".join(_drawn(picker, 9, 60))


def test_a_title_is_typed_and_a_deletion_is_confirmed() -> None:
    actions = _Actions()
    choices = [Choice("a"), Choice("b")]
    picker = Picker("Go on with", choices, 0, actions)
    picker.begin_renaming()
    picker.type("newx")
    picker.erase()
    assert _drawn(picker, 9, 60)[-1].startswith("New title: new_")
    picker.end_asking(is_wanted=True)
    picker.begin_deleting()
    picker.type("n")
    picker.begin_deleting()
    picker.type("y")

    assert actions.done == [("highlighted", 0), ("rename", 0, "new"), ("delete", 0)]
    assert picker.filter == ""


def test_a_picker_keeps_to_its_rows_and_columns_and_names_its_keys() -> None:
    detail = "cold, about 14 s · 3 min ago · 12 turns"
    chat = Choice("a conversation with a long title", detail, ("asked " * 20, "answered " * 20))
    for columns in (40, 60, 100):
        for rows in (3, 6, 9, 12):
            picker = Picker("Go on with", [chat] * 20, 0, _Actions())
            drawn = _drawn(picker, rows, columns)
            assert len(drawn) <= max(rows, 3)
            assert max(map(len, drawn)) <= columns
            assert "Ctrl-R renames" in drawn[-1]
            assert "cold, about 14 s" in drawn[1]


def test_a_long_list_is_paged_and_says_how_long_it_is() -> None:
    """Of 195 conversations eight rows were shown, and no word of the others."""
    picker = Picker("Go on with", [Choice(f"chat {n}") for n in range(200)], 0, _Actions())
    assert _drawn(picker, 12, 100)[0].endswith("Esc cancels  1 of 200")
    picker.move(+PAGE_ROWS, wraps=False)
    assert _drawn(picker, 12, 40)[0] == "Go on with  9 of 200"
    picker.move(+picker.count, wraps=False)
    assert picker.result == 199
    picker.move(-picker.count, wraps=False)
    assert picker.result == 0

    picker.type("chat 19 or so")
    picker.erase_word()
    picker.erase_word()
    assert _drawn(picker, 12, 40)[0] == "Go on with  chat 19  1 of 12"
    picker.erase_all()
    assert picker.count == 200


def test_the_end_of_a_long_search_and_of_a_long_title_is_seen() -> None:
    """What was typed beyond the row was not seen."""
    picker = Picker("Go on with", [Choice("a", name="holiday")], 0, _Actions())
    picker.begin_renaming()
    picker.type(" plans for the whole of the summer 2027")
    assert _drawn(picker, 9, 40)[-1] == "New title: he whole of the summer 2027_"
    picker.end_asking(is_wanted=False)
    picker.type("words " * 20 + "last")
    assert _drawn(picker, 9, 40)[0].endswith("words last")


def test_special_keys_are_no_search_text(start_chat: StartChat, tmp_path: Path) -> None:
    """PageDown and End put their escape sequences, "[6~[4~", into the search."""
    _fill(tmp_path)
    chat = start_chat(columns=100, rows=30)
    chat.enter("/resume").wait_for_shown("❯ hello · my cat is Mia")
    chat.type("\x1b[D\x1bOP\x1b[3~\x1b[6~").wait_for_shown("❯ hello · what is a radix tree")
    chat.type("\x1b[5~").wait_for_shown("❯ hello · my cat is Mia")
    chat.type("\x1b[F\r").wait_for("A tree of prefixes.")


def test_conversations_are_searched_inside_renamed_and_deleted(start_chat, tmp_path):
    store = _fill(tmp_path)
    chat = start_chat(columns=100, rows=30)
    chat.enter("/resume").wait_for("hello · my cat is Mia").wait_for_shown("cold, about 0.1 s")
    chat.wait_for_shown("┊ A cat named Mia.")
    assert "Hello, script" not in chat.text
    chat.type("prefixes").wait_for_shown("┊ what is a radix tree")
    chat.wait_for(lambda _: "Mia" not in chat.shown)
    chat.type(_CTRL_R).wait_for_shown("New title: hello_").type("\x15trees\r")
    chat.wait_for_shown("❯ trees")
    chat.type("\x7f" * 8).wait_for_shown("my cat is Mia")
    chat.type(_CTRL_O).wait_for_shown("hello").wait_for_shown("hides 1 one-shot")
    chat.type("script").wait_for_shown("┊ Hello, script.")
    chat.type(_CTRL_X).wait_for_shown("Delete it for good?").type("y").wait_for_shown("no match")
    chat.type("\x7f" * 6).wait_for_shown("❯ hello · my cat is Mia").type(_DOWN)
    chat.type("\r").wait_for("A tree of prefixes.")
    chat.wait_for(lambda _: "· trees ·" in chat.shown)

    assert sorted(summary.title for summary in store.summaries()) == ["hello", "trees"]


def test_on_a_small_screen_the_cost_stays(start_chat: StartChat, tmp_path: Path) -> None:
    _fill(tmp_path)
    chat = start_chat(columns=40, rows=12)
    chat.enter("/resume").wait_for_shown("cold, about 0.1 s")
    chat.wait_for_shown("^R rename · ^X delete · ^O one-shots")


def test_on_a_small_screen_no_two_rows_look_alike() -> None:
    """At 40 columns the figures took so much that all questions were "What is the…"."""
    detail = "cold, about 14 s · 3 min ago · 12 turns"
    countries = ("France", "Spain", "Italy")
    choices = [Choice(f"What is the capital of {name}?", detail) for name in countries]

    rows = _drawn(Picker("Go on with", choices, 0, _Actions()), 9, 40)[1:4]

    assert all(name in row for name, row in zip(countries, rows, strict=True))
    assert all("cold, about 14 s" in row for row in rows)

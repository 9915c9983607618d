"""Pickers, blocks of lines, files in messages, settings, the look, the shared file of history."""

import asyncio
import json
import os
import stat
from pathlib import Path

import pytest
from rich.cells import cell_len

from kvchat.chat import answer_settings
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.attachment import mentioned_files, split_attached
from kvchat.chat.conversation import Conversation
from kvchat.chat.conversation import Role as TurnRole
from kvchat.chat.typed_lines import TypedLines
from kvchat.cli.sessions import session_lines
from kvchat.core.errors import UsageError
from kvchat.core.library_environment import set_for_libraries
from kvchat.core.types import SamplingParams
from kvchat.terminal.completion import PrivateHistory
from kvchat.terminal.history_view import tree_rows
from kvchat.terminal.multiline import InputBlocks, edit_text, is_block_open, without_block_marks
from kvchat.terminal.paint import Painter, RenderContext
from kvchat.terminal.pickers import Picker, pick_by_number
from kvchat.terminal.theme import Glyphs, Look, Role
from kvchat.terminal.view import Choice
from support.turns import turn

# Pickers


def test_a_search_that_finds_nothing_says_how_to_go_on() -> None:
    picker = _picker()
    picker.type("zz")
    shown = "".join(text for _, text in picker.fragments(8, 40, Glyphs()))
    assert "no match · Esc cancels" in shown


def _picker() -> Picker:
    return Picker("Go on with", [Choice("radix trees"), Choice("poems", "2 h ago"), Choice("C")])


def test_the_arrows_go_round() -> None:
    picker = _picker()
    picker.move(-1)
    assert picker.result == 2
    picker.move(+1)
    assert picker.result == 0


def test_typing_narrows_the_list_and_erasing_widens_it() -> None:
    picker = _picker()
    picker.type("h ago")
    assert picker.result == 1
    picker.type(" xyz")
    assert picker.result is None
    for _ in " xyz":
        picker.erase()
    assert picker.result == 1


def test_a_long_list_shows_the_part_around_the_cursor() -> None:
    picker = Picker("Pick", [Choice(f"choice {number}") for number in range(50)], 25)
    shown = "".join(fragment[1] for fragment in picker.fragments(6, 40, Glyphs()))

    assert "choice 25" in shown
    assert shown.count("\n") == 5


@pytest.mark.parametrize(
    ("text", "index"), [("1", 0), (" 3 ", 2), ("4", None), ("0", None), ("x", None)]
)
def test_a_number_picks_from_a_plain_list(text: str, index: int | None) -> None:
    assert pick_by_number(text, 3) == index


def test_a_picker_is_measured_in_cells() -> None:
    """Titles of ideographs, two cells each, made rows wider than the screen."""
    choices = [Choice("日本語の会話" * 9, "2 日 · 3 turns"), Choice("日本語" * 9)]
    picker = Picker("日本語" * 9, choices)
    for width in range(30, 100):
        rows = "".join(f[1] for f in picker.fragments(6, width, Glyphs())).split("\n")

        assert max(cell_len(row) for row in rows) <= width
        assert any("2 日 · 3 turns" in row for row in rows)


def test_a_tree_is_measured_in_cells() -> None:
    """Messages of ideographs, two cells each, made rows wider than the screen."""
    conversation = Conversation("id", 0.0)
    conversation.add(turn(1, text="日本語の会話" * 20))
    conversation.add(turn(2, 1, TurnRole.ASSISTANT, "日本語の会話" * 20))

    rows = tree_rows(conversation, RenderContext(Painter(Look()), 60), {})

    assert all(56 <= row.cell_len <= 60 for row in rows)


@pytest.mark.parametrize("text", ["²", "①", "1²", "1" * 5000])
def test_digits_that_make_no_number_pick_nothing(text: str) -> None:
    """A superscript two is a digit that int() refuses, and so are thousands of digits: either
    raised ValueError."""
    assert pick_by_number(text, 3) is None


# Blocks of lines


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["one"], "one"),
        (["one\\", "two"], "one\ntwo"),
        (["ends in two\\\\"], "ends in two\\\\"),
        (['"""', "one", 'two"""'], "one\ntwo"),
        (['"""one', "", "two", '"""'], "one\n\ntwo"),
        (['"""all in one"""'], "all in one"),
        (['not """ at the beginning'], 'not """ at the beginning'),
    ],
)
def test_lines_become_one_message(lines: list[str], message: str) -> None:
    blocks = InputBlocks()

    taken = [blocks.take(line) for line in lines]

    assert taken[:-1] == [None] * (len(lines) - 1)
    assert taken[-1] == message
    assert not blocks.is_open


_MODULE = '"""What it is for."""\n\nimport os\n'
_PROGRAM = '''"""What it is for."""\n\nTEXT = """words"""'''


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_MODULE, _MODULE),
        (_PROGRAM, _PROGRAM),
        ('"""\nWhat it is for.\n"""\n\nimport os', '"""\nWhat it is for.\n"""\n\nimport os'),
        (f'"""\n{_MODULE}"""', _MODULE.rstrip()),
        (f'"""\n{_PROGRAM}\n"""', _PROGRAM),
        ('"""\nthe mark """ is\n"""', 'the mark """ is'),
        ('"""""" ', ""),
    ],
)
def test_a_pasted_text_with_marks_of_its_own_can_be_sent(text: str, message: str) -> None:
    """A pasted module that began with its docstring could never be sent, or lost the outermost
    quotation marks where it ended in some."""
    assert not is_block_open(text)
    assert without_block_marks(text) == message


@pytest.mark.parametrize("text", ['"""', '""""', '"""one', f'"""\n{_MODULE}', '"""\na """ b'])
def test_a_block_goes_on_until_it_is_closed(text: str) -> None:
    assert is_block_open(text)
    assert without_block_marks(text) == text


# Mentioned files


def test_only_files_that_are_there_are_mentioned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b c.txt"):
        Path(name).write_text("x")

    assert mentioned_files("see @a.txt, and @a.txt again") == [Path("a.txt")]
    assert mentioned_files('see @"b c.txt".') == [Path("b c.txt")]
    assert mentioned_files("mail me@a.txt or ask @nobody or @ alone @../nowhere") == []
    assert mentioned_files(f"@{'x' * 5000}") == []


# Settings


def test_every_setting_can_be_changed_by_its_flag_name() -> None:
    options = AskOptions(sampling=SamplingParams(temperature=0.7))
    for name, text in [("temperature", "0"), ("top-p", "0.5"), ("top_k", "40"), ("min-p", "0.1")]:
        options = answer_settings.changed(options, name, text)
    options = answer_settings.changed(options, "--repetition-penalty", "1.1")
    options = answer_settings.changed(options, "seed", "7")
    options = answer_settings.changed(options, "max-tokens", "100")
    options = answer_settings.changed(options, "stop", '"\\n\\n"')

    assert options.sampling == SamplingParams(0.0, 40, 0.5, 0.1, 1.1)
    assert (options.seed, options.max_tokens, options.stops) == (7, 100, ("\n\n",))
    assert {name for name, _ in answer_settings.describe(options)} == set(answer_settings.NAMES)


def test_settings_can_be_unset() -> None:
    options = AskOptions(seed=7, max_tokens=5, stops=("x",))
    for name in ("seed", "max-tokens", "stop"):
        options = answer_settings.changed(options, name, "none")

    assert (options.seed, options.max_tokens, options.stops) == (None, None, ())


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("temprature", "1", "no setting"),
        ("temperature", "hot", "must be a number"),
        ("temperature", "-1", "must be 0 to 100"),
        ("top-k", "1.5", "must be a whole number"),
        ("max-tokens", "0", "1 or more"),
        ("max-tokens", str(10**30), "nearer to 0"),
        ("temperature", "nan", "must be a number"),
        ("stop", '""', "empty"),
    ],
)
def test_values_that_cannot_be_are_refused_in_a_sentence(name: str, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        answer_settings.changed(AskOptions(), name, text)


# The look


@pytest.mark.parametrize(
    ("environment", "color", "has_colour", "is_plain"),
    [
        ({"TERM": "xterm-256color"}, "auto", True, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "auto", False, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, "auto", True, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "always", True, False),
        ({"TERM": "xterm"}, "never", False, False),
        ({"TERM": "dumb"}, "auto", False, True),
        ({"TERM": "xterm", "ACCESSIBLE": "1"}, "auto", False, True),
        ({"TERM": "xterm", "ACCESSIBLE": "0"}, "auto", True, False),
    ],
)
def test_the_environment_decides_the_look(environment, color, has_colour, is_plain):
    look = Look.choose(color, False, environment)

    assert (look.has_colour, look.is_plain) == (has_colour, is_plain)


def test_only_terminals_known_to_reflow_are_taken_to() -> None:
    assert Look.choose("auto", False, {"TERM": "xterm-kitty"}).reflows
    assert Look.choose("auto", False, {"TERM": "screen", "TMUX": "/tmp/x"}).reflows
    assert not Look.choose("auto", False, {"TERM": "xterm-256color"}).reflows
    assert not Look.choose("auto", False, {"TERM": "screen", "STY": "1", "TMUX": "/x"}).reflows


def test_without_colours_no_style_has_one() -> None:
    look = Look(has_colour=False)

    assert all(look.style(role).color is None for role in Role)
    assert not any("ansi" in style for style in look.prompt_styles().values())


# History


def test_history_is_private_and_newest_first(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history"
    history = PrivateHistory(TypedLines(path))
    for text in ("first", "two\nlines", "é\x1b[31m"):
        history.store_string(text)

    assert list(PrivateHistory(TypedLines(path)).load_history_strings()) == [
        "é\x1b[31m",
        "two\nlines",
        "first",
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_damaged_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_bytes(b'"one"\n{torn\n\xff\n17\n"two"\n"torn at the e')

    assert list(PrivateHistory(TypedLines(path)).load_history_strings()) == ["two", "one"]


def test_a_long_history_is_shortened_to_its_newest_entries(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_text("".join(f"{json.dumps(str(number))}\n" for number in range(12_000)))

    entries = list(PrivateHistory(TypedLines(path)).load_history_strings())

    assert entries[0] == "11999"
    assert len(path.read_text().splitlines()) <= 5000


@pytest.mark.parametrize("kind", ["symlink", "directory", "missing"])
def test_without_a_usable_file_there_is_no_history_and_no_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "history"
    if kind == "symlink":
        path.symlink_to("/etc/passwd")
    elif kind == "directory":
        path.mkdir()
    history = PrivateHistory(TypedLines(path))

    assert list(history.load_history_strings()) == []
    if kind != "missing":
        history.store_string("typed")
        assert list(history.load_history_strings()) == []


@pytest.mark.parametrize(
    ("text", "names", "words"),
    [
        ("a.txt:\n```\none\n```\n\nwhat?", ["a.txt"], "what?"),
        ("a.txt:\n````\n```\n````\n\nb c.md:\n```\n\n```\n\n", ["a.txt", "b c.md"], ""),
        ("My code:\n```\none\n```\n\nwhat?", [], "My code:\n```\none\n```\n\nwhat?"),
        ("a.txt: what is it?", [], "a.txt: what is it?"),
        ("./Makefile:\n```\nall:\n```\n\nwhat?", ["Makefile"], "what?"),
        ("./my notes:\n```\nall:\n```\n\nwhat?", ["my notes"], "what?"),
    ],
)
def test_the_summary_of_a_message_leaves_out_its_files(text, names, words):
    assert split_attached(text) == (names, words)


def test_saved_conversations_take_two_rows_each_where_one_is_too_wide() -> None:
    """At 80 columns titles were broken within a word, below the next id."""
    entries = [
        ("20261126-101500-abcd  2026-11-26 10:15    1 turn ", "A title", "(ready in 0.1 s)"),
        ("20261126-101400-abcd  2026-11-26 10:14    2 turns", "A " + "long " * 9 + "one", ""),
    ]
    assert session_lines(entries[:1], 80) == [" ".join(("  ".join(entries[0][:2]), entries[0][2]))]
    assert len(session_lines(entries, None)) == 2
    assert session_lines(entries, 70) == [
        "20261126-101500-abcd 2026-11-26 10:15 1 turn (ready in 0.1 s)",
        "    A title",
        "20261126-101400-abcd 2026-11-26 10:14 2 turns",
        "    A long long long long long long long long long one",
    ]


def test_what_a_field_has_no_room_for_stands_below_its_value() -> None:
    """At 40 columns the second row of a figure in /stats began where the names do."""
    painter, line = Painter(Look()), "cache:  2 of 79,148 blocks hold KV for reuse"
    hung = ["cache:  2 of 79,148 blocks hold KV", "        for reuse"]

    assert [row.plain for row in painter.wrapped(line, 36, hanging=8)] == hung
    assert [row.plain for row in painter.wrapped(line, 20, hanging=8)][1].startswith("blocks")
    assert [row.plain for row in painter.wrapped("a\n\n b", 36, hanging=8)] == ["a", "", " b"]


# The editor


def test_the_editor_has_the_users_environment_and_not_that_of_libraries() -> None:
    name = "KVCHAT_TEST_OF_LIBRARIES"
    set_for_libraries(name, "1")
    try:
        text = asyncio.run(edit_text(f"""sh -c 'echo "${name}|$PATH" > "$0"'""", ""))
    finally:
        os.unsetenv(name)
    assert text == f"|{os.environ['PATH']}"

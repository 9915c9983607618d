"""The built-in tools stay below their directory, cut what is long, and end when told to."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kvchat.chat.tools import ToolCall
from kvchat.tools.local_tools import local_tools
from kvchat.tools.toolbox import MOST_RESULT_CHARS, Toolbox, call_in_words


@pytest.fixture
def place(tmp_path: Path) -> Path:
    root = tmp_path / "work"
    (root / "src").mkdir(parents=True)
    (root / "src" / "a.py").write_text("import os\nprint('Hello')\n")
    (root / "notes.txt").write_text("".join(f"line {n}\n" for n in range(1, 1001)))
    (root / "picture.bin").write_bytes(b"\x00\x01")
    (root / ".git").mkdir()
    (root / ".git" / "hello").write_text("hello")
    (tmp_path / "secret.txt").write_text("hello secret")
    return root


def run(place: Path, name: str, **arguments: Any) -> str:
    return Toolbox(local_tools(place)).run(ToolCall(name, arguments), threading.Event()).text


def test_a_file_is_read_in_parts(place: Path) -> None:
    first = run(place, "read_file", path="notes.txt")
    assert first.startswith("line 1\nline 2\n")
    assert first.endswith("[600 more lines; first_line=401]")

    last = run(place, "read_file", path="notes.txt", first_line=990)
    assert last.splitlines()[0] == "line 990"
    assert last.endswith("line 1000")


def test_files_are_listed_without_those_of_other_programs(place: Path) -> None:
    assert run(place, "list_files").splitlines() == ["notes.txt", "picture.bin", "src/a.py"]
    assert run(place, "list_files", pattern="*.py") == "src/a.py"
    assert run(place, "list_files", path="src", pattern="*.c") == "There is no such file."


def test_lines_are_found_in_texts(place: Path) -> None:
    assert run(place, "search_files", text="HELLO") == "src/a.py:2: print('Hello')"
    assert run(place, "search_files", text="hello", pattern="*.txt") == "No line contains it."


OUTSIDE = ("../secret.txt", "/etc/hostname", "link.txt", "linked/secret.txt")


@pytest.mark.parametrize("path", OUTSIDE)
def test_nothing_outside_the_directory_is_read(place: Path, path: str) -> None:
    (place / "link.txt").symlink_to(place.parent / "secret.txt")
    (place / "linked").symlink_to(place.parent)

    assert "is not below the working directory" in run(place, "read_file", path=path)
    assert "secret" not in run(place, "search_files", text="secret")
    assert "secret" not in run(place, "list_files")


BAD: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("read_file", {}, "KeyError"),
    ("read_file", {"path": "gone.txt"}, "there is no file"),
    ("read_file", {"path": "src"}, "there is no file"),
    ("read_file", {"path": 3}, "must be a text"),
    ("read_file", {"path": "a\0b"}, "must be a text"),
    ("read_file", {"path": "picture.bin"}, "not a text file"),
    ("read_file", {"path": "notes.txt", "first_line": "x"}, "ValueError"),
    ("list_files", {"path": "gone"}, "there is no directory"),
    ("search_files", {"text": "x", "path": "gone"}, "there is no directory"),
    ("run_command", {"command": ""}, "must be a text"),
    ("nothing", {}, "no such tool"),
)


@pytest.mark.parametrize(("name", "arguments", "told"), BAD)
def test_a_bad_call_is_a_result_that_says_so(
    place: Path, name: str, arguments: dict[str, Any], told: str
) -> None:
    text = run(place, name, **arguments)

    assert text.startswith("Error: ")
    assert told in text


def test_a_file_that_cannot_be_opened_is_named_with_the_reason(place: Path) -> None:
    os.mkfifo(place / "pipe")

    assert "there is no file" in run(place, "read_file", path="pipe")


def test_a_command_runs_in_the_directory_and_its_code_is_told(place: Path) -> None:
    assert run(place, "run_command", command="ls; echo oops >&2; exit 3") == (
        "notes.txt\npicture.bin\nsrc\noops\n[exit code 3]"
    )


def test_a_command_has_no_terminal_and_no_input(place: Path) -> None:
    assert run(place, "run_command", command="cat; test -t 1 || echo none") == (
        "none\n[exit code 0]"
    )


def test_long_output_keeps_its_beginning_and_its_end(place: Path) -> None:
    text = run(place, "run_command", command="seq 1 200000")

    assert text.startswith("1\n2\n")
    assert text.endswith("200000\n[exit code 0]")
    assert "left out]" in text
    assert len(text) < MOST_RESULT_CHARS + 100


def test_what_acts_on_a_terminal_is_made_visible(place: Path) -> None:
    text = run(place, "run_command", command=r"printf '\033]0;owned\007 \233x'")

    assert "\x1b" not in text
    assert "\x07" not in text


def test_a_command_ends_when_it_is_told_to_with_all_its_children(place: Path) -> None:
    stop = threading.Event()
    stop.set()
    call = ToolCall("run_command", {"command": "sleep 1000 & echo $! > child; wait"})

    text = Toolbox(local_tools(place)).run(call, stop).text

    assert text.endswith("[stopped by the user]")
    if (place / "child").exists() and (place / "child").read_text().strip():
        stat = Path(f"/proc/{(place / 'child').read_text().strip()}/stat")
        assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_a_call_is_one_safe_line() -> None:
    call = ToolCall("run_command", {"command": "a\n\x1b[31mb", "n": 1})

    assert call_in_words(call) == 'run_command(command="a\\n\\u001b[31mb", n=1)'


def test_permissions_are_by_tool_and_the_safe_one_counts(place: Path) -> None:
    toolbox = Toolbox(local_tools(place), allowed=("read_file",))
    toolbox.permissions.never.add("run_command")

    names = ("read_file", "run_command", "list_files")
    assert [toolbox.permissions.of(name) for name in names] == [True, False, None]


def test_a_command_that_is_always_allowed_allows_no_other(place: Path) -> None:
    """ "always" for one harmless command let every later one run without a question."""
    toolbox = Toolbox(local_tools(place))
    status, other = (ToolCall("run_command", {"command": text}) for text in ("ls", "ls; rm -rf ."))

    toolbox.allow(status)
    toolbox.allow(ToolCall("read_file", {"path": "a"}))

    assert toolbox.permissions.of_call(ToolCall("run_command", {"command": "ls"})) is True
    assert toolbox.permissions.of_call(other) is None
    assert toolbox.permissions.of("run_command") is None
    assert toolbox.permissions.of_call(ToolCall("read_file", {"path": "b"})) is True
    toolbox.permissions.never.add("run_command")
    assert toolbox.permissions.of_call(status) is False

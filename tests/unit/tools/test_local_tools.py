"""The built-in tools stay below their directory, cut what is long, and end when told to."""

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from itertools import count
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


@pytest.mark.parametrize("name", ["list_files", "search_files"])
@pytest.mark.parametrize("inside", ["other.md", "empty/.keep/"])
def test_a_search_ends_in_time_where_no_file_is_like_the_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, inside: str
) -> None:
    """The time was looked at for files like the pattern only: one of *.py among a million others
    went through all of them.
    """
    for number in range(5):
        path = tmp_path / str(number) / inside
        path.mkdir(parents=True) if inside.endswith("/") else path.parent.mkdir()
        path.touch()
    clock = count(0, 9)  # each look is nine seconds later
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))

    assert run(tmp_path, name, text="x", pattern="*.py") == "[there may be more]"
    assert next(clock) <= 9 * 6


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
def test_a_bad_call_is_a_result_that_says_so(place, name, arguments, told):
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


# A process that leaves the session, one whose parent has ended, and ones that come meanwhile.
LEAVING = (
    "setsid sleep 1000 & echo $! > child; sleep 1000",
    "(setsid sh -c 'env -i sleep 1000 & echo $! > child' &); sleep 1000",
    "while true; do setsid sleep 1000 & echo $! > child; sleep 0.01; done",
)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere such a process goes on")
@pytest.mark.parametrize("command", LEAVING)
def test_what_leaves_the_session_of_a_command_ends_with_it(place: Path, command: str) -> None:
    stop, child = threading.Event(), place / "child"

    def stop_it() -> None:
        while not (child.exists() and child.read_text().strip()):
            time.sleep(0.01)
        stop.set()

    threading.Thread(target=stop_it, daemon=True).start()
    text = Toolbox(local_tools(place)).run(ToolCall("run_command", {"command": command}), stop).text

    assert text.endswith("[stopped by the user]")
    stat = Path(f"/proc/{child.read_text().strip()}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_a_command_finds_its_signals_as_a_shell_does(place: Path) -> None:
    assert run(place, "run_command", command="yes | head -1") == "y\n[exit code 0]"


def test_a_command_sees_no_secrets(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = {
        **dict.fromkeys(("OPENAI_API_KEY", "HF_TOKEN", "aws_secret_access_key", "DB_PASS"), "s3"),
        **dict.fromkeys(("GH_PAT", "MYSQL_PWD", "GITHUB_TOKEN", "SERVICE_PASSWORD_FILE"), "s3"),
        "DATABASE_URL": "postgres://me:s3@host/db",
    }
    seen = {
        **dict.fromkeys(("TOKENIZERS_PARALLELISM", "SSH_AUTH_SOCK", "KEYMAP", "KEYBOARD_2"), "ok"),
        "PROXY": "http://host:80/a@b",
    }
    for name, value in (hidden | seen | {"NPM_TOKEN": "ok"}).items():
        monkeypatch.setenv(name, value)
    toolbox = Toolbox(local_tools(place, allowed_secrets=("NPM_TOKEN",)))

    text = toolbox.run(ToolCall("run_command", {"command": "env"}), threading.Event()).text

    assert {line.split("=")[0] for line in text.splitlines()} >= {*seen, "NPM_TOKEN", "PATH", "PWD"}
    assert not any(line.startswith(f"{name}=") for line in text.splitlines() for name in hidden)
    told = run(place, "run_command", command='test -n "$HF_TOKEN"')
    assert told == "[HF_TOKEN is a secret, and not given to commands]\n[exit code 1]"


def test_links_are_followed_below_the_directory_only(place: Path) -> None:
    (place / "AGENTS.md").write_text("the rules")
    (place / "CLAUDE.md").symlink_to("AGENTS.md")
    (place / "src" / "up.md").symlink_to("../CLAUDE.md")
    (place / "whole.md").symlink_to(place / "AGENTS.md")
    (place / "source").symlink_to("src")
    (place / "out").symlink_to("src/../../secret.txt")
    (place / "away").symlink_to("/etc")

    for path in ("CLAUDE.md", "src/up.md", "whole.md", "source/up.md", str(place / "source/up.md")):
        assert run(place, "read_file", path=path) == "the rules"
    assert run(place, "list_files", path="source") == "src/a.py"
    for path in ("out", "away/hostname", "source/../../secret.txt"):
        assert "is not below the working directory" in run(place, "read_file", path=path)


@pytest.mark.parametrize("name", ["read_file", "list_files", "search_files"])
def test_a_loop_of_links_is_a_result_that_says_so(place: Path, name: str) -> None:
    """It ended the answer with "unexpected RuntimeError ... This is a bug"."""
    (place / "a").symlink_to("b")
    (place / "b").symlink_to("a")

    text = run(place, name, path="a/x", text="x")

    assert text == "Error: a/x leads through too many links."


@pytest.mark.parametrize("name", ["read_file", "list_files", "search_files"])
def test_a_name_that_becomes_a_link_after_a_look_leads_nowhere(place, monkeypatch, name):
    """A race read outside: names were opened after they had been looked at."""
    (place / "dir" / "in").mkdir(parents=True)
    (place / "dir" / "in" / "secret.txt").write_text("inside")
    (place.parent / "in").mkdir()
    (place.parent / "in" / "secret.txt").write_text("outside")
    look = os.readlink

    def look_and_swap(part: str, **others: Any) -> str:
        try:
            return look(part, **others)
        finally:
            if part == "dir":
                (place / "dir").rename(place / "old")
                (place / "dir").symlink_to(place.parent)

    monkeypatch.setattr(os, "readlink", look_and_swap)

    text = run(place, name, path="dir/in/secret.txt" if name == "read_file" else "dir/in", text="s")

    assert text == "Error: there is no directory on the way to {}.".format(
        "dir/in/secret.txt" if name == "read_file" else "dir/in"
    )


def test_the_directory_stays_the_same_one_if_it_is_renamed(place: Path) -> None:
    toolbox = Toolbox(local_tools(place))
    place.rename(place.parent / "moved")
    place.mkdir()
    (place / "notes.txt").write_text("another one")

    text = toolbox.run(ToolCall("read_file", {"path": "notes.txt"}), threading.Event()).text

    assert text.startswith("line 1\n")


def test_lines_are_counted_as_other_programs_count_them(place: Path) -> None:
    odd = "one\x0ctwo\u2028three\x85four\r\nfive\x1csix\nseven\rstill\n"
    (place / "odd.txt").write_text(odd, newline="")

    assert run(place, "search_files", text="seven") == "odd.txt:3: seven still"
    assert run(place, "read_file", path="odd.txt") == "onetwo threefour\nfivesix\nseven still"


class Failing:
    name, description, is_allowed_by_call = "fail", "", False
    parameters: Mapping[str, Any] = {}

    def __init__(self, error: Exception) -> None:
        self._error = error

    def run(self, arguments: Mapping[str, Any], stop: threading.Event) -> str:
        raise self._error


@pytest.mark.parametrize("kind", [RuntimeError, RecursionError, MemoryError, AssertionError])
def test_no_failure_of_a_tool_ends_a_turn(kind, caplog):
    caplog.set_level(logging.INFO, logger="kvchat")  # another test may have set its level
    toolbox = Toolbox([Failing(kind("words of the user"))])

    text = toolbox.run(ToolCall("fail", {}), threading.Event()).text

    assert text == f"Error: {kind.__name__}: words of the user"
    assert kind.__name__ in caplog.text
    assert "words of the user" not in caplog.text


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

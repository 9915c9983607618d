"""In tmux, a terminal that breaks earlier lines anew when it is resized."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from support.matrix import spread

_DEADLINE_S = 60.0
_REPOSITORY = Path(__file__).resolve().parents[2]
_WIDTHS = (100, 60, 100, 60)
_WIDER = (60, 200, 60, 200)
_END = "first token"  # of the line behind an answer

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class _Tmux:
    """One window of a tmux server of its own."""

    def __init__(self, socket: Path, command: str) -> None:
        self._base = ["tmux", "-S", str(socket), "-f", os.devnull]
        paths = (_REPOSITORY, _REPOSITORY / "kernels", _REPOSITORY / "tests")
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": "/nonexistent",
            "LANG": "C.UTF-8",
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths),
        }
        size = ["-x", "80", "-y", "24"]
        arguments = [*self._base, "-u", "new-session", "-d", *size, command]
        subprocess.run(arguments, check=True, env=environment)
        self.tell("set-option", "-g", "status", "off")

    def tell(self, *arguments: str) -> str:
        done = subprocess.run([*self._base, *arguments], check=True, capture_output=True, text=True)
        return done.stdout

    @property
    def text(self) -> str:
        """Scrollback and screen, lines that tmux itself has wrapped joined again."""
        return self.tell("capture-pane", "-p", "-J", "-S", "-")

    def wait_for(self, is_there: Callable[[str], bool]) -> str:
        end_s = time.monotonic() + _DEADLINE_S
        while not is_there(text := self.text):
            assert time.monotonic() < end_s, f"the screen was:\n{text}"
            time.sleep(0.05)  # asking costs a process, and the chat needs the processor
        return text

    def close(self) -> None:
        subprocess.run([*self._base, "kill-server"], check=False, capture_output=True)


def _has(what: str) -> Callable[[str], bool]:
    return lambda text: what in text


@contextmanager
def _window(checkpoint: Path) -> Iterator[_Tmux]:
    command = f"{sys.executable} -m support.scripted_repl {checkpoint} --reflows"
    with TemporaryDirectory() as directory:  # a socket's path has to be short
        window = _Tmux(Path(directory) / "tmux", command)
        yield window
        window.close()


# A frame that is on its way while the window changes is wrapped by the terminal, and no program can
# know that. On a machine with much other work it happens now and then: one of so many answers has
# to be right.
_TRIES = 2


def test_resizing_leaves_every_word_once_and_no_stale_row(checkpoint: Path) -> None:
    assert any(_is_whole_after_resizes(checkpoint) for _ in range(_TRIES))


def _is_whole_after_resizes(checkpoint: Path) -> bool:
    with _window(checkpoint) as tmux:
        text = _resized_while_it_answers(tmux)
    assert text.count("context") <= 2, "one line of statistics, one toolbar"
    answer = text.split("❯ prose 220", 1)[1].split("cached", 1)[0]
    return re.findall(r"\S+", answer) == [f"word{number}" for number in range(220)]


def _resized_while_it_answers(tmux: _Tmux) -> str:
    tmux.wait_for(_has("/help for help"))
    tmux.tell("send-keys", "prose 220", "Enter")
    for columns, rows, word in ((60, 24, 40), (100, 30, 80), (40, 12, 120), (80, 24, 160)):
        mark = f"word{word} "
        tmux.wait_for(_has(mark))
        tmux.tell("resize-window", "-x", str(columns), "-y", str(rows))
    return tmux.wait_for(_has("tokens, "))


@pytest.mark.parametrize(
    ("block", "widths"),
    spread(
        [(block, widths) for block in ("table", "list") for widths in (_WIDTHS, _WIDER)],
        always=[("table", _WIDER), ("list", _WIDTHS)],
    ),
)
def test_no_row_of_an_open_block_is_left_in_the_scrollback(checkpoint, block, widths):
    """Rows of a table so far were pushed into the scrollback, and came again with the whole."""
    cells = [f"cell{number}" for number in range(60)]
    assert any(_cells_of(checkpoint, block, widths) == cells for _ in range(_TRIES))


def _cells_of(checkpoint: Path, block: str, widths: tuple[int, ...]) -> list[str]:
    """Return the cells in sight and in the scrollback, after resizes while the block was open."""
    with _window(checkpoint) as tmux:
        tmux.tell("resize-window", "-x", str(widths[0]), "-y", "30")
        tmux.wait_for(_has("/help for help"))
        tmux.tell("send-keys", f"{block} 60", "Enter")
        tmux.wait_for(_has("rows so far" if block == "table" else "cell1"))
        for columns in widths[1:]:
            tmux.tell("resize-window", "-x", str(columns), "-y", "30")
            before = tmux.text
            # A busy machine may have come to the end of the answer: then nothing changes any more.
            tmux.wait_for(lambda text, before=before: text != before or _END in text)  # type: ignore[misc]
        return re.findall(r"cell\d+", tmux.wait_for(_has(_END)))

"""Makes the live prompt for the terminal of the standard streams.

Apart from `prompt.py` so that plain lines need none of prompt_toolkit's drawing.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit.data_structures import Size
from prompt_toolkit.input.defaults import create_input

from kvchat.terminal.completion import LineCompleter
from kvchat.terminal.desk import Desk
from kvchat.terminal.gist import gist
from kvchat.terminal.history import PrivateHistory
from kvchat.terminal.paint import Painter
from kvchat.terminal.prompt import LivePrompt, Terminal
from kvchat.terminal.registry import build_registry

_DEFAULT_ROWS, _DEFAULT_COLUMNS = 24, 80


def new_live_prompt(
    painter: Painter, desk: Desk, history_path: Path | None, editor: str
) -> LivePrompt:
    """Return the prompt, with the history and the completions of this chat."""
    terminal = Terminal(create_input(), sys.stdout, _terminal_size)
    history = PrivateHistory(history_path)
    completer = LineCompleter(build_registry(), lambda: _sessions(desk), lambda: _turns(desk))
    return LivePrompt(terminal, painter, completer, history, editor)


def _terminal_size() -> Size:
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        return Size(_DEFAULT_ROWS, _DEFAULT_COLUMNS)
    return Size(size.lines or _DEFAULT_ROWS, size.columns or _DEFAULT_COLUMNS)


def _sessions(desk: Desk) -> Iterable[tuple[str, str]]:
    store = desk.host.store
    if store is not None:
        for summary in store.summaries()[:50]:
            yield summary.session_id, summary.title


def _turns(desk: Desk) -> Iterable[tuple[str, str]]:
    for number, turn in enumerate(desk.user_turns, start=1):
        yield str(number), gist(turn, 60)

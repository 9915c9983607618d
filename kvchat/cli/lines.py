"""What commands print and ask: lines on standard output; sentences, questions on standard error."""

import sys

from kvchat.core.errors import UsageError
from kvchat.core.text import sanitize


def print_line(line: str) -> None:
    """Print a line of a command's result."""
    sys.stdout.write(f"{sanitize(line)}\n")


def say(sentence: str) -> None:
    """Tell the user a sentence beside the result."""
    sys.stderr.write(f"kvchat: {sanitize(sentence)}\n")
    sys.stderr.flush()


def confirm(question: str) -> bool:
    """Return whether the user says yes; raises UsageError where there is no terminal."""
    if sys.stdin is None or sys.stdin.closed or not sys.stdin.isatty():
        raise UsageError(f"{question} It has to be confirmed at a terminal.", "Or give --yes.")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")

"""confirm: asks the user a question that a command needs answered before it deletes something."""

import sys

from kvchat.core.errors import UsageError


def confirm(question: str) -> bool:
    """Return whether the user says yes; raises UsageError where there is no terminal."""
    if sys.stdin is None or sys.stdin.closed or not sys.stdin.isatty():
        raise UsageError(f"{question} It has to be confirmed at a terminal.", "Or give --yes.")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")

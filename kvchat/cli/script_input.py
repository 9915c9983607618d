"""Standard input of the script modes: a whole text, or its lines, of any encoding and size."""

from collections.abc import Iterator
from typing import BinaryIO

from kvchat.cli.output import Notices
from kvchat.core.errors import ContextTooLong, UnreadableFile
from kvchat.core.text import encoding_of, text_of

# About four million tokens: more than any model's context holds.
_MAX_MESSAGE_BYTES = 16 << 20


def read_text(stdin: BinaryIO, notices: Notices) -> str:
    """Return all of standard input as one message, without line ends at its end.

    Raises ContextTooLong for more than any context holds.
    """
    try:
        data = stdin.read(_MAX_MESSAGE_BYTES + 1)
    except OSError as error:
        raise _unreadable(error) from error
    if len(data) > _MAX_MESSAGE_BYTES:
        raise too_long("The input")
    return _decode(data, notices).rstrip("\r\n")


def read_lines(stdin: BinaryIO, notices: Notices) -> Iterator[tuple[int, str]]:
    """Yield the lines of standard input as they arrive, each after its number, without empty lines.

    Raises ContextTooLong for a line longer than any context holds.
    """
    for number, line in enumerate(bounded_lines(stdin), start=1):
        if line is None:
            raise too_long(f"Line {number} of the input")
        text = _decode(line, notices).rstrip("\r\n")
        if text.strip():
            yield number, text


def bounded_lines(stdin: BinaryIO) -> Iterator[bytes | None]:
    """Yield the lines; None for a line that is too long, which is not held in memory.

    What begins with the mark of an encoding whose lines end in other bytes is read whole.
    """
    is_first = True
    try:
        while line := stdin.readline(_MAX_MESSAGE_BYTES + 1):
            if is_first and encoding_of(line) not in ("utf-8", "utf-8-sig"):
                data = line + stdin.read(_MAX_MESSAGE_BYTES + 1 - len(line))
                is_whole = len(data) <= _MAX_MESSAGE_BYTES
                yield from (
                    text_of(data)[0].encode().splitlines(keepends=True) if is_whole else [None]
                )
                return
            is_first = False
            is_whole = len(line) <= _MAX_MESSAGE_BYTES
            while line and not is_whole and not line.endswith(b"\n"):
                line = stdin.readline(_MAX_MESSAGE_BYTES)
            yield line if is_whole else None
    except OSError as error:
        raise _unreadable(error) from error


def too_long(what: str) -> ContextTooLong:
    size = _MAX_MESSAGE_BYTES >> 20
    return ContextTooLong(f"{what} has more than {size} MiB, which no context holds.", "Cut it.")


def _unreadable(error: OSError) -> UnreadableFile:
    return UnreadableFile(
        f"Standard input cannot be read: {error.strerror}.", "Give a prompt with -p."
    )


def _decode(data: bytes, notices: Notices) -> str:
    text, is_whole = text_of(data)
    if not is_whole:
        notices.tell("the input is not valid UTF-8; what could not be read became \ufffd.")
    return text


def with_prompt(piped: str, prompt: str | None) -> str:
    """Join piped input with the prompt given on the command line, which comes last."""
    return "\n\n".join(part for part in (piped, prompt or "") if part)

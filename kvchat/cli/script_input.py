"""Reads standard input in the script modes: one message, a turn a line, or a JSON request a line.

It decodes the bytes and limits the size of lines and messages.
"""

import json
import math
from collections.abc import Iterator
from typing import BinaryIO, NoReturn

from kvchat.chat.json_requests import BadRequest, JsonRequest, label_of, parse_request
from kvchat.cli.output import Notices
from kvchat.core.errors import ContextTooLong, KvchatError, UsageError

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
        raise _too_long("The input")
    return _decode(data, notices).rstrip("\r\n")


def read_lines(stdin: BinaryIO, notices: Notices) -> Iterator[str]:
    """Yield the lines of standard input as they arrive, without empty lines.

    Raises ContextTooLong for a line longer than any context holds.
    """
    for number, line in enumerate(_bounded_lines(stdin), start=1):
        if line is None:
            raise _too_long(f"Line {number} of the input")
        text = _decode(line, notices).rstrip("\r\n")
        if text.strip():
            yield text


def read_requests(stdin: BinaryIO, notices: Notices) -> Iterator[JsonRequest | BadRequest]:
    """Yield the requests of standard input, and a BadRequest for each invalid line."""
    for number, line in enumerate(_bounded_lines(stdin), start=1):
        if line is None:
            problem = _too_long(f"Line {number} of the input")
            yield BadRequest(problem, label_of(None, number))
        elif line.strip():
            yield _request(line, number)


def _request(line: bytes, number: int) -> JsonRequest | BadRequest:
    content = None
    try:
        content = json.loads(line, parse_constant=_no_constant, parse_float=_finite)
        return parse_request(content, number)
    except (ValueError, RecursionError):
        problem = UsageError(f"Line {number} of the input is not JSON.")
        return BadRequest(problem, label_of(content, number))
    except KvchatError as error:
        return BadRequest(error, label_of(content, number))


def _no_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity: Python reads and writes them, but they are not JSON."""
    raise ValueError(name)


def _finite(text: str) -> float:
    """Parse a number; refuse one that is too large, as it would be written as Infinity."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _bounded_lines(stdin: BinaryIO) -> Iterator[bytes | None]:
    """Yield the lines; None for a line that is too long, which is not held in memory."""
    try:
        while line := stdin.readline(_MAX_MESSAGE_BYTES + 1):
            is_whole = len(line) <= _MAX_MESSAGE_BYTES
            while line and not is_whole and not line.endswith(b"\n"):
                line = stdin.readline(_MAX_MESSAGE_BYTES)
            yield line if is_whole else None
    except OSError as error:
        raise _unreadable(error) from error


def _too_long(what: str) -> ContextTooLong:
    size = _MAX_MESSAGE_BYTES >> 20
    return ContextTooLong(f"{what} has more than {size} MiB, which no context holds.", "Cut it.")


def _unreadable(error: OSError) -> UsageError:
    return UsageError(f"Standard input cannot be read: {error.strerror}.", "Give a prompt with -p.")


def _decode(data: bytes, notices: Notices) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        notices.tell("the input is not valid UTF-8; what could not be read became \ufffd.")
        return data.decode("utf-8", errors="replace")


def with_prompt(piped: str, prompt: str | None) -> str:
    """Join piped input with the prompt given on the command line, which comes last."""
    return "\n\n".join(part for part in (piped, prompt or "") if part)

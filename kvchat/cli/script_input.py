"""Standard input of scripts: one message, a turn a line, or a JSON request a line.

Knows bytes, encodings and lines; knows no conversation.
"""

import json
from collections.abc import Iterator
from typing import BinaryIO

from kvchat.cli.json_requests import BadRequest, JsonRequest, label_of, parse_request
from kvchat.cli.output import Notices
from kvchat.core.errors import KvchatError, UsageError


def read_text(stdin: BinaryIO, notices: Notices) -> str:
    """Return all of standard input as one message, without its last line ends."""
    return _decode(stdin.read(), notices).rstrip("\r\n")


def read_lines(stdin: BinaryIO, notices: Notices) -> Iterator[str]:
    """Yield the lines of standard input as they come; empty ones are no turns."""
    for line in stdin:
        text = _decode(line, notices).rstrip("\r\n")
        if text.strip():
            yield text


def read_requests(stdin: BinaryIO, notices: Notices) -> Iterator[JsonRequest | BadRequest]:
    """Yield the requests of standard input, an error in place of each line that is none."""
    for number, line in enumerate(stdin, start=1):
        if not line.strip():
            continue
        content = None
        try:
            content = json.loads(line)
            yield parse_request(content, number)
        except (ValueError, RecursionError):
            problem = UsageError(f"Line {number} of the input is not JSON.")
            yield BadRequest(problem, label_of(content, number))
        except KvchatError as error:
            yield BadRequest(error, label_of(content, number))


def _decode(data: bytes, notices: Notices) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        notices.tell("the input is not valid UTF-8; what could not be read became \ufffd.")
        return data.decode("utf-8", errors="replace")


def with_prompt(piped: str, prompt: str | None) -> str:
    """Join piped input with the prompt given on the command line, which comes last."""
    return "\n\n".join(part for part in (piped, prompt or "") if part)

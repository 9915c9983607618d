"""Bodies and their Worker: parses requests without stopping other clients' streams for long.

Python's parser does not give the interpreter up until it ends. What it takes depends on the number
of values, not of bytes: 5 million token ids take half a second, a text of as many bytes 20 ms, and
3 million empty lists three seconds, most of it in garbage collection. So the values of a large body
are counted first, piece by piece, and more than any request needs are refused. Large bodies are
read one after another on one thread: two at once would only take the interpreter from each other.
"""

import asyncio
import json
import queue
import threading
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cache
from json import detect_encoding
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request

from kvchat.chat.fields import Fields
from kvchat.server.api_errors import ApiError

T = TypeVar("T")


class Worker:
    """Runs functions in the order in which they come, each after the one before.

    An executor of Python would keep the process from ending for as long as its thread works.
    """

    def __init__(self, name: str) -> None:
        self._due: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """How many functions wait for the one that runs."""
        return self._due.qsize()

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function after those before it, unless its future is cancelled by then."""
        future: Future[T] = Future()
        self._due.put((future, function))
        return future

    def run(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        """Do the same, for the event loop to wait for."""
        return asyncio.wrap_future(self.submit(function))

    def _run(self) -> None:
        while (due := self._due.get()) is not None:
            future, function = due
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

    def close(self, patience_s: float) -> bool:
        """End after the functions that wait; return whether that took less than so many seconds."""
        self._due.put(None)
        self._thread.join(patience_s)
        return not self._thread.is_alive()


# Enough for a context of a million token ids; a text is one value, however long.
MOST_VALUES = 1 << 20
# Lists and objects together; the messages of a conversation are objects.
MOST_NESTED = 1 << 17
# Keys of objects: a bias for each token of a large vocabulary.
MOST_KEYS = 1 << 18
# Parsing this many bytes takes a few milliseconds, whatever they are. So does reading the fields.
_MOST_BYTES_AT_ONCE = 1 << 17
_MOST_OBJECTS_AT_ONCE = 1000
_BYTES_OF_PIECE = 1 << 18
# The forms of zlib's streams: gzip, and what HTTP calls deflate, which begins with zlib's head.
_WINDOW_BITS = {"gzip": 31, "deflate": 15}
# What stands in any body with half a character.
_SIGNS_OF_SURROGATES = (b"\\ud", b"\\uD")


class Body(Fields):
    """The fields of a request's whole body, which has `num_bytes`."""

    def __init__(self, values: Mapping[str, Any], num_bytes: int) -> None:
        super().__init__(values)
        self.num_bytes = num_bytes

    async def read(self, read: Callable[["Body"], T], num_others: int = 0) -> T:
        """Return what `read` makes of the fields.

        A large body is read on another thread, so that the streams of other clients go on: 200,000
        messages take seconds. `num_others` objects that are no part of the body are read with it.
        """
        is_small = self.num_bytes <= _MOST_BYTES_AT_ONCE and num_others <= _MOST_OBJECTS_AT_ONCE
        return read(self) if is_small else await _reader().run(lambda: read(self))


async def plain_body(body: bytes, encoding: str, most_bytes: int) -> bytes:
    """Return a body as it was before it was compressed, as its Content-Encoding says.

    Raises ApiError if it cannot be, or has more than `most_bytes`.
    """
    encoding = encoding.strip().lower()
    if not body or encoding in ("", "identity"):
        return body
    return await _reader().run(lambda: _decompressed(body, encoding, most_bytes))


def too_large(most_bytes: int) -> ApiError:
    """Return the error for a body of more bytes than are read."""
    return ApiError(413, f"The body has more than {most_bytes:,} bytes.")


async def read_request(request: Request) -> Body:
    """Parse the body of a request; errors as `read_body`."""
    return await read_body(await request.body())


async def read_body(body: bytes) -> Body:
    """Parse a request's body, a large one on another thread.

    Raises ApiError for anything but a JSON object in Unicode, and for one of too many values.
    """
    body = _in_utf8(body)
    if len(body) <= _MOST_BYTES_AT_ONCE:
        return _parsed(body)
    return await _reader().run(lambda: _counted_and_parsed(body))


@cache
def _reader() -> Worker:
    """Return the thread that reads large bodies; it starts with the first of them."""
    return Worker("kvchat-bodies")


class Counts(NamedTuple):
    """How many values JSON has at most, how many of them are lists and objects, and the keys."""

    values: int
    nested: int
    keys: int


def _counted_and_parsed(body: bytes) -> Body:
    counts = count_values(body)
    for number, most, name in (
        (counts.values, MOST_VALUES, "values"),
        (counts.nested, MOST_NESTED, "lists and objects"),
        (counts.keys, MOST_KEYS, "keys of objects"),
    ):
        if number > most:
            sentence = f"The body has {number:,} {name}, and at most {most:,} are read."
            raise ApiError(413, sentence, code="too_many_values")
    return _parsed(body)


def count_values(body: bytes, piece: int = _BYTES_OF_PIECE) -> Counts:
    """Count the signs outside of strings that a value comes after.

    `piece` bytes are looked at without giving the interpreter up.
    """
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # now each quotation mark is a string's
    num_commas = num_nested = num_keys = num_marks = 0
    for start in range(0, len(plain), piece):
        parts = plain[start : start + piece].split(b'"')
        outside = b"".join(parts[num_marks % 2 :: 2])
        num_marks += len(parts) - 1
        num_commas += outside.count(b",")
        num_nested += outside.count(b"[") + outside.count(b"{")
        num_keys += outside.count(b":")
    return Counts(1 + num_commas + num_nested, num_nested, num_keys)


def _decompressed(body: bytes, encoding: str, most_bytes: int) -> bytes:
    if encoding not in _WINDOW_BITS:
        sentence = f"Bodies may be plain or in {' or '.join(_WINDOW_BITS)}, not in {encoding!r}."
        raise ApiError(415, sentence, code="unsupported_encoding")
    stream = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        plain = stream.decompress(body, most_bytes + 1)
    except zlib.error:
        raise ApiError(400, f"The body is not in {encoding}.") from None
    if len(plain) > most_bytes:
        raise too_large(most_bytes)
    if not stream.eof:
        raise ApiError(400, f"The body ends within its {encoding}.")
    if stream.unused_data:
        raise ApiError(400, f"The body goes on after its {encoding}.")
    return plain


def _in_utf8(body: bytes) -> bytes:
    """Return a body of UTF-16 or UTF-32 in UTF-8, and any other as it is."""
    encoding = detect_encoding(body)
    if encoding.startswith("utf-8"):
        return body
    try:
        return body.decode(encoding).encode()
    except UnicodeError:
        raise _no_json() from None


def _no_json() -> ApiError:
    return ApiError(400, "The body is not JSON.")


def _parsed(body: bytes) -> Body:
    try:
        values = json.loads(body.decode("utf-8-sig"))
        if any(sign in body for sign in _SIGNS_OF_SURROGATES):
            values = _without_surrogates(values)
    except (ValueError, RecursionError):
        raise _no_json() from None
    if not isinstance(values, dict):
        raise ApiError(400, "The body must be a JSON object.")
    return Body(values, len(body))


def _without_surrogates(value: Any) -> Any:
    """Return a value of JSON with a question mark for each half of a character.

    Clients that cut a text send one, and no response could be written with it.
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(item) for k, item in value.items()}
    return value

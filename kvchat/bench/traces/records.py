"""Traces of block hashes: reads kvchat's own form and that of the public Mooncake traces.

A trace is JSON lines, one a request, in order of time; it holds no text. kvchat's form begins with
a head and has these fields, of which only `blocks` is required in each line:

    {"kvchat_trace": 1, "block_tokens": 256}
    {"time_s": 12.5, "prompt_tokens": 1310, "answer_tokens": 200, "blocks": ["9f3c", "04aa", ...]}

    time_s         seconds since any moment
    prompt_tokens  tokens of the prompt; by default all blocks are of the prompt
    answer_tokens  tokens of the answer
    blocks         the hashes, texts or whole numbers, of the context's blocks of `block_tokens`
                   tokens: prompt, then answer; a block's hash stands for all before it, too
    one_shot       true: no later request is expected to continue this context
    machine        the machine that had the request, any text

`--trace-log` writes it (`engine/request_trace.py`), with `found` and `first_token_s` besides.

Mooncake's form has `timestamp` in milliseconds, `input_length`, `output_length`, and `hash_ids` of
the prompt's blocks of 512 tokens, the last one perhaps not full.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvchat.core.errors import StoreError, UsageError

MOONCAKE_BLOCK_TOKENS = 512
# Tokens of a block of kvchat's own traces: whole numbers of its blocks, and few hashes a request.
BLOCK_TOKENS = 256
_LINE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `blocks` are those of prompt and answer, `prompt_tokens` says where it ends."""

    time_s: float
    prompt_tokens: int
    answer_tokens: int
    blocks: Sequence[object]
    is_one_shot: bool = False
    machine: str = ""


def read_trace(path: Path) -> tuple[int, Iterator[TraceRequest]]:
    """Return the tokens of a block and the requests of a file, read while they are taken.

    Raises UsageError for a file that is no trace, naming the line, and StoreError if it cannot be
    read.
    """
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise UsageError(f"{path} is empty.", "A trace has a request a line: docs/benchmarks.")
    number, head = first
    if "kvchat_trace" in head:
        block_tokens = head.get("block_tokens", BLOCK_TOKENS)
        if head["kvchat_trace"] != 1 or type(block_tokens) is not int or block_tokens < 1:
            raise UsageError(f"{path} is a trace of a form that this version does not know.")
        return block_tokens, _requests(path, lines, _own_request, block_tokens)
    if "hash_ids" in head:
        requests = _requests(path, _again(first, lines), _mooncake_request, MOONCAKE_BLOCK_TOKENS)
        return MOONCAKE_BLOCK_TOKENS, requests
    if "blocks" in head:
        requests = _requests(path, _again(first, lines), _own_request, BLOCK_TOKENS)
        return BLOCK_TOKENS, requests
    raise UsageError(
        f"Line {number} of {path} has neither `blocks` nor `hash_ids`: it is no trace.",
        "docs/benchmarks/traces.md has the form.",
    )


def _again(first: tuple[int, Any], rest: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    yield first
    yield from rest


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(_LINE_BYTES):
                number += 1
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    record = None
                if not isinstance(record, dict):
                    raise UsageError(f"Line {number} of {path} is not a JSON object.")
                yield number, record
    except OSError as error:
        raise StoreError(f"The trace cannot be read: {error}.") from error


def _requests(
    path: Path, lines: Iterable[tuple[int, dict[str, Any]]], form: Any, block_tokens: int
) -> Iterator[TraceRequest]:
    for number, record in lines:
        try:
            request = form(record, block_tokens)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"Line {number} of {path} is no request: {error}.") from error
        yield request


def _own_request(record: dict[str, Any], block_tokens: int) -> TraceRequest:
    blocks = _list(record["blocks"])
    return TraceRequest(
        float(record.get("time_s", 0.0)),
        int(record.get("prompt_tokens", len(blocks) * block_tokens)),
        int(record.get("answer_tokens", 0)),
        blocks,
        record.get("one_shot") is True,
        str(record.get("machine", "")),
    )


def _mooncake_request(record: dict[str, Any], block_tokens: int) -> TraceRequest:
    return TraceRequest(
        float(record.get("timestamp", 0)) / 1000.0,
        int(record["input_length"]),
        int(record.get("output_length", 0)),
        _list(record["hash_ids"]),
    )


def _list(value: object) -> list[object]:
    if not isinstance(value, list) or not all(isinstance(item, str | int) for item in value):
        raise ValueError("its blocks are not a list of hashes")
    return value

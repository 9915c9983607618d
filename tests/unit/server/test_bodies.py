"""Bodies: large ones are counted, then parsed, while the event loop goes on."""

import asyncio
import json
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvchat.server import bodies
from kvchat.server.api_errors import ApiError
from kvchat.server.bodies import count_values, read_body

SIGNS = 'a,[{"\\\n\ud83d\u00e9'


def some_value(draw: random.Random, depth: int = 0) -> Any:
    """Return a value of JSON whose texts have the signs that stand between values too."""
    kind = draw.randrange(4 if depth < 4 else 2)
    if kind == 0:
        return draw.choice([None, True, 1.5, -7])
    if kind == 1:
        return "".join(draw.choices(SIGNS, k=draw.randrange(7)))
    items = [some_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return items if kind == 2 else {f"{item}{n}": item for n, item in enumerate(items)}


def nested(value: Any) -> list[Any]:
    """Return all lists and objects of a value."""
    if not isinstance(value, list | dict):
        return []
    items = value.values() if isinstance(value, dict) else value
    return [value, *(each for item in items for each in nested(item))]


def test_signs_are_counted_outside_of_strings_only() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        value = [some_value(draw) for _ in range(8)]
        parts = nested(value)
        # A value comes after each comma, and may after each sign that opens a list or an object.
        num_commas = sum(max(0, len(part) - 1) for part in parts)

        text = json.dumps(value, ensure_ascii=draw.random() < 0.5)
        counted = count_values(text.encode(errors="replace"), draw.randint(1, 30))

        num_keys = sum(len(part) for part in parts if isinstance(part, dict))
        assert counted == (1 + num_commas + len(parts), len(parts), num_keys), seed


def refused(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as raised:
        asyncio.run(read_body(body))
    return raised.value


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (b"[5" + b",5" * bodies.MOST_VALUES + b"]", "values"),
        (b"[[]" + b",[]" * (1 << 17) + b"]", "lists"),
    ],
)
def test_more_values_than_any_request_needs_are_refused(value: bytes, name: str) -> None:
    """10 MB of token ids stopped all streams for 0.6 s, of empty lists for 3 s."""
    error = refused(b'{"prompt": ' + value + b"}")

    assert error.status == 413
    assert name in error.message


def test_a_long_text_is_one_value() -> None:
    text = '[{,"\\' * 1_000_000

    body = asyncio.run(read_body(json.dumps({"prompt": text}).encode()))

    assert body.text("prompt") == text


def test_a_large_body_is_parsed_on_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def parsed(text: str) -> Any:
        threads.append(threading.current_thread())
        return {}

    monkeypatch.setattr(bodies, "json", SimpleNamespace(loads=parsed))
    asyncio.run(read_body(b'{"a": 1}'))
    asyncio.run(read_body(b'{"a": "' + b"x" * 200_000 + b'"}'))

    small, large = threads
    assert small is threading.current_thread() is not large


@pytest.mark.parametrize("padding", [0, 200_000])
def test_half_a_character_becomes_a_question_mark_anywhere(padding: int) -> None:
    sent = b'{"a\\ud83d": ["\\ud83d\\ude00", {"b": "\\uD83d!"}, 1, null], "p": "' + b"x" * padding
    body = asyncio.run(read_body(sent + b'"}'))

    assert body.raw("a?") == ["\N{GRINNING FACE}", {"b": "?!"}, 1, None]


@pytest.mark.parametrize("padding", [0, 200_000])
@pytest.mark.parametrize(
    "sent", [b"[" * 100_000, b'{"a":' * 100_000, b"{", b"[]", b'{"a": "\xff"}']
)
def test_what_is_no_object_is_refused(sent: bytes, padding: int) -> None:
    assert refused(sent + b" " * padding).status in (400, 413)


def test_large_bodies_are_parsed_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were given to the threads of the event loop: six parsed at once, for six times as long,
    and all else that needs such a thread waited.
    """
    threads, parse = [], json.loads

    def parsed(text: str) -> Any:
        threads.append(threading.current_thread())
        return parse(text)

    monkeypatch.setattr(bodies, "json", SimpleNamespace(loads=parsed))
    body = json.dumps({"prompt": "x" * (1 << 18)}).encode()

    async def run() -> None:
        await asyncio.gather(*(read_body(body) for _ in range(8)))

    asyncio.run(run())
    assert len(threads) == 8
    assert len(set(threads)) == 1

"""What is typed is prefilled before it is sent: sending then reads only what is new."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest

from kvchat.chat.attachment import Attached
from kvchat.chat.controller import ChatController
from kvchat.chat.events import AnswerEnded
from kvchat.chat.host import ChatHost
from kvchat.chat.read_ahead import ReadAhead, finished
from kvchat.core.stats import Cost
from kvchat.core.types import CachedTokens
from support.tiny_host import BLOCK_SIZE, answer_options, finish, tiny_host

FILE = Attached("ships.txt", "ships.txt:\n```\n" + "Twelve ships lie here.\n" * 8 + "```\n")
LONG = "a line that is done and will hardly change any more\n" * 4
_DEADLINE_S = 60.0


class Typing:
    """A controller on a real engine, and what its user types."""

    def __init__(self, host: ChatHost) -> None:
        host.wait_until_ready()
        self.host = host
        self.controller = ChatController(host, lambda *_: host, None, answer_options())
        self.ahead = ReadAhead(self.controller)

    def pause(self, text: str) -> None:
        """The user types no more for a moment, the text being what it is."""
        asyncio.run(self.ahead.consider(text))

    def num_computed(self) -> int:
        return self.host.status().result(_DEADLINE_S).num_tokens_computed

    def wait_until_computed(self, is_enough: Callable[[int], bool]) -> None:
        end_s = time.monotonic() + _DEADLINE_S
        while not is_enough(self.num_computed()):
            assert time.monotonic() < end_s

    def send(self, text: str) -> AnswerEnded:
        self.ahead.forget()
        return finish(self.controller.ask(text))


@pytest.fixture
def typing(checkpoint: Path) -> Iterator[Typing]:
    made = Typing(tiny_host(checkpoint, None))
    yield made
    made.host.close()


def test_sending_reads_only_what_is_new(typing: Typing) -> None:
    """A file of 1,600 tokens was read only after Enter."""
    typing.controller.attached = (FILE,)
    typing.pause("What is")
    typing.wait_until_computed(lambda num_tokens: num_tokens >= len(FILE.text))
    assert typing.controller.conversation is None, "nothing is said yet"

    ended = typing.send("What is in it?")

    num_new = ended.usage.prompt_tokens - len(FILE.text)
    assert ended.usage.prefilled_tokens <= num_new + BLOCK_SIZE
    assert [turn.text for turn in typing.controller.place.user_turns] == [
        f"{FILE.text}\nWhat is in it?"
    ]


def test_what_is_edited_away_is_not_in_the_way(typing: Typing) -> None:
    typing.pause(f"{LONG}and")
    typing.wait_until_computed(lambda num_tokens: num_tokens >= len(LONG))
    typing.pause("no")
    before = typing.num_computed()

    ended = typing.send("no")

    assert ended.usage.prompt_tokens < 40
    assert typing.num_computed() - before <= ended.usage.prompt_tokens + 12
    assert [turn.text for turn in typing.controller.place.user_turns] == ["no"]


def test_what_does_not_fit_is_not_read_and_said(typing: Typing) -> None:
    """It said "text 0% read" for as long as it stood in the prompt."""
    before = typing.num_computed()
    typing.pause("word " * 5000)
    assert typing.ahead.is_too_long
    typing.pause(LONG)
    assert not typing.ahead.is_too_long
    typing.pause("word " * 1_000_000)
    assert typing.ahead.is_too_long
    typing.pause("")
    assert not typing.ahead.is_too_long
    assert typing.num_computed() < before + 1000


def test_lines_are_read_as_they_are_finished(typing: Typing) -> None:
    typing.pause(LONG)
    typing.wait_until_computed(lambda num_tokens: num_tokens >= len(LONG))
    before = typing.num_computed()
    more = LONG + "one more line of them, and it is done\n"
    typing.pause(f"{more}unfin")
    typing.wait_until_computed(lambda num_tokens: num_tokens > before)
    typing.pause(f"{more}unfinished")

    assert typing.num_computed() - before <= len(more) - len(LONG) + BLOCK_SIZE


def test_a_message_that_is_sent_does_not_wait_for_the_reading(checkpoint: Path) -> None:
    steps, is_sent = count(), threading.Event()
    host = tiny_host(
        checkpoint, None, before_step=lambda: next(steps) == 1 and is_sent.wait(_DEADLINE_S)
    )
    typing = Typing(host)
    typing.pause(LONG + LONG)
    reply = typing.controller.ask("no")
    is_sent.set()
    ended = finish(reply)

    assert ended.usage.prompt_tokens < 40
    assert typing.num_computed() < len(LONG + LONG), "the reading was given up"
    host.close()


def test_nothing_unsent_comes_to_the_disk(checkpoint: Path, tmp_path: Path) -> None:
    first = Typing(tiny_host(checkpoint, None, kept=tmp_path / "kv"))
    first.pause(LONG)
    first.wait_until_computed(lambda num_tokens: num_tokens >= len(LONG))
    first.host.close()

    second = Typing(tiny_host(checkpoint, None, kept=tmp_path / "kv"))
    assert second.send(f"{LONG}Go.").usage.cached.total == 0
    second.host.close()


def test_without_a_cache_nothing_is_read_ahead(checkpoint: Path) -> None:
    typing = Typing(tiny_host(checkpoint, None, reuse=False))
    typing.pause(LONG)

    assert typing.num_computed() == 0
    typing.host.close()


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("", ""),
        ("a word", ""),
        ("a line\nand", "a line\n"),
        ("a line\n", "a line\n"),
        ("\nx", "\n"),
        ("word " * 30 + "wor", "word " * 30),
        ("a line\n" + "x" * 100, "a line\n"),
    ],
)
def test_only_what_is_finished_is_read(text: str, done: str) -> None:
    assert finished(text) == done


class Costs:
    """Stands for a controller: `costs` are what its engine answers, one after another."""

    def __init__(self, *costs: Cost | None) -> None:
        self.engine = self
        self.costs = list(costs)
        self.before_answer = lambda: None

    async def cost(self, token_ids: list[int]) -> Cost | None:
        self.before_answer()
        return self.costs.pop(0)


def _ahead(costs: Costs, num_begun: int, num_before: int) -> ReadAhead:
    ahead = ReadAhead(cast(Any, costs))
    ahead._begun, ahead._num_before = list(range(num_begun)), num_before
    return ahead


def _cost(num_cached: int, num_tokens: int) -> Cost:
    return Cost(num_tokens, CachedTokens(device=num_cached))


def test_the_share_of_what_is_read_is_not_told_of_another_text() -> None:
    """What was asked about is no longer what is typed: the answer is of the text before."""
    costs = Costs(_cost(500, 1000))
    ahead = _ahead(costs, 1000, 0)
    costs.before_answer = ahead.forget

    assert asyncio.run(ahead.share_read()) is None


@pytest.mark.parametrize(
    ("num_begun", "num_before", "cached", "share"),
    [
        (1000, 0, 500, 0.5),
        (1000, 200, 600, 0.5),
        (1000, 200, 100, 0.0),
        (1000, 0, 990, 1.0),
        (1000, 1000, 0, 0.0),
    ],
)
def test_the_share_of_what_is_read_is_between_none_and_all(num_begun, num_before, cached, share):
    """The place moved meanwhile: nothing new was begun, and the share was a division by zero."""
    ahead = _ahead(Costs(_cost(cached, num_begun)), num_begun, num_before)

    assert asyncio.run(ahead.share_read()) == share


def test_no_share_is_told_where_nothing_is_begun_or_nothing_is_known() -> None:
    assert asyncio.run(_ahead(Costs(), 0, 0).share_read()) is None
    assert asyncio.run(_ahead(Costs(None), 1000, 0).share_read()) is None

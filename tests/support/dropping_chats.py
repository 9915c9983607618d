"""Measures chats whose context is full again and again, under `--context-policy drop`.

python -m support.dropping_chats MODEL [--chats N] [--context TOKENS]

Each message is a fact, and no chat pauses between them, so that moved KV never gives way to the
context's own. It prints what turns read and take, and how many facts that are still inside are
recalled over moved KV, and over KV of the same ids that is read anew.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvchat.chat.answer_settings import AskOptions, changed
from kvchat.chat.controller import ChatController
from kvchat.chat.conversation import Role
from kvchat.chat.events import AnswerEnded
from kvchat.chat.host import ChatHost
from kvchat.cli.build import open_host, settings_of
from kvchat.core.events import RequestEvent, RequestFailed, SampleFinished, TokensGenerated
from kvchat.core.types import SamplingParams
from kvchat.engine.request import RequestSpec
from kvchat.terminal.room import RoomMaker

_NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gwen", "Hugo", "Ivy", "Jack"]
_COLOURS = ["red", "blue", "green", "white", "black", "yellow"]
_NUM_WINDOWS, _NUM_ASKED, _ANSWER = 3, 5, 8


@dataclass(frozen=True)
class Turn:
    """A turn of a chat: the tokens of its message, those it read, its seconds, and if it left out
    messages.
    """

    num_new: int
    num_read: int
    seconds: float
    is_drop: bool


@dataclass
class Recall:
    """How many facts were asked for, known over moved KV and over KV that was read anew, how many
    answers over both were alike, and how many over the first were once its own KV was there.
    """

    asked: int = 0
    moved: int = 0
    read: int = 0
    alike: int = 0
    after: int = 0


@dataclass
class Measured:
    """The turns of each chat, and what all of them recalled."""

    turns: list[list[Turn]] = field(default_factory=list)
    recall: Recall = field(default_factory=Recall)


class DroppingChat:
    """A chat of facts with one model, which goes on without its oldest messages."""

    def __init__(self, host: ChatHost, seed: int) -> None:
        options = changed(AskOptions(max_tokens=_ANSWER), "context-policy", "drop")
        self._host = host
        self._seed = seed
        self._controller = ChatController(host, lambda name, hear: host, None, options, None)
        self._controller.options = changed(self._controller.options, "temperature", "0")
        self._said: list[str] = []
        self._room = RoomMaker(self._controller, self._no_summary, self._said.append)
        self._facts: dict[str, tuple[str, str]] = {}

    async def _no_summary(self, plan: object) -> AnswerEnded:
        raise AssertionError("this policy makes none")

    def turns(self) -> Iterator[Turn]:
        """Send messages until the chat has had three contexts of tokens."""
        limit, total, number = self._host.wait_until_ready().context_limit, 0, 0
        while total < _NUM_WINDOWS * limit:
            turn = self._say(number)
            total += turn.num_new + _ANSWER
            number += 1
            yield turn

    def _say(self, number: int) -> Turn:
        name = f"{_NAMES[(number + self._seed) % len(_NAMES)]}{10 + number}"
        colour = _COLOURS[(number * 7 + self._seed * 5) % len(_COLOURS)]
        text = f"Remember: the car of {name} is {colour}. Say OK."
        self._facts[text] = name, colour
        num_drops, began = len(self._said), time.perf_counter()
        assert asyncio.run(self._room.make(text if number else None))
        num_new = self._controller.num_next_tokens(text) if number else 0
        last = list(self._controller.ask(text))[-1]
        seconds = time.perf_counter() - began
        assert isinstance(last, AnswerEnded), last
        read = last.usage.prefilled_tokens
        return Turn(num_new or read, read, seconds, len(self._said) > num_drops)

    def recall(self, into: Recall) -> None:
        """Ask for facts that are still inside: over moved KV, over KV that is read, and again."""
        conversation = self._controller.require_conversation()
        inside = [t.text for t in conversation.path() if t.role is Role.USER]
        known = [self._facts[text] for text in inside if text in self._facts]
        chosen = [known[i * len(known) // _NUM_ASKED] for i in range(_NUM_ASKED)]
        name, asked = (
            conversation.session_id,
            [f"What colour is the car of {n}?" for n, _ in chosen],
        )
        prompts = [self._prompt(question) for question in asked]
        over_moved = self._answers(prompts, name)
        over_own = self._answers(prompts, "")
        after = self._answers(prompts, name)
        into.asked += len(chosen)
        for (_, colour), one, other, last in zip(chosen, over_moved, over_own, after, strict=True):
            into.moved += colour in one.lower()
            into.read += colour in other.lower()
            into.alike += one == other
            into.after += last == other

    def _prompt(self, question: str) -> tuple[int, ...]:
        conversation, place = self._controller.require_conversation(), self._controller.place
        more = self._host.model.user_ids(conversation, place.parent_id, question, None)
        return (*self._controller.context_ids, *more)

    def _answers(self, prompts: Sequence[tuple[int, ...]], moved_under: str) -> list[str]:
        """Ask all at once, so that nothing is read in between."""
        futures = [self._answer(prompt, moved_under) for prompt in prompts]
        return [self._host.model.tokenizer.decode(future.result()) for future in futures]

    def _answer(self, prompt: tuple[int, ...], moved_under: str) -> "Future[list[int]]":
        tokens: list[int] = []
        done: Future[list[int]] = Future()

        def listen(event: RequestEvent) -> None:
            if isinstance(event, TokensGenerated):
                tokens.extend(event.token_ids)
            elif isinstance(event, RequestFailed):
                done.set_exception(event.error)
            elif isinstance(event, SampleFinished):
                done.set_result(tokens)

        spec = RequestSpec(
            prompt, SamplingParams(temperature=0.0), max_tokens=12, moved_under=moved_under
        )
        self._host._engine.submit(spec, listen)
        return done

    def close(self) -> None:
        self._controller.close_session()


def measure(host: ChatHost, num_chats: int) -> Measured:
    """Hold the chats, one after another."""
    found = Measured()
    for seed in range(num_chats):
        chat = DroppingChat(host, seed)
        found.turns.append(list(chat.turns()))
        chat.recall(found.recall)
        chat.close()
        sys.stdout.write(f"chat {seed + 1}: {len(found.turns[-1])} turns, {found.recall}\n")
        sys.stdout.flush()
    return found


def report(found: Measured) -> str:
    """Return the figures of some chats, a line each."""
    turns = [turn for chat in found.turns for turn in chat]
    drops = [turn for turn in turns if turn.is_drop]
    others = [turn for turn in turns if not turn.is_drop]
    beyond = [turn.num_read - turn.num_new for turn in drops]
    thirds = [
        statistics.median(t.seconds for chat in found.turns for t in _third(chat, part))
        for part in range(3)
    ]
    num_new, num_read = (sum(getattr(t, x) for t in turns) for x in ("num_new", "num_read"))
    return "\n".join(
        (
            f"chats={len(found.turns)} turns={len(turns)} drops={len(drops)}",
            f"prefilled={num_read} of_messages={num_new} ratio={num_read / num_new:.3f}",
            f"beyond the message in a turn that drops: {min(beyond)} to {max(beyond)}",
            f"seconds a turn: drops={statistics.median(t.seconds for t in drops):.3f} "
            f"others={statistics.median(t.seconds for t in others):.3f}",
            f"seconds a turn by thirds of a chat: {' '.join(f'{x:.3f}' for x in thirds)}",
            f"{found.recall}",
        )
    )


def _third(chat: list[Turn], part: int) -> list[Turn]:
    size = len(chat) // 3
    return chat[part * size : (part + 1) * size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--chats", type=int, default=20)
    parser.add_argument("--context", type=int, default=512)
    arguments = parser.parse_args()
    settings = settings_of(
        {"model": arguments.model, "max_context": arguments.context, "incognito": True}
    )
    host = open_host(settings, attaches=False)
    host.wait_until_ready()
    try:
        sys.stdout.write(report(measure(host, arguments.chats)) + "\n")
    finally:
        host.close()


if __name__ == "__main__":
    main()

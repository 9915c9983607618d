"""Answering: passes requests to the engine and its events back to the event loop.

Encoding a conversation may wait for the process that renders its template, so it happens on a
thread of its own, one request after another. Grammars are compiled on another: some take a second.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from kvchat.chat.answer_memory import Fed
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.events import (
    AnswerCall,
    AnswerEnded,
    AnswerFailed,
    AnswerText,
    ChatEvent,
    ContextScored,
    ReadingPrompt,
    SavingFailed,
)
from kvchat.chat.prefixes import Asked, ResentChats
from kvchat.chat.reply import PAUSE_S
from kvchat.chat.resent_chat import ResentChat
from kvchat.chat.thinking import Think
from kvchat.core.errors import KvchatError
from kvchat.core.types import FinishReason
from kvchat.server.api_errors import ApiError, as_api_error
from kvchat.server.bodies import Worker
from kvchat.server.metrics import Metrics

T = TypeVar("T")
# What is told of an answer while it is generated.
Told = ReadingPrompt | ContextScored | AnswerText | AnswerCall | AnswerEnded

# A client may count a connection without a byte as dead, and some count events only: whatever the
# engine does meanwhile, a stream has an event this often.
PING_INTERVAL_S = 1.0
# A request that is refused before it is encoded gets its own HTTP status. What waits longer for its
# turn, or takes longer, begins its stream without.
ENCODING_S = 5.0
# What is encoded when the server ends has so long; most takes milliseconds.
CLOSE_S = 5.0
# Grammars that wait to be compiled.
MOST_GRAMMARS = 64
_log = logging.getLogger(__name__)


class Wakeups:
    """Tells answers on the event loop that they have news, once for all that have some.

    A step of the engine has news for every running answer. Waking the loop for each would cost the
    engine's thread a system call each, in which the loop's thread takes the interpreter from it.
    """

    def __init__(self) -> None:
        self._due: deque[asyncio.Event] = deque()
        self._asked: asyncio.AbstractEventLoop | None = None  # a loop that is to call `_tell`

    def wake(self, loop: asyncio.AbstractEventLoop, has_news: asyncio.Event) -> None:
        """Set `has_news` on the loop soon. Called on any thread."""
        self._due.append(has_news)
        if self._asked is loop:
            return
        self._asked = loop
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._asked = None  # before the queue is read: what comes after it asks again
        while self._due:
            self._due.popleft().set()


class Answer:
    """The events of one request, on the event loop. Close it, finished or not."""

    def __init__(
        self,
        begin: Callable[[Callable[[], None]], Asked],
        remember: Callable[[Asked, AnswerEnded], None],
        metrics: Metrics,
        run: Callable[[Callable[[], Asked]], "asyncio.Future[Asked]"],
        wakeups: Wakeups,
        client: str,
        limit_s: float | None = None,
    ) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._limit_s = limit_s  # from when it is submitted; None for no limit
        self._limit: asyncio.TimerHandle | None = None
        self._wakeups = wakeups
        self._begin = begin
        self._remember = remember
        self._metrics = metrics
        self._run = run
        self._has_news = asyncio.Event()
        self._began: asyncio.Future[Asked] | None = None  # until it is taken
        self._asked: Asked | None = None
        self._first: list[ChatEvent] = []
        self._written_s = self._loop.time()
        self._polled_s = -math.inf
        self._is_silent = False
        self._is_left = self._is_closed = False
        self._silence: asyncio.TimerHandle | None = None
        self.is_complete = False  # all samples have ended, and `events` has told of it

    async def start(self) -> None:
        """Submit the request; raises ApiError if it cannot be answered.

        Returns within a few seconds also where that is not known yet: then `events` raises.
        """
        self._listen_for_silence()
        self._began = self._run(lambda: self._begin(self._notify))
        await asyncio.wait((self._began,), timeout=ENCODING_S)
        if self._began.done():
            self._take_begun()
            await self._hear_first()

    def _take_begun(self) -> None:
        """Take the request that is encoded and submitted; raises ApiError if it is not."""
        assert self._began is not None, "the answer is not started"
        try:
            asked = self._asked = self._began.result()
        except KvchatError as error:
            raise as_api_error(error) from error
        finally:
            self._began = None
        self._metrics.num_running += 1
        if self._limit_s is not None:
            end = partial(asked.reply.cancel, FinishReason.TIMEOUT)
            self._limit = self._loop.call_later(self._limit_s, end)

    async def _hear_first(self) -> None:
        """Wait a while for the engine's first event: a refusal still gets its own HTTP status."""
        await self._has_news.wait()
        if not self._is_silent:  # else `events` tells of the silence first
            self._has_news.clear()  # before the poll: what comes after it sets it again
        self._first = self.asked.reply.poll()
        failed = next((event for event in self._first if isinstance(event, AnswerFailed)), None)
        if failed is not None:
            self.close()
            raise as_api_error(failed.error)

    def _notify(self) -> None:
        """Called on the engine's thread."""
        self._wakeups.wake(self._loop, self._has_news)

    async def events(self) -> AsyncIterator[list[Told]]:
        """Yield all progress, texts, calls and ends of answers that have come since the last time.

        An empty list means that nothing was written for a while. Ends early after `leave`. Raises
        ApiError if the request fails.
        """
        if self._began is not None:
            self._began.add_done_callback(lambda _: self._has_news.set())
        while self._began is not None:
            if await self._is_silent_at_news():
                yield []
            if self._is_left:
                return
            if self._began.done():
                self._take_begun()
                self._first = self.asked.reply.poll()
        reply, events = self.asked.reply, self._first
        while True:
            told, failed = self._heard(events)
            self.is_complete = reply.is_finished and failed is None
            if told:
                yield told
            if failed is not None:
                raise as_api_error(failed.error)
            if reply.is_finished:
                return
            if await self._is_silent_at_news():
                yield []
            await self._pause()
            if self._is_left:
                return
            self._polled_s = self._loop.time()
            events = reply.poll()

    async def _pause(self) -> None:
        """Wait until the last poll is PAUSE_S ago, or an answer ends: clients need not be told of
        each token apart, and each time costs the next step as much as telling of several. The
        first token is told at once, though it follows the progress of its prompt.
        """
        reply, end_s = self.asked.reply, self._polled_s + PAUSE_S
        if reply.num_tokens and not reply.has_news_of_end and end_s > self._loop.time():
            with suppress(TimeoutError):
                async with asyncio.timeout_at(end_s):
                    await self._has_news.wait()

    async def _is_silent_at_news(self) -> bool:
        """Wait for news; return whether nothing was written for too long."""
        await self._has_news.wait()
        self._has_news.clear()  # before the poll: what comes after it sets it again
        is_silent, self._is_silent = self._is_silent, False
        return is_silent and not self._is_left

    def leave(self) -> None:
        """End `events`: the client has gone."""
        self._is_left = True
        self._has_news.set()

    def note_written(self) -> None:
        """Note that the client got something now."""
        self._written_s = self._loop.time()
        self._is_silent = False

    def _listen_for_silence(self) -> None:
        """Count it as news that nothing was written: one timer for the answer, not one a wait.

        It goes by the clock. That the engine has news does not mean that there is anything to
        write: a call is written when it is complete.
        """
        left_s = self._written_s + PING_INTERVAL_S - self._loop.time()
        if left_s <= 0:
            self._is_silent = True
            self._has_news.set()
        next_s = left_s if left_s > 0 else PING_INTERVAL_S
        self._silence = self._loop.call_later(next_s, self._listen_for_silence)

    def _heard(self, events: list[ChatEvent]) -> tuple[list[Told], AnswerFailed | None]:
        """Return what is to be told of events, and the failure if there is one; note all ends."""
        told: list[Told] = []
        failed = None
        for event in events:
            if isinstance(event, AnswerFailed):
                failed = event
            elif not isinstance(event, SavingFailed):
                told.append(event)
            if isinstance(event, AnswerEnded):
                self._metrics.note_answer(event.usage, event.timing, self._client)
                self._remember(self.asked, event)
        return told, failed

    @property
    def asked(self) -> Asked:
        """What was submitted; its `fed` is complete once the answer has ended and is remembered."""
        assert self._asked is not None, "the answer is not started"
        return self._asked

    def close(self) -> None:
        """Cancel the request if it is not finished, and let go of it. Idempotent."""
        for timer in (self._silence, self._limit):
            if timer is not None:
                timer.cancel()
        if self._began is not None:  # it is still encoded
            self._began.add_done_callback(_drop)
            self._began = None
        if self._asked is None or self._is_closed:
            return
        self._is_closed = True
        self._metrics.num_running -= 1
        if not self._asked.reply.is_finished:
            self._asked.reply.cancel()
        self._asked.session.close()


def _drop(began: "asyncio.Future[Asked]") -> None:
    """Cancel a request whose client has gone before it was submitted."""
    if not began.cancelled() and began.exception() is None:
        began.result().reply.cancel()
        began.result().session.close()


class Answering:
    """Begins answers on one host. Owns the chats until `close`.

    system    the system prompt of conversations that come without one
    limit_s   an answer that takes longer ends; None for no limit
    """

    def __init__(
        self,
        chats: ResentChats,
        metrics: Metrics,
        system: str | None = None,
        limit_s: float | None = None,
    ) -> None:
        self._system = system
        self._limit_s = limit_s
        self._chats = chats
        self._metrics = metrics
        self._encoder = Worker("kvchat-encode")
        self._compiler = Worker("kvchat-grammars")
        self._wakeups = Wakeups()

    @property
    def stabilises(self) -> bool:
        """Whether what changes in the prompts of agents is moved behind what stays."""
        return self._chats.stabilises

    async def chat(self, chat: ResentChat, options: AskOptions) -> Answer:
        """Begin to answer a conversation."""
        chat = self._with_system(chat)
        return await self._started(
            lambda notify: self._chats.ask(chat, options, notify), self._remember, options.client
        )

    async def complete(self, prompt: str | tuple[int, ...], options: AskOptions) -> Answer:
        """Begin to continue a text, or token ids, without a template."""
        return await self._started(
            lambda notify: self._chats.complete(prompt, options, notify),
            lambda *_: None,
            options.client,
        )

    async def count(self, chat: ResentChat, think: Think) -> int:
        """Return the number of tokens of a conversation's context."""
        chat = self._with_system(chat)
        try:
            return await self.on_encoder(lambda: self._chats.count(chat, think))
        except KvchatError as error:
            raise as_api_error(error) from error

    def _with_system(self, chat: ResentChat) -> ResentChat:
        return chat if not self._system or chat.system else replace(chat, system=self._system)

    async def _started(
        self,
        begin: Callable[[Callable[[], None]], Asked],
        remember: Callable[[Asked, AnswerEnded], None],
        client: str,
    ) -> Answer:
        run, limit_s = self.on_encoder, self._limit_s
        answer = Answer(begin, remember, self._metrics, run, self._wakeups, client, limit_s)
        try:
            await answer.start()
        except BaseException:
            answer.close()  # also where what waits for it is cancelled
            raise
        return answer

    def _remember(self, asked: Asked, ended: AnswerEnded) -> None:
        # On the encoder's thread, as all uses of the memory.
        self._encoder.submit(lambda: self._chats.remember(asked, ended))

    def forget(self, fed: Fed) -> None:
        """Remove the answer of a request for good, on the encoder's thread. Raises StoreError."""
        self._chats.forget(fed)

    def on_encoder(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        """Run a function on the thread that encodes, after what it has to do before."""
        return self._encoder.run(function)

    def on_compiler(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        """Run a function on the thread that compiles grammars; raises ApiError if many wait."""
        if self._compiler.num_waiting >= MOST_GRAMMARS:
            sentence = "Too many formats wait to be compiled; try again later."
            raise ApiError(503, sentence, code="too_many_formats")
        return self._compiler.run(function)

    def close(self) -> None:
        """Wait `CLOSE_S` seconds for the encoder's last work, which closes the chats.

        What takes longer is left: every answer that ended before is remembered on the disk. So is
        a grammar that is being compiled, for which no request waits any more.
        """
        self._compiler.close(0.0)
        self._encoder.submit(self._chats.close)
        if not self._encoder.close(CLOSE_S):
            _log.warning("a request was still encoded when the server ended")


async def whole_answers(answer: Answer, num_samples: int) -> list[AnswerEnded]:
    """Wait for all samples; return them in their order, and close the answer."""
    ended: dict[int, AnswerEnded] = {}
    try:
        async with aclosing(answer.events()) as events:  # type: ignore[type-var]
            async for told in events:
                ended |= {event.sample: event for event in told if isinstance(event, AnswerEnded)}
    finally:
        answer.close()
    if len(ended) < num_samples:
        raise ApiError(500, "The answer ended early.")
    return [ended[sample] for sample in range(num_samples)]

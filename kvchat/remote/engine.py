"""RemoteEngine: another program's server in the place of an engine.

It has what an EngineThread asks of an Engine, and runs on that thread. Requests are tasks of an
event loop that advances within `step`. The server has the model and its KV cache; this engine knows
only what the server tells of them.
"""

import asyncio
import logging
import math
import time
from array import array
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvchat.core.errors import ContextTooLong, EngineEnded, GenerationError, KvchatError, UsageError
from kvchat.core.events import (
    PrefillProgress,
    RequestEvent,
    RequestFailed,
    SampleFinished,
    TokensGenerated,
)
from kvchat.core.stats import EngineStatus, KvPlaces
from kvchat.core.types import (
    CachedTokens,
    FinishReason,
    Health,
    KeptPositions,
    MissReason,
    Pooling,
    StopWatcher,
    Timing,
    Usage,
)
from kvchat.engine.request import RequestSpec, only_repeats
from kvchat.remote.answer_ids import AnswerIds
from kvchat.remote.exchange import ServerClient, ServerLost
from kvchat.remote.kinds import Kind, Server
from kvchat.remote.local_client import LocalClient
from kvchat.remote.message_ids import Mark
from kvchat.remote.server_kv import ServerKv, SlotFiles
from kvchat.remote.wire import Counts, Piece, Reader, request, tells_its_end

if TYPE_CHECKING:
    from kvchat.engine.embedding import Embedding

T = TypeVar("T")
_log = logging.getLogger(__name__)

# An answer that comes at once was sent together: it tells nothing of the server's rate.
_LEAST_DECODE_S = 0.005
# A step waits so long for news; a cancel waits for the step.
_STEP_S = 0.02
_LEAVING_S = 5.0
# How often a server is looked after while nothing is asked of it, if another engine can replace it.
_LOOK_S = 1.0
_NO_THINNING = "A server's KV cannot be dropped from here."
# More ids than any answer has. A server may go on for ever, and what it says is saved.
_MOST_IDS = 1 << 18
# Messages come in pieces of about a token, but some servers send single letters: a limit of tokens
# is passed by as many pieces of so many letters each.
_CHARS_PER_TOKEN = 6
_NOT_KNOWN = "The server does not tell this."
_BROKEN_OFF = "The answer broke off, as its server {}."
_GO_ON = "/continue goes on from there."
_ENDED = "The kvchat serve that this chat used has ended."
_SILENT = "The kvchat serve that this chat used does not answer any more."
_STALLED = (
    "The kvchat serve that this chat used answers, but computes nothing any more: restart it."
)
_ILL = (Health.STALLED, Health.FAILED)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a server may be silent, in seconds; the last two where another can replace it.

    question_s  to a question about KV
    silence_s   to a request for an answer; then it is asked whether it still runs
    answer_s    to that, the second time
    """

    question_s: float = 5.0
    silence_s: float = 5.0
    answer_s: float = 10.0


# Encodes a text that follows an id.
Spell = Callable[[int, str], Sequence[int]]


class ServerSpeculation:
    """Drafts are the server's own business; `tell` switches those of a server of this user."""

    def __init__(self, tell: Callable[[str], None] | None) -> None:
        self._tell = tell

    def learn(self, contexts: object) -> None:
        """Nothing drafts here."""

    def switch(self, mode: str) -> None:
        if self._tell is not None:
            self._tell(mode)
        elif mode != "off":
            raise UsageError("Whether the model guesses ahead is the server's own setting.")


@dataclass(slots=True)
class _Sample:
    """One sample of a request while the server answers it. Times are of `time.perf_counter`."""

    request_id: int
    number: int
    spec: RequestSpec
    submitted_s: float
    watcher: StopWatcher | None
    last_id: int
    first_s: float | None = None
    last_s: float | None = None
    ids: "array[int]" = field(default_factory=lambda: array("i"))
    num_pieces: int = 0
    num_chars: int = 0
    num_heard: int = 0
    stop_token: int | None = None
    slot: int | None = None
    counts: Counts | None = None
    cancelled_for: FinishReason | None = None
    is_over: bool = False
    task: "asyncio.Task[None] | None" = None

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def count(self, piece: Piece) -> None:
        """Count what a server that takes messages says."""
        num_chars = len(piece.text) + len(piece.thinking)
        num_chars += sum(len(call.arguments) for call in piece.calls)
        self.num_pieces += num_chars > 0
        self.num_chars += num_chars

    def is_at_limit(self, takes_ids: bool) -> bool:
        """Whether the next id would be too many, which a server should not have sent."""
        limit = self.spec.max_tokens
        if self.num_tokens >= _MOST_IDS or self.num_chars >= _MOST_IDS * _CHARS_PER_TOKEN:
            return True
        if limit is None or takes_ids:
            return limit is not None and self.num_tokens >= limit
        return self.num_pieces > limit and self.num_chars > limit * _CHARS_PER_TOKEN


class RemoteEngine:
    """Sends requests to one server, and returns its answers as an engine's events.

    spell       returns the ids of a text that follows an id, if the server takes the ids of the
                chat's own tokenizer. None if ids stand for messages (`message_ids.py`)
    has_ended   whether the server has ended. After that, or after a connection broke or the server
                fell silent or computes nothing any more, `step` raises EngineEnded. None for a
                server that the user named: only its requests fail then
    patience    how long a server may be silent
    """

    def __init__(
        self,
        server: Server,
        spell: Spell | None,
        has_ended: Callable[[], bool] | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._has_ended = has_ended
        self._patience = patience or Patience()
        self._why_lost = ""
        self._heard_s = 0.0
        self._is_doubted = False
        self._watch: asyncio.Task[None] | None = None
        self._server = server
        self._spell = spell
        self._takes_ids = spell is not None
        self._loop = asyncio.new_event_loop()
        self._client = _new_client(server, is_own=has_ended is not None)
        self._slots = SlotFiles(server, self._client)
        shares_ids = server.kind is Kind.KVCHAT and self._takes_ids
        self._kv = ServerKv(self._client, self._patience.question_s) if shares_ids else None
        # Of this user: a chat may change what holds for all that it answers.
        self._own = own = self._kv if has_ended is not None else None
        self.speculation = ServerSpeculation(
            (lambda mode: self._answer_of(own.speculate(mode))) if own is not None else None
        )
        self._news: asyncio.Queue[RequestEvent] = asyncio.Queue()
        self._samples: list[_Sample] = []
        self._num_requests = 0

    # What an EngineThread asks

    @property
    def has_work(self) -> bool:
        return bool(self._samples or self._why_lost or self._watch) or not self._news.empty()

    @property
    def idle_s(self) -> float | None:
        return _LOOK_S if self._has_ended is not None else None

    def abandon_steps(
        self, is_unwanted: Callable[[frozenset[int]], bool], is_awaited: Callable[[], bool]
    ) -> None:
        """No step takes long."""

    def prepare(self) -> None:
        """The server is ready."""

    def submit(self, spec: RequestSpec, submitted_s: float | None = None) -> int:
        """Begin a request; raises KvchatError for one that the server cannot answer."""
        if spec.new_constraint is not None or spec.num_top_logprobs is not None:
            raise UsageError("A server's answers have no format and no logprobs here.")
        if spec.thinning is not None:
            raise UsageError(_NO_THINNING, "Leave out --kv-budget.")
        limit = self._server.max_context
        if self._takes_ids and len(spec.prompt_ids) >= limit:
            raise ContextTooLong(
                f"The prompt has {len(spec.prompt_ids):,} tokens, and the server's context holds "
                f"{limit:,}.",
                "Shorten it.",
                len(spec.prompt_ids),
                limit,
            )
        self._num_requests += 1
        now_s = time.perf_counter()
        for number in range(spec.num_samples):
            watcher = spec.new_stop_watcher() if spec.new_stop_watcher is not None else None
            sample = _Sample(self._num_requests, number, spec, now_s, watcher, spec.prompt_ids[-1])
            sample.task = self._loop.create_task(self._answer(sample))
            sample.task.add_done_callback(partial(self._end, sample))
            self._samples.append(sample)
        self._heard_s = now_s
        self._begin_watching()
        return self._num_requests

    def cancel(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        for sample in self._samples:
            if sample.request_id == request_id and sample.task is not None:
                sample.cancelled_for = sample.cancelled_for or reason
                sample.task.cancel()

    def step(self) -> list[RequestEvent]:
        """Wait a moment for news of the running requests; return all that there is.

        Raises EngineEnded once the server is lost, no request runs and no news is left.
        """
        if not self._samples and self._news.empty() and self._has_ended is not None:
            if self._why_lost or self._has_ended():
                raise EngineEnded(self._why_lost or _ENDED)
            if self._watch is None:
                return []
        return self._loop.run_until_complete(self._heard())

    def close(self) -> None:
        self._loop.run_until_complete(self._closed())
        self._loop.close()

    # What a chat asks

    def status(self) -> EngineStatus:
        if self._own is None:
            raise GenerationError(_NOT_KNOWN)
        return self._answer_of(self._own.status())

    def locate(self, contexts: list[list[int]], done: Callable[[list[KvPlaces]], None]) -> None:
        if self._kv is None:
            raise GenerationError(_NOT_KNOWN)
        done(self._answer_of(self._kv.locate(contexts)))

    def prefetch(self, token_ids: Sequence[int]) -> None:
        """Let a kvchat server bring back KV; others do so when they are asked."""
        if self._kv is not None:
            self._answer_of(self._kv.prefetch(token_ids))

    def read_ahead(self, token_ids: Sequence[int]) -> None:
        """Let a kvchat server prefill; others are not asked to read what may never be sent."""
        if self._kv is not None:
            self._answer_of(self._kv.read_ahead(token_ids))

    def end_read_ahead(self) -> None:
        self.read_ahead(())

    def move_kv(
        self, sources: Sequence[int], targets: Sequence[int], num_own: int, name: str
    ) -> int:
        """Move none: a server has a context by its ids only."""
        return 0

    def thin_beginnings(self, kept: Sequence[KeptPositions]) -> None:
        """Let a server of this user thin them; another has its KV for itself."""
        if self._own is not None:
            self._answer_of(self._own.thin_beginnings(kept))

    def repeat_scores(self, token_ids: Sequence[int], part: Sequence[int]) -> list[float] | None:
        """Ask a server of this user; raise UsageError for another, which tells no scores."""
        if self._own is None:
            raise UsageError(_NO_THINNING, "Leave out --keep.")
        scores: list[float] | None = self._answer_of(self._own.repeat_scores(token_ids, part))
        return scores

    def embedding(self, token_ids: Sequence[int], pooling: Pooling) -> "Embedding":
        """Raise UsageError: a server is asked for answers alone."""
        raise UsageError("Another server computes here, so there are no embeddings.")

    def pin(
        self,
        token_ids: Sequence[int],
        label: str,
        done: Callable[[int], None],
        ttl_s: float = math.inf,
    ) -> None:
        if self._kv is None:
            raise UsageError("The KV of this server cannot be pinned from here.")
        done(self._answer_of(self._kv.pin(token_ids, label, ttl_s)))

    def share(self, token_ids: Sequence[int], done: Callable[[int], None]) -> None:
        raise UsageError("The KV of this server cannot be shared from here.")

    def forget(self, contexts: list[tuple[list[int], int]], done: Callable[[], None]) -> None:
        """Drop KV from a kvchat server's memory; others keep what they keep."""
        if self._kv is not None:
            self._answer_of(self._kv.forget(contexts))
        done()

    def _answer_of(self, question: Coroutine[Any, Any, T]) -> T:
        """Return a kvchat server's answer; one that gives none is asked whether it still runs."""
        if self._is_doubted or self._why_lost:
            question.close()
            raise GenerationError(_NOT_KNOWN)
        try:
            return self._loop.run_until_complete(question)
        except GenerationError:
            self._is_doubted = self._has_ended is not None
            self._begin_watching()
            raise

    def _begin_watching(self) -> None:
        is_watched = self._has_ended is not None or self._server.kind is Kind.KVCHAT
        if is_watched and self._watch is None:
            self._watch = self._loop.create_task(self._watched())

    # On the event loop

    async def _watched(self) -> None:
        """Ask the server whether it still runs, after each silence of running requests.

        A long prompt may be read in silence, but the question is answered meanwhile. So a server
        whose process stands still is lost too, which would keep its connections for ever, and one
        whose engine stands still, which says so. A server that the user named may be silent.
        """
        try:
            while self._samples or self._is_doubted:
                left_s = self._heard_s + self._patience.silence_s - time.perf_counter()
                if left_s > 0 and not self._is_doubted:
                    await asyncio.sleep(left_s)
                    continue
                if why := await self._fault():
                    self._lose_all(why)
                    return
                self._heard_s, self._is_doubted = time.perf_counter(), False
        finally:
            if self._watch is asyncio.current_task():
                self._watch = None

    async def _fault(self) -> str:
        """Return why the server is lost, "" if it is not.

        Asks twice: one answer may be late on a machine with too much to do.
        """
        heard_s = self._heard_s
        for _ in range(2):
            state = await self._client.health(self._patience.answer_s)
            if self._heard_s != heard_s:
                return ""
            if state is not None:
                return _STALLED if state in _ILL else ""
        return _SILENT if self._has_ended is not None else ""

    def _lose_all(self, why: str) -> None:
        """End the running requests, and the engine if another one can replace it."""
        does = "does not answer" if why == _SILENT else "computes nothing any more"
        error: KvchatError = EngineEnded(_BROKEN_OFF.format(does), _GO_ON)
        if self._has_ended is None:
            error = GenerationError(
                f"The server at {self._server.address.shown} computes nothing any more.",
                "Restart it and /retry, or go on with /model NAME.",
            )
        else:
            self._why_lost, self._is_doubted = why, False
        for sample in {sample.request_id: sample for sample in self._samples}.values():
            self._fail(sample, error)
        for sample in self._samples:
            if sample.task is not None:
                sample.task.cancel()

    async def _heard(self) -> list[RequestEvent]:
        events: list[RequestEvent] = []
        try:
            async with asyncio.timeout(_STEP_S):
                events.append(await self._news.get())
        except TimeoutError:
            return events
        while not self._news.empty():
            events.append(self._news.get_nowait())
        return events

    async def _closed(self) -> None:
        tasks = [sample.task for sample in self._samples if sample.task is not None]
        tasks += [self._watch] if self._watch is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVING_S):
                await self._slots.save_all()
        await self._client.close()

    async def _answer(self, sample: _Sample) -> None:
        """Pass on one sample's answer, from the request to its end; `_end` tells of a cancel."""
        try:
            reason = await self._stream(sample)
            sample.is_over = True
            self._news.put_nowait(_finished(sample, reason, self._takes_ids))
            num_tokens = len(sample.spec.prompt_ids) + sample.num_tokens
            await self._slots.note(sample.spec.session_id, sample.slot, num_tokens)
        except ServerLost as error:
            self._slots.server_was_away()
            self._lose(sample, error)
        except KvchatError as error:
            self._slots.server_was_away()
            self._fail(sample, error)
        except Exception as error:
            _log.exception("a request to the server failed")
            self._fail(sample, GenerationError(f"The request to the server failed: {error!r}."))

    def _end(self, sample: _Sample, task: "asyncio.Task[None]") -> None:
        """Forget a sample whose task is over, perhaps cancelled before it began."""
        self._samples.remove(sample)
        if not self._samples and self._watch is not None and not self._is_doubted:
            self._watch.cancel()
            self._watch = None
        # Cancelled without a reason: another sample failed, or the engine closes.
        if sample.cancelled_for is not None and not sample.is_over:
            reason = sample.cancelled_for
            self._news.put_nowait(_finished(sample, reason, self._takes_ids))

    async def _stream(self, sample: _Sample) -> FinishReason:
        """Pass on what the server streams; return why the answer ended."""
        spec = sample.spec
        sample.slot = await self._slots.restored(spec.session_id)
        sent = request(self._server, spec, sample.number, self._takes_ids, sample.slot)
        reader, answer = Reader(self._server.kind, self._takes_ids), AnswerIds()
        finish: FinishReason | None = None
        async with aclosing(self._client.stream(sent)) as documents:
            async for document in documents:
                self._heard_s = time.perf_counter()
                if tells_its_end(document):
                    break
                piece = reader.read(document)
                sample.counts = piece.counts or sample.counts
                self._tell_progress(sample, piece)
                ids = self._own_ids(sample, piece) if self._takes_ids else answer.ids_of(piece)
                # After a stop token the server tells its figures, unless it does not stop there.
                if ids and sample.stop_token is not None:
                    return FinishReason.STOP
                sample.count(piece)
                if (ending := self._say(sample, ids)) is not None:
                    return ending
                if piece.calls and sample.is_at_limit(self._takes_ids):
                    return FinishReason.LENGTH
                finish = piece.finish or finish
                sample.slot = piece.slot if piece.slot is not None else sample.slot
        self._say(sample, answer.last_ids())
        if not self._takes_ids and finish is FinishReason.STOP:
            sample.stop_token = Mark.END
        if finish is None:
            raise ServerLost(
                f"The server at {self._server.address.shown} broke off the answer.", _GO_ON
            )
        return finish

    def _own_ids(self, sample: _Sample, piece: Piece) -> Sequence[int]:
        """Return a piece's ids; if the server left out some, those that spell the same text."""
        assert self._spell is not None
        num_new = piece.num_so_far - sample.num_heard
        sample.num_heard = max(sample.num_heard, piece.num_so_far)
        if not piece.text or num_new <= len(piece.token_ids):
            return piece.token_ids
        return self._spell(sample.last_id, piece.text)

    def _tell_progress(self, sample: _Sample, piece: Piece) -> None:
        if piece.progress is not None and sample.first_s is None:
            cached, done, total = piece.progress
            tokens = CachedTokens(device=cached)
            self._news.put_nowait(PrefillProgress(sample.request_id, tokens, done, total))
            sample.counts = sample.counts or Counts(total, tokens)

    def _say(self, sample: _Sample, ids: Sequence[int]) -> FinishReason | None:
        """Pass on new ids up to a stop token; return why the answer ends here, if it does.

        Limits are kept here too: not every server keeps them.
        """
        num_before, ending = sample.num_tokens, None
        for token_id in ids:
            if self._takes_ids and token_id in sample.spec.stop_token_ids:
                sample.stop_token = token_id
                break
            if sample.is_at_limit(self._takes_ids):
                ending = FinishReason.LENGTH
                break
            sample.ids.append(token_id)
            if sample.watcher is not None and sample.watcher.feed(token_id):
                ending = FinishReason.STOP
                break
            if only_repeats(sample.ids, sample.num_tokens, sample.spec.repetition_limit):
                ending = FinishReason.REPETITION
                break
        if said := sample.ids[num_before:]:
            sample.last_s = time.perf_counter()
            sample.first_s = sample.first_s or sample.last_s
            sample.last_id = said[-1]
            event = TokensGenerated(sample.request_id, sample.number, tuple(said))
            self._news.put_nowait(event)
        return ending

    def _lose(self, sample: _Sample, error: ServerLost) -> None:
        """End a request whose connection broke; the engine too, if another can replace it."""
        if self._has_ended is None:
            self._fail(sample, error)
            return
        self._why_lost = self._why_lost or _ENDED
        self._fail(sample, EngineEnded(_BROKEN_OFF.format("has ended"), _GO_ON))

    def _fail(self, sample: _Sample, error: KvchatError) -> None:
        """End all samples of a request with an error."""
        for other in self._samples:
            if other.request_id == sample.request_id:
                other.is_over = True
                if other is not sample and other.task is not None:
                    other.task.cancel()
        self._news.put_nowait(RequestFailed(sample.request_id, error))


def _new_client(server: Server, is_own: bool) -> ServerClient:
    """Return a client of a server; one of this user on this machine needs no whole library."""
    if is_own and server.kind is Kind.KVCHAT:
        return LocalClient(server.address)
    from kvchat.remote.client import Client

    return Client(server.address)


def _finished(sample: _Sample, reason: FinishReason, takes_ids: bool) -> SampleFinished:
    """Return the event for an answer's end, with the server's own figures where it tells them.

    Without a stop token the next message begins with what closes the answer.
    """
    now_s, num_ids = time.perf_counter(), len(sample.spec.prompt_ids)
    counts = sample.counts or Counts()
    first_s = sample.first_s if sample.first_s is not None else now_s
    last_s = sample.last_s if sample.last_s is not None else first_s
    prompt, cached = counts.prompt or num_ids, counts.cached or CachedTokens()
    if cached.total > prompt:  # some servers count what they restored, and not what was asked
        cached = CachedTokens(device=prompt)
    usage = Usage(
        prompt_tokens=prompt,
        cached=cached,
        completion_tokens=counts.generated or sample.num_tokens,
        is_estimate=not takes_ids and not (counts.prompt and counts.generated),
    )
    timing = Timing(
        ttft_s=first_s - sample.submitted_s,
        prefill_s=first_s - sample.submitted_s,
        decode_s=last_s - first_s if last_s - first_s >= _LEAST_DECODE_S else 0.0,
        total_s=now_s - sample.submitted_s,
    )
    return SampleFinished(
        sample.request_id,
        sample.number,
        reason,
        usage,
        timing,
        stop_token=sample.stop_token,
        miss_reason=MissReason.NOT_TOLD if counts.cached is None else counts.miss_reason,
    )

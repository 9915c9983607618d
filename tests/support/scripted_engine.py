"""ScriptedEngine: says what a script tells it to, at the pace the script tells.

Stands where an Engine stands, below a real EngineThread, ChatHost and session: only the model is
not there. Its tokenizer has one token per byte. Remembers every context it has seen, as a perfect
prefix cache would.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvchat.chat.chat_model import ChatModel, read_chat_model
from kvchat.core.errors import ContextTooLong
from kvchat.core.events import (
    LoadProgress,
    ModelReady,
    PrefillProgress,
    PromptScored,
    RequestEvent,
    SampleFinished,
    TokensGenerated,
)
from kvchat.core.stats import EngineStatus, KvPlaces, ReadRates, SpeculationStatus, TierStatus
from kvchat.core.types import (
    CachedTokens,
    DraftUse,
    FinishReason,
    Pooling,
    Timing,
    TokenLogprobs,
    Usage,
)
from kvchat.engine.request import RequestSpec
from kvchat.model.checkpoint.source import find_model
from support.template_zoo import CHAT_TEMPLATE, TOOLS_AS_JSON
from support.tokenizer_zoo import SPECIAL_TOKENS, byte_tokenizer

_END = 256 + SPECIAL_TOKENS.index("<|end|>")
BLOCK_SIZE = 16
_log = logging.getLogger(__name__)
TOKENS_PER_S = 1000.0


@dataclass(frozen=True, slots=True)
class Script:
    """One answer. `step_s` passes before every step, which reads or generates so many tokens.

    `trouble` is what the disk tier says of itself from then on. The second half is not said until
    the file `until` is there.
    """

    text: str
    tokens_per_step: int = 4
    step_s: float = 0.0
    prefill_per_step: int = 4096
    error: Exception | None = None
    trouble: str = ""
    until: Path | None = None

    @property
    def is_half(self) -> bool:
        """Whether only the first half may be said yet."""
        return self.until is not None and not self.until.exists()


# Says what to answer to the user's last message, for each sample.
Author = Callable[[str, int], Script]


def write_text_checkpoint(directory: Path, template: str = CHAT_TEMPLATE) -> Path:
    """Write a checkpoint that has everything but weights; return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 260}))
    (directory / "chat_template.jinja").write_text(template)
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def write_tool_checkpoint(directory: Path) -> Path:
    """Write such a checkpoint whose template takes tools."""
    source = TOOLS_AS_JSON.replace("<|im_start|>", "<|start|>").replace("<|im_end|>", "<|end|>")
    return write_text_checkpoint(directory, source)


def text_model(directory: Path) -> ChatModel:
    """Return the text side of a checkpoint written here."""
    return read_chat_model(find_model(str(directory)))


@dataclass(slots=True)
class _Sample:
    request_id: int
    sample: int
    spec: RequestSpec
    script: Script
    ids: list[int]
    cached: int
    num_read: int
    submitted_s: float
    num_said: int = 0
    first_s: float | None = None
    cancelled_for: FinishReason | None = None


class _Cache:
    """Remembers contexts; `measure` is all that is asked of it."""

    def __init__(self) -> None:
        self._contexts: list[list[int]] = []

    def add(self, token_ids: list[int]) -> None:
        self._contexts.append(list(token_ids))

    def forget(self, token_ids: list[int], kept: int) -> None:
        self._contexts = [
            known[:kept] if known[:kept] == token_ids[:kept] else known for known in self._contexts
        ]

    def num_cached_tokens(self, token_ids: list[int]) -> int:
        longest = 0
        for known in self._contexts:
            common = next(
                (i for i, (a, b) in enumerate(zip(known, token_ids, strict=False)) if a != b),
                min(len(known), len(token_ids)),
            )
            longest = max(longest, common)
        whole = min(longest, max(0, len(token_ids) - 1))
        return whole // BLOCK_SIZE * BLOCK_SIZE


class _Speculation:
    """The engine's own from its first use on: until then a short test does without torch."""

    @cached_property
    def _own(self) -> Any:
        from kvchat.engine.ngram import NgramDrafter
        from kvchat.engine.speculation import Mode, Speculation

        return Speculation([NgramDrafter()], Mode.OFF)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def learn(self, branches: object) -> None:
        """Nothing drafts here."""

    def status(self) -> SpeculationStatus:
        if "_own" in self.__dict__:
            return self._own.status()
        return SpeculationStatus("off", ("ngram",), DraftUse())


class Reader:
    """An author that keeps the whole prompt that was read last, and answers with one text."""

    def __init__(self, answer: str = "ok") -> None:
        self.read = ""
        self.answer = answer

    def __call__(self, question: str, sample: int) -> Script:
        return Script(self.answer)


class ScriptedEmbedding:
    """Takes two steps; its vector tells the number of tokens and how they are pooled."""

    def __init__(self, token_ids: Sequence[int], pooling: Pooling) -> None:
        self._steps = iter((False, True))
        self.vector = [float(len(token_ids)), 1.0 if pooling is Pooling.MEAN else 0.0]
        self.is_closed = False

    def step(self) -> bool:
        return next(self._steps)

    def close(self) -> None:
        self.is_closed = True


class ScriptedEngine:
    """Has of an Engine what an EngineThread asks of it."""

    moves_kv = False

    def __init__(self, model: ChatModel, author: Author, max_context: int = 32768) -> None:
        self.cache = _Cache()
        self.speculation = _Speculation()
        self._model = model
        self._author = author
        self._max_context = max_context
        self._running: list[_Sample] = []
        self._num_requests = 0
        self._num_steps = 0
        self._num_tokens = 0
        self._disk = TierStatus(
            "disk", num_packs=2, num_bytes=3 << 20, limit_bytes=1 << 30, is_shared=True
        )

    def embedding(self, token_ids: Sequence[int], pooling: Pooling) -> ScriptedEmbedding:
        if len(token_ids) > self._max_context:
            raise ContextTooLong("Too long.", "", len(token_ids), self._max_context)
        return ScriptedEmbedding(token_ids, pooling)

    def cached_tokens(self, token_ids: list[int]) -> CachedTokens:
        return CachedTokens(device=self.cache.num_cached_tokens(token_ids))

    def locate(self, contexts: list[list[int]], done: Callable[[list[KvPlaces]], None]) -> None:
        rates = ReadRates(computed=TOKENS_PER_S)
        done([KvPlaces(len(ids), self.cached_tokens(ids), rates) for ids in contexts])

    def read_ahead(self, token_ids: list[int]) -> None:
        self.cache.add(token_ids)
        _log.info("read ahead tokens=%d", len(token_ids))

    def move_kv(self, sources: list[int], targets: list[int], num_own: int, name: str) -> int:
        """Move KV where `moves_kv` says so, of which nothing is inexact here."""
        assert targets[num_own:] == sources[len(sources) - len(targets) + num_own :]
        if (
            not self.moves_kv
            or self.cache.num_cached_tokens(targets[:num_own]) < num_own - BLOCK_SIZE
        ):
            return 0
        self.cache.add(targets)
        return len(targets)

    def end_read_ahead(self) -> None:
        """Nothing is under way: it reads at once."""

    @property
    def idle_s(self) -> None:
        """There is nothing to look after."""

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def abandon_steps(
        self, is_unwanted: Callable[[frozenset[int]], bool], is_awaited: Callable[[], bool]
    ) -> None:
        """No step takes long enough to be given up."""

    def submit(self, spec: RequestSpec, submitted_s: float | None = None) -> int:
        if len(spec.prompt_ids) >= self._max_context:
            raise ContextTooLong(
                f"The prompt has {len(spec.prompt_ids)} tokens, "
                f"and the context holds {self._max_context}.",
                "Shorten it.",
                len(spec.prompt_ids),
                self._max_context,
            )
        self._num_requests += 1
        prompt = list(spec.prompt_ids)
        if isinstance(self._author, Reader):
            self._author.read = self._model.tokenizer.decode(prompt)
        question, said = self._exchange(prompt)
        cached = self.cache.num_cached_tokens(prompt)
        for sample in range(spec.num_samples):
            script = self._author(question, sample)
            ids = list(script.text.removeprefix(said).encode())
            tokens = [self._token(byte) for byte in ids]
            self._running.append(
                _Sample(
                    request_id=self._num_requests,
                    sample=sample,
                    spec=spec,
                    script=script,
                    ids=tokens,
                    cached=cached,
                    num_read=cached,
                    submitted_s=time.perf_counter(),
                )
            )
        return self._num_requests

    def prepare(self) -> None:
        """There is nothing to prepare."""

    def pin(
        self, token_ids: list[int], label: str, done: Callable[[int], None], ttl_s: float
    ) -> None:
        """There is no disk."""
        done(0)

    def forget(self, contexts: list[tuple[list[int], int]], done: Callable[[], None]) -> None:
        for ids, kept in contexts:
            self.cache.forget(ids, kept)
        done()

    def cancel(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        for sample in self._running:
            if sample.request_id == request_id:
                sample.cancelled_for = reason

    def step(self) -> list[RequestEvent]:
        time.sleep(max(sample.script.step_s for sample in self._running))
        self._num_steps += 1
        events: list[RequestEvent] = []
        for sample in list(self._running):
            events += self._advance(sample)
        return events

    def status(self) -> EngineStatus:
        return EngineStatus(
            num_steps=self._num_steps,
            num_tokens_computed=self._num_tokens,
            num_preempted=0,
            block_size=BLOCK_SIZE,
            block_bytes=4096,
            num_blocks=1024,
            num_free=1000,
            num_cached=24,
            num_evicted=0,
            num_copied=0,
            max_context=self._max_context,
            max_step_tokens=512,
            tiers=(self._disk,),
            speculation=self.speculation.status(),
        )

    def close(self) -> None:
        """Finish what is under way: nothing is."""

    def _advance(self, sample: _Sample) -> list[RequestEvent]:
        if sample.cancelled_for is not None:
            return [self._finish(sample, sample.cancelled_for)]
        if sample.script.error is not None:
            raise sample.script.error
        if sample.script.trouble:
            self._disk = replace(self._disk, trouble=sample.script.trouble)
        prompt = len(sample.spec.prompt_ids)
        if sample.num_read < prompt:
            count = min(sample.script.prefill_per_step, prompt - sample.num_read)
            sample.num_read += count
            self._num_tokens += count
            cached = CachedTokens(device=sample.cached)
            read = PrefillProgress(sample.request_id, cached, sample.num_read, prompt)
            if sample.num_read < prompt or not sample.spec.scores_prompt or sample.sample:
                return [read]
            scored = tuple(TokenLogprobs(token, 0.0) for token in sample.spec.prompt_ids[1:])
            return [read, PromptScored(sample.request_id, scored)]
        return self._say(sample)

    def _say(self, sample: _Sample) -> list[RequestEvent]:
        if sample.first_s is None:
            sample.first_s = time.perf_counter()
        end = min(sample.num_said + sample.script.tokens_per_step, len(sample.ids))
        if end > len(sample.ids) // 2 and sample.script.is_half:
            end = max(sample.num_said, len(sample.ids) // 2)
        limit = self._max_context - len(sample.spec.prompt_ids)
        if sample.spec.max_tokens is not None:
            limit = min(limit, sample.spec.max_tokens)
        reached, end = end >= limit, min(end, limit)
        tokens = tuple(sample.ids[sample.num_said : end])
        sample.num_said = end
        self._num_tokens += len(tokens)
        events: list[RequestEvent] = []
        if tokens:
            is_told = sample.spec.num_top_logprobs is not None
            logprobs = tuple(TokenLogprobs(token, 0.0) for token in tokens) if is_told else ()
            events.append(TokensGenerated(sample.request_id, sample.sample, tokens, logprobs))
        if reached:
            events.append(self._finish(sample, FinishReason.LENGTH))
        elif end == len(sample.ids):
            events.append(self._finish(sample, FinishReason.STOP))
        return events

    def _finish(self, sample: _Sample, reason: FinishReason) -> SampleFinished:
        self._running.remove(sample)
        self.cache.add([*sample.spec.prompt_ids, *sample.ids[: sample.num_said]])
        now_s = time.perf_counter()
        first_s = sample.first_s if sample.first_s is not None else now_s
        usage = Usage(
            prompt_tokens=len(sample.spec.prompt_ids),
            cached=CachedTokens(device=sample.cached),
            completion_tokens=sample.num_said,
        )
        timing = Timing(
            ttft_s=first_s - sample.submitted_s,
            prefill_s=first_s - sample.submitted_s,
            decode_s=now_s - first_s,
            total_s=now_s - sample.submitted_s,
        )
        stop = _END if reason is FinishReason.STOP else None
        return SampleFinished(sample.request_id, sample.sample, reason, usage, timing, stop)

    def _exchange(self, prompt: list[int]) -> tuple[str, str]:
        """The last question, and what has been said in answer to it already."""
        text = self._model.tokenizer.decode(prompt)
        question, asks, said = text.rpartition("user\n")[2].rpartition("assistant\n")
        if not asks:  # the beginning of a message, such as a file that is pinned
            return said.strip("\n"), ""
        return question.strip("\n"), said

    def _token(self, byte: int) -> int:
        token_id = self._model.tokenizer.token_id(_BYTE_LETTERS[byte])
        assert token_id is not None
        return token_id


def _byte_letters() -> list[str]:
    """Return the letter that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return [letters[byte] for byte in range(256)]


_BYTE_LETTERS = _byte_letters()


@dataclass(frozen=True)
class Loading:
    """A model that loads until a file is there; `is_silent` where it tells nothing meanwhile."""

    until: Path
    is_silent: bool

    def last(self, progress: Callable[[LoadProgress], None]) -> None:
        if not self.is_silent:
            progress(LoadProgress("reading weights", 0.25))
        while not self.until.exists():
            time.sleep(0.02)
        if not self.is_silent:
            progress(LoadProgress("checking the weights"))


def scripted_build(
    model: ChatModel,
    author: Author,
    loading: "Loading | None" = None,
    failure: Exception | None = None,
    max_context: int = 32768,
) -> Callable[[Callable[[LoadProgress], None]], tuple[ScriptedEngine, ModelReady]]:
    """Return what an EngineThread builds its engine with; it loads at once unless `loading`."""

    def build(progress: Callable[[LoadProgress], None]) -> tuple[ScriptedEngine, ModelReady]:
        if loading is not None:
            loading.last(progress)
        if failure is not None:
            raise failure
        ready = ModelReady(
            "scripted", "none", "cpu", "float32", max_context, 0.0, stored_as="Q4_K_M"
        )
        return ScriptedEngine(model, author, max_context), ready

    return build


NOTHING = SimpleNamespace()

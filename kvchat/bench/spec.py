"""Scenario `spec`: decoding with speculation on and off, alternating, on several kinds of text.

Answers questions of four categories and recorded conversations; random text at a high temperature
is the worst case. With random weights an oracle drafts: it has the coming text, and each draft is
correct with a given probability. Where a head drafts, the checkpoint's own or an EAGLE-3 one, its
time is measured too: it drafts, and the oracle's tokens take the place of its own. Each measured
gain stands beside the gain that the engine predicts from step costs.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvchat.bench.engines import complete_requests, random_ids
from kvchat.bench.measure import Sample
from kvchat.bench.replay import exchanges
from kvchat.bench.report import Figure, Result, over
from kvchat.bench.setup import BenchSetup
from kvchat.bench.spec_texts import CATEGORIES
from kvchat.chat.chat_model import ChatModel, read_chat_model, readopt
from kvchat.chat.conversation import ROOT, Conversation
from kvchat.chat.session_file import read_session
from kvchat.core.config import EngineConfig, SpeculationConfig
from kvchat.core.errors import KvchatError
from kvchat.core.events import SampleFinished
from kvchat.core.types import NO_MEMORY, SamplingParams
from kvchat.engine.assembly import AssembledEngine, build_engine
from kvchat.engine.drafters import Drafter, DraftOrder, Offer
from kvchat.engine.engine import Engine
from kvchat.engine.head_drafter import HeadDrafter
from kvchat.engine.request import Request, RequestSpec
from kvchat.engine.speculation import Mode, Speculation
from kvchat.model.checkpoint.source import DEMO, DEMO_DRAFT, find_model


class OracleDrafter:
    """Drafts `future`, the completion of every request; `rate` is the share of right tokens.

    It is that of every 20 tokens, in random order. Whether a token is right depends only on its
    position, so all runs are equal.
    """

    name = "draft"

    def __init__(self, future: Sequence[int], rate: float, vocab_size: int) -> None:
        order, are_right = random.Random(0), list[bool]()
        while len(are_right) < len(future):
            are_right += order.sample([n < rate * 20 for n in range(20)], 20)
        self._ids = [
            token if is_right else (token + 1) % vocab_size
            for token, is_right in zip(future, are_right, strict=False)
        ]
        self._source = f"oracle {rate:g}"

    def offer(self, request: Request, most: int) -> Offer | None:
        left = min(most, len(self._ids) - request.num_generated)
        return Offer(self._source, left, is_free=True) if left > 0 else None

    def prepare(self) -> None:
        """There is nothing to prepare."""

    def catch_up(self, wanted: Sequence[DraftOrder]) -> None:
        """The drafts do not depend on the context."""

    def propose(self, wanted: Sequence[DraftOrder]) -> list[Sequence[int]]:
        starts = [want.request.num_generated for want in wanted]
        return [self._ids[s : s + w.num_tokens] for s, w in zip(starts, wanted, strict=True)]

    def update(self, requests: Sequence[Request], seconds: float) -> None:
        """The drafts do not depend on the requests."""

    def learn(self, contexts: Sequence[Sequence[int]]) -> None:
        """The drafts do not depend on the contexts."""

    def forget(self, contexts: Sequence[tuple[Sequence[int], int]]) -> None:
        """No contexts are stored."""

    def close(self) -> None:
        """There is nothing to release."""


class SimulatedHead(OracleDrafter):
    """A head for the next token that takes its own time, and proposes the oracle's tokens.

    So a head with random weights is measured as one that was trained.
    """

    name = "mtp"

    def __init__(self, head: HeadDrafter, future: Sequence[int], rate: float, size: int) -> None:
        super().__init__(future, rate, size)
        self._head = head

    def offer(self, request: Request, most: int) -> Offer | None:
        return self._head.offer(request, most)

    def propose(self, wanted: Sequence[DraftOrder]) -> list[Sequence[int]]:
        own, others = self._head.propose(wanted), super().propose(wanted)
        return [given[: len(drafted)] for drafted, given in zip(own, others, strict=True)]

    def read_hidden(self, request: Request, rows: torch.Tensor) -> None:
        self._head.read_hidden(request, rows)

    def update(self, requests: Sequence[Request], seconds: float) -> None:
        self._head.update(requests, seconds)


_KINDS = {"repetitive": "1.3", "code": "", "pinned-document": "", "free-text": ""}
_MUST_NOT_SLOW = "0.95"
_NUM_TOKENS = 96
_MAX_ANSWERS = 12
_ORACLE_RATES = (0.5, 0.7, 0.9)
# What trained heads reach on code and retrieval, and one that is never right.
_HEAD_RATES = {0.75: "1.3", 0.0: "0.97"}
_HOT = SamplingParams(temperature=3.0)


@dataclass(frozen=True, slots=True)
class _Question:
    """A prompt to answer with speculation on and off."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Tally:
    """The totals of one pass over a text in one mode."""

    num_tokens: int = 0
    seconds: float = 0.0
    predicted_s: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0
    num_verified: int = 0

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass over a text without drafts and with drafts, and the number of equal answers."""

    off: _Tally
    on: _Tally
    num_same: int

    @property
    def gain(self) -> float:
        return self.on.rate / self.off.rate

    @property
    def predicted(self) -> float:
        """The gain that the engine predicts from the costs of its steps."""
        return self.on.predicted_s / self.on.seconds if self.on.seconds else 1.0


def run(setup: BenchSetup) -> Result:
    """Measure every kind of text that is available for the model."""
    is_demo = setup.source.name == DEMO
    draft = setup.draft or (find_model(DEMO_DRAFT) if is_demo else None)
    assembled = build_engine(
        setup.source,
        setup.model,
        setup.cache,
        EngineConfig(),
        NO_MEMORY,
        lambda event: None,
        SpeculationConfig("auto"),
        draft,
    )
    settings = {
        "model": setup.source.name,
        "draft": " and ".join(assembled.engine.speculation.status().drafters),
        "dtype": str(assembled.loaded.dtype).removeprefix("torch."),
        "device": assembled.loaded.device.type,
        "tokens": setup.scaled(_NUM_TOKENS),
    }
    texts = _texts(setup, assembled.loaded.spec.vocab_size)
    bench = _Bench(assembled, setup.scaled(_NUM_TOKENS), setup.repeats)
    figures: list[Figure] = []
    notes = []
    for name, questions in texts.items():
        passes = bench.passes(questions)
        differing = sum(len(questions) - p.num_same for p in passes)
        if differing and assembled.loaded.dtype == torch.float32:
            return Result("spec", settings, refusal=f"drafts changed an answer to {name}")
        if differing:
            notes.append(f"{name}: {differing} answers differ, after a near tie")
        figures += _figures(name, passes, _KINDS.get(name, _MUST_NOT_SLOW))
    if not texts:
        figures += _oracle_figures(bench, has_oracles=True)
        notes.append("no tokenizer: an oracle drafts, correct with the probability in its name")
    elif setup.draft is not None:
        figures += _oracle_figures(bench, has_oracles=False)
    return Result("spec", settings, tuple(figures), notes=tuple(notes))


def _texts(setup: BenchSetup, vocab_size: int) -> dict[str, list[_Question]]:
    """Return the questions of each kind of text; empty without a tokenizer or conversations."""
    try:
        model = read_chat_model(setup.source)
    except KvchatError:
        return {}
    directory = setup.sessions or Path("sessions")
    texts = {name: _asked(model, questions) for name, questions in CATEGORIES.items()}
    if not all(question.prompt for asked in texts.values() for question in asked):
        return {}  # of some types transformers makes a tokenizer without any word
    for name in _KINDS:
        path = directory / f"{name}.jsonl"
        if path.is_file():
            texts[name] = _recorded(path, model)
    texts["unguessable"] = [
        _Question(tuple(random_ids(60, vocab_size, seed)), _HOT) for seed in range(4)
    ]
    return texts


def _asked(model: ChatModel, questions: Sequence[str]) -> list[_Question]:
    """Return questions as first messages of conversations of their own."""
    greedy, empty = SamplingParams(temperature=0.0), Conversation("", 0.0, None)
    return [
        _Question(model.user_ids(empty, ROOT, text, None), greedy, model.stop_token_ids)
        for text in questions
    ]


def _recorded(path: Path, model: ChatModel) -> list[_Question]:
    conversation = read_session(path.read_bytes(), path.name).conversation
    readopt(conversation, model)
    contexts = [
        conversation.context_ids(question.turn_id) for question, _ in exchanges(conversation)
    ]
    greedy = SamplingParams(temperature=0.0)
    return [_Question(tuple(ids), greedy, model.stop_token_ids) for ids in contexts[:_MAX_ANSWERS]]


class _Bench:
    """Answers questions with speculation off and on, alternating, on one engine."""

    def __init__(self, assembled: AssembledEngine, max_tokens: int, repeats: int) -> None:
        self.engine: Engine = assembled.engine
        self.vocab_size = assembled.loaded.spec.vocab_size
        self._max_tokens = max_tokens
        self._repeats = repeats

    def passes(self, questions: Sequence[_Question]) -> list[_Pass]:
        """Answer all questions several times; the first pass is a warm-up and is dropped."""
        return [self._pass(questions) for _ in range(1 + self._repeats)][1:]

    def _pass(self, questions: Sequence[_Question]) -> _Pass:
        """Answer all questions as one conversation: the drafter has the earlier contexts."""
        self.engine.speculation.forget([])
        off, on, num_same = _Tally(), _Tally(), 0
        for question in questions:
            plain = self.answer(question, Mode.OFF, off)
            num_same += self.answer(question, Mode.AUTO, on) == plain
        return _Pass(off, on, num_same)

    def answer(self, question: _Question, mode: Mode, tally: _Tally) -> tuple[int, ...]:
        """Answer one question; return the ids."""
        self.engine.speculation.switch(mode)
        spec = RequestSpec(
            question.prompt,
            question.sampling,
            max_tokens=self._max_tokens,
            stop_token_ids=question.stop_token_ids,
        )
        [completion] = complete_requests(self.engine, [spec])
        _count(tally, completion.finished)
        return completion.token_ids


def _count(tally: _Tally, finished: SampleFinished) -> None:
    """Add an answer's tokens and seconds after its first token, and its drafts."""
    drafts, seconds = finished.usage.drafts, finished.timing.decode_s
    tally.num_tokens += finished.usage.completion_tokens - 1
    tally.seconds += seconds
    tally.predicted_s += seconds * (drafts.gain if drafts.gain is not None else 1.0)
    tally.num_drafted += drafts.num_drafted
    tally.num_accepted += drafts.num_accepted
    tally.num_verified += drafts.num_verified


def _figures(name: str, passes: Sequence[_Pass], must: str) -> list[Figure]:
    on, off = Sample(tuple(p.on.rate for p in passes)), Sample(tuple(p.off.rate for p in passes))
    gain = statistics.median(p.gain for p in passes)
    predicted = statistics.median(p.predicted for p in passes)
    drafted = sum(p.on.num_drafted for p in passes)
    accepted = sum(p.on.num_accepted for p in passes)
    verified = sum(p.on.num_verified for p in passes)
    beside = ("without drafts", gain, "times plain")
    costs = ("predicted from step costs", predicted)
    figures = [
        Figure(name, on.median, "tokens/s", off.median, *beside, must, on.spread),
        over(f"{name}: gain", gain, "x", costs, "measured over predicted", "0.9"),
    ]
    if drafted:
        share, length = 100 * accepted / drafted, 1 + accepted / verified
        accepted_figure = Figure(
            f"{name}: accepted", share, "%", ratio=length, ratio_name="tokens per verify step"
        )
        figures.append(accepted_figure)
    return figures


def _oracle_figures(bench: _Bench, *, has_oracles: bool) -> list[Figure]:
    """Check the engine's predictions at known acceptance rates; a head takes its own time."""
    prompt = tuple(random_ids(48, bench.vocab_size, seed=3))
    question = _Question(prompt, SamplingParams(temperature=0.0))
    future = bench.answer(question, Mode.OFF, _Tally())
    own = bench.engine.speculation
    head = own.drafter(HeadDrafter)
    figures = []
    for rate in _ORACLE_RATES if has_oracles else ():
        oracle = OracleDrafter(future, rate, bench.vocab_size)
        figures += _with_drafter(bench, question, oracle, f"oracle {rate:g}", "")
    for rate, must in _HEAD_RATES.items():
        if head is None:
            break
        simulated = SimulatedHead(head, future, rate, bench.vocab_size)
        figures += _with_drafter(bench, question, simulated, f"head, simulated {rate:g}", must)
    own.close()
    return figures


def _with_drafter(
    bench: _Bench, question: _Question, drafter: Drafter, name: str, must: str
) -> list[Figure]:
    bench.engine.speculation = Speculation([drafter])
    return _figures(name, bench.passes([question]), must)

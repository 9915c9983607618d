"""Scenario `equality`: does an answer depend on where the KV of its context came from?

Runs the same greedy conversations in several modes: without cache, with KV cached from turn to
turn, with KV restored from the disk, and with drafts. Counts the conversations with any difference
from the first mode. Beside it stands transformers' count: its cache kept against a new cache per
turn. In low precision some differ, because sums of other lengths round differently; in float32 none
may differ.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import DynamicCache

from kvchat.bench.engines import GREEDY, complete_requests, free_memory, new_engine, random_ids
from kvchat.bench.peers import Transformers
from kvchat.bench.report import Figure, Result
from kvchat.bench.setup import BenchSetup
from kvchat.chat.chat_model import ChatModel, read_chat_model
from kvchat.chat.conversation import Role
from kvchat.chat.session_file import read_session
from kvchat.chat.template import NewTurn
from kvchat.core.config import CacheConfig, EngineConfig, SpeculationConfig
from kvchat.core.errors import KvchatError
from kvchat.core.types import NO_MEMORY
from kvchat.engine.assembly import AssembledEngine, build_engine
from kvchat.engine.request import RequestSpec
from kvchat.model.checkpoint.source import DEMO, DEMO_DRAFT, find_model

_NUM_CONVERSATIONS = 48
_NUM_TURNS = 4
_NUM_TOKENS = 24
# The lengths of random-token turns: mostly short, one long enough for several prefill steps.
_TURN_LENGTHS = (9, 14, 23, 37, 60, 98, 700)
_CLOCK = datetime(2026, 1, 2, 3, 4, 5)

Answers = list[tuple[int, ...]]
# (conversation's number, ids of the context) -> ids of the answer.
Reply = Callable[[int, list[int]], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Script:
    """The user's turns of one conversation.

    `words` are messages, for a model with a tokenizer; `ids` are random tokens, for one without.
    """

    words: tuple[str, ...] = ()
    ids: tuple[tuple[int, ...], ...] = ()

    def turn(self, model: ChatModel | None, index: int, context: Sequence[int]) -> list[int]:
        """Return the ids that turn `index` appends to `context`."""
        if model is None:
            return list(self.ids[index])
        if not context:
            return model.format.opening(NewTurn(self.words[index], _CLOCK))
        return model.format.following(NewTurn(self.words[index], _CLOCK), context[-1])


def run(setup: BenchSetup) -> Result:
    """Run every conversation in every mode and count the differences."""
    try:
        model = read_chat_model(setup.source)
        messages = _messages(setup.sessions or Path("sessions"))
    except KvchatError:
        model, messages = None, []
    chats = _Chats(setup, model if messages else None, messages)
    held = chats.held()
    plain, peer = held.pop("no cache"), chats.held_by_transformers()
    settings = {
        "model": setup.source.name,
        "dtype": chats.dtype,
        "device": chats.device.type,
        "conversations": len(chats.scripts),
        "turns": _NUM_TURNS,
        "tokens": _NUM_TOKENS,
    }
    beside = _num_different(*peer)
    figures = [
        Figure(
            f"{name}: conversations that differ",
            _num_different(plain, answers),
            "",
            beside,
            "transformers, its cache kept",
        )
        for name, answers in held.items()
    ]
    return Result("equality", settings, tuple(figures))


def _num_different(one: list[Answers], other: list[Answers]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def _messages(directory: Path) -> list[str]:
    """Return the users' messages of under 400 characters in the recorded conversations."""
    return [
        turn.text
        for path in sorted(directory.glob("*.jsonl"))
        for turn in read_session(path.read_bytes(), path.name).conversation.turns()
        if turn.role is Role.USER and len(turn.text) < 400
    ]


class _Chats:
    """Runs the same conversations in one mode after another."""

    def __init__(self, setup: BenchSetup, model: ChatModel | None, messages: Sequence[str]) -> None:
        self._setup = setup
        self._model = model
        self._stops = model.stop_token_ids if model is not None else frozenset[int]()
        plain = self._engine(replace(setup.cache, reuse=False))
        self._plain = plain
        self.dtype = str(plain.loaded.dtype).removeprefix("torch.")
        self.device = plain.loaded.device
        count = 4 if setup.is_quick else _NUM_CONVERSATIONS
        self.scripts = [
            _script(seed, messages, plain.loaded.spec.vocab_size) for seed in range(count)
        ]

    def held(self) -> dict[str, list[Answers]]:
        """Return the answers of every mode, by its name."""
        held = {"no cache": self._hold(self._plain)}
        self._plain.engine.close()
        held["cached"] = self._hold_and_close(self._engine(self._setup.cache))
        held["restarted"] = self._restarted()
        held["drafts"] = self._hold_and_close(self._speculating())
        return held

    def held_by_transformers(self) -> tuple[list[Answers], list[Answers]]:
        """Return transformers' answers with a new cache per turn, and with a kept cache."""
        free_memory()
        peer = Transformers(self._setup.source, self.device, getattr(torch, self.dtype))
        anew = self._all(lambda number, context: self._cut(peer.generate(context, _NUM_TOKENS)[0]))
        caches = [DynamicCache(config=peer.model.config) for _ in self.scripts]

        def go_on(number: int, context: list[int]) -> tuple[int, ...]:
            answer = self._cut(peer.generate(context, _NUM_TOKENS, caches[number])[0])
            surplus = caches[number].get_seq_length() - len(context) - len(answer)
            if surplus > 0:
                caches[number].crop(-surplus)
            return answer

        return anew, self._all(go_on)

    def _engine(self, cache: CacheConfig) -> AssembledEngine:
        return new_engine(self._setup.source, self._setup.model, cache)

    def _speculating(self) -> AssembledEngine:
        draft = find_model(DEMO_DRAFT) if self._setup.source.name == DEMO else None
        source, model, cache = self._setup.source, self._setup.model, self._setup.cache
        spec, memory = SpeculationConfig("auto"), NO_MEMORY
        return build_engine(
            source, model, cache, EngineConfig(), memory, lambda _: None, spec, draft
        )

    def _hold(self, assembled: AssembledEngine) -> list[Answers]:
        return self._all(lambda number, context: self._answer(assembled, context))

    def _hold_and_close(self, assembled: AssembledEngine) -> list[Answers]:
        try:
            return self._hold(assembled)
        finally:
            assembled.engine.close()

    def _restarted(self) -> list[Answers]:
        """Run each turn of all conversations in a new engine, over one cache directory."""
        answers: list[Answers] = [[] for _ in self.scripts]
        with TemporaryDirectory(prefix="kvchat-bench-") as directory:
            for turn in range(_NUM_TURNS):
                cache = replace(self._setup.cache, directory=Path(directory))
                assembled = self._engine(cache)
                for script, given in zip(self.scripts, answers, strict=True):
                    given.append(self._answer(assembled, self._context(script, given[:turn])))
                assembled.engine.close()
        return answers

    def _answer(self, assembled: AssembledEngine, context: list[int]) -> tuple[int, ...]:
        spec = RequestSpec(
            tuple(context), GREEDY, max_tokens=_NUM_TOKENS, stop_token_ids=self._stops
        )
        return complete_requests(assembled.engine, [spec])[0].token_ids

    def _all(self, reply: Reply) -> list[Answers]:
        held = []
        for number, script in enumerate(self.scripts):
            answers: Answers = []
            for _ in range(_NUM_TURNS):
                answers.append(reply(number, self._context(script, answers)))
            held.append(answers)
        return held

    def _context(self, script: _Script, answers: Sequence[tuple[int, ...]]) -> list[int]:
        """Return the ids of the conversation up to the next answer."""
        ids = script.turn(self._model, 0, [])
        for index, answer in enumerate(answers):
            ids += answer
            ids += script.turn(self._model, index + 1, ids)
        return ids

    def _cut(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return an answer's ids before its first stop token."""
        end = next((i for i, token in enumerate(ids) if token in self._stops), len(ids))
        return tuple(ids[:end])


def _script(seed: int, messages: Sequence[str], vocab_size: int) -> _Script:
    chance = random.Random(seed)
    if messages:
        return _Script(words=tuple(chance.sample(messages, _NUM_TURNS)))
    lengths = [chance.choice(_TURN_LENGTHS) for _ in range(_NUM_TURNS)]
    ids = [random_ids(n, vocab_size, seed * _NUM_TURNS + i) for i, n in enumerate(lengths)]
    return _Script(ids=tuple(map(tuple, ids)))

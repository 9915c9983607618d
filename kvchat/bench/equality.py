"""Scenario `equality`: does an answer depend on where the KV of its context came from?

Conversations are held greedily in several ways: every turn read anew, KV kept from turn to turn, KV
brought back from the disk, and with drafts. Counted are conversations that anywhere differ from the
first way. transformers' own model stands beside it: its cache kept, against its cache made anew.
In low precision some differ, for sums of other lengths round differently; in float32 none may.
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
from kvchat.core.config import CacheConfig, EngineConfig, SpeculationConfig
from kvchat.core.errors import KvchatError
from kvchat.engine.assembly import AssembledEngine, build_speculating_engine
from kvchat.engine.request import RequestSpec
from kvchat.model.source import DEMO, DEMO_DRAFT, find_model

_NUM_CONVERSATIONS = 48
_NUM_TURNS = 4
_NUM_TOKENS = 24
# Of turns without words: short ones, and a few that are read in several steps.
_TURN_LENGTHS = (9, 14, 23, 37, 60, 98, 700)
_CLOCK = datetime(2026, 1, 2, 3, 4, 5)

Answers = list[tuple[int, ...]]
# Holds a context's next turn: the ids of the context -> the ids of the answer, without a stop.
Reply = Callable[[int, list[int]], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Script:
    """What the user says in one conversation, turn by turn.

    `words` are messages for a model with a tokenizer; `ids` are tokens of no meaning.
    """

    words: tuple[str, ...] = ()
    ids: tuple[tuple[int, ...], ...] = ()

    def turn(self, model: ChatModel | None, index: int, context: Sequence[int]) -> list[int]:
        """Return the ids that a turn adds to what was said before it."""
        if model is None:
            return list(self.ids[index])
        if not context:
            return model.format.opening(None, self.words[index], _CLOCK)
        return model.format.following(self.words[index], context[-1], _CLOCK)


def run(setup: BenchSetup) -> Result:
    """Hold every conversation in every way, and count."""
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
    """Return what users said in the recorded conversations."""
    return [
        turn.text
        for path in sorted(directory.glob("*.jsonl"))
        for turn in read_session(path.read_bytes(), path.name).conversation.turns()
        if turn.role is Role.USER and len(turn.text) < 400
    ]


class _Chats:
    """The same conversations, held in one way after another."""

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
        """Return the answers of every way."""
        held = {"no cache": self._hold(self._plain)}
        self._plain.engine.close()
        held["cached"] = self._hold_and_close(self._engine(self._setup.cache))
        held["restarted"] = self._restarted()
        held["drafts"] = self._hold_and_close(self._speculating())
        return held

    def held_by_transformers(self) -> tuple[list[Answers], list[Answers]]:
        """Return its answers with a cache made anew each turn, and with one that is kept."""
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
        configs = EngineConfig(), SpeculationConfig("auto")
        return build_speculating_engine(source, draft, model, cache, *configs, None, lambda _: None)

    def _hold(self, assembled: AssembledEngine) -> list[Answers]:
        return self._all(lambda number, context: self._answer(assembled, context))

    def _hold_and_close(self, assembled: AssembledEngine) -> list[Answers]:
        try:
            return self._hold(assembled)
        finally:
            assembled.engine.close()

    def _restarted(self) -> list[Answers]:
        """Hold each turn of all conversations in an engine of its own, over one directory."""
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
        """Return what is said up to the answer that comes next."""
        ids = script.turn(self._model, 0, [])
        for index, answer in enumerate(answers):
            ids += answer
            ids += script.turn(self._model, index + 1, ids)
        return ids

    def _cut(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return an answer up to where it stops."""
        end = next((i for i, token in enumerate(ids) if token in self._stops), len(ids))
        return tuple(ids[:end])


def _script(seed: int, messages: Sequence[str], vocab_size: int) -> _Script:
    chance = random.Random(seed)
    if messages:
        return _Script(words=tuple(chance.sample(messages, _NUM_TURNS)))
    lengths = [chance.choice(_TURN_LENGTHS) for _ in range(_NUM_TURNS)]
    ids = [random_ids(n, vocab_size, seed * _NUM_TURNS + i) for i, n in enumerate(lengths)]
    return _Script(ids=tuple(map(tuple, ids)))

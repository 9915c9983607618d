"""Scenario `turns`: the cost of another turn of a conversation.

Counts the tokens that a 20-turn chat prefills. Compares the time to first token after a long
history with that after a short history, and with transformers, which keeps its cache in memory.
"""

from dataclasses import dataclass

from kvchat.bench.engines import complete, new_engine, random_ids
from kvchat.bench.measure import Sample, alternated
from kvchat.bench.peers import Transformers
from kvchat.bench.report import Figure, Result, compared, over
from kvchat.bench.setup import BenchSetup
from kvchat.engine.assembly import AssembledEngine

_NUM_TURNS = 20
_USER_TOKENS = 24
_ANSWER_TOKENS = 40
_SHORT, _LONG = 512, 8192


def run(setup: BenchSetup) -> Result:
    """Measure prefilled tokens and time to first token."""
    assembled = new_engine(setup.source, setup.model, setup.cache)
    settings = {
        "model": setup.source.name,
        "dtype": str(assembled.loaded.dtype).removeprefix("torch."),
        "device": assembled.loaded.device.type,
        "new_tokens": _USER_TOKENS,
    }
    figures = [_reread(assembled)]
    short, long = setup.scaled(_SHORT), setup.scaled(_LONG)
    if long + _USER_TOKENS < assembled.engine.max_context:
        figures += _first_tokens(setup, assembled, short, long)
    return Result("turns", settings, tuple(figures))


@dataclass(frozen=True, slots=True)
class _Chat:
    """The prefilled tokens of a chat, and the tokens that were new."""

    num_new: int
    num_read: int


def _reread(assembled: AssembledEngine) -> Figure:
    chat = _chat(assembled)
    name, most = f"prefilled in {_NUM_TURNS} turns", f"+{assembled.engine.cache.block_size} a turn"
    new = ("new tokens", chat.num_new)
    return over(name, chat.num_read, "tokens", new, "prefilled over new", most)


def _chat(assembled: AssembledEngine) -> _Chat:
    """Run a chat in which each turn follows all earlier turns and answers."""
    vocab_size = assembled.loaded.spec.vocab_size
    context: list[int] = []
    num_new = num_read = 0
    for turn in range(_NUM_TURNS):
        context += random_ids(_USER_TOKENS, vocab_size, seed=1000 + turn)
        completion = complete(assembled.engine, context, _ANSWER_TOKENS)
        num_new += _USER_TOKENS
        num_read += completion.finished.usage.prefilled_tokens
        context += completion.token_ids
    return _Chat(num_new, num_read)


def _first_tokens(
    setup: BenchSetup, assembled: AssembledEngine, short: int, long: int
) -> list[Figure]:
    ours = _Ours(assembled)
    after_short, after_long = alternated(
        lambda: ours.first_token_s(short), lambda: ours.first_token_s(long), setup.repeats
    )
    peer = _Theirs(setup, assembled)
    theirs = Sample(tuple(peer.first_token_s(long) for _ in range(max(1, setup.repeats // 2))))
    name, beside = f"first token, {long:,} of history", f"{short:,} of history"
    kept = "transformers, cache kept"
    return [
        compared(name, after_long, after_short, "ms", beside, "long over short", "1.6"),
        compared(name, after_long, theirs, "ms", kept, "ours over theirs"),
    ]


class _Ours:
    """A conversation with a history of a given length and a new message each time."""

    def __init__(self, assembled: AssembledEngine) -> None:
        self._engine = assembled.engine
        self._vocab_size = assembled.loaded.spec.vocab_size
        self._num_asked = 0

    def first_token_s(self, history: int) -> float:
        context = random_ids(history, self._vocab_size, seed=history)
        if self._engine.cache.num_cached_tokens(context) < history - self._engine.cache.block_size:
            complete(self._engine, context, 1)
        self._num_asked += 1
        new = random_ids(_USER_TOKENS, self._vocab_size, seed=10_000 + self._num_asked)
        return complete(self._engine, context + new, 1).finished.timing.ttft_s


class _Theirs:
    """The same with transformers, whose cache already holds the history."""

    def __init__(self, setup: BenchSetup, assembled: AssembledEngine) -> None:
        loaded = assembled.loaded
        self._peer = Transformers(setup.source, loaded.device, loaded.dtype)
        self._vocab_size = loaded.spec.vocab_size

    def first_token_s(self, history: int) -> float:
        context = random_ids(history, self._vocab_size, seed=history)
        new = random_ids(_USER_TOKENS, self._vocab_size, seed=20_000)
        cache = self._peer.filled_cache(context)
        return self._peer.generate(context + new, 1, cache)[1]

"""Rows of `kv` for the rules that drop KV of positions: what is recalled over a share of the KV,
and how fast tokens come.

The recall suite runs through the engine. SnapKV and KVzip get a text and one question at a time, of
which the last token and the answer are computed over what is left. H2O generates the text, token by
token, and then the questions, one after another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvchat.bench.decode import NUM_TOKENS
from kvchat.bench.engines import GREEDY, complete_requests, random_ids
from kvchat.bench.measure import alternated
from kvchat.bench.recall import NUM_FACTS, RecallText
from kvchat.bench.report import Figure, compared
from kvchat.bench.setup import BenchSetup
from kvchat.chat.keeping import kept_positions
from kvchat.core.text import Size
from kvchat.core.types import KeptPositions, digest_of_ids, rate
from kvchat.engine.assembly import AssembledEngine
from kvchat.engine.engine import Engine
from kvchat.engine.request import RequestSpec, Thinning

_SHARES = (0.5, 0.25)
_CONTEXT = 4096
# KVzip repeats a text in parts; H2O is given the first tokens of one.
_PART_TOKENS, _GIVEN = 256, 64
# H2O generates its texts, which takes long.
_GENERATED_TEXTS = 1


@dataclass(slots=True)
class _Guide:
    """A TokenConstraint: in each step one token of some."""

    steps: Sequence[Sequence[int]]
    num_taken: int = 0

    def allowed(self) -> bytes:
        bits = sum(1 << token for token in set(self.steps[self.num_taken]))
        return bits.to_bytes(bits.bit_length() // 8 + 1, "little")

    def accept(self, token_id: int) -> bool:
        self.num_taken += 1
        return self.num_taken == len(self.steps)


def thinned(
    setup: BenchSetup, own: AssembledEngine, texts: Sequence[RecallText], request: Sequence[int]
) -> list[Figure]:
    """Return figures for each rule and share; `request` asks a model to repeat the text before."""
    engine, figures = own.engine, _rates(setup, own)
    if not texts:
        return figures
    exact = [_answers(engine, text, None) for text in texts]
    needed = [_repeat_scores(engine, text.ids, request) for text in texts]
    for share in _SHARES:
        budget = Thinning(budget=Size(share=share))
        by_question = [_answers(engine, text, budget) for text in texts]
        by_repeating = []
        for text, scores in zip(texts, needed, strict=True):
            engine.thin_beginnings([_zipped(engine, text.ids, scores, share)])
            by_repeating.append(_answers(engine, text, None))
            engine.thin_beginnings(())
        figures += [
            _recall(f"SnapKV {share:.0%}", by_question, exact),
            _recall(f"KVzip {share:.0%}", by_repeating, exact),
        ]
    generated = texts[:_GENERATED_TEXTS]
    exact = [_generated(engine, text, None) for text in generated]
    for share in _SHARES:
        budget = Thinning(budget=Size(share=share))
        found = [_generated(engine, text, budget) for text in generated]
        figures.append(_recall(f"H2O {share:.0%}", found, exact))
    return figures


def _answers(engine: Engine, text: RecallText, thinning: Thinning | None) -> list[int]:
    """Return for each question the number of the answer that the model chooses."""
    found = []
    for *question, last in text.questions:
        own = None
        if thinning is not None:
            own = Thinning(budget=thinning.budget, num_last=len(question))
        [chosen] = _guided(engine, [*text.ids, *question], [[last], text.answers], own)
        found.append(text.answers.index(chosen))
    return found


def _generated(engine: Engine, text: RecallText, thinning: Thinning | None) -> list[int]:
    """Return the chosen answers to all questions, behind a text that is generated."""
    steps = [[token] for token in text.ids[_GIVEN:]]
    for question in text.questions:
        steps += [*([token] for token in question), text.answers]
    chosen = _guided(engine, text.ids[:_GIVEN], steps, thinning)
    return [text.answers.index(token) for token in chosen]


def _guided(
    engine: Engine,
    prompt: Sequence[int],
    steps: Sequence[Sequence[int]],
    thinning: Thinning | None,
) -> list[int]:
    """Generate tokens of which each is one of some; return those that were chosen."""
    spec = RequestSpec(
        tuple(prompt),
        GREEDY,
        max_tokens=len(steps),
        is_kept=False,
        new_constraint=partial(_Guide, steps),
        thinning=thinning,
    )
    [completion] = complete_requests(engine, [spec])
    pairs = zip(completion.token_ids, steps, strict=True)
    return [token for token, allowed in pairs if len(allowed) > 1]


def _repeat_scores(engine: Engine, ids: Sequence[int], request: Sequence[int]) -> list[float]:
    """Return how much the model needs each token of a text to repeat it."""
    complete_requests(engine, [RequestSpec(tuple(ids), GREEDY, max_tokens=1, is_kept=False)])
    highest = [0.0] * len(ids)
    for start in range(0, len(ids), _PART_TOKENS):
        part = [*request, *ids[max(0, start - 8) : start + _PART_TOKENS]]
        highest = list(map(max, highest, engine.repeat_scores(ids, part) or highest))
    return highest


def _zipped(
    engine: Engine, ids: Sequence[int], scores: Sequence[float], share: float
) -> KeptPositions:
    """Return the positions of a text that KVzip keeps."""
    positions = kept_positions(scores, share, 0, engine.cache.block_size)
    return KeptPositions(digest_of_ids(ids), len(ids), positions, "KVzip")


def _recall(name: str, answers: Sequence[Sequence[int]], exact: Sequence[Sequence[int]]) -> Figure:
    ours, own = (
        sum(text[i] == i for text in each for i in range(NUM_FACTS)) for each in (answers, exact)
    )
    return Figure(f"{name}: recall", ours, f"of {NUM_FACTS * len(answers)}", own, "all KV")


def _rates(setup: BenchSetup, own: AssembledEngine) -> list[Figure]:
    """Return the decode rates over a share of the KV, the time to choose it included."""
    engine, length = own.engine, setup.scaled(_CONTEXT)
    if length + NUM_TOKENS >= engine.max_context:
        return []
    prompt = random_ids(length, own.loaded.spec.vocab_size, seed=3)
    figures = []
    for share in _SHARES:
        budget = Thinning(budget=Size(share=share), num_last=NUM_TOKENS)
        over_less, over_all = (partial(_rate, engine, prompt, each) for each in (budget, None))
        ours, plain = alternated(over_less, over_all, setup.repeats)
        name = f"SnapKV {share:.0%}: context {length:,}"
        figures.append(compared(name, ours, plain, "tokens/s", "all KV"))
    return figures


def _rate(engine: Engine, prompt: Sequence[int], thinning: Thinning | None) -> float:
    spec = RequestSpec(
        tuple(prompt), GREEDY, max_tokens=NUM_TOKENS, is_kept=False, thinning=thinning
    )
    [completion] = complete_requests(engine, [spec])
    finished = completion.finished
    return rate(finished.usage.completion_tokens - 1, finished.timing.decode_s)

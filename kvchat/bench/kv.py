"""Scenario `kv`: KV in few bits beside KV of the model's dtype: bytes, decoding, and quality. Then
answers over the KV of some positions (`thinning.py`).

Quality is measured on a text that comes with kvchat: its perplexity, how far predictions are from
those over plain KV, and how often the likeliest token is the same; and by a hundred questions on
texts of a thousand tokens (`recall.py`). With `--sessions` the perplexity of recorded conversations
is measured too, as `weights` computes it. A code that the model cannot have, or that changes its
answers too much, is a note.
"""

import logging
import math
from dataclasses import dataclass, replace
from functools import partial

import torch

from kvchat.bench.decode import NUM_TOKENS, decode_rate
from kvchat.bench.engines import new_engine, random_ids
from kvchat.bench.measure import alternated
from kvchat.bench.recall import NUM_FACTS, RecallText, recall, recall_texts
from kvchat.bench.report import Figure, Result, compared, over
from kvchat.bench.setup import BenchSetup
from kvchat.bench.thinning import thinned
from kvchat.bench.weights import perplexity, predictions, recorded_texts
from kvchat.chat.keeping import REPEAT
from kvchat.core.errors import KvchatError, ModelError, UsageError
from kvchat.core.parameters import KV_CODES
from kvchat.engine.assembly import AssembledEngine
from kvchat.model.rounding import divergences, new_encoder, sample_ids

_log = logging.getLogger(__name__)

_CONTEXTS = (128, 1024, 4096)
_RECALL_TOKENS = 1024
# Parts of a context, of which recall is shown for itself.
_NUM_DEPTHS = 5


def run(setup: BenchSetup) -> Result:
    """Measure each code of KV beside plain KV, with the same model."""
    figures: list[Figure] = []
    notes: list[str] = []
    own = _with_plain_kv(setup)
    dtype = str(own.loaded.dtype).removeprefix("torch.")
    settings: dict[str, object] = {
        "model": setup.source.name,
        "weights": own.loaded.weights,
        "device": own.loaded.device.type,
        "own": dtype,
    }
    texts = _texts(setup, own)
    plain: _Quality | None = None
    for number, code in enumerate(KV_CODES, start=1):
        setup.tell(f"{code}, {number} of {len(KV_CODES)} codes")
        try:
            rounded = new_engine(setup.source, setup.model, replace(setup.cache, kv_dtype=code))
        except ModelError as error:
            notes.append(str(error))
            continue
        beside = f"KV in {dtype}"
        measured = [_token_bytes(rounded, own, beside), *_rates(setup, rounded, own, beside)]
        if texts is not None:
            # By an engine of its own: measuring quality rebinds the model's attention.
            plain = plain or _quality(_with_plain_kv(setup), texts)
            measured += _agreement(_quality(rounded, texts), plain, texts, beside)
        if setup.sessions is not None:
            quality, note = _perplexity(setup, rounded, _with_plain_kv(setup), beside)
            measured += quality
            notes += [note] if note else []
        figures += [replace(figure, name=f"{code}: {figure.name}") for figure in measured]
    setup.tell("KV of some positions")
    try:
        figures += _over_less_kv(setup)
    except UsageError as error:
        notes.append(str(error))
    if not figures:
        return Result("kv", settings, refusal=" ".join(notes))
    return Result("kv", settings, tuple(figures), notes=tuple(dict.fromkeys(notes)))


def _over_less_kv(setup: BenchSetup) -> list[Figure]:
    """Measure the rules that drop KV of positions; raises UsageError where a model has none."""
    own = _with_plain_kv(setup)
    texts = _texts(setup, own)
    if texts is None:
        return thinned(setup, own, (), ())
    encode = new_encoder(setup.source)
    suite = texts.recall[:1] if setup.is_quick else texts.recall
    return thinned(setup, own, suite, encode(REPEAT)[len(encode("")) :])


def _with_plain_kv(setup: BenchSetup) -> AssembledEngine:
    """Build the engine with KV in the model's dtype, also where memory is short."""
    found = new_engine(setup.source, setup.model, replace(setup.cache, kv_dtype="auto"))
    if not found.ready.kv_dtype:
        return found
    return new_engine(setup.source, setup.model, replace(setup.cache, kv_dtype=found.ready.dtype))


@dataclass(frozen=True, slots=True)
class _Texts:
    """The tokens of the text that comes with kvchat, and the recall suite."""

    sample: list[int]
    recall: list[RecallText]


def _texts(setup: BenchSetup, own: AssembledEngine) -> _Texts | None:
    """Return the texts in a model's tokens; None for a model without a tokenizer."""
    try:
        sample = sample_ids(setup.source, setup.scaled(own.engine.max_context))
        num_tokens = min(setup.scaled(_RECALL_TOKENS), own.engine.max_context)
        suite = recall_texts(new_encoder(setup.source), num_tokens)
    except Exception as error:  # tokenizers raises any kind
        _log.info("predictions not compared: %s", type(error).__name__)
        return None
    fitting = [text for text in suite if text.num_tokens <= own.engine.max_context]
    return _Texts(sample, fitting)


@dataclass(frozen=True, slots=True)
class _Quality:
    """A model's logits after the tokens of the sample, and its answers to the recall suite."""

    logits: torch.Tensor
    answers: list[list[int]]


def _quality(assembled: AssembledEngine, texts: _Texts) -> _Quality:
    logits = torch.cat(list(predictions(assembled, texts.sample))).cpu()
    return _Quality(logits, [recall(assembled, text) for text in texts.recall])


def _agreement(ours: _Quality, plain: _Quality, texts: _Texts, beside: str) -> list[Figure]:
    """Compare predictions and answers over a code with those over plain KV."""
    same = int((plain.logits.argmax(-1) == ours.logits.argmax(-1)).sum())
    wanted = torch.tensor(texts.sample[1:])
    mine, own = (
        math.exp(torch.nn.functional.cross_entropy(x.logits.float(), wanted)) for x in (ours, plain)
    )
    divergence = max(0.0, float(divergences(plain.logits, ours.logits).mean()))
    return [
        over("perplexity of the text", mine, "", (beside, own)),
        Figure("KL to plain KV", divergence, "nats"),
        Figure("top-1 as plain KV", 100 * same / len(plain.logits), "%"),
        *_recall_figures(ours.answers, plain.answers, beside),
    ]


def _recall_figures(ours: list[list[int]], plain: list[list[int]], beside: str) -> list[Figure]:
    """Return how many answers are right at each depth, how many are others than over plain KV, and
    how many are right over one of both alone. A model that guesses changes its guesses: of two
    wrong answers neither recalls a fact.
    """
    if not ours:
        return []

    def right(answers: list[list[int]], first: int, last: int) -> int:
        return sum(text[i] == i for text in answers for i in range(first, last))

    figures = []
    each = NUM_FACTS // _NUM_DEPTHS
    for first in range(0, NUM_FACTS, each):
        where = f"recall at {100 * first // NUM_FACTS} to {100 * (first + each) // NUM_FACTS} %"
        count = right(ours, first, first + each)
        beside_count = right(plain, first, first + each)
        unit = f"of {each * len(ours)}"
        figures.append(Figure(where, count, unit, beside_count, beside))
    pairs = [
        (fact, *answers)
        for of_text in zip(ours, plain, strict=True)
        for fact, answers in enumerate(zip(*of_text, strict=True))
    ]
    unit = f"of {len(pairs)}"
    changed = sum(mine != own for _, mine, own in pairs)
    in_one = sum((mine == fact) != (own == fact) for fact, mine, own in pairs)
    figures.append(Figure("other answers", changed, unit))
    return [*figures, Figure("facts recalled over one alone", in_one, unit)]


def _token_bytes(rounded: AssembledEngine, own: AssembledEngine, beside: str) -> Figure:
    ours, plain = (each.engine.cache.kv_pool.geometry.token_bytes for each in (rounded, own))
    return over("KV of a token", ours, "bytes", (beside, plain))


def _rates(
    setup: BenchSetup, rounded: AssembledEngine, own: AssembledEngine, beside: str
) -> list[Figure]:
    """Return the decode rates at each context that fits."""
    figures = []
    longest = min(each.engine.max_context for each in (rounded, own)) - NUM_TOKENS - 1
    for length in dict.fromkeys(map(setup.scaled, _CONTEXTS)):
        if length > longest:
            continue
        prompt = random_ids(length, own.loaded.spec.vocab_size, seed=2)
        ours, plain = alternated(
            partial(decode_rate, rounded.engine, prompt),
            partial(decode_rate, own.engine, prompt),
            setup.repeats,
        )
        figures.append(compared(f"context {length:,}", ours, plain, "tokens/s", beside))
    return figures


def _perplexity(
    setup: BenchSetup, rounded: AssembledEngine, own: AssembledEngine, beside: str
) -> tuple[list[Figure], str]:
    """Return the figure of recorded conversations, and a note if there is none."""
    try:
        texts = recorded_texts(setup)
    except KvchatError as error:
        return [], f"perplexity: not measured; the model cannot chat: {error}"
    if not texts:
        return [], f"perplexity: not measured; there are no sessions in {setup.sessions}"
    limit = min(each.engine.max_context for each in (rounded, own))
    texts = [text[: setup.scaled(limit)] for text in texts]
    ours, plain = (perplexity(each, texts) for each in (rounded, own))
    return [over("perplexity", ours, "", (beside, plain))], ""

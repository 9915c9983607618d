"""Scenario `kv`: KV of 8 bits beside KV of the model's dtype: bytes, decoding, and quality.

Quality is the perplexity of recorded conversations, as `weights` computes it; it needs a model with
a tokenizer and `--sessions`. There is nothing to compare where KV of 8 bits does not work.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvchat.bench.decode import NUM_TOKENS, decode_rate
from kvchat.bench.engines import new_engine, random_ids
from kvchat.bench.measure import alternated
from kvchat.bench.report import Figure, Result
from kvchat.bench.setup import BenchSetup
from kvchat.bench.weights import perplexity, recorded_texts
from kvchat.core.config import INT8_KV
from kvchat.core.errors import KvchatError, ModelError
from kvchat.engine.assembly import AssembledEngine

_CONTEXTS = (128, 1024, 4096)


def run(setup: BenchSetup) -> Result:
    """Measure both kinds of KV with the same model."""
    own = new_engine(setup.source, setup.model, replace(setup.cache, kv_dtype="auto"))
    dtype = str(own.loaded.dtype).removeprefix("torch.")
    settings = {
        "model": setup.source.name,
        "weights": own.loaded.weights,
        "device": own.loaded.device.type,
        "own": dtype,
    }
    try:
        rounded = new_engine(setup.source, setup.model, replace(setup.cache, kv_dtype=INT8_KV))
    except ModelError as error:
        return Result("kv", settings, refusal=str(error))
    beside = f"KV in {dtype}"
    figures = [_token_bytes(rounded, own, beside), *_rates(setup, rounded, own, beside)]
    # Perplexity last: it rebinds the model's attention.
    quality, note = _quality(setup, rounded, own, beside)
    return Result("kv", settings, (*figures, *quality), notes=(note,) if note else ())


def _token_bytes(rounded: AssembledEngine, own: AssembledEngine, beside: str) -> Figure:
    ours, plain = (each.engine.cache.kv_pool.geometry.token_bytes for each in (rounded, own))
    return Figure("KV of a token", ours, "bytes", plain, beside, ours / plain, "times that")


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
        figures.append(
            Figure(
                f"context {length:,}",
                ours.median,
                "tokens/s",
                plain.median,
                beside,
                ours.median / plain.median,
                "times that",
                spread=ours.spread,
            )
        )
    return figures


def _quality(
    setup: BenchSetup, rounded: AssembledEngine, own: AssembledEngine, beside: str
) -> tuple[Sequence[Figure], str]:
    """Return the figure of perplexity, and a note if there is none."""
    if setup.sessions is None:
        return (), "perplexity: not measured; give recorded conversations by --sessions"
    try:
        texts = recorded_texts(setup)
    except KvchatError as error:
        return (), f"perplexity: not measured; the model cannot chat: {error}"
    if not texts:
        return (), f"perplexity: not measured; there are no sessions in {setup.sessions}"
    limit = min(each.engine.max_context for each in (rounded, own))
    kept = [text[: setup.scaled(limit)] for text in texts]
    ours, plain = (perplexity(each, kept) for each in (rounded, own))
    figure = Figure("perplexity", ours, "", plain, beside, ours / plain, "times that")
    return (figure,), ""

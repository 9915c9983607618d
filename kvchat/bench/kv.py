"""Scenario `kv`: KV in few bits beside KV of the model's dtype: bytes, decoding, and quality.

Quality is measured on a text that comes with kvchat: how far predictions are from those over plain
KV, and how often the likeliest token is the same. With `--sessions` the perplexity of recorded
conversations is measured too, as `weights` computes it. A code that the model cannot have, or that
changes its answers too much, is a note.
"""

import logging
from dataclasses import replace
from functools import partial

import torch

from kvchat.bench.decode import NUM_TOKENS, decode_rate
from kvchat.bench.engines import new_engine, random_ids
from kvchat.bench.measure import alternated
from kvchat.bench.report import Figure, Result
from kvchat.bench.setup import BenchSetup
from kvchat.bench.weights import perplexity, predictions, recorded_texts
from kvchat.core.errors import KvchatError, ModelError
from kvchat.core.parameters import KV_CODES
from kvchat.engine.assembly import AssembledEngine
from kvchat.model.rounding import divergences, sample_ids

_log = logging.getLogger(__name__)

_CONTEXTS = (128, 1024, 4096)


def run(setup: BenchSetup) -> Result:
    """Measure each code of KV beside plain KV, with the same model."""
    figures: list[Figure] = []
    notes: list[str] = []
    settings: dict[str, object] = {"model": setup.source.name}
    for code in KV_CODES:
        own = new_engine(setup.source, setup.model, replace(setup.cache, kv_dtype="auto"))
        dtype = str(own.loaded.dtype).removeprefix("torch.")
        device = own.loaded.device.type
        settings |= {"weights": own.loaded.weights, "device": device, "own": dtype}
        try:
            rounded = new_engine(setup.source, setup.model, replace(setup.cache, kv_dtype=code))
        except ModelError as error:
            notes.append(str(error))
            continue
        beside = f"KV in {dtype}"
        measured = [_token_bytes(rounded, own, beside), *_rates(setup, rounded, own, beside)]
        # Quality last: it rebinds the model's attention.
        measured += _agreement(setup, rounded, own)
        if setup.sessions is not None:
            quality, note = _perplexity(setup, rounded, own, beside)
            measured += quality
            notes += [note] if note else []
        figures += [replace(figure, name=f"{code}: {figure.name}") for figure in measured]
    if not figures:
        return Result("kv", settings, refusal=" ".join(notes))
    return Result("kv", settings, tuple(figures), notes=tuple(dict.fromkeys(notes)))


def _agreement(setup: BenchSetup, rounded: AssembledEngine, own: AssembledEngine) -> list[Figure]:
    """Compare predictions on the text; nothing for a model without a tokenizer."""
    try:
        ids = sample_ids(setup.source, setup.scaled(own.engine.max_context))
    except Exception as error:  # tokenizers raises any kind
        _log.info("predictions not compared: %s", type(error).__name__)
        return []
    plain, other = (torch.cat(list(predictions(each, ids))).cpu() for each in (own, rounded))
    same = int((plain.argmax(-1) == other.argmax(-1)).sum())
    return [
        Figure("KL to plain KV", max(0.0, float(divergences(plain, other).mean())), "nats"),
        Figure("top-1 as plain KV", 100 * same / len(plain), "%"),
    ]


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
    return [Figure("perplexity", ours, "", plain, beside, ours / plain, "times that")], ""

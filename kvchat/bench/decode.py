"""Scenario `decode`: tokens a second of one request, by context length.

Beside transformers' `generate` in the same run, and the ceiling that reading the weights and the
KV once a token sets. No figure where the two do not generate the same.
"""

import torch

from kvchat.bench.ceilings import Bandwidth, measure_bandwidth
from kvchat.bench.engines import complete, new_engine, random_ids
from kvchat.bench.measure import alternated
from kvchat.bench.peers import Transformers
from kvchat.bench.report import Figure, Result
from kvchat.bench.scenarios import BenchSetup
from kvchat.core.types import rate
from kvchat.engine.assembly import AssembledEngine
from kvchat.model.self_test import compare_with_own

_CONTEXTS = (128, 1024, 4096)
_NUM_TOKENS = 64
_MIN_COSINE = 0.98


def run(setup: BenchSetup) -> Result:
    """Measure decoding at several context lengths."""
    assembled = new_engine(setup.source, setup.model, setup.cache)
    loaded = assembled.loaded
    settings = {
        "model": setup.source.name,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": loaded.device.type,
        "tokens": _NUM_TOKENS,
    }
    peer = Transformers(setup.source, loaded.device, loaded.dtype)
    refusal = _difference(assembled, peer)
    # Comparing rebinds the model to pools of its own; measure on a fresh engine.
    assembled = new_engine(setup.source, setup.model, setup.cache)
    if refusal:
        return Result("decode", settings, refusal=refusal)
    bandwidth = measure_bandwidth(loaded.device)
    figures: list[Figure] = []
    for length in _CONTEXTS:
        if setup.scaled(length) + _NUM_TOKENS < assembled.engine.max_context:
            figures += _measure(setup, assembled, peer, bandwidth, setup.scaled(length))
    notes = (
        f"measured read bandwidth {bandwidth.read / 1e9:.1f} GB/s, "
        f"copy {bandwidth.copy / 1e9:.1f} GB/s",
    )
    return Result("decode", settings, tuple(figures), notes=notes)


def _difference(assembled: AssembledEngine, peer: Transformers) -> str:
    """Return why the two cannot be compared: they compute different things. Empty if they agree."""
    loaded = assembled.loaded
    prompt = random_ids(48, loaded.spec.vocab_size, seed=1)
    own, _ = peer.generate(prompt, 16)
    ours = list(complete(assembled.engine, prompt, 16).token_ids)
    # Low precision may turn a near tie the other way; then the logits must still agree.
    is_close = loaded.dtype != torch.float32 and compare_with_own(loaded) > _MIN_COSINE
    return "" if ours == own or is_close else "greedy tokens differ from transformers'"


def _measure(
    setup: BenchSetup,
    assembled: AssembledEngine,
    peer: Transformers,
    bandwidth: Bandwidth,
    length: int,
) -> list[Figure]:
    engine, spec = assembled.engine, assembled.loaded.spec
    prompt = random_ids(length, spec.vocab_size, seed=2)

    def ours() -> float:
        timing = complete(engine, prompt, _NUM_TOKENS).finished.timing
        return rate(_NUM_TOKENS - 1, timing.decode_s)

    mine, theirs = alternated(ours, lambda: peer.decode_rate(prompt, _NUM_TOKENS), setup.repeats)
    kv_bytes = engine.cache.kv_pool.geometry.token_bytes * (length + _NUM_TOKENS // 2)
    ceiling = bandwidth.read / (_streamed_bytes(assembled) + kv_bytes)
    name = f"context {length:,}"
    return [
        Figure(
            name,
            mine.median,
            "tokens/s",
            theirs.median,
            "transformers generate",
            mine.median / theirs.median,
            "times the peer",
            "1.5",
            mine.spread,
        ),
        Figure(
            name,
            mine.median,
            "tokens/s",
            ceiling,
            "reading weights and KV once",
            mine.median / ceiling,
            "of the ceiling",
            spread=mine.spread,
        ),
    ]


def _streamed_bytes(assembled: AssembledEngine) -> int:
    """Return the weight bytes a token needs: all but an embedding table that is only looked up."""
    module = assembled.loaded.module
    total = sum(parameter.nbytes for parameter in module.parameters())
    table = module.get_input_embeddings().weight
    is_tied = module.get_output_embeddings() is not None and (
        module.get_output_embeddings().weight.data_ptr() == table.data_ptr()
    )
    return total if is_tied else total - table.nbytes

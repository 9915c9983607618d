"""Scenario `decode`: tokens a second of one request, by context length.

Beside transformers' `generate` in the same run, and llama.cpp where it is installed and given the
model as GGUF, and a llama-bench; the bytes a token moves, the weights and its KV once, beside what
memory allows. One row is sampled, with top-k and top-p, beside greedy: all others are greedy. `kv`
measures KV of 8 bits. A token's time is also fitted as a + b * context: a is the weights, b the KV.
No figure where ours and transformers do not generate the same; with fewer bits, which change what
is generated, where the two passes over the very same weights do not agree.
"""

import statistics
from collections.abc import Sequence
from functools import partial

import torch

from kvchat.bench.engines import (
    GREEDY,
    complete,
    complete_requests,
    free_memory,
    model_facts,
    new_engine,
    random_ids,
)
from kvchat.bench.measure import Bandwidth, alternated, measure_bandwidth
from kvchat.bench.peers import Peer, Transformers, prompts_beside_peers
from kvchat.bench.report import Figure, Result, beside_ceiling, compared, over
from kvchat.bench.setup import BenchSetup
from kvchat.core.parameters import KV_CODES
from kvchat.core.types import SamplingParams, rate
from kvchat.engine.assembly import AssembledEngine
from kvchat.engine.engine import Engine
from kvchat.engine.request import RequestSpec
from kvchat.model.packed.quantise import pack_of
from kvchat.model.self_test import compare_with_own

_CONTEXTS = {"cpu": (128, 1024, 4096), "cuda": (1024, 8192, 32768)}
NUM_TOKENS = 64
# What models recommend. The seed is fixed, so that all runs say the same.
_SAMPLED = SamplingParams(temperature=0.7, top_k=20, top_p=0.95, seed=1)
_MIN_COSINE = 0.98


def run(setup: BenchSetup) -> Result:
    """Measure decoding at several context lengths."""
    assembled = new_engine(setup.source, setup.model, setup.cache)
    loaded = assembled.loaded
    settings = {
        **model_facts(setup.source, loaded),
        "tokens": NUM_TOKENS,
    }
    peer = Transformers(setup.source, loaded.device, loaded.dtype)
    refusal = _difference(assembled, peer, setup.cache.kv_dtype)
    if refusal:
        return Result("decode", settings, refusal=refusal)
    # The comparison binds the model to other pools, so measure on a new engine. Free the first one
    # before: both may not fit in memory.
    del assembled, loaded
    free_memory()
    assembled = new_engine(setup.source, setup.model, setup.cache)
    bandwidth = measure_bandwidth(assembled.loaded.device)
    figures: list[Figure] = []
    prompts: list[list[int]] = []
    rates: dict[int, float] = {}
    for length in dict.fromkeys(map(setup.scaled, _CONTEXTS[assembled.loaded.device.type])):
        if length + NUM_TOKENS < assembled.engine.max_context:
            prompts.append(random_ids(length, assembled.loaded.spec.vocab_size, seed=2))
            beside_peer, *moved = _measure(setup, assembled, peer, bandwidth, prompts[-1])
            figures += [beside_peer, *moved]
            rates[length + NUM_TOKENS // 2] = beside_peer.value
    if prompts:
        figures.append(_sampled(setup, assembled, len(prompts[0])))
    del peer  # free its weights
    beside_peer_of = partial(_beside_peer, setup, assembled.engine)
    beside, note = prompts_beside_peers(setup, prompts, beside_peer_of)
    notes = (str(bandwidth), note)
    return Result(
        "decode", settings, (*figures, *_fit(assembled, bandwidth, rates), *beside), notes=notes
    )


def _difference(assembled: AssembledEngine, peer: Transformers, kv_dtype: str) -> str:
    """Return why kvchat and transformers cannot be compared; empty if their results agree."""
    loaded = assembled.loaded
    prompt = random_ids(48, loaded.spec.vocab_size, seed=1)
    own, _ = peer.generate(prompt, 16)
    ours = list(complete(assembled.engine, prompt, 16).token_ids)
    if loaded.weights in ("int8", "int4") or kv_dtype in KV_CODES:
        return (
            "" if compare_with_own(loaded) > _MIN_COSINE else "the paged pass differs from its own"
        )
    # In low precision a near tie may be decided differently; then the logits must still agree.
    is_close = loaded.dtype != torch.float32 and compare_with_own(loaded) > _MIN_COSINE
    return "" if ours == own or is_close else "greedy tokens differ from transformers'"


def _measure(
    setup: BenchSetup,
    assembled: AssembledEngine,
    peer: Transformers,
    bandwidth: Bandwidth,
    prompt: Sequence[int],
) -> list[Figure]:
    engine, length = assembled.engine, len(prompt)
    own = _beside_peer(setup, engine, peer, prompt, "transformers generate", "1.5")
    kv_bytes = engine.cache.kv_pool.geometry.token_bytes * (length + NUM_TOKENS // 2)
    num_bytes = streamed_bytes(assembled) + kv_bytes
    name = f"{own.name}: {num_bytes / 1e6:,.4g} MB a token"
    return [
        own,
        *(
            beside_ceiling(name, own.value * num_bytes, "GB/s", ceiling, own.spread)
            for ceiling in bandwidth.ceilings()
        ),
    ]


def _sampled(setup: BenchSetup, assembled: AssembledEngine, length: int) -> Figure:
    """Return the rate of drawing by top-k and top-p beside that of taking the likeliest token."""
    engine = assembled.engine
    prompt = random_ids(length, assembled.loaded.spec.vocab_size, seed=2)
    sampled, greedy = alternated(
        partial(decode_rate, engine, prompt, _SAMPLED),
        partial(decode_rate, engine, prompt),
        setup.repeats,
    )
    name = f"context {length:,}, sampled with top-k {_SAMPLED.top_k} and top-p {_SAMPLED.top_p}"
    return compared(name, sampled, greedy, "tokens/s", "greedy", "of greedy")


def decode_rate(engine: Engine, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> float:
    """Return tokens a second after the first."""
    spec = RequestSpec(tuple(prompt), sampling, max_tokens=NUM_TOKENS)
    [completion] = complete_requests(engine, [spec])
    timing = completion.finished.timing
    return rate(NUM_TOKENS - 1, timing.decode_s)


def _fit(assembled: AssembledEngine, bandwidth: Bandwidth, rates: dict[int, float]) -> list[Figure]:
    """Return the figures of the fit a + b * context: least squares over the measured contexts."""
    if len(rates) < 2 or not all(rates.values()):
        return []
    slope, start = statistics.linear_regression(list(rates), [1 / r for r in rates.values()])
    weights, weights_s = "reading the weights", streamed_bytes(assembled) / bandwidth.read
    kv_s = assembled.engine.cache.kv_pool.geometry.token_bytes / bandwidth.read
    return [
        over("a token, without its context", start * 1e3, "ms", (weights, weights_s * 1e3)),
        over("a thousand tokens of context", slope * 1e6, "ms", ("reading their KV", kv_s * 1e6)),
    ]


def _beside_peer(
    setup: BenchSetup,
    engine: Engine,
    peer: Peer | Transformers,
    prompt: Sequence[int],
    peer_name: str = "",
    must: str = "1.0",
) -> Figure:
    mine, theirs = alternated(
        partial(decode_rate, engine, prompt),
        partial(peer.decode_rate, prompt, NUM_TOKENS),
        setup.repeats,
    )
    name = f"context {len(prompt):,}"
    beside = peer_name or peer.name
    return compared(name, mine, theirs, "tokens/s", beside, "times the peer", must)


def streamed_bytes(assembled: AssembledEngine) -> int:
    """Return the weight bytes read per token: all weights except an untied embedding table."""
    module = assembled.loaded.module
    total = sum(parameter.nbytes for parameter in module.parameters())
    packs = [pack_of(layer) for layer in module.modules()]
    total += sum(pack.weights.num_bytes for pack in packs if pack is not None)
    table = module.get_input_embeddings().weight
    has_own_head = pack_of(module.get_output_embeddings()) is not None
    is_tied = (
        not has_own_head
        and module.get_output_embeddings() is not None
        and (module.get_output_embeddings().weight.data_ptr() == table.data_ptr())
    )
    return total if is_tied else total - table.nbytes

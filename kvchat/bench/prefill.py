"""Scenario `prefill`: tokens a second of reading a prompt, by its length, nothing cached.

Beside transformers' forward pass over the same prompt in the same run, and llama.cpp where it is
installed and given the model as GGUF, and a llama-bench; its products beside the rate of one large
product, and its bytes beside what memory allows.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import nn

from kvchat.bench.decode import streamed_bytes
from kvchat.bench.engines import complete, free_memory, model_facts, new_engine, random_ids
from kvchat.bench.measure import Ceilings, alternated, measure_bandwidth, measure_products
from kvchat.bench.peers import Peer, Transformers, prompts_beside_peers
from kvchat.bench.report import Figure, Result, beside_ceiling, compared
from kvchat.bench.setup import BenchSetup
from kvchat.core.types import rate
from kvchat.engine.assembly import AssembledEngine
from kvchat.model.self_test import compare_with_own

_LENGTHS = {"cpu": (128, 1024, 4096), "cuda": (1024, 8192, 32768)}
_MIN_COSINE = 0.98


def run(setup: BenchSetup) -> Result:
    """Measure the prefill of prompts of several lengths, to the first token."""
    assembled = new_engine(setup.source, setup.model, setup.cache)
    loaded = assembled.loaded
    settings = {
        **model_facts(setup.source, loaded),
        "step_tokens": assembled.engine.status().max_step_tokens,
    }
    if compare_with_own(loaded) < _MIN_COSINE:
        return Result("prefill", settings, refusal="the paged pass differs from the model's own")
    # The comparison binds the model to other pools, so measure on a new engine. Free the first one
    # before: both may not fit in memory.
    del assembled, loaded
    free_memory()
    assembled = new_engine(setup.source, setup.model, setup.cache)
    device, dtype = assembled.loaded.device, assembled.loaded.dtype
    peer = Transformers(setup.source, device, dtype)
    ceilings = Ceilings(measure_bandwidth(device), measure_products(device, dtype))
    figures: list[Figure] = []
    prompts: list[list[int]] = []
    for length in dict.fromkeys(map(setup.scaled, _LENGTHS[device.type])):
        if length + 1 < assembled.engine.max_context:
            prompts.append(random_ids(length, assembled.loaded.spec.vocab_size, seed=3))
            beside_peer = _beside_peer(setup, assembled, peer, prompts[-1])
            figures += [beside_peer, *_beside_ceilings(assembled, ceilings, length, beside_peer)]
    del peer  # free its weights
    beside, note = prompts_beside_peers(setup, prompts, partial(_beside_peer, setup, assembled))
    notes = (str(ceilings.bandwidth), note)
    return Result("prefill", settings, (*figures, *beside), notes=notes)


def _rate_of(assembled: AssembledEngine, prompt: Sequence[int]) -> Callable[[], float]:
    """Return what reads a prompt, nothing cached, and returns tokens a second."""
    engine = assembled.engine

    def ours() -> float:
        engine.cache.clear()
        finished = complete(engine, prompt, 1).finished
        assert finished.usage.prefilled_tokens == len(prompt)
        return rate(len(prompt), finished.timing.ttft_s)

    return ours


def _beside_peer(
    setup: BenchSetup, assembled: AssembledEngine, peer: Peer | Transformers, prompt: Sequence[int]
) -> Figure:
    mine, theirs = alternated(
        _rate_of(assembled, prompt),
        lambda: rate(len(prompt), peer.prefill_s(prompt)),
        setup.repeats,
    )
    name = f"prompt of {len(prompt):,}"
    return compared(name, mine, theirs, "tokens/s", peer.name, "times the peer")


def _beside_ceilings(
    assembled: AssembledEngine, ceilings: Ceilings, length: int, own: Figure
) -> Iterator[Figure]:
    """Yield the FLOP per second and bytes per second of a prefill, each beside its ceiling."""
    prompts_per_s = own.value / length
    flops = num_flops(assembled, length)
    name = f"{own.name}: {flops / 1e12:,.3g} TFLOP"
    yield beside_ceiling(name, flops * prompts_per_s, "TFLOP/s", ceilings.product, own.spread)
    num_steps = -(-length // assembled.engine.status().max_step_tokens)
    num_bytes = num_steps * streamed_bytes(assembled)
    num_bytes += length * assembled.engine.cache.kv_pool.geometry.token_bytes
    name = f"{own.name}: {num_bytes / 1e6:,.4g} MB"
    for ceiling in ceilings.bandwidth.ceilings():
        yield beside_ceiling(name, num_bytes * prompts_per_s, "GB/s", ceiling, own.spread)


def num_flops(assembled: AssembledEngine, length: int) -> int:
    """Return the FLOP (multiplications and additions) of the prefill of `length` tokens.

    2 per token and linear-layer weight, the output head for the last token only; plus 2 per visible
    (query, key) pair, head and dimension of key and value. Correct for dense models; too high for a
    mixture of experts, where a token uses only some experts.
    """
    loaded = assembled.loaded
    head = loaded.module.get_output_embeddings()
    own = sum(m.weight.numel() for m in loaded.module.modules() if isinstance(m, nn.Linear))
    in_head = head.weight.numel() if isinstance(head, nn.Linear) else 0
    total = 2 * (length * (own - in_head) + in_head)
    for layer in loaded.spec.layers:
        pairs = sum(p + 1 - layer.span.first_visible(p) for p in range(length))
        total += 2 * pairs * layer.num_heads * (layer.key_dim + layer.value_dim)
    return total

"""Scenario `prefill`: tokens a second of reading a prompt, by its length, nothing cached.

Beside transformers' forward pass over the same prompt in the same run.
"""

from kvchat.bench.engines import complete, new_engine, random_ids
from kvchat.bench.measure import alternated
from kvchat.bench.peers import Transformers
from kvchat.bench.report import Figure, Result
from kvchat.bench.scenarios import BenchSetup
from kvchat.core.types import rate
from kvchat.engine.assembly import AssembledEngine
from kvchat.model.self_test import compare_with_own

_LENGTHS = (128, 1024, 4096)
_MIN_COSINE = 0.98


def run(setup: BenchSetup) -> Result:
    """Measure reading prompts of several lengths to the first token."""
    assembled = new_engine(setup.source, setup.model, setup.cache)
    loaded = assembled.loaded
    settings = {
        "model": setup.source.name,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "weights": loaded.weights,
        "device": loaded.device.type,
        "step_tokens": assembled.engine.status().max_step_tokens,
    }
    if compare_with_own(loaded) < _MIN_COSINE:
        return Result("prefill", settings, refusal="the paged pass differs from the model's own")
    # Comparing rebinds the model to pools of its own; measure on a fresh engine.
    assembled = new_engine(setup.source, setup.model, setup.cache)
    peer = Transformers(setup.source, loaded.device, loaded.dtype)
    lengths = [setup.scaled(length) for length in _LENGTHS]
    fitting = [length for length in lengths if length + 1 < assembled.engine.max_context]
    return Result("prefill", settings, tuple(_measure(setup, assembled, peer, n) for n in fitting))


def _measure(
    setup: BenchSetup, assembled: AssembledEngine, peer: Transformers, length: int
) -> Figure:
    engine = assembled.engine
    prompt = random_ids(length, assembled.loaded.spec.vocab_size, seed=3)

    def ours() -> float:
        engine.cache.clear()
        finished = complete(engine, prompt, 1).finished
        assert finished.usage.prefilled_tokens == length
        return rate(length, finished.timing.ttft_s)

    mine, theirs = alternated(ours, lambda: rate(length, peer.prefill_s(prompt)), setup.repeats)
    return Figure(
        f"prompt of {length:,}",
        mine.median,
        "tokens/s",
        theirs.median,
        "transformers",
        mine.median / theirs.median,
        "times the peer",
        spread=mine.spread,
    )

"""Real architectures over host memory: windows, shared KV, keys wider than values, the same ids.

What transformers generates is held against conversations whose KV was pushed out into host memory
and came back, all of it or its end, between any two turns.
"""

from pathlib import Path

import pytest

from support.matrix import spread
from support.specimens import PROMPT_LENGTHS, Specimen, complete, engine_on, make_specimen

NAMES = (
    "llama",
    "gemma3, mixed windows",
    "gemma3n, shared KV",
    "deepseek_v3, wide keys",
    "gpt_oss, sinks",
)


@pytest.fixture(scope="module", params=spread(NAMES, NAMES[1::2]))
def specimen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Specimen:
    directory: Path = tmp_path_factory.mktemp("model")
    return make_specimen(request.param, directory)


@pytest.mark.parametrize("block_size", spread([4, 16], [4]))
def test_what_was_demoted_and_promoted_gives_the_same_ids(specimen, block_size):
    engine = engine_on(
        specimen.loaded, block_size, num_blocks=2 + 400 // block_size, num_host_blocks=200
    )
    expected = [specimen.expected[PROMPT_LENGTHS.index(max(PROMPT_LENGTHS))]]
    prompt = max(specimen.prompts, key=len)
    assert complete(engine, [prompt]) == expected

    for num_demoting in (1, 3, 1 << 20):
        engine.cache.evict_cold(num_demoting)
        assert engine.chain.flush(60.0)
        assert complete(engine, [prompt]) == expected

    host = engine.status().tier("host")
    assert host is not None
    assert host.bytes_read > 0
    engine.close()


def test_prompts_that_push_each_other_out_get_their_own_ids(specimen: Specimen) -> None:
    """Eleven blocks for two requests that need twenty: one gives way to the other, and returns."""
    engine = engine_on(specimen.loaded, 8, num_blocks=1 + 11, num_host_blocks=200)
    prompts = [specimen.prompts[2], specimen.prompts[1][::-1]]
    expected = [specimen.generate(prompt) for prompt in prompts]

    for _ in range(2):
        assert complete(engine, prompts) == expected

    host = engine.status().tier("host")
    assert host is not None
    assert host.bytes_written > 0
    engine.close()

"""Real families whose layers with a window keep a window: tokens and logits of those that do not.

Every chat passes the window of 8 tokens ten times, in chunks of 7, with a fork, in two turns. Types
on the gathered path are here too; of Llama 4 it passes chunks of 16 tokens.
"""

import pytest
import torch

from kvchat.cache.kv_pool import KvGeometry, LayerGeometry
from kvchat.cache.windowed_pool import Windows
from kvchat.core.config import ModelConfig
from kvchat.core.types import SamplingParams
from kvchat.engine.draft_model import ModelDrafter
from kvchat.engine.engine import Engine
from kvchat.engine.kv_storage import block_counts
from kvchat.engine.ngram import NgramDrafter
from kvchat.engine.request import RequestSpec
from kvchat.engine.speculation import Speculation
from kvchat.model.hf.gathered import WITH_WINDOWS
from kvchat.model.loader import load_model
from support.every_type import every_config, every_model
from support.fixed_drafts import FixedDraftPolicy
from support.matrix import spread
from support.said import said_by
from support.specimens import (
    MAX_CONTEXT,
    Specimen,
    cache_and_runner,
    complete,
    engine_on,
    make_specimen,
    random_ids,
    specimen_of,
)
from support.watched_logits import watched_logits

FAMILIES = ["gemma3, mixed windows", "mistral, window", "gpt_oss, sinks", "gemma3n, shared KV"]
GATHERED = sorted(WITH_WINDOWS)
GREEDY = SamplingParams(temperature=0.0)
CHUNKS = {"block_size": 4, "max_step_tokens": 7, "num_blocks": 90}


@pytest.fixture(scope="module", params=spread(FAMILIES + GATHERED, [*FAMILIES[:3], GATHERED[0]]))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Specimen:
    name, directory = request.param, tmp_path_factory.mktemp("model")
    if name in FAMILIES:
        return make_specimen(name, directory)
    return specimen_of(name, every_model(every_config(name)), directory)


def logits_of_a_chat(engine: Engine) -> tuple[list[torch.Tensor], list[int]]:
    """Return the logits of every step of a prompt, a forked answer, and the next turn; and the
    ids of that turn.
    """
    rows = watched_logits(engine)
    context = random_ids(60, 1)
    for num_samples in (2, 1):
        spec = RequestSpec(tuple(context), GREEDY, max_tokens=12, num_samples=num_samples)
        context += [*said_by(engine, spec)[0], 5, 6, 7]
    return rows, context[:-3]


def test_logits_are_equal_to_the_bit_where_all_is_kept(made: Specimen) -> None:
    whole, _ = logits_of_a_chat(engine_on(made.loaded, **CHUNKS))

    windowed, context = logits_of_a_chat(engine_on(made.loaded, **CHUNKS, num_window_blocks=14))

    with torch.inference_mode():
        right = made.reference(torch.tensor([context]), use_cache=False).logits[0, -13:-1]
    error = (torch.cat(windowed[-12:]) - right).abs().max()
    assert error < 2e-4 * right.abs().max()
    assert len(windowed) == len(whole) > 20
    assert all(torch.equal(one, other) for one, other in zip(windowed, whole, strict=True))


@pytest.mark.parametrize("has_drafts", [False, True], ids=["plain", "drafts"])
def test_answers_are_transformers_own(made: Specimen, has_drafts: bool) -> None:
    speculation = Speculation([NgramDrafter()], policy=FixedDraftPolicy(3)) if has_drafts else None
    engine = engine_on(made.loaded, **CHUNKS, num_window_blocks=30, speculation=speculation)

    assert complete(engine, made.prompts) == made.expected
    assert complete(engine, made.prompts) == made.expected  # from what is cached


@pytest.mark.parametrize("num_window_blocks", [0, 30], ids=["whole", "windows"])
def test_a_draft_model_with_windows_guesses_as_one_without(made, num_window_blocks):
    """The draft model is the target's copy: what it guesses is right if its KV is."""
    loaded = load_model(
        made.loaded.source, ModelConfig(dtype="float32"), MAX_CONTEXT, lambda _: None
    )
    cache, runner = cache_and_runner(loaded, 4, 90, num_window_blocks)
    drafter = ModelDrafter(runner, cache, loaded.spec.vocab_size, loaded.max_context)
    speculation = Speculation([drafter], policy=FixedDraftPolicy(3))
    engine = engine_on(made.loaded, **CHUNKS, num_window_blocks=30, speculation=speculation)

    assert complete(engine, made.prompts) == made.expected
    assert complete(engine, made.prompts) == made.expected  # from what is cached
    use = speculation.total.use()
    assert use.num_accepted > 0.95 * use.num_drafted > 40


# The budget


def gemma(block_size: int = 16) -> KvGeometry:
    """18 layers of Gemma-3-270M, of which every sixth has no window."""
    return KvGeometry((LayerGeometry(1, 256, 256),) * 18, torch.bfloat16, block_size)


OF_GEMMA = Windows(frozenset(i for i in range(18) if i % 6 != 5), 512)


def test_8k_of_gemma_fit_in_little_more_than_its_architecture_needs() -> None:
    geometry = gemma()
    layer_bytes = geometry.block_bytes // 18 // 16
    needed = layer_bytes * (3 * 8192 + 15 * 512)

    counts = block_counts(geometry, OF_GEMMA, int(1.15 * needed), 1 << 15, 256)

    assert (counts.num_blocks - 2) * 16 >= 8192
    assert needed < 0.22 * geometry.token_bytes * 8192


@pytest.mark.parametrize("budget", [1 << 20, 1 << 24, 1 << 28, 1 << 32])
def test_a_budget_is_used_and_not_exceeded(budget: int) -> None:
    geometry = gemma()
    counts = block_counts(geometry, OF_GEMMA, budget, 1 << 15, 256)
    window_bytes = geometry.block_bytes // 18 * 15
    other_bytes = geometry.block_bytes - window_bytes
    taken = counts.num_blocks * other_bytes + counts.num_window_blocks * window_bytes

    assert 0.98 * budget - geometry.block_bytes <= taken <= budget
    assert counts.num_window_blocks <= counts.num_blocks

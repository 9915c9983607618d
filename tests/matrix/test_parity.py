"""Greedy ids over a paged cache are those of `generate`, architecture by architecture.

And they are not, once the window, a softcap, the sinks or one block is wrong: the controls at the
end show that the comparison can fail.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from kvchat.model import self_test
from kvchat.model.batch import SequencePiece, build_batch
from kvchat.model.paged_model import PagedModel
from kvchat_kernels.paged_attention import FULL, AttentionSpan
from support.architectures import MANNERS, SUPPORTED
from support.matrix import spread
from support.specimens import (
    MAX_CONTEXT,
    NUM_GENERATED,
    PROMPT_LENGTHS,
    Specimen,
    complete,
    engine_on,
    random_ids,
)

GetSpecimen = Callable[[str], Specimen]
STRANGERS = [random_ids(length, seed=1000 + length) for length in (3, 40)]


@dataclass(frozen=True)
class Shape:
    block_size: int
    max_step_tokens: int
    reuse: bool


SHAPES = {
    "blocks of 8, chunks of 7": Shape(8, 7, True),
    "blocks of 16, chunks of 64, no cache": Shape(16, 64, False),
    "blocks of 32, chunks of 8": Shape(32, 8, True),
}


@pytest.mark.parametrize(
    ("name", "shape"),
    spread(
        [(name, shape) for name in SUPPORTED for shape in SHAPES],
        always=[
            *((name, "blocks of 8, chunks of 7") for name in MANNERS),
            *(("llama", shape) for shape in SHAPES),
        ],
    ),
)
def test_greedy_ids_are_those_of_generate(name: str, shape: str, specimen: GetSpecimen) -> None:
    made, how = specimen(name), SHAPES[shape]
    engine = engine_on(made.loaded, how.block_size, how.max_step_tokens, how.reuse)
    assert all(len(set(ids)) > 2 for ids in made.expected), "an oracle that says one word"

    first = complete(engine, [*made.prompts, *STRANGERS])
    before = engine.status().num_tokens_computed
    second = complete(engine, made.prompts)

    assert first[: len(PROMPT_LENGTHS)] == made.expected
    assert second == made.expected
    computed = engine.status().num_tokens_computed - before
    generated = len(PROMPT_LENGTHS) * (NUM_GENERATED - 1)
    assert computed == (generated + len(PROMPT_LENGTHS) if how.reuse else 57 + 88)


@pytest.mark.parametrize("name", spread(SUPPORTED, MANNERS[1::3]))
def test_prompts_read_token_by_token_make_no_difference(name: str, specimen: GetSpecimen) -> None:
    made = specimen(name)

    assert complete(engine_on(made.loaded, 16, 1), made.prompts) == made.expected


@pytest.mark.parametrize("name", spread(SUPPORTED, MANNERS[2::3]))
def test_a_pool_for_one_evicts_preempts_and_reads_again_unchanged(name, specimen):
    made = specimen(name)
    longest = max(PROMPT_LENGTHS) + NUM_GENERATED
    engine = engine_on(made.loaded, 8, 16, num_blocks=2 + -(-longest // 8))

    first = complete(engine, [*STRANGERS, *made.prompts])
    second = complete(engine, made.prompts[::-1])

    assert first[len(STRANGERS) :] == made.expected
    assert second == made.expected[::-1]
    assert engine.status().num_evicted > 0


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_row_of_logits_is_the_models_own(name: str, specimen: GetSpecimen) -> None:
    """The self-test's scenario, held to rounding in every row and not to most rows' direction."""
    made = specimen(name)
    one, other = (random_ids(self_test.NUM_TOKENS, seed=seed) for seed in (1, 2))
    with torch.inference_mode():
        own = made.reference(input_ids=torch.tensor([one])).logits[0]

    paged = self_test._paged_logits(made.loaded, one, other)

    assert (paged - own).abs().max() < 1e-4 * own.abs().max()
    assert self_test.compare_with_own(made.loaded) > 1 - 1e-6


@pytest.mark.parametrize("name", spread(SUPPORTED, MANNERS))
def test_a_context_filled_to_its_limit_is_still_right(name: str, specimen: GetSpecimen) -> None:
    made = specimen(name)
    prompt = random_ids(MAX_CONTEXT - 3, seed=77)
    expected = made.generate(prompt)[:3]

    assert complete(engine_on(made.loaded, 16, 50), [prompt]) == [expected]


# Controls: a comparison that these pass would prove nothing.


def differs(made: Specimen, **changes: object) -> bool:
    wrong = made.with_layers(**changes)
    is_different = complete(engine_on(wrong), made.prompts) != made.expected
    complete(engine_on(made.loaded), made.prompts[:1])  # binds the right layers again
    return is_different


WINDOWED = [
    "mistral, window",
    "qwen2_moe, window in its mask only",
    "gemma2, softcap",
    "gemma3, mixed windows",
    "gemma3n, shared KV",
    "gpt_oss, sinks",
    "gpt_neo, attention of its own",
]


@pytest.mark.parametrize("name", WINDOWED)
def test_dropping_the_window_shows(name: str, specimen: GetSpecimen) -> None:
    made = specimen(name)
    assert any(layer.span.window for layer in made.loaded.spec.layers)

    assert differs(made, span=FULL)


@pytest.mark.parametrize("name", ["mistral, window", "gpt_neo, attention of its own"])
def test_a_window_one_too_long_shows(name: str, specimen: GetSpecimen) -> None:
    made = specimen(name)
    window = max(layer.span.window or 0 for layer in made.loaded.spec.layers)

    assert differs(made, span=AttentionSpan(window=window + 1))


def test_dropping_the_softcap_shows(specimen: GetSpecimen) -> None:
    assert differs(specimen("gemma2, softcap"), has_softcap=False)


def test_dropping_the_sinks_shows(specimen: GetSpecimen) -> None:
    assert differs(specimen("gpt_oss, sinks"), has_sinks=False)


@pytest.mark.parametrize("which", [0, 1], ids=["keys", "values"])
def test_one_corrupted_block_shows(which: int, specimen: GetSpecimen) -> None:
    made = specimen("llama")
    engine = engine_on(made.loaded)
    prompt = made.prompts[2]
    assert complete(engine, [prompt]) == [made.expected[2]]
    block = engine.cache.match(prompt).blocks[3]

    engine.cache.kv_pool.layers[0][which][block] += 3.0

    assert complete_unchecked(engine, prompt) != made.expected[2]


def complete_unchecked(engine, prompt):  # type: ignore[no-untyped-def]
    engine.cache.check = lambda tables: None  # the match above was never released
    return complete(engine, [prompt])[0]


def test_positions_shifted_by_one_show(specimen: GetSpecimen) -> None:
    made = specimen("llama")
    ids = made.prompts[1]
    pools = [(torch.zeros(9, 8, 2, 16), torch.zeros(9, 8, 2, 16)) for _ in made.loaded.spec.layers]
    model = PagedModel(made.loaded, pools)
    right = build_batch([SequencePiece(ids, 0, range(1, 9), len(ids))], 8, torch.device("cpu"))
    scrambled = right.positions.flip(0)
    with torch.inference_mode():
        own = made.reference(input_ids=torch.tensor([ids])).logits[0]

    good = model.forward(right)
    bad = model.forward(type(right)(**{**_fields(right), "positions": scrambled}))

    assert torch.allclose(good, own, atol=1e-4)
    assert (bad - own).abs().max() > 0.1


def _fields(batch: object) -> dict[str, object]:
    return {name: getattr(batch, name) for name in type(batch).__dataclass_fields__}  # type: ignore[attr-defined]

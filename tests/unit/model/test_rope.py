"""Frequencies that depend on the batch's length are fixed: a cached key is valid in every batch."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvchat.model.batch import SequencePiece, build_batch
from kvchat.model.hf.module_adapter import freeze_rope
from kvchat.model.loader import LoadedModel
from kvchat.model.paged_model import PagedModel
from support.architectures import SUPPORTED
from support.checkpoints import tiny_model
from support.specimens import Specimen, random_ids

GetSpecimen = Callable[[str], Specimen]
CPU = torch.device("cpu")
SHORT, LONG = random_ids(6, seed=1), random_ids(50, seed=2)


def longrope(original: int):  # type: ignore[no-untyped-def]
    """A phi3 whose short factors hold up to `original` positions."""
    model_type, settings = SUPPORTED["phi3, longrope"]
    rope = {**settings["rope_parameters"], "original_max_position_embeddings": original}
    changed = {"rope_parameters": rope, "original_max_position_embeddings": original}
    return tiny_model(model_type, **{**settings, **changed})


def own_logits(module: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return module(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def mixed_batch(loaded: LoadedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a short and a long sequence that share one step."""
    pools = [(torch.zeros(12, 8, 2, 16), torch.zeros(12, 8, 2, 16)) for _ in loaded.spec.layers]
    model = PagedModel(loaded, pools)
    pieces = [
        SequencePiece(SHORT, 0, [1], len(SHORT)),
        SequencePiece(LONG, 0, range(2, 10), len(LONG)),
    ]
    logits = model.forward(build_batch(pieces, 8, CPU))
    return logits[: len(SHORT)], logits[len(SHORT) :]


def test_longrope_is_frozen_to_its_long_factors_and_a_mixed_batch_is_exact(specimen):
    made = specimen("phi3, longrope")

    short, long = mixed_batch(made.loaded)

    # Its short factors hold for 4 positions: transformers uses the long ones for both.
    assert torch.allclose(short, own_logits(made.reference, SHORT), atol=1e-4)
    assert torch.allclose(long, own_logits(made.reference, LONG), atol=1e-4)


def test_without_freezing_the_short_sequence_of_a_mixed_batch_would_be_wrong() -> None:
    """The control: left alone, transformers reads a short text with the short factors, and in a
    batch with a long one with the long factors."""
    floating, frozen = longrope(original=20), longrope(original=20)
    assert freeze_rope(frozen, 128) == ("longrope",)

    assert torch.allclose(own_logits(floating, LONG), own_logits(frozen, LONG), atol=1e-4)
    assert (own_logits(floating, SHORT) - own_logits(frozen, SHORT)).abs().max() > 0.05


@pytest.mark.parametrize(("limit", "is_long"), [(20, False), (21, True), (500, True)])
def test_the_engines_longest_context_decides_between_short_and_long(limit, is_long):
    floating, frozen = longrope(original=20), longrope(original=20)
    freeze_rope(frozen, limit)

    like_short = torch.allclose(own_logits(floating, SHORT), own_logits(frozen, SHORT), atol=1e-4)
    assert like_short is not is_long


def test_a_mixed_batch_is_each_sequence_alone_under_frozen_frequencies(specimen):
    model = longrope(original=20)
    freeze_rope(model, 128)
    expected = own_logits(model, SHORT), own_logits(model, LONG)
    model.set_attn_implementation("kvchat_paged")

    found = mixed_batch(replace(specimen("phi3, longrope").loaded, module=model))

    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_frozen_frequencies_stay_whatever_lengths_come_by() -> None:
    model = longrope(original=20)
    freeze_rope(model, 128)
    before = model.model.rotary_emb.inv_freq.clone()
    for ids in (LONG, SHORT, random_ids(100, seed=3), SHORT):
        own_logits(model, ids)

    assert torch.equal(model.model.rotary_emb.inv_freq, before)


def test_dynamic_scaling_does_not_grow_with_what_was_read_before() -> None:
    model_type, settings = SUPPORTED["llama, dynamic rope"]
    model = tiny_model(model_type, **{**settings, "max_position_embeddings": 16})
    assert freeze_rope(model, 64) == ("dynamic",)

    before = own_logits(model, SHORT)
    own_logits(model, LONG)

    assert torch.equal(own_logits(model, SHORT), before)


def test_each_kind_of_layer_is_frozen_by_itself() -> None:
    kinds = {
        "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    model_type, settings = SUPPORTED["gemma3, mixed windows"]
    changed = {"rope_parameters": kinds, "max_position_embeddings": 16}
    model = tiny_model(model_type, **{**settings, **changed})
    rotary = model.model.rotary_emb
    before = {name: buffer.clone() for name, buffer in rotary.named_buffers()}

    assert freeze_rope(model, 64) == ("dynamic",)

    assert not torch.equal(rotary.full_attention_inv_freq, before["full_attention_inv_freq"])
    assert torch.equal(rotary.sliding_attention_inv_freq, before["sliding_attention_inv_freq"])
    short = own_logits(model, SHORT)
    own_logits(model, LONG)
    assert torch.equal(own_logits(model, SHORT), short)


def test_a_fixed_rope_is_left_as_it_is() -> None:
    for name in ("llama", "llama, yarn", "gemma3, mixed windows", "gpt2, learned positions"):
        model_type, settings = SUPPORTED[name]
        assert freeze_rope(tiny_model(model_type, **settings), 128) == ()

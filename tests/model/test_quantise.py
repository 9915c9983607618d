"""Quantised weights: exact except for the rounding, equal in every batch, or refused."""

from pathlib import Path

import pytest
import torch
from torch import nn

from kvchat.core.config import CacheConfig, ModelConfig
from kvchat.core.errors import ModelError, UsageError
from kvchat.engine.assembly import kv_geometry, kv_identity
from kvchat.model import quantise
from kvchat.model.fused_parts import HalfProduct, MergedProduct
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.quantise import (
    Int4Weight,
    Int8Weight,
    SharedInputProducts,
    exact_levels,
    pack_of,
)
from kvchat.model.self_test import compare_with_own
from kvchat.model.source import find_model
from support.architectures import SUPPORTED
from support.checkpoints import save_checkpoint, tiny_model
from support.specimens import CPU, complete, engine_on, random_ids

_SHAPES = [(16, 64), (48, 96), (80, 160), (32, 4864), (16, 2080)]


def load(directory: Path, name: str, weights: str, dtype: str = "bfloat16") -> LoadedModel:
    model_type, settings = SUPPORTED[name]
    source = find_model(str(save_checkpoint(directory, tiny_model(model_type, **settings))))
    return load_model(source, ModelConfig(dtype=dtype, weights=weights), 128, lambda _: None)


def weight_of(shape: tuple[int, int]) -> torch.Tensor:
    torch.manual_seed(shape[1])
    return torch.randn(*shape) * torch.rand(shape[0], 1)


def outlying(rows: int, width: int) -> torch.Tensor:
    """Activations as transformers have them: one channel fifty times the others."""
    torch.manual_seed(rows)
    x = torch.randn(rows, width)
    x[:, 5] *= 50
    return x


def relative(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out - exact).norm() / exact.norm())


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("shape", _SHAPES)
def test_int8_is_exact_but_for_the_bits_of_its_weights(shape: tuple[int, int], rows: int) -> None:
    weight, x = weight_of(shape), outlying(rows, shape[1])
    pack = Int8Weight(weight)
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    rounded = ((weight / scale).round() * scale).double()

    out = pack.multiply(pack.prepare(x))

    allowed = 1e-3 * (127 / exact_levels()) ** 2  # two bits less without VNNI instructions
    assert relative(out, x.double() @ rounded.t()) < allowed
    by_bfloat16 = (x.bfloat16() @ rounded.bfloat16().t()).double()
    assert relative(out, x.double() @ rounded.t()) < relative(by_bfloat16, x.double() @ rounded.t())


@pytest.mark.parametrize("levels", [127, 63])
def test_activations_of_either_width_are_exact(
    levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processors without VNNI take 7 bits; here both do."""
    monkeypatch.setattr(quantise, "exact_levels", lambda: levels)
    weight, x = weight_of((16, 64)), outlying(4, 64)
    pack = Int8Weight(weight)

    assert relative(pack.multiply(pack.prepare(x)), x.double() @ weight.double().t()) < 0.01


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("shape", _SHAPES)
def test_int4_is_within_half_a_step_of_its_groups(shape: tuple[int, int], rows: int) -> None:
    weight = weight_of(shape)
    x = torch.randn(rows, shape[1]).bfloat16().float()
    pack = Int4Weight(weight)

    out = pack.multiply(pack.prepare(x))

    # A step of 1/15 of a group's range, off by a 12th of its square on average: 0.1 for normal
    # weights; a wrong group, offset or order of columns is off by more than 1.
    assert relative(out, x.double() @ weight.double().t()) < 0.15
    assert relative(out, x.double() @ weight.double().t()) > 0.01


@pytest.mark.parametrize("make", [Int8Weight, Int4Weight])
def test_a_rows_result_does_not_hang_on_its_neighbours(make: type) -> None:
    pack = make(weight_of((48, 96)))
    x = outlying(6, 96)
    alone = torch.cat([pack.multiply(pack.prepare(row[None])) for row in x])
    x[5] *= 1e4

    together = pack.multiply(pack.prepare(x))

    assert torch.allclose(together[:5], alone[:5], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("make", [Int8Weight, Int4Weight])
def test_nothing_in_gives_nothing_out(make: type) -> None:
    pack = make(torch.zeros(16, 64))
    for x in (torch.zeros(2, 64), torch.randn(2, 64)):
        assert torch.equal(pack.multiply(pack.prepare(x)), torch.zeros(2, 16))


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3, mixed windows", "gpt_oss, sinks"])
def test_a_packed_model_runs_fused_and_paged_as_its_own_code_does(
    name: str, weights: str, tmp_path: Path
) -> None:
    loaded = load(tmp_path, name, weights)

    assert compare_with_own(loaded) > 0.999
    assert loaded.weights == weights
    assert loaded.fusing is not None
    is_whole = name != "gpt_oss, sinks"
    assert loaded.fusing.wait().num_layers == (len(loaded.spec.layers) if is_whole else 0)
    assert all(len(ids) == 20 for ids in complete(engine_on(loaded), [random_ids(30, 3)]))


def test_int8_in_float32_says_what_the_unpacked_model_says_for_a_while(tmp_path: Path) -> None:
    exact = load(tmp_path / "a", "llama", "auto", "float32")
    packed = load(tmp_path / "b", "llama", "int8", "float32")
    prompts = [random_ids(length, seed=length) for length in (5, 23, 60)]

    ours, theirs = complete(engine_on(packed), prompts), complete(engine_on(exact), prompts)

    assert [ids[:3] for ids in ours] == [ids[:3] for ids in theirs]


def test_the_original_weights_are_freed(tmp_path: Path) -> None:
    loaded = load(tmp_path, "llama", "int8")
    layer = loaded.module.model.layers[0].self_attn.q_proj
    pack = pack_of(layer)

    assert layer.weight.numel() == 0
    assert pack is not None
    assert pack.num_bytes == 64 * 64 + 64 * 4


def test_a_tied_embedding_stays(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    source = find_model(str(save_checkpoint(tmp_path, model)))

    loaded = load_model(source, ModelConfig(weights="int4"), 128, lambda _: None)

    assert loaded.module.get_input_embeddings().weight.shape == (272, 64)
    assert pack_of(loaded.module.lm_head) is not None
    assert compare_with_own(loaded) > 0.999


def test_shapes_that_do_not_fit_int4_have_8_bits_and_a_note_says_so(tmp_path: Path) -> None:
    model = tiny_model("llama", hidden_size=72, intermediate_size=100)
    source = find_model(str(save_checkpoint(tmp_path, model)))

    loaded = load_model(source, ModelConfig(weights="int4"), 128, lambda _: None)

    assert ["fit 4 bits and are held in 8" in note for note in loaded.notes] == [True]
    assert compare_with_own(loaded) > 0.999
    loaded = load_model(source, ModelConfig(weights="int8"), 128, lambda _: None)
    assert loaded.notes == ()
    assert compare_with_own(loaded) > 0.999


def test_experts_stay_as_they_are_and_a_note_says_so(tmp_path: Path) -> None:
    notes = load(tmp_path, "gpt_oss, sinks", "int8").notes

    assert ["Only linear layers are packed" in note for note in notes] == [True]


@pytest.mark.parametrize("make", [Int8Weight, Int4Weight])
@pytest.mark.parametrize("shape", [(0, 64), (1, 0, 64), (2, 3, 64)])
def test_a_product_of_any_number_of_rows_has_its_shape(make: type, shape: tuple[int, ...]) -> None:
    """Of no rows it once had none: a step in the middle of a prompt asks the head for no row."""
    layers = [nn.Linear(64, width) for width in (16, 48)]
    for layer in layers:
        layer.__dict__[quantise._PACK] = make(layer.weight.detach())

    assert SharedInputProducts(layers)(torch.randn(*shape)).shape == (*shape[:-1], 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_16_bits_take_no_rows_either(dtype: torch.dtype) -> None:
    layers = [nn.Linear(64, width, dtype=dtype) for width in (16, 48)]

    assert HalfProduct(layers)(torch.empty(0, 64)).shape == (0, 64)
    assert MergedProduct(layers)(torch.empty(1, 0, 64, dtype=dtype)).shape == (1, 0, 64)


def test_layers_that_are_not_packed_make_no_packed_product() -> None:
    layer = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="not packed alike"):
        SharedInputProducts([layer])


def test_a_torch_without_the_kernels_is_told_of_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantise, "_has_kernels", lambda: False)

    with pytest.raises(ModelError, match="no int8 kernels"):
        load(tmp_path, "llama", "int8")


def test_an_unknown_form_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--weights is 'int2'"):
        ModelConfig(weights="int2")


def test_kv_of_other_weights_is_never_met(tmp_path: Path) -> None:
    identities = set()
    for weights in ("auto", "int8", "int4"):
        loaded = load(tmp_path / weights, "llama", weights)
        geometry = kv_geometry(loaded.spec, CacheConfig(), loaded.dtype)
        identities.add(kv_identity(loaded, geometry, "the same content"))
    assert loaded.device == CPU
    assert len(identities) == 3

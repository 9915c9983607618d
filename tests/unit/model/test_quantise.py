"""Quantised weights: exact except for the rounding, equal in every batch, or refused."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from kvchat.core.config import CacheConfig, ModelConfig
from kvchat.core.errors import UsageError
from kvchat.engine.kv_storage import kv_geometry, kv_identity
from kvchat.model.checkpoint.source import find_model
from kvchat.model.gpu.fused_parts import MergedProduct
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.packed.quantise import PackedForward, pack_of, use_instead
from kvchat.model.self_test import compare_with_own
from kvchat_kernels.linear.blocks import quantised
from kvchat_kernels.linear.cpu import BlockProduct, FloatProduct
from support.architectures import SUPPORTED
from support.checkpoints import save_checkpoint, tiny_model
from support.specimens import CPU, complete, engine_on, random_ids


def load(directory: Path, name: str, weights: str, dtype: str = "bfloat16") -> LoadedModel:
    model_type, settings = SUPPORTED[name]
    source = find_model(str(save_checkpoint(directory, tiny_model(model_type, **settings))))
    return load_model(source, ModelConfig(dtype=dtype, weights=weights), 128, lambda _: None)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3, mixed windows", "gpt_oss, sinks"])
def test_a_packed_model_runs_paged_as_its_own_code_does(name, weights, tmp_path):
    loaded = load(tmp_path, name, weights)

    assert compare_with_own(loaded) > 0.999
    assert loaded.weights == weights
    assert loaded.compiled is not None
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
    assert pack.weights.num_bytes == 64 * 64 + 2 * 64 * 64 // 32


def test_a_tied_embedding_stays(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    source = find_model(str(save_checkpoint(tmp_path, model)))

    loaded = load_model(source, ModelConfig(weights="int4"), 128, lambda _: None)

    assert loaded.module.get_input_embeddings().weight.shape == (272, 64)
    assert pack_of(loaded.module.lm_head) is not None
    assert compare_with_own(loaded) > 0.999


def test_layers_of_any_shape_are_packed(tmp_path: Path) -> None:
    """Rows of 72 and 100 columns are no whole blocks of 32."""
    model = tiny_model("llama", hidden_size=72, intermediate_size=100)
    source = find_model(str(save_checkpoint(tmp_path, model)))

    for weights in ("int4", "int8"):
        loaded = load_model(source, ModelConfig(weights=weights), 128, lambda _: None)
        assert loaded.notes == ()
        assert pack_of(loaded.module.model.layers[0].mlp.down_proj) is not None
        assert compare_with_own(loaded) > 0.999


def test_experts_of_another_form_stay_as_they_are_and_a_note_says_so(tmp_path: Path) -> None:
    """Those of gpt-oss have biases and lie turned."""
    notes = load(tmp_path, "gpt_oss, sinks", "int8").notes

    assert ["layers that cannot be packed" in note for note in notes] == [True]


@pytest.mark.parametrize(("weights", "most"), [("int8", 0.02), ("int4", 0.2)])
def test_plain_experts_are_packed_and_compute_the_same(weights, most, tmp_path):
    """Held to the module's own forward; 40 rows of 3 experts each are few and many rows."""
    settings = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    directory = save_checkpoint(tmp_path, tiny_model("qwen3_moe", **settings))
    source = find_model(str(directory))
    loaded = load_model(source, ModelConfig(weights=weights), 128, lambda _: None)
    plain = load_model(source, ModelConfig(), 128, lambda _: None)
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))

    packed = loaded.module.model.layers[0].mlp.experts
    experts = plain.module.model.layers[0].mlp.experts
    _, factors, chosen = plain.module.model.layers[0].mlp.gate(x)
    for rows in (40, 1, 0):
        expected = experts(x[:rows], chosen[:rows], factors[:rows])
        found = packed(x[:rows], chosen[:rows], factors[:rows])
        assert found.shape == expected.shape
        assert (found - expected).norm() <= most * expected.norm()

    assert loaded.notes == ()
    assert sum(part.numel() for part in packed.parameters()) == 0
    assert compare_with_own(loaded) > 0.99


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_threads_share_out_the_experts_of_many_rows(weights: str, tmp_path: Path) -> None:
    """All threads once took part in each small product, and waited for each other in each."""
    settings = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    directory = save_checkpoint(tmp_path, tiny_model("qwen3_moe", **settings))
    loaded = load_model(
        find_model(str(directory)), ModelConfig(weights=weights), 128, lambda _: None
    )
    layer = loaded.module.model.layers[0].mlp
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    _, factors, chosen = layer.gate(x)

    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(layer.experts(x, chosen, factors))
            assert torch.get_num_threads() == threads
            with ThreadPoolExecutor(1) as later:
                assert later.submit(torch.get_num_threads).result() == threads
    finally:
        torch.set_num_threads(before)

    assert torch.equal(*results)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(0, 64), (1, 0, 64), (2, 3, 64)])
def test_a_product_of_any_number_of_rows_has_its_shape(bits: int, shape: tuple[int, ...]) -> None:
    """Of no rows it once had none: a step in the middle of a prompt asks the head for no row."""
    layer = nn.Linear(64, 48)
    weights = quantised(layer.weight.detach(), bits)
    use_instead(layer, PackedForward(layer, BlockProduct(weights)))

    assert layer(torch.randn(*shape)).shape == (*shape[:-1], 48)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_16_bits_take_no_rows_either(dtype: torch.dtype) -> None:
    layers = [nn.Linear(64, width, dtype=dtype) for width in (16, 48)]

    assert FloatProduct(layers[0].weight, layers[0].bias)(torch.empty(0, 64)).shape == (0, 16)
    assert MergedProduct(layers)(torch.empty(1, 0, 64, dtype=dtype)).shape == (1, 0, 64)


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


def test_kv_of_packed_experts_is_not_that_of_plain_ones(tmp_path: Path) -> None:
    """A GPU leaves experts as they are: with --weights int8 it once met a CPU's KV as its own."""
    packed, plain = (load(tmp_path / name, "qwen3_moe", name) for name in ("int8", "auto"))
    geometry = kv_geometry(packed.spec, CacheConfig(), packed.dtype)
    on_a_gpu = replace(packed, module=plain.module)

    assert kv_identity(packed, geometry, "same") != kv_identity(on_a_gpu, geometry, "same")

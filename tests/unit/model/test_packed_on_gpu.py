"""Weights of 4 and 8 bits on a GPU, on a machine without one: there plain torch or the interpreter
multiplies, and everything around it is as on the GPU."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeConfig

import kvchat.model.packed.quantise as packing
from kvchat.core.config import ModelConfig
from kvchat.core.errors import ModelError
from kvchat.model import loader
from kvchat.model.checkpoint.source import find_model
from kvchat.model.gpu import memory as gpu_memory
from kvchat.model.gpu.graphs import SHAPES
from kvchat.model.hf.model_class import MetaModel
from kvchat.model.loader import load_model
from kvchat.model.packed.experts import (
    DeviceExpertPacks,
    ExpertPacks,
    expert_packs_of,
    has_packed_experts,
)
from kvchat.model.packed.quantise import (
    DeviceForward,
    DevicePack,
    DeviceProducts,
    pack_of,
    use_instead,
    weight_bytes,
)
from kvchat.model.self_test import compare_with_own
from kvchat_kernels.experts import MAX_ROWS
from kvchat_kernels.linear import blocks
from kvchat_kernels.linear.blocks import BlockWeights, dequantised, quantised, with_planes_apart
from kvchat_kernels.linear.gguf_blocks import block_weights
from support.architectures import SUPPORTED
from support.checkpoints import save_checkpoint, tiny_model
from support.gguf_files import write_gguf
from support.gpu_packs import MIXTURES, load_packed_as_on_gpu
from support.specimens import complete, engine_on, random_ids

GPU = torch.device("cuda", 0)
MIB = 1 << 20


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "gemma3, mixed windows", "gpt_oss, sinks", *MIXTURES]
)
def test_a_packed_model_runs_fused_and_paged_as_its_own_code_does(
    name: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_packed_as_on_gpu(tmp_path, name, weights, monkeypatch)

    assert compare_with_own(loaded) > 0.99999
    assert loaded.weights == weights
    assert loaded.fusing is not None
    is_whole = name not in ("gpt_oss, sinks", *MIXTURES)
    assert has_packed_experts(loaded.module) == (name in MIXTURES)
    assert loaded.fusing.fusion.num_layers == (len(loaded.spec.layers) if is_whole else 0)
    assert all(len(ids) == 20 for ids in complete(engine_on(loaded), [random_ids(30, 3)]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma2, softcap"])
def test_a_packed_model_runs_fused_in_16_bits(name, weights, dtype, tmp_path, monkeypatch):
    loaded = load_packed_as_on_gpu(tmp_path, name, weights, monkeypatch, dtype)

    assert loaded.fusing is not None
    assert loaded.fusing.fusion.num_layers == len(loaded.spec.layers)
    assert compare_with_own(loaded) > 0.98


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_packed_head_of_a_model_that_is_not_packed_runs_fused(weights, tmp_path, monkeypatch):
    """Drafts of a recurrent model with --weights int4 failed: fused products took empty weights."""
    loaded = load_packed_as_on_gpu(tmp_path, "qwen3", weights, monkeypatch)

    _, step, fusing, _ = loader.ways_to_run(loaded.module, loaded.spec, GPU, loader.OWN)

    assert fusing is not None
    assert fusing.fusion.num_layers == len(loaded.spec.layers)
    assert compare_with_own(replace(loaded, step=step, fusing=fusing)) > 0.99999


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_gpu_and_a_cpu_round_weights_alike(weights, tmp_path, monkeypatch):
    source = find_model(str(save_checkpoint(tmp_path / "a", tiny_model("llama"))))
    on_cpu = load_model(source, ModelConfig(weights=weights), 128, lambda _: None)
    on_gpu = load_packed_as_on_gpu(tmp_path / "b", "llama", weights, monkeypatch)
    names = [name for name, part in on_cpu.module.named_modules() if pack_of(part) is not None]

    assert len(names) > 10
    for name in names:
        packs = [pack_of(loaded.module.get_submodule(name)) for loaded in (on_cpu, on_gpu)]
        one, other = (dequantised(pack.weights) for pack in packs if pack is not None)
        assert torch.equal(one, other)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_on_a_gpu_are_those_on_a_cpu(name, weights, tmp_path, monkeypatch):
    """The same weights to the bit; activations beside 4 bits have 8 on a CPU."""
    model_type, settings = MIXTURES[name]
    source = find_model(str(save_checkpoint(tmp_path / "a", tiny_model(model_type, **settings))))
    on_cpu = load_model(source, ModelConfig(weights=weights), 128, lambda _: None)
    on_gpu = load_packed_as_on_gpu(tmp_path / "b", name, weights, monkeypatch)
    own = {path: expert_packs_of(part) for path, part in on_cpu.module.named_modules()}
    x = torch.randn(90, 64, generator=torch.Generator().manual_seed(0))
    chosen = torch.rand(90, 4, generator=torch.Generator().manual_seed(1)).topk(2)

    num_packed = 0
    for path, module in on_gpu.module.named_modules():
        packs, others = expert_packs_of(module), own[path]
        if packs is None:
            continue
        num_packed += 1
        assert isinstance(packs, DeviceExpertPacks)
        assert isinstance(others, ExpertPacks)
        assert sum(part.numel() for part in module.parameters()) == 0
        for matrix, product in zip(
            (*packs.gate_up, packs.down), (*others.gate_up, others.down), strict=True
        ):
            assert torch.equal(dequantised(matrix), dequantised(product.weights))
        for count in (90, 5, 1, 0):
            rows = x[:count], chosen.indices[:count], chosen.values[:count]
            expected = on_cpu.module.get_submodule(path)(*rows)
            most = 1e-3 if weights == "int8" else 0.02
            assert (module(*rows) - expected).norm() <= most * expected.norm()
    assert num_packed == 2


def test_no_more_than_one_expert_is_on_the_gpu_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's experts of Qwen3-30B take 1.2 GB: all at once, they once stayed as they were."""
    weight, sent = torch.randn(7, 24, 64), []

    def noted(tile: torch.Tensor, bits: int) -> BlockWeights:
        sent.append(tuple(tile.shape))
        return quantised(tile, bits)

    monkeypatch.setattr(blocks, "quantised", noted)
    for bits in (4, 8):
        packed = blocks.quantised_matrices(weight, bits, torch.device("cpu"))
        assert torch.equal(dequantised(packed), dequantised(quantised(weight.flatten(0, 1), bits)))
    assert sent == [(24, 64)] * 14


def test_the_unfused_model_is_there_to_go_back_to(tmp_path, monkeypatch):
    """Fused code that fails its self-test on a GPU costs speed, and not the model."""
    loaded = load_packed_as_on_gpu(tmp_path, "llama", "int4", monkeypatch)
    assert loaded.fusing is not None

    loaded.fusing.abandon()

    assert loaded.weights == "int4", "KV of rounded weights is not that of others"
    assert compare_with_own(loaded) > 0.99999


def some_layers(*widths: int, bits: int = 4) -> list[nn.Linear]:
    layers = [nn.Linear(64, width, bias=index > 0) for index, width in enumerate(widths)]
    for layer in layers:
        weights = quantised(layer.weight.detach(), bits)
        use_instead(layer, DeviceForward(layer, DevicePack(weights)))
    return layers


def packs_of(layers: list[nn.Linear]) -> list[BlockWeights]:
    packs = [pack_of(layer) for layer in layers]
    assert all(isinstance(pack, DevicePack) for pack in packs)
    return [pack.weights for pack in packs if pack is not None]


def test_merged_weights_are_held_once() -> None:
    layers, x = some_layers(48, 16, 32), torch.randn(2, 3, 64)
    apart = [layer(x) for layer in layers]

    merged = DeviceProducts(layers)

    assert torch.allclose(merged(x), torch.cat(apart, dim=-1), atol=1e-6)
    assert len({w.levels.untyped_storage().data_ptr() for w in packs_of(layers)}) == 1
    for layer, own in zip(layers, apart, strict=True):
        assert torch.allclose(layer(x), own, atol=1e-6)
    again = DeviceProducts(layers)
    assert again._products[0][0] is merged._products[0][0], "another copy of the weights"


def test_layers_in_other_layouts_are_multiplied_one_after_another() -> None:
    """In a GGUF file the values' weights often have more bits than those of queries and keys."""
    layers = some_layers(48, 16) + some_layers(32, bits=8)
    x = torch.randn(5, 64)

    out = DeviceProducts(layers)(x)

    assert torch.allclose(out, torch.cat([layer(x) for layer in layers], dim=-1), atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 64), (1, 0, 64), (2, 3, 64)])
def test_a_product_of_any_number_of_rows_has_its_shape(shape: tuple[int, ...]) -> None:
    assert DeviceProducts(some_layers(16, 48))(torch.randn(*shape)).shape == (*shape[:-1], 64)


def test_layers_that_are_not_packed_make_no_packed_product() -> None:
    with pytest.raises(ValueError, match="not packed alike"):
        DeviceProducts([nn.Linear(8, 8)])


@pytest.mark.parametrize(
    "kind", ["Q8_0", "Q4_K", "Q6_K", "Q5_0", "Q2_K", "IQ4_XS", "MXFP4", "TQ1_0", "IQ2_XS"]
)
def test_the_blocks_of_a_gguf_file_go_to_the_gpu_as_they_are(kind, tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(BlockWeights, "to", lambda weights, device: sent.append(device) or weights)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    model = tiny_model("llama", **sizes, head_dim=64)
    source = find_model(str(write_gguf(tmp_path / "m.gguf", model, kind)))
    config, spec = loader.inspect_model(source)
    meta = MetaModel(config)

    module, _ = loader._read_weights(source, meta, None, spec, lambda _: None, GPU)

    twins = dict(model.named_modules())
    packed = [(n, x) for n, x in module.named_modules() if isinstance(pack_of(x), DevicePack)]
    assert len(packed) == len(sent) >= 2 * 7
    assert set(sent) == {GPU}
    for name, layer in packed:
        x = torch.randn(3, layer.in_features)
        assert torch.allclose(layer(x), twins[name](x), atol=1e-3), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q3_K", "MXFP4", "mixed"])
def test_the_experts_of_a_gguf_file_go_to_the_gpu_in_their_blocks(kind, tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(BlockWeights, "to", lambda weights, device: sent.append(device) or weights)
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "head_dim": 64}
    settings = SUPPORTED["qwen3_moe"][1] | {"moe_intermediate_size": 256}
    model = tiny_model("qwen3_moe", **settings, **sizes)

    def kind_of(stored: str) -> str:
        if "_exps" not in stored:
            return "BF16"
        return ("Q6_K" if "down" in stored else "Q4_K") if kind == "mixed" else kind

    metadata = {"expert_feed_forward_length": 256}
    source = find_model(str(write_gguf(tmp_path / "m.gguf", model, kind_of, metadata)))
    config, spec = loader.inspect_model(source)
    meta = MetaModel(config)

    module, _ = loader._read_weights(source, meta, None, spec, lambda _: None, GPU)

    experts, own = module.model.layers[0].mlp.experts, model.model.layers[0].mlp.experts
    packs = expert_packs_of(experts)
    assert isinstance(packs, DeviceExpertPacks)
    assert sent == [GPU] * 3
    gate_up = [dequantised(part).view(4, 256, 256) for part in packs.gate_up]
    assert torch.allclose(torch.cat(gate_up, dim=1), own.gate_up_proj, rtol=1e-5, atol=1e-7)
    x, chosen = torch.randn(3, 256), torch.tensor([[0, 3], [1, 3], [2, 0]])
    factors = torch.rand(3, 2)
    assert torch.allclose(experts(x, chosen, factors), own(x, chosen, factors), atol=1e-4)


@pytest.mark.parametrize(("kind", "num_bytes"), [("Q4_K", 18.5), ("Q5_K", 22.5), ("Q6_K", 26.25)])
def test_whole_scales_stay_whole_on_a_gpu(kind: str, num_bytes: float) -> None:
    """As floats those of Q4_K made a file of 18 GB one of 24 there."""
    stored = torch.zeros(2, stored_bytes_of_a_row(kind), dtype=torch.uint8)
    weights = block_weights(stored, kind)
    assert weights is not None

    on_gpu = with_planes_apart(weights.to(torch.device("meta")))

    assert on_gpu.num_bytes == num_bytes * 2 * 512 / 32


def stored_bytes_of_a_row(kind: str) -> int:
    """The bytes of 512 columns in a file."""
    return 2 * {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[kind]


def test_steps_of_graphs_have_no_more_rows_than_the_kernels_of_experts() -> None:
    """With more rows the host reads how many each expert has, which no graph can repeat."""
    assert max(shape.num_tokens for shape in SHAPES) <= MAX_ROWS


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", [*MIXTURES, "tied", "not tied"])
def test_what_packed_weights_will_take_is_known_before(name, weights, tmp_path):
    small = ("llama", {"hidden_size": 72, "tie_word_embeddings": name == "tied"})
    model_type, settings = MIXTURES.get(name, small)
    source = find_model(str(save_checkpoint(tmp_path, tiny_model(model_type, **settings))))
    own = load_model(source, ModelConfig(), 128, lambda _: None)
    packed = load_model(source, ModelConfig(weights=weights), 128, lambda _: None)

    assert weight_bytes(own.module, own.spec).of(weights) == held_bytes(packed.module)


def held_bytes(module: nn.Module) -> int:
    kept = sum(part.nbytes for part in (*module.parameters(), *module.buffers()))
    packs = [pack_of(part) for part in module.modules()]
    experts = [expert_packs_of(part) for part in module.modules()]
    kept += sum(pack.weights.num_bytes for pack in packs if pack is not None)
    return kept + sum(pack.num_bytes for pack in experts if pack is not None)


def test_a_mixture_of_30_b_is_rounded_to_what_fits_a_card_of_24_gb(monkeypatch):
    """Qwen3-30B-A3B, all of whose experts a GPU once kept in 16 bits: it was refused."""
    config = Qwen3MoeConfig(
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        vocab_size=151936,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    names = [f"model.layers.{layer}.self_attn" for layer in range(48)]
    layers = [SimpleNamespace(module_name=name) for name in names]
    spec = SimpleNamespace(gathered=None, state=(), layers=layers, read_elsewhere=())
    monkeypatch.setattr(gpu_memory, "free_bytes", lambda device: 23_500 * MIB)

    chosen, notes = gpu_memory.weights_on_gpu(module, spec, ModelConfig(), GPU, "Qwen3-30B-A3B")  # type: ignore[arg-type]

    assert chosen == "int4"
    assert notes == (
        "The weights of Qwen3-30B-A3B take 58,235 MiB, and 23,500 MiB of the GPU's memory are "
        "free: they are rounded to int4, 18,753 MiB.",
    )


@pytest.mark.parametrize(
    ("free_mib", "asked", "chosen"),
    [
        (24_000, "auto", "auto"),
        (16_000, "auto", "int8"),  # 15,316 fit, but no KV beside them
        (12_000, "auto", "int8"),
        (8_000, "auto", "int4"),
        (24_000, "int4", "int4"),
        (4_000, "auto", None),
        (8_000, "int8", None),
    ],
)
def test_a_gpu_gets_the_most_bits_that_fit(free_mib, asked, chosen, monkeypatch):
    """An 8 B model, whose weights take 15,316 MiB in 16 bits."""
    sizes = packing.WeightBytes(15_316 * MIB, 8_630 * MIB, 5_400 * MIB)
    monkeypatch.setattr(gpu_memory, "weight_bytes", lambda module, spec: sizes)
    monkeypatch.setattr(gpu_memory, "free_bytes", lambda device: free_mib * MIB)
    spec = SimpleNamespace(gathered=None, state=())
    arguments = nn.Linear(1, 1), spec, ModelConfig(weights=asked), GPU, "Some-8B"

    if chosen is None:
        with pytest.raises(ModelError, match=f"and {free_mib:,} MiB of the GPU's memory are free"):
            gpu_memory.weights_on_gpu(*arguments)  # type: ignore[arg-type]
        return
    found, notes = gpu_memory.weights_on_gpu(*arguments)  # type: ignore[arg-type]

    assert found == chosen
    assert len(notes) == (chosen != asked)
    if free_mib == 8_000:
        assert notes == (
            "The weights of Some-8B take 15,316 MiB, and 8,000 MiB of the GPU's memory are free: "
            "they are rounded to int4, 5,400 MiB.",
        )


def test_a_model_that_cannot_be_packed_needs_room_for_all_of_its_bits(monkeypatch):
    sizes = packing.WeightBytes(15_316 * MIB, 8_630 * MIB, 5_400 * MIB)
    monkeypatch.setattr(gpu_memory, "weight_bytes", lambda module, spec: sizes)
    monkeypatch.setattr(gpu_memory, "free_bytes", lambda device: 12_000 * MIB)
    spec = SimpleNamespace(gathered=object(), state=())

    with pytest.raises(ModelError, match="take 15,316 MiB, and 12,000 MiB"):
        gpu_memory.weights_on_gpu(nn.Linear(1, 1), spec, ModelConfig(), GPU, "x")  # type: ignore[arg-type]

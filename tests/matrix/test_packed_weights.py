"""A quantised checkpoint is the checkpoint of the weights that its format stands for, exactly."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvchat.core.config import ModelConfig
from kvchat.core.errors import ExitCode, ModelError, ModelUnsupported
from kvchat.core.events import LoadProgress
from kvchat.model.checkpoint import tensors as checkpoint_tensors
from kvchat.model.checkpoint.identity import sample_digest
from kvchat.model.checkpoint.source import find_model
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.packed.experts import ExpertPacksByTurns, expert_packs_of
from kvchat.model.packed.formats import PackedTensor, Packing, unpacked
from kvchat.model.packed.quantise import is_packed, pack_of
from kvchat.model.self_test import compare_with_own
from kvchat_kernels.linear.blocks import BlockWeights, dequantised
from support import packers
from support.checkpoints import save_checkpoint, tiny_model
from support.matrix import spread

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}


def compressed(bits: int, **weights: object) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, **weights}}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


def bitsandbytes(bits: int) -> dict[str, Any]:
    return {"quant_method": "bitsandbytes", f"load_in_{bits}bit": True}


def mlx(bits: int) -> dict[str, Any]:
    return {"group_size": 32, "bits": bits}


LAYERS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)

FORMATS: dict[str, tuple[packers.Packer, dict[str, Any]]] = {
    "gptq, 4 bits": (packers.gptq, GPTQ),
    "gptq, 8 bits, whole rows": (
        lambda draw, rows, columns: packers.gptq(draw, rows, columns, 8, columns),
        {**GPTQ, "bits": 8, "group_size": -1},
    ),
    "gptq, 3 bits": (partial(packers.gptq, bits=3), {**GPTQ, "bits": 3}),
    "gptq, 2 bits": (partial(packers.gptq, bits=2), {**GPTQ, "bits": 2}),
    "gptq, 8 bits by a rule": (
        partial(packers.gptq, bits=8, group=16),
        {**GPTQ, "dynamic": {"+:.*": {"bits": 8, "group_size": 16}}},
    ),
    "auto-round, 2 bits by a rule": (
        partial(packers.gptq, bits=2),
        {**GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
        | {"extra_config": {".*": {"bits": 2}}},
    ),
    "gptq, ordered by activation": (
        partial(packers.gptq, is_ordered_by_activation=True),
        {**GPTQ, "desc_act": True},
    ),
    "gptq, symmetric": (partial(packers.gptq, is_symmetric=True), {**GPTQ, "sym": True}),
    "gptq, second version": (
        partial(packers.gptq, zero_less=0),
        {**GPTQ, "checkpoint_format": "gptq_v2"},
    ),
    "auto-round": (
        packers.gptq,
        {**GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
    ),
    "awq": (packers.awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "fp8, blocks of 128": (
        partial(packers.fp8_blocks, block=(128, 128)),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    "fp8, blocks": (
        partial(packers.fp8_blocks, block=(24, 20)),
        {"quant_method": "fp8", "weight_block_size": [24, 20]},
    ),
    "fp8, one scale": (packers.fp8_whole, {"quant_method": "fp8"}),
    "fp8, a scale a row": (
        partial(packers.by_rows, dtype=torch.float8_e4m3fn),
        {"quant_method": "fbgemm_fp8"},
    ),
    "compressed-tensors, 4 bits": (packers.pack_quantized, compressed(4)),
    "compressed-tensors, 8 bits": (partial(packers.pack_quantized, bits=8), compressed(8)),
    "compressed-tensors, zeros": (
        partial(packers.pack_quantized, has_zeros=True),
        compressed(4, symmetric=False),
    ),
    "compressed-tensors, int8": (partial(packers.by_rows, dtype=torch.int8), compressed(8)),
    "compressed-tensors, fp8": (
        partial(packers.by_rows, dtype=torch.float8_e4m3fn),
        compressed(8, type="float"),
    ),
    "compressed-tensors, nvfp4": (packers.nvfp4, compressed(4, type="float")),
    "modelopt, nvfp4": (
        partial(packers.nvfp4, is_modelopt=True),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ),
    "modelopt, fp8": (packers.fp8_whole, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "bitsandbytes, nf4": (packers.bitsandbytes_4, bitsandbytes(4)),
    "bitsandbytes, nested": (partial(packers.bitsandbytes_4, is_nested=True), bitsandbytes(4)),
    "bitsandbytes, fp4": (partial(packers.bitsandbytes_4, kind="fp4"), bitsandbytes(4)),
    "bitsandbytes, 8 bits": (packers.bitsandbytes_8, bitsandbytes(8)),
    "mlx, 4 bits": (packers.mlx, mlx(4)),
    "mlx, 8 bits": (partial(packers.mlx, bits=8), mlx(8)),
    "mlx, 6 bits": (partial(packers.mlx, bits=6), mlx(6)),
    "mlx, bits by layer": (
        partial(packers.mlx, bits=8),
        mlx(4) | {f"language_model.model.layers.0.{name}": {"bits": 8} for name in LAYERS},
    ),
}
# Each library's manner of storing, once for whole numbers and once for floats.
_DIFFERENT = [
    *("gptq, 4 bits", "gptq, ordered by activation", "auto-round, 2 bits by a rule", "awq"),
    *("fp8, blocks", "compressed-tensors, zeros", "compressed-tensors, nvfp4", "modelopt, fp8"),
    *("bitsandbytes, nested", "bitsandbytes, 8 bits", "mlx, 6 bits"),
]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny_model("llama", **sizes, intermediate_size=64, num_hidden_layers=1)
    return save_checkpoint(tmp_path_factory.mktemp("original"), model)


def pair(original: Path, directory: Path, name: str) -> tuple[Path, Path]:
    """Return the directories of a packed checkpoint and of its plain twin."""
    packer, settings = FORMATS[name]
    plain, packed = (
        Path(shutil.copytree(original, directory / kind)) for kind in ("plain", "packed")
    )
    key = "quantization" if "mlx" in name else "quantization_config"
    packers.pack_checkpoint(plain, packed, packer, {key: settings})
    return packed, plain


def load(directory: Path, dtype: str = "float32", weights: str = "auto") -> LoadedModel:
    config = ModelConfig(dtype=dtype, weights=weights)
    return load_model(find_model(str(directory)), config, None, lambda _: None)


def assert_twins(packed: Path, plain: Path, dtype: str = "float32") -> None:
    ours, theirs = load(packed, dtype), load(plain, dtype)
    assert ours.dtype == theirs.dtype
    assert not ours.notes
    ids = torch.tensor([[3, 14, 15, 92, 65]])
    for model in (ours, theirs):
        model.module.set_attn_implementation("eager")
    expected = dict(theirs.module.named_parameters())
    for name, parameter in ours.module.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    logits, twins = (model.module(ids, use_cache=False).logits for model in (ours, theirs))
    assert torch.equal(logits, twins)


@pytest.mark.parametrize("name", spread(FORMATS, _DIFFERENT))
def test_a_packed_checkpoint_has_the_weights_and_logits_of_its_twin(name, original, tmp_path):
    assert_twins(*pair(original, tmp_path, name))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_unpacked_to_the_dtype_that_is_asked_for(dtype, original, tmp_path):
    assert_twins(*pair(original, tmp_path, "gptq, 4 bits"), dtype)


def test_the_experts_of_gpt_oss_are_unpacked(tmp_path: Path) -> None:
    """Their format needed a package, and a GPU."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    model = tiny_model("gpt_oss", num_local_experts=4, num_hidden_layers=1, **sizes)
    plain = save_checkpoint(tmp_path / "plain", model)
    packed = Path(shutil.copytree(plain, tmp_path / "packed"))
    draw, parts = packers.Draw(7), {}
    tensors = load_file(plain / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() != 3:
            parts[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        made = packers.mxfp4_experts(draw, experts, rows, columns)
        tensors[name] = made.weight.contiguous()
        parts |= {f"{name}_{ending}": part for ending, part in made.parts.items()}
    assert len(parts) > len(tensors)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(parts, packed / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    _configure(packed, quantization_config=settings)

    assert_twins(packed, plain)
    # In 16 bits they stay as they are, and multiply so.
    ours, theirs = load(packed, "auto"), load(plain, "auto")
    packs = expert_packs_of(ours.module.model.layers[0].mlp.experts)
    assert isinstance(packs, ExpertPacksByTurns)
    assert 8 * packs.num_bytes == 4.25 * 4 * 3 * sizes["hidden_size"] ** 2
    ids = torch.arange(40)[None] * 7 % 250
    for model in (ours, theirs):
        model.module.set_attn_implementation("eager")
    with torch.no_grad():
        logits, twins = (
            model.module(ids, use_cache=False).logits.float() for model in (ours, theirs)
        )
    errors = (logits - twins).norm(dim=-1) / twins.norm(dim=-1)
    assert errors.median() < 0.02  # a few rows have other experts, nearly at a tie


def test_packed_experts_are_merged_as_the_model_holds_them(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 128}
    model = tiny_model("mixtral", num_local_experts=2, num_hidden_layers=1, **sizes)
    plain = save_checkpoint(tmp_path / "plain", model)
    packed = Path(shutil.copytree(plain, tmp_path / "packed"))
    packers.pack_checkpoint(plain, packed, packers.gptq, {"quantization_config": GPTQ})

    assert_twins(packed, plain)
    source = find_model(str(packed))
    assert checkpoint_tensors.stays_packed(source, torch.bfloat16, for_cpu=False)


def test_a_packed_checkpoint_may_be_held_in_fewer_bits(original: Path, tmp_path: Path) -> None:
    packed, plain = pair(original, tmp_path, "awq")
    ours, theirs = (load(directory, "bfloat16", "int8") for directory in (packed, plain))
    assert ours.weights == theirs.weights == "int8"


_IN_BLOCKS = [
    *("gptq, 4 bits", "gptq, 8 bits, whole rows", "gptq, symmetric", "awq"),
    *("gptq, second version", "auto-round", "compressed-tensors, 4 bits"),
    *("compressed-tensors, 8 bits", "compressed-tensors, zeros", "mlx, 4 bits", "mlx, 8 bits"),
]


def packs_and_weights(
    packed: Path, plain: Path
) -> tuple[LoadedModel, list[tuple[BlockWeights, torch.Tensor]]]:
    """Return a packed model, and its packed weights with those that they stand for."""
    ours, twins = load(packed, "auto"), dict(load(plain).module.named_modules())
    packs = ((name, pack_of(layer)) for name, layer in ours.module.named_modules())
    return ours, [(pack.weights, twins[name].weight) for name, pack in packs if pack]


@pytest.mark.parametrize("name", _IN_BLOCKS)
def test_groups_of_whole_numbers_stay_in_blocks(name: str, original: Path, tmp_path: Path) -> None:
    packed, plain = pair(original, tmp_path, name)

    ours, packs = packs_and_weights(packed, plain)

    assert len(packs) == 7
    for held, weight in packs:
        assert torch.equal(dequantised(held), weight)
    assert ours.weights == "blocks"
    assert compare_with_own(ours) > 0.995  # activations are rounded to 8 bits, too


@pytest.mark.parametrize("name", ["fp8, blocks of 128", "compressed-tensors, fp8", "modelopt, fp8"])
def test_floats_of_8_bits_stay_so(name, tmp_path, monkeypatch):
    """They became 16 bits, which take twice the memory: but where torch multiplies these fast."""
    monkeypatch.setattr(checkpoint_tensors, "is_fast_by_torch", lambda dtype: False)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    sizes = {"hidden_size": 128, **heads}
    model = tiny_model("llama", **sizes, intermediate_size=256, num_hidden_layers=1)
    packed, plain = pair(save_checkpoint(tmp_path / "original", model), tmp_path, name)

    ours, packs = packs_and_weights(packed, plain)

    assert len(packs) == 7
    for held, weight in packs:
        assert torch.allclose(dequantised(held), weight, rtol=1e-6)
        assert held.num_bytes <= 1.05 * weight.numel()
    assert ours.compiled is not None
    assert compare_with_own(ours) > 0.999
    monkeypatch.setattr(checkpoint_tensors, "is_fast_by_torch", lambda dtype: True)
    assert not any(pack_of(layer) for layer in load(packed, "auto").module.modules())
    monkeypatch.setattr(checkpoint_tensors, "free_bytes", lambda device: 1)
    assert any(pack_of(layer) for layer in load(packed, "auto").module.modules())


@pytest.mark.parametrize("name", ["compressed-tensors, nvfp4", "modelopt, nvfp4"])
def test_nvfp4_takes_the_bytes_of_its_file(name, tmp_path, monkeypatch):
    """It became 16 bits, on every processor, and then 6: its scale and factor were one float."""
    monkeypatch.setattr(checkpoint_tensors, "is_fast_by_torch", lambda dtype: True)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    model = tiny_model("llama", hidden_size=128, **heads, intermediate_size=320)
    packed, plain = pair(save_checkpoint(tmp_path / "original", model), tmp_path, name)

    ours, packs = packs_and_weights(packed, plain)

    assert len(packs) == 7 * ours.module.config.num_hidden_layers
    for held, weight in packs:
        assert torch.allclose(dequantised(held), weight, rtol=1e-6)
        of_rows = 4 * len(weight)
        assert held.num_bytes == weight.numel() * 9 // 16 + of_rows
    assert ours.compiled is not None
    assert compare_with_own(ours) > 0.999


def test_symmetric_groups_take_the_fewest_bytes(original: Path, tmp_path: Path) -> None:
    """4 bits, and half a bit of scale for 32 columns; a zero that differs takes 32 bits more."""
    sizes = {}
    for name in ("gptq, symmetric", "gptq, 4 bits"):
        ours = load(pair(original, tmp_path / name, name)[0], "auto")
        weights = [pack.weights for layer in ours.module.modules() if (pack := pack_of(layer))]
        num_bits = 8 * sum(w.num_bytes for w in weights)
        sizes[name] = num_bits / sum(w.num_out * w.num_in for w in weights)
    assert sizes["gptq, symmetric"] == 4.5
    assert sizes["gptq, 4 bits"] <= 6.0


def assert_unpacked(made: packers.PackedWeight, settings: dict[str, Any]) -> None:
    """One weight is what its parts stand for, by itself and in blocks if these hold it."""
    parts = {f"one.{ending}": part for ending, part in made.parts.items()}
    packing = Packing(settings["quant_method"], settings)
    tensor = unpacked(parts, packing, torch.float32, "m")["one.weight"]
    assert isinstance(tensor, PackedTensor)
    assert torch.equal(tensor[...], made.weight)
    for blocks in (tensor.blocks(for_cpu=False), tensor.blocks(for_cpu=True)):
        assert blocks is None or torch.equal(dequantised(blocks), made.weight)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [31, 36, 60, 63, 95])
def test_the_last_word_of_a_row_may_be_filled_in_part(bits: int, columns: int) -> None:
    """Compiled code read the columns that fill it too, and 63 columns had 64 weights."""
    made = packers.pack_quantized(packers.Draw(1), 5, columns, bits, columns)
    assert_unpacked(made, compressed(bits))


@pytest.mark.parametrize(("columns", "group"), [(192, 128), (320, 64), (96, 64), (960, 128)])
def test_the_last_group_may_be_smaller_where_no_groups_are_listed(columns: int, group: int) -> None:
    """960 columns in groups of 128, as SmolLM2 has, were read as 8 groups of 120."""
    gptq = packers.gptq(packers.Draw(1), 3, columns, group=group)
    del gptq.parts["g_idx"]
    assert_unpacked(gptq, {**GPTQ, "group_size": group})
    assert_unpacked(
        packers.pack_quantized(packers.Draw(1), 3, columns, group=group),
        compressed(4, group_size=group),
    )


@pytest.mark.parametrize("name", ["gptq, 3 bits", "gptq, 2 bits", "fp8, one scale"])
def test_what_blocks_cannot_hold_is_unpacked(name: str, original: Path, tmp_path: Path) -> None:
    ours = load(pair(original, tmp_path, name)[0], "auto")
    assert not is_packed(ours.module)
    assert ours.weights == "own"


def test_loading_says_the_format_and_the_memory_first(original: Path, tmp_path: Path) -> None:
    packed, _ = pair(original, tmp_path, "gptq, 4 bits")
    for dtype, stage in (
        ("auto", "loading 4-bit GPTQ weights in blocks"),
        ("float32", "unpacking 4-bit GPTQ to float32, 0 MiB"),
    ):
        heard: list[LoadProgress] = []
        load_model(find_model(str(packed)), ModelConfig(dtype=dtype), None, heard.append)
        assert stage in [event.stage for event in heard]


def test_scales_and_format_are_part_of_the_identity(original: Path, tmp_path: Path) -> None:
    packed, plain = pair(original, tmp_path, "gptq, 4 bits")
    seen = {sample_digest(find_model(str(directory))) for directory in (packed, plain)}
    _change(packed, lambda tensors: _first(tensors, ".scales").mul_(2))
    seen.add(sample_digest(find_model(str(packed))))
    _configure(packed, quantization_config={**GPTQ, "checkpoint_format": "gptq_v2"})
    seen.add(sample_digest(find_model(str(packed))))
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "hqq"}, "'hqq'"),
        ({"quant_method": "aqlm"}, "'aqlm'"),
        ({"quant_method": "eetq"}, "'eetq'"),
        ({"quant_method": "spqr"}, "'spqr'"),
        ({"bits": 4}, "'quantization_config'"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "GPTQ in the layout 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ in the layout 'gemv'"),
        ({**compressed(4), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        ({**compressed(4), "transform_config": {"R1": {}}}, "rotated"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:gptqmodel"}, "auto-round"),
    ],
)
def test_a_format_that_is_not_read_is_refused_by_name(settings, said, original, tmp_path):
    directory = Path(shutil.copytree(original, tmp_path / "m"))
    _configure(directory, quantization_config=settings)
    refused = _refused(directory)
    assert type(refused) is ModelUnsupported
    assert said in refused.message
    assert "GPTQ" in refused.hint


Tensors = dict[str, torch.Tensor]


def _first(tensors: Tensors, ending: str) -> torch.Tensor:
    return next(tensor for name, tensor in sorted(tensors.items()) if name.endswith(ending))


def _drop(ending: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(next(n for n in sorted(tensors) if n.endswith(ending)))


def _cut(ending: str) -> Callable[[Tensors], Any]:
    def cut(tensors: Tensors) -> None:
        name = next(n for n in sorted(tensors) if n.endswith(ending))
        tensors[name] = tensors[name][:-1].clone()

    return cut


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("gptq, 4 bits", _drop(".scales")),
        ("gptq, 4 bits", _drop(".qzeros")),
        ("gptq, 4 bits", _cut(".scales")),
        ("gptq, 4 bits", _cut(".g_idx")),
        ("gptq, 4 bits", _cut(".qweight")),
        ("gptq, 4 bits", lambda tensors: _first(tensors, ".g_idx").fill_(99)),
        ("gptq, ordered by activation", lambda tensors: _first(tensors, ".g_idx").fill_(-1)),
        ("awq", _cut(".qzeros")),
        ("awq", _drop(".qzeros")),
        ("awq", _cut(".qweight")),
        ("awq", _cut(".scales")),
        ("fp8, blocks", _drop(".weight_scale_inv")),
        ("fp8, blocks", _cut(".weight_scale_inv")),
        ("compressed-tensors, 4 bits", _drop(".weight_scale")),
        ("compressed-tensors, 4 bits", _drop(".weight_shape")),
        ("compressed-tensors, 4 bits", _cut(".weight_packed")),
        ("compressed-tensors, 4 bits", lambda t: _first(t, ".weight_shape").fill_(10**9)),
        ("compressed-tensors, zeros", _cut(".weight_zero_point")),
        ("modelopt, nvfp4", _drop(".weight_scale")),
        ("bitsandbytes, nf4", _drop(".absmax")),
        ("bitsandbytes, nf4", _cut(".absmax")),
        ("bitsandbytes, nf4", _cut(".quant_map")),
        ("bitsandbytes, nf4", _cut("bitsandbytes__nf4")),
        ("bitsandbytes, nf4", lambda t: _first(t, "bitsandbytes__nf4").fill_(255)),
        ("bitsandbytes, nested", _drop(".nested_absmax")),
        ("bitsandbytes, 8 bits", _cut(".SCB")),
        ("mlx, 4 bits", _drop(".biases")),
        ("mlx, 4 bits", _cut(".scales")),
    ],
)
def test_parts_that_are_missing_or_do_not_fit_are_told_in_a_sentence(
    name: str, damage: Callable[[Tensors], Any], original: Path, tmp_path: Path
) -> None:
    packed, _ = pair(original, tmp_path, name)
    _change(packed, damage)
    for dtype in ("float32", "auto"):  # unpacked, and in blocks
        message = _refused(packed, dtype).message
        assert "packed weights" in message or "in other shapes" in message


@pytest.mark.parametrize(
    "settings",
    [
        5,
        {**GPTQ, "bits": "4"},
        {**GPTQ, "bits": 5},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": ["gptq"]},
    ],
)
def test_settings_that_cannot_be_are_told_in_a_sentence(settings, original, tmp_path):
    packed, _ = pair(original, tmp_path, "gptq, 4 bits")
    _configure(packed, quantization_config=settings)
    _refused(packed)


def _refused(directory: Path, dtype: str = "float32") -> ModelError:
    with pytest.raises(ModelError) as caught:
        load(directory, dtype)
    assert caught.value.hint
    assert caught.value.exit_code is ExitCode.MODEL
    assert "\n" not in str(caught.value)
    return caught.value


def _change(directory: Path, change: Callable[[Tensors], Any]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _configure(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

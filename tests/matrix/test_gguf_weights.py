"""A model in a GGUF file is the model in safetensors: every architecture, every block format."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from kvchat.core.config import ModelConfig
from kvchat.core.errors import ModelError, ModelUnsupported
from kvchat.model.checkpoint import tensors as checkpoint_tensors
from kvchat.model.checkpoint.source import find_model
from kvchat.model.gguf import tensors as gguf_tensors
from kvchat.model.hf.model_class import MetaModel
from kvchat.model.loader import LoadedModel, inspect_model, load_model
from kvchat.model.packed.experts import ExpertPacksByTurns, expert_packs_of
from kvchat.model.packed.quantise import is_packed, num_packed_bytes, pack_of, packed_table
from kvchat.model.self_test import compare_with_own
from kvchat_kernels.linear import cpu as linear_cpu
from kvchat_kernels.linear.blocks import dequantised
from kvchat_kernels.linear.cpu import read_blocks
from support.checkpoints import tiny_model
from support.gguf_families import EXTRA, FAMILIES
from support.gguf_files import QUANTISED, RANDOM_BLOCKS, write_gguf
from support.matrix import spread

# As gpt-oss has it by default.
_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 32.0,
    "rope.scaling.original_context_length": 4096,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_IN_FORMS_OF_THEIR_OWN = [
    *("deepseek_v3, yarn", "gpt2", "falcon, 40b", "qwen3_next", "gemma3n", "gemma4, experts"),
    *("granitemoehybrid", "nemotron", "mamba2", "llama4", "phi2", "internlm2", "olmo", "mpt"),
    *("bitnet", "glm", "kimi_linear"),
]
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 48},
    "qwen3": {},
    "qwen3_moe": {**_MOE, "norm_topk_prob": True},
    "gemma": {},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 8, "num_hidden_layers": 7, "query_pre_attn_scalar": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "phi3": {"sliding_window": 8},
    "starcoder2": {},
    "stablelm": {},
    "smollm3": {"num_hidden_layers": 5},
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.5},
    "olmo2": {},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 8, "num_hidden_layers": 5},
}


# Rows in another order, biases, norms plus one, experts, blocks by turns, parts in one matrix.
_OF_EACH_MANNER = ["llama", "qwen2", "gemma3_text", "mixtral", "gpt_oss", "phi3", "cohere2"]


def load(path: Path, dtype: str = "float32") -> LoadedModel:
    source = find_model(str(path))
    return load_model(source, ModelConfig(source.name, "cpu", dtype=dtype), None, lambda _: None)


def with_random_norms(model: PreTrainedModel) -> PreTrainedModel:
    """A norm of ones would hide that its weights were left out or shifted."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def assert_twins(loaded: LoadedModel, model: PreTrainedModel, tolerance: float = 0.0) -> None:
    own = dict(loaded.module.named_parameters())
    for name, parameter in model.named_parameters():
        assert (own[name] - parameter).abs().max() <= tolerance, name
    ids = torch.arange(40)[None] * 7 % 250
    loaded.module.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(ids).logits
        found = loaded.module(ids, use_cache=False).logits
    assert (found - expected).abs().max() <= 10 * tolerance


@pytest.mark.parametrize("family", spread(_FAMILIES, _OF_EACH_MANNER))
def test_logits_equal_those_of_the_safetensors_twin(family: str, tmp_path: Path) -> None:
    model = with_random_norms(tiny_model(family, **_FAMILIES[family]))
    path = write_gguf(tmp_path / "m.gguf", model, metadata=_metadata_of(family, model))
    # Gemma's norms are stored plus one, which rounds.
    assert_twins(load(path), model, tolerance=1e-6 if family.startswith("gemma") else 0.0)


@pytest.mark.parametrize("family", spread(FAMILIES, _IN_FORMS_OF_THEIR_OWN))
def test_a_family_that_llama_cpp_stores_in_another_form_is_its_twin(family, tmp_path):
    model_type, settings, metadata = FAMILIES[family]
    model = with_random_norms(tiny_model(model_type, **settings))
    path = write_gguf(tmp_path / "m.gguf", model, metadata=metadata, extra=EXTRA.get(family))

    loaded = load(path)

    assert compare_with_own(loaded) > 0.9999
    # Weights that are stored plus one, or by their exponential, are rounded.
    assert_twins(loaded, model, tolerance=2e-6)


def _metadata_of(family: str, model: PreTrainedModel) -> dict[str, Any]:
    if family == "mixtral":
        return {"expert_count": 4}
    if family == "gpt_oss":
        return {"expert_feed_forward_length": 96, **_YARN}
    if family == "stablelm":
        return {"rope.dimension_count": 4}  # a quarter of 16, which is the model's default
    return {}


@pytest.mark.parametrize("kind", [*QUANTISED, *RANDOM_BLOCKS])
def test_every_block_format_is_unpacked_exactly(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    model = tiny_model("llama", **sizes, head_dim=64)
    path = write_gguf(tmp_path / "m.gguf", model, kind)
    assert_twins(load(path), model)


_AT_THEIR_SIZE = [
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "TQ2_0", "MXFP4"),
]


@pytest.mark.parametrize("kind", spread(_AT_THEIR_SIZE, ["Q5_0", "Q3_K"]))
def test_a_model_takes_the_memory_that_its_file_has(kind: str, tmp_path: Path) -> None:
    """A file of 5 GB in Q3_K or IQ4_XS took 20 as bfloat16."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    model = tiny_model("llama", **sizes, head_dim=64)
    path = write_gguf(tmp_path / "m.gguf", model, lambda n: "F16" if "token_embd" in n else kind)

    loaded = load(path, "auto")

    gguf = find_model(str(path)).gguf
    assert gguf is not None
    stored = [t for t in gguf.tensors.values() if len(t.shape) == 2 and "token_embd" not in t.name]
    num_bytes = sum(tensor.num_bytes for tensor in stored)
    assert num_bytes < num_packed_bytes(loaded.module) * 1.001 <= 1.05 * num_bytes
    twins = dict(model.named_modules())
    for name, layer in loaded.module.named_modules():
        pack = pack_of(layer)
        if pack is not None:
            weight = twins[name].weight
            assert torch.allclose(dequantised(pack.weights), weight, rtol=1e-6, atol=1e-6), name


def test_gpt_oss_has_its_experts_in_mxfp4_and_runs_on_pages(tmp_path: Path) -> None:
    model = with_random_norms(tiny_model("gpt_oss", **_FAMILIES["gpt_oss"]))
    metadata = _metadata_of("gpt_oss", model)
    path = write_gguf(tmp_path / "m.gguf", model, "MXFP4", metadata)
    loaded = load(path)
    assert compare_with_own(loaded) > 0.9999
    assert_twins(loaded, model)
    own = load(path, "auto")
    own.module.set_attn_implementation("eager")
    packs = [expert_packs_of(layer.mlp.experts) for layer in own.module.model.layers]
    assert all(isinstance(pack, ExpertPacksByTurns) for pack in packs)
    ids = torch.arange(40)[None] * 7 % 250
    with torch.no_grad():
        logits, twins = (each.module(ids, use_cache=False).logits.float() for each in (own, loaded))
    errors = (logits - twins).norm(dim=-1) / twins.norm(dim=-1)
    assert errors.median() < 0.02  # a few rows have other experts, nearly at a tie
    plain = load(
        write_gguf(tmp_path / "n.gguf", model, metadata={"expert_feed_forward_length": 96})
    )
    assert plain.module.config.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(
    "kind",
    spread(["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"], ["Q8_0", "Q4_K"]),
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_linear_layers_multiply_with_the_blocks_of_the_file(kind, family, tmp_path):
    """Rows that llama.cpp has in another order included."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    model = tiny_model(family, **sizes, head_dim=64)
    path = write_gguf(tmp_path / "m.gguf", model, kind)

    loaded = load(path, dtype="auto")

    twins, num_packed = dict(model.named_modules()), 0
    for name, layer in loaded.module.named_modules():
        if (pack := pack_of(layer)) is not None:
            num_packed += 1
            twin = twins[name].weight
            assert layer.weight.numel() == 0
            assert torch.allclose(dequantised(pack.weights), twin, rtol=1e-5, atol=1e-7)
    assert num_packed >= 2 * 7
    assert loaded.weights == "blocks"
    assert compare_with_own(loaded) > 0.995  # activations are rounded to 8 bits, too


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_head_tied_to_the_embeddings_multiplies_with_the_blocks_of_the_table(family, tmp_path):
    model = tiny_model(family, **{**_FAMILIES[family], "tie_word_embeddings": True})
    path = write_gguf(tmp_path / "m.gguf", model, "Q8_0")

    loaded = load(path, dtype="auto")

    table = model.get_input_embeddings().weight
    pack = pack_of(loaded.module.get_output_embeddings())
    assert torch.allclose(dequantised(pack.weights), table, rtol=1e-5, atol=1e-7)
    assert torch.equal(loaded.module.get_input_embeddings().weight, table.to(torch.bfloat16))
    assert compare_with_own(loaded) > 0.999


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", spread(["Q8_0", "Q4_0", "Q5_1", "Q4_K", "Q6_K"], ["Q4_0", "Q6_K"]))
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_large_table_of_embeddings_stays_in_its_blocks(
    family: str, kind: str, is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are the same, bit by bit; a tied head and the table are held once."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
    model = tiny_model(family, **sizes, tie_word_embeddings=is_tied)
    path = write_gguf(tmp_path / "m.gguf", model, kind)
    unpacked = load(path, dtype="auto")
    monkeypatch.setattr(checkpoint_tensors, "_LARGE_TABLE_BYTES", 1)

    loaded = load(path, dtype="auto")

    table = loaded.module.get_input_embeddings()
    assert packed_table(table) is not None
    assert table.weight.numel() == 0
    # Gemma's own class of tables, run on the rows found, was a copy with the table's whole weight.
    inner = [part for part in vars(table.forward).values() if isinstance(part, torch.nn.Module)]
    assert len(inner) == (family == "gemma3_text")
    assert all(weight.numel() == 0 for part in inner for weight in part.parameters())
    ids = torch.tensor([[3, 1, 3, 250, 0]])
    assert torch.equal(table(ids), unpacked.module.get_input_embeddings()(ids))
    assert table(ids[:, :0]).shape == (1, 0, 256)
    if is_tied:
        head = pack_of(loaded.module.get_output_embeddings()).weights
        assert head.levels.data_ptr() == packed_table(table).levels.data_ptr()
    # Compiled steps take its rows in float32, and those of the other one in bfloat16.
    assert compare_with_own(loaded) == pytest.approx(compare_with_own(unpacked), abs=1e-3)


@pytest.mark.parametrize("num_bytes", [1, 3_000])
def test_rows_are_let_go_of_while_a_matrix_is_read(num_bytes, monkeypatch):
    """A process held the file of the largest matrix beside its copy."""
    data = torch.randint(0, 256, (37, 144 * 2), dtype=torch.uint8)
    whole = read_blocks(data, "Q4_K", is_interleaved=True)
    monkeypatch.setattr(linear_cpu, "_BYTES_AT_ONCE", num_bytes)
    ends: list[int] = []

    read = read_blocks(data, "Q4_K", is_interleaved=True, on_read=ends.append)

    assert ends == [*range(max(1, num_bytes // 288), 37, max(1, num_bytes // 288)), 37]
    parts = read.parts()
    for name, part in whole.parts().items():
        assert torch.equal(part.view(torch.uint8), parts[name].view(torch.uint8)), name


@pytest.mark.parametrize("token_id", [-1, -300, 512])
def test_a_table_in_blocks_has_no_row_for_an_unknown_token(token_id, tmp_path, monkeypatch):
    """It returned the last row for -1; tables of torch raise this error."""
    model = tiny_model("llama", hidden_size=256, intermediate_size=512, vocab_size=512)
    monkeypatch.setattr(checkpoint_tensors, "_LARGE_TABLE_BYTES", 1)
    loaded = load(write_gguf(tmp_path / "m.gguf", model, "Q8_0"), dtype="auto")
    table = loaded.module.get_input_embeddings()
    assert packed_table(table) is not None

    with pytest.raises(IndexError):
        table(torch.tensor([[0, token_id]]))


def test_weights_in_blocks_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft whose table is in blocks has few parameters, and seemed to fit into a cache."""
    model = tiny_model("llama", hidden_size=256, intermediate_size=512, tie_word_embeddings=True)
    path = write_gguf(tmp_path / "m.gguf", model, "Q8_0")
    monkeypatch.setattr(checkpoint_tensors, "_LARGE_TABLE_BYTES", 1)

    loaded = load(path, dtype="auto")

    assert sum(p.nbytes for p in loaded.module.parameters()) < 1 << 14
    in_matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert num_packed_bytes(loaded.module) == in_matrices // 32 * 34


def test_a_table_that_a_head_reads_itself_is_unpacked(tmp_path, monkeypatch):
    """Its weights would have been zeros, and all its logits."""
    model = tiny_model("llama", hidden_size=256, intermediate_size=512, tie_word_embeddings=True)
    source = find_model(str(write_gguf(tmp_path / "m.gguf", model, "Q8_0")))
    config, _ = inspect_model(source)
    monkeypatch.setattr(checkpoint_tensors, "_LARGE_TABLE_BYTES", 1)

    found = checkpoint_tensors.read_tensors(
        source, MetaModel(config), None, lambda _: None, torch.device("cpu"), ("lm_head",)
    )

    assert found.blocks
    assert "model.embed_tokens.weight" not in found.blocks
    table = found.tensors["model.embed_tokens.weight"].float()
    assert torch.allclose(table, model.get_input_embeddings().weight, rtol=0.1, atol=1e-3)


def test_a_file_that_is_new_builds_its_model_without_weights_once(tmp_path, monkeypatch):
    """The probe had one, and the names and shapes of tensors came from another."""
    own, built = MetaModel.build, []

    def build(model: MetaModel, attention: str) -> Any:
        built.append(attention)
        return own(model, attention)

    monkeypatch.setattr(MetaModel, "build", build)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama", **sizes), "Q8_0")

    assert is_packed(load(path, "auto").module)
    assert len(built) == 1


def test_the_turned_matrices_of_gpt_2_stay_in_blocks(tmp_path: Path) -> None:
    model = tiny_model("gpt2", n_embd=64, n_layer=2, n_head=4, n_positions=512)
    metadata = {"feed_forward_length": 256, "attention.key_length": None}
    path = write_gguf(tmp_path / "m.gguf", model, "Q8_0", metadata)

    loaded = load(path, dtype="auto")

    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        layer = loaded.module.get_submodule(f"transformer.h.1.{name}")
        own = model.get_submodule(f"transformer.h.1.{name}").weight.t()
        assert torch.allclose(dequantised(pack_of(layer).weights), own, rtol=1e-5, atol=1e-7)
    assert compare_with_own(loaded) > 0.999


def test_a_dtype_that_is_asked_for_unpacks_the_blocks(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), "Q8_0")

    assert not is_packed(load(path, "bfloat16").module)
    assert is_packed(load(path, "auto").module)


def test_blocks_are_unpacked_to_bfloat16_and_plain_weights_stay_as_they_are(tmp_path: Path) -> None:
    model = tiny_model("llama")
    for kind, dtype in (("Q8_0", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32)):
        loaded = load(write_gguf(tmp_path / f"{kind}.gguf", model, kind), dtype="auto")
        assert loaded.dtype == dtype


def test_llama_3_rope_factors_in_a_tensor_are_applied(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny_model("llama", rope_parameters=rope)
    factors = [_llama3_factor(500000.0 ** (index / 8)) for index in range(8)]
    assert len(set(factors)) > 2
    extra = {"rope_freqs.weight": np.array(factors, dtype=np.float32)}
    assert_twins(load(write_gguf(tmp_path / "m.gguf", model, extra=extra)), model)


def _llama3_factor(inverse_frequency: float) -> float:
    """Llama 3's formula, as its authors wrote it, for the numbers above."""
    wavelength = 2 * math.pi * inverse_frequency
    if wavelength < 8192 / 4:
        return 1.0
    if wavelength > 8192:
        return 32.0
    smooth = (8192 / wavelength - 1) / 3
    return 1 / ((1 - smooth) / 32 + smooth)


def test_a_file_in_parts_is_one_model(tmp_path: Path) -> None:
    import gguf

    model = tiny_model("llama")
    whole = write_gguf(tmp_path / "whole.gguf", model)
    reader = gguf.GGUFReader(whole)
    names = [tensor.name for tensor in reader.tensors]
    for number in range(3):
        writer = gguf.GGUFWriter(tmp_path / f"m-0000{number + 1}-of-00003.gguf", "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", len(names))
        if number == 0:
            for field in reader.fields.values():
                _copy_field(writer, field)
        for tensor in reader.tensors[number::3]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    assert_twins(load(tmp_path / "m-00002-of-00003.gguf"), model)
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match=r"00003-of-00003\.gguf cannot be read"):
        find_model(str(tmp_path / "m-00001-of-00003.gguf"))


def _copy_field(writer: Any, field: Any) -> None:
    if not field.name.startswith(("GGUF.", "general.architecture")):
        value = field.contents()
        sub_type = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, value, field.types[0], sub_type)


@pytest.mark.parametrize(("dtype", "form"), [("bfloat16", " as bfloat16"), ("auto", "")])
def test_weights_that_do_not_fit_are_refused_before_they_are_unpacked(
    dtype: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), "Q8_0")
    monkeypatch.setattr(gguf_tensors, "free_bytes", lambda device: 1000)
    with pytest.raises(ModelError, match=rf"take \S+ \S+ of memory{form}, and 1000 B are free"):
        load(path, dtype=dtype)


def test_an_architecture_that_is_not_mapped_is_named(tmp_path: Path) -> None:
    import gguf

    for architecture, message in (("rwkv7", "of the architecture 'rwkv7'"), ("clip", "mmproj")):
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ModelUnsupported, match=message) as caught:
            load(tmp_path / "m.gguf")
        assert caught.value.hint

"""Prompts, answers, cached rows and rows beside others of a model are computed by one arithmetic.

A trained model answered "What is the capital of France?" in two ways: a prompt that was read anew
ran in transformers' modules, whose stream is bfloat16, and one from the cache in compiled steps,
whose stream is float32. At a near tie the likeliest token was another.
"""

from pathlib import Path

import pytest
import torch

from kvchat.core.config import ModelConfig
from kvchat.model.batch import SequencePiece, build_batch
from kvchat.model.checkpoint.source import find_model
from kvchat.model.decoder.reader import read_decoder
from kvchat.model.loader import LoadedModel, load_model, read_plain_module
from kvchat.model.packed.quantise import pack_of, round_activations
from kvchat.model.paged_model import PagedModel
from kvchat_kernels.cpu.calls import multiplies_bytes
from kvchat_kernels.linear.blocks import Rounding
from support.checkpoints import tiny_model
from support.gguf_files import write_gguf

BLOCK = 16
CPU = torch.device("cpu")
IDS = [7 * number % 250 for number in range(1, 161)]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}


def load(path: Path, **config: str) -> LoadedModel:
    return load_model(find_model(str(path)), ModelConfig(**config), None, lambda _: None)


def of_file(directory: Path, kind: str, family: str = "llama") -> LoadedModel:
    """Load a GGUF file whose norms are no numbers of bfloat16."""
    model = tiny_model(family, **SIZES)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            generator = torch.Generator().manual_seed(len(parameter))
            parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return load(write_gguf(directory / "m.gguf", model, kind))


def logits(
    loaded: LoadedModel, sizes: list[int], beside: int = 0, kv_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Return the logits of all of IDS, read in steps of these sizes, beside another sequence."""
    blocks_each = -(-len(IDS) // BLOCK)
    shape = (1 + 2 * blocks_each, BLOCK)
    pools = [
        tuple(
            torch.zeros(*shape, layer.num_kv_heads, dim, dtype=kv_dtype)
            for dim in (layer.key_dim, layer.value_dim)
        )
        for layer in loaded.spec.storing_layers
    ]
    model = PagedModel(loaded, pools)  # type: ignore[arg-type]
    rows, start = [], 0
    for number, size in enumerate(sizes):
        piece = SequencePiece(IDS[start : start + size], start, range(1, 1 + blocks_each), size)
        pieces = [piece]
        if beside:
            ids, table = IDS[number * beside :][:beside], range(1 + blocks_each, shape[0])
            pieces.insert(0, SequencePiece(ids, number * beside, table, 0))
        rows.append(model.forward(build_batch(pieces, BLOCK, CPU)))
        start += size
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("kind", "is_large"),
    [
        ("Q4_1", False),
        ("Q4_K", False),
        ("Q8_0", False),
        ("BF16", False),
        ("Q4_K", True),
        ("Q5_0", True),
        ("Q6_K", True),
    ],
)
def test_a_prompt_its_cached_rows_and_an_answer_are_the_same_numbers(
    kind: str, is_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvchat.model.cpu.compiled_step.is_fast_by_torch", lambda dtype: False)
    if is_large:
        monkeypatch.setattr("kvchat.model.packed.quantise._MOST_EXACT_WEIGHTS", 1000)
    loaded = of_file(tmp_path, kind)

    cold = logits(loaded, [len(IDS)])

    assert torch.equal(cold, logits(loaded, [128, 32])), "most of it cached"
    assert torch.equal(cold, logits(loaded, [1] * len(IDS))), "an answer"
    assert torch.equal(cold, logits(loaded, [40] * 4, beside=9)), "beside another sequence"


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_logits_are_those_of_float32_but_for_the_kv(family, kind, tmp_path, monkeypatch):
    """Norms, biases, tables in blocks, angles and Gemma's factor are not rounded to bfloat16."""
    monkeypatch.setattr("kvchat.model.checkpoint.tensors._LARGE_TABLE_BYTES", 1)
    loaded = of_file(tmp_path, kind, family)
    exact = read_plain_module(loaded.source, torch.float32, "eager")
    with torch.inference_mode():
        expected = exact(torch.tensor([IDS])).logits[0]

    found = logits(loaded, [len(IDS)], kv_dtype=torch.float32)

    assert (found - expected).norm() <= 0.0005 * expected.norm()


def test_norms_and_biases_are_the_files_own_numbers(tmp_path: Path) -> None:
    loaded = of_file(tmp_path, "Q8_0", "qwen2")
    exact = dict(read_plain_module(loaded.source, torch.float32, "eager").named_parameters())

    decoder = read_decoder(loaded.module, loaded.spec)

    assert not isinstance(decoder, str)
    layer = decoder.layers[1]
    name = "model.layers.1"
    assert torch.equal(layer.before_mlp.weight, exact[f"{name}.post_attention_layernorm.weight"])
    assert torch.equal(layer.attention.qkv[0].bias, exact[f"{name}.self_attn.q_proj.bias"])
    assert loaded.module.get_parameter(f"{name}.self_attn.q_proj.bias").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("file_format", "exact", "coarse"),
    [
        ("Q4_1", Rounding.BYTES, Rounding.BYTE),
        ("Q5_0", Rounding.HALVES, Rounding.COARSE),
        ("Q8_0", Rounding.HALVES, Rounding.HALVES),
    ],
)
def test_activations_of_large_models_have_8_bits_beside_weights_of_fewer(
    file_format: str,
    exact: Rounding,
    coarse: Rounding,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small models need 16: SmolLM2 changed 2 % of its likeliest tokens without them."""
    if not multiplies_bytes() and exact is Rounding.HALVES:
        exact = coarse = Rounding.SHORT
    loaded = of_file(tmp_path, file_format)
    layer = loaded.module.get_submodule("model.layers.0.mlp.down_proj")
    assert pack_of(layer).weights.layout.rounding is exact

    monkeypatch.setattr("kvchat.model.packed.quantise._MOST_EXACT_WEIGHTS", 1000)
    round_activations(loaded.module)

    assert pack_of(layer).weights.layout.rounding is coarse

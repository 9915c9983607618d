"""Recurrent layers multiply with weights in fewer bits: packed here, or in a GGUF file's blocks."""

from pathlib import Path

import pytest
import torch
from torch import nn

from kvchat.core.config import CacheConfig, ModelConfig
from kvchat.engine.kv_storage import kv_geometry, kv_identity
from kvchat.model.checkpoint.source import find_model
from kvchat.model.hf.probe import probe
from kvchat.model.hf.weight_reads import watching_reads
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.packed.experts import expert_packs_of
from kvchat.model.packed.quantise import RowsApart, pack_of
from kvchat.model.self_test import compare_with_own
from kvchat_kernels.linear.blocks import dequantised
from support.checkpoints import save_checkpoint, tiny_config, tiny_model
from support.hybrid_files import HYBRIDS, write_hybrid
from support.matrix import spread
from support.stateful_models import FORMS, STATEFUL, Chat, open_engine, words

# Weights that transformers' own code reads without calling their layer, by the ends of their names.
_READ = {
    "mamba, no attention": "dt_proj",
    "falcon_mamba, no attention": "dt_proj",
    "jamba, mamba-1": "dt_proj",
}


def load(directory: Path, **config: str) -> LoadedModel:
    return load_model(find_model(str(directory)), ModelConfig(**config), 400, lambda _: None)


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    return {name: part for name, part in module.named_modules() if type(part) is nn.Linear}


def similarity(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the median cosine of two passes' rows of logits, without their means."""
    pair = [each.float() - each.float().mean(dim=1, keepdim=True) for each in (found, expected)]
    return torch.cosine_similarity(*pair).median().item()


@pytest.mark.parametrize("name", spread(STATEFUL, {*_READ, *FORMS[:6]}))
def test_all_linear_layers_are_packed_but_those_whose_weights_others_read(name, tmp_path):
    model_type, settings = STATEFUL[name]
    reference = tiny_model(model_type, **settings)
    directory = save_checkpoint(tmp_path, reference)
    ids = torch.arange(40)[None] * 7 % 250
    with torch.no_grad():
        expected = reference(ids, use_cache=False).logits[0]

    loaded = load(directory, weights="int8", dtype="float32", device="cpu")

    layers = linear_layers(loaded.module)
    kept = {name for name, layer in layers.items() if pack_of(layer) is None}
    assert loaded.weights == "int8"
    assert kept == set(loaded.spec.read_elsewhere)
    assert kept == {each for each in layers if each.endswith(_READ.get(name, "none"))}
    assert all((layer.weight.numel() == 0) != (n in kept) for n, layer in layers.items())
    # Zamba keeps the mixers' own tensors, which are no layers.
    assert bool(loaded.notes) == (name == "zamba, mamba-1")
    assert compare_with_own(loaded) > 0.9999
    loaded.module.set_attn_implementation("eager")
    with torch.no_grad():
        found = loaded.module(ids, use_cache=False).logits[0]
    assert similarity(found, expected) > 0.997


def test_weights_that_layers_share_are_packed_once(tmp_path: Path) -> None:
    """Zamba 2 has one block of attention whose weights several of its layers use."""
    model_type, settings = STATEFUL["zamba2"]
    loaded = load(save_checkpoint(tmp_path, tiny_model(model_type, **settings)), weights="int8")

    packs = [pack_of(layer) for layer in linear_layers(loaded.module).values()]

    assert None not in packs
    assert len({id(pack) for pack in packs}) < len(packs)


def test_what_makes_decays_and_gates_has_8_bits(tmp_path: Path) -> None:
    model_type, settings = STATEFUL["qwen3_5"]
    model = tiny_model(model_type, **settings)

    loaded = load(save_checkpoint(tmp_path, model), weights="int4")

    mixer = loaded.module.model.layers[0].linear_attn
    bits = {name: pack_of(layer).weights.bits for name, layer in linear_layers(mixer).items()}
    assert bits == {
        "in_proj_qkv": 4, "in_proj_z": 4, "in_proj_a": 8, "in_proj_b": 8, "out_proj": 4
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "weights"),
    [("qwen3_5", "int8"), ("qwen3_5", "int4"), ("lfm2_moe", "int4"), ("falcon_h1", "int8")],
)
def test_a_packed_model_goes_on_after_a_restart_as_if_there_was_none(name, weights, tmp_path):
    model_type, settings = STATEFUL[name]
    reference = tiny_model(model_type, **settings)
    directory = save_checkpoint(tmp_path / "m", reference)
    loaded = load(directory, weights=weights, dtype="float32", device="cpu")
    prompt = words(61, seed=1)

    chat = Chat(reference, open_engine(loaded, tmp_path / "kv"))
    [first] = chat.ask(prompt)
    context = [*prompt, *first.ids, *words(9, seed=2)]
    chat.engine.close()
    again = Chat(reference, open_engine(loaded, tmp_path / "kv"))
    [restored] = again.ask(context)
    again.engine.close()
    fresh = Chat(reference, open_engine(loaded, None))
    [anew] = fresh.ask(context)
    fresh.engine.close()

    assert restored.num_from_disk >= 48
    assert anew.num_cached == 0
    assert restored.ids == anew.ids


def test_state_of_other_weights_is_never_met(tmp_path: Path) -> None:
    model_type, settings = STATEFUL["qwen3_5"]
    directory = save_checkpoint(tmp_path, tiny_model(model_type, **settings))
    identities = set()
    for weights in ("auto", "int8", "int4"):
        loaded = load(directory, weights=weights)
        geometry = kv_geometry(loaded.spec, CacheConfig(), loaded.dtype)
        identities.add(kv_identity(loaded, geometry, "the same content"))

    assert len(identities) == 3


_BLOCKS = [
    *((name, kind) for name in HYBRIDS for kind in ("Q8_0", "Q4_K")),
    *(("qwen35", kind) for kind in ("Q4_0", "Q5_K", "Q6_K")),
]


@pytest.mark.parametrize(
    ("name", "kind"),
    spread(
        _BLOCKS,
        always=[("qwen3next", "Q8_0"), ("lfm2", "Q4_K"), ("falcon-h1", "Q4_K"), ("qwen35", "Q6_K")],
    ),
)
def test_recurrent_layers_multiply_with_the_blocks_of_the_file(name, kind, tmp_path):
    """Rows and columns that llama.cpp has in another order included.

    Held to the same file unpacked, which tests of forms hold to the model it was written from.
    """
    path = write_hybrid(tmp_path / "m.gguf", name, kind)

    loaded = load(path, device="cpu")

    plain = load(path, device="cpu", dtype="float32")
    twins = linear_layers(plain.module)
    unpacked = []
    for each, layer in linear_layers(loaded.module).items():
        pack = pack_of(layer)
        if pack is None:
            unpacked.append(each.rpartition(".")[2])
        else:
            assert layer.weight.numel() == 0
            assert torch.allclose(dequantised(pack.weights), twins[each].weight, rtol=1e-5)
    assert set(unpacked) <= {"shared_expert_gate", "dt_proj"}  # of float32 in the file
    packed_experts = [
        expert_packs_of(part) is not None
        for part in loaded.module.modules()
        if type(part).__name__.endswith("Experts")
    ]
    assert all(packed_experts)
    assert loaded.weights == "blocks"
    assert compare_with_own(loaded) > 0.99


def test_parts_of_a_matrix_in_unequal_formats_stay_in_them(tmp_path: Path) -> None:
    """Qwen3-Next has in one matrix what its files have in two. Q4_K_M has 5 bits and 4 there, and
    the layer that holds a third of what a token reads took 16."""
    mixed = lambda stored: "Q5_K" if "attn_qkv" in stored else "Q4_K"  # noqa: E731
    path = write_hybrid(tmp_path / "m.gguf", "qwen3next", mixed)

    loaded = load(path, device="cpu")

    layer = loaded.module.model.layers[0].linear_attn.in_proj_qkvz
    assert isinstance(layer, RowsApart)
    matrices = [pack_of(part).weights for part in layer.parts]
    assert [weights.bits for weights in matrices] == [5, 4]
    plain = load(path, device="cpu", dtype="float32").module.model.layers[0].linear_attn
    whole = torch.cat([dequantised(weights) for weights in matrices])[layer.order]
    assert torch.allclose(whole, plain.in_proj_qkvz.weight, rtol=1e-5)
    assert compare_with_own(loaded) > 0.99


def test_the_probe_names_the_layers_whose_weights_others_read() -> None:
    model_type, settings = STATEFUL["mamba, no attention"]

    spec = probe(tiny_config(model_type, **settings))

    assert spec.read_elsewhere == (
        "backbone.layers.0.mixer.dt_proj", "backbone.layers.1.mixer.dt_proj"
    )  # fmt: skip


class _Reader(nn.Module):
    """Calls one layer, reads the dtype of a second and the weight of a third, which it shares."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.asked, self.read = (nn.Linear(4, 4) for _ in range(3))
        self.read.weight = self.called.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.asked(self.called(x).to(self.asked.weight.dtype))
        return x @ self.read.weight.T


def test_a_read_is_told_from_a_call_and_from_a_dtype() -> None:
    module = _Reader()
    weight = module.called.weight

    with watching_reads(module) as found:
        module(torch.ones(1, 4))

    assert found == {"read"}
    assert module.called.weight is module.read.weight is weight
    assert not module.called._forward_hooks

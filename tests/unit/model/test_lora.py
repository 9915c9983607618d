"""An adapter is merged into the layers it names, or refused in a sentence; it is never ignored."""

import json
import shutil
from math import sqrt
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvchat.core.config import ModelConfig
from kvchat.core.errors import ExitCode, ModelError
from kvchat.core.types import NO_MEMORY
from kvchat.model.checkpoint.identity import content_digest, sample_digest
from kvchat.model.checkpoint.source import find_model
from kvchat.model.files.adapter import read_adapter
from kvchat.model.loader import LoadedModel, load_model
from support.checkpoints import save_checkpoint, tiny_model

Tensors = dict[str, torch.Tensor]
RANK, ALPHA = 4, 12
Q, GATE = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.gate_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("base"), tiny_model("llama"))


def write_adapter(directory: Path, tensors: Tensors, **settings: object) -> Path:
    """Write an adapter as peft does."""
    directory.mkdir(exist_ok=True)
    plain = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "init_lora_weights": True}
    (directory / "adapter_config.json").write_text(json.dumps(plain | settings))
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, directory / "adapter_model.safetensors")
    return directory


def pair(layer: str, num_in: int, num_out: int, rank: int = RANK) -> Tensors:
    draw = torch.Generator().manual_seed(len(layer))
    return {
        f"{layer}.lora_A.weight": torch.randn(rank, num_in, generator=draw),
        f"{layer}.lora_B.weight": torch.randn(num_out, rank, generator=draw),
    }


def load(directory: Path, adapter: Path | None = None, dtype: str = "float32") -> LoadedModel:
    source = find_model(str(directory), None if adapter is None else str(adapter))
    return load_model(source, ModelConfig(dtype=dtype), None, lambda _: None)


def changed(before: torch.Tensor, parts: Tensors, layer: str, scale: float) -> torch.Tensor:
    """Return a weight with its change, one number at a time."""
    into, out_of = parts[f"{layer}.lora_A.weight"], parts[f"{layer}.lora_B.weight"]
    after = before.clone()
    for row in range(len(after)):
        for column in range(after.shape[1]):
            products = (out_of[row, r] * into[r, column] for r in range(len(into)))
            after[row, column] += scale * sum(float(product) for product in products)
    return after


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, ALPHA / RANK),
        ({"use_rslora": True}, ALPHA / sqrt(RANK)),
        ({"alpha_pattern": {"self_attn.q_proj": 2}}, 2 / RANK),
        ({"init_lora_weights": "gaussian", "use_dora": False}, ALPHA / RANK),
    ],
    ids=["plain", "by the root of the rank", "an alpha of its own", "gaussian"],
)
def test_an_adapter_changes_the_layers_it_names_and_no_other(settings, scale, base, tmp_path):
    parts = pair(Q, 64, 64)
    plain, merged = load(base), load(base, write_adapter(tmp_path / "a", parts, **settings))
    before, after = (dict(model.module.named_parameters()) for model in (plain, merged))
    for name in before:
        if name == f"{Q}.weight":
            torch.testing.assert_close(after[name], changed(before[name], parts, Q, scale))
        else:
            assert torch.equal(before[name], after[name])


@pytest.mark.parametrize(
    ("pattern", "is_own"),
    [
        (r"layers\.[0-9]+\.self_attn\.q_proj", True),
        ("q_proj|k_proj", True),
        ("layers.0.self_attn.(q|k)_proj", True),
        (r"layers\.0\..+", True),
        (r"layers\.[01]\.self_attn\.q_proj", True),
        ("q_pro.", True),
        ("^model.*q_proj", True),
        (r".*\.0\..*", True),
        (Q, True),
        ("proj", False),
        ("q_proj.", False),
        ("^layers.0.self_attn.q_proj", False),
    ],
)
def test_keys_of_alpha_pattern_are_regular_expressions(pattern, is_own, base, tmp_path):
    """They were compared as text, so a model with the wrong scale answered without a word."""
    patterns = {"lm_head": 5, pattern: 64, "q_proj": ALPHA}
    adapter = read_adapter(write_adapter(tmp_path / "a", pair(Q, 64, 64), alpha_pattern=patterns))
    assert adapter.scale(Q, RANK) == (64 if is_own else ALPHA) / RANK


def test_layers_that_are_stored_turned_are_changed_turned(tmp_path: Path) -> None:
    """GPT-2's linear layers, and tables of embeddings, are [in, out]."""
    settings = {"num_key_value_heads": None, "intermediate_size": None, "n_head": 4, "n_embd": 64}
    base = save_checkpoint(tmp_path / "gpt2", tiny_model("gpt2", **settings))
    layer, table = "transformer.h.0.attn.c_attn", "transformer.wte"
    parts = pair(layer, 64, 192)
    into, out_of = torch.randn(RANK, 272), torch.randn(64, RANK)
    tensors = {**parts, f"{table}.lora_embedding_A": into, f"{table}.lora_embedding_B": out_of}
    adapter = write_adapter(tmp_path / "a", tensors, fan_in_fan_out=True)
    before, after = load(base).module, load(base, adapter).module
    scale = ALPHA / RANK
    expected = changed(before.get_submodule(layer).weight.t(), parts, layer, scale).t()
    torch.testing.assert_close(after.get_submodule(layer).weight, expected)
    embedded = before.transformer.wte.weight + scale * (out_of @ into).t()
    torch.testing.assert_close(after.transformer.wte.weight, embedded)
    # The head is tied to the table in the file, but the adapter changes the table only.
    assert torch.equal(after.lm_head.weight, before.lm_head.weight)


def test_weights_that_a_model_divides_are_changed_before_it_does(tmp_path: Path) -> None:
    """RWKV halves some weights behind every so many layers."""
    settings = {"head_dim": None, "attention_hidden_size": 64, "rescale_every": 1}
    base = save_checkpoint(tmp_path / "rwkv", tiny_model("rwkv", **settings))
    layer = "rwkv.blocks.1.attention.output"
    parts = pair(layer, 64, 64)
    before, after = load(base), load(base, write_adapter(tmp_path / "a", parts))
    whole = 2 * before.module.get_submodule(layer).weight
    expected = changed(whole, parts, layer, ALPHA / RANK) / 2
    torch.testing.assert_close(after.module.get_submodule(layer).weight, expected)
    assert after.spec.read_elsewhere == ()


def test_what_was_trained_whole_replaces_the_models(base: Path, tmp_path: Path) -> None:
    head, norm = torch.randn(272, 64), torch.randn(64)
    tensors = {
        **pair(Q, 64, 64),
        "lm_head.weight": head,
        "model.norm.modules_to_save.default.weight": norm,
    }
    adapter = write_adapter(tmp_path / "a", tensors, modules_to_save=["lm_head", "norm"])
    module = load(base, adapter).module
    assert torch.equal(module.lm_head.weight, head)
    assert torch.equal(module.model.norm.weight, norm)


def test_a_merged_weight_has_the_dtype_of_the_model(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", pair(Q, 64, 64))
    merged = load(base, adapter, "bfloat16")
    assert {parameter.dtype for parameter in merged.module.parameters()} == {torch.bfloat16}


def test_an_adapter_is_part_of_the_identity(base: Path, tmp_path: Path) -> None:
    one = write_adapter(tmp_path / "one", pair(Q, 64, 64))
    other = write_adapter(tmp_path / "other", pair(Q, 64, 64), lora_alpha=13)
    sources = [find_model(str(base), path) for path in (None, str(one), str(other))]
    for digest in (sample_digest, lambda source: content_digest(source, NO_MEMORY)):
        assert len({digest(source) for source in sources}) == 3
    assert set(sources[1].marks()) > set(sources[0].marks())


def test_an_adapters_directory_stands_for_its_base_and_says_so(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", pair(Q, 64, 64), base_model_name_or_path=str(base))
    loaded = load(adapter)
    assert loaded.identity == load(base, adapter).identity
    assert "merged into its base" in " ".join(loaded.notes)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "is an adapter and does not name its base"),
        ("nobody/no-such-model", "is an adapter for nobody/no-such-model"),
        ("/no/such/directory", "is an adapter for /no/such/directory"),
    ],
)
def test_an_adapter_whose_base_is_not_here_names_it(name: str, said: str, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", pair(Q, 64, 64), base_model_name_or_path=name)
    with pytest.raises(ModelError) as caught:
        find_model(str(adapter))
    assert said in caught.value.message
    assert "--adapter" in caught.value.hint


def test_an_adapter_beside_a_whole_model_is_not_passed_over_in_silence(base, tmp_path):
    both = Path(shutil.copytree(base, tmp_path / "both"))
    write_adapter(both, pair(Q, 64, 64))
    assert "is not used" in " ".join(load(both).notes)
    assert not load(both, both).notes
    assert load(both, both).identity != load(both).identity


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"peft_type": "IA3"}, "'IA3'"),
        ({"use_dora": True}, "dora"),
        ({"use_qalora": True}, "qalora"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, "'pissa'"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"alpha_pattern": {"q_proj": "x"}}, "lora_alpha"),
        ({"alpha_pattern": {"(": 3}}, "is no regular expression"),
        ({"alpha_pattern": {"(.*?.*?)" * 12 + "[XY]": 3}}, "takes too long"),
    ],
)
def test_an_adapter_that_is_not_plain_is_refused_by_name(settings, said, base, tmp_path):
    adapter = write_adapter(tmp_path / "a", pair(Q, 64, 64), **settings)
    assert said in _refused(base, adapter)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.clear(), "changes no layer"),
        (lambda t: t.pop(f"{Q}.lora_A.weight"), "not a pair"),
        (lambda t: t.update(pair("model.layers.9.mlp.up_proj", 64, 96)), "has no model.layers.9"),
        (lambda t: t.update(pair(GATE, 64, 64)), "do not fit"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(8, 64)}), "another shape"),
        (lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.zeros(64)}), "has no"),
        (lambda t: t.update({"model.lora_A.weight": torch.zeros(4, 64)}), "has no weight"),
    ],
)
def test_an_adapter_that_does_not_fit_is_told_in_a_sentence(change, said, base, tmp_path):
    tensors = pair(Q, 64, 64)
    change(tensors)
    assert said in _refused(base, write_adapter(tmp_path / "a", tensors))


def test_a_directory_without_an_adapter_is_told(base: Path, tmp_path: Path) -> None:
    assert "has no adapter_config.json" in _refused(base, tmp_path)
    adapter = write_adapter(tmp_path / "a", pair(Q, 64, 64))
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    assert "cannot be read" in _refused(base, adapter)
    path.unlink()
    assert "has no adapter_model.safetensors" in _refused(base, adapter)


def _refused(base: Path, adapter: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(base, adapter)
    assert caught.value.exit_code is ExitCode.MODEL
    assert "\n" not in str(caught.value)
    return caught.value.message

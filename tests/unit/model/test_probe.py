"""The probe reads what each layer does, and refuses what cannot be paged with a reason."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from kvchat.core.config import ModelConfig
from kvchat.core.errors import ExitCode, ModelUnsupported
from kvchat.core.types import NO_MEMORY
from kvchat.model.checkpoint.source import find_model
from kvchat.model.hf import probe as probe_module
from kvchat.model.hf.probe import ProbeInconclusive, probe
from kvchat.model.loader import inspect_model, load_model
from kvchat.model.self_test import compare_with_own, ensure_trusted
from kvchat.model.spec import ModelSpec
from kvchat_kernels.paged_attention import FULL, AttentionSpan
from support.architectures import GATHERED, REFUSED, SUPPORTED
from support.checkpoints import save_checkpoint, tiny_config, tiny_model


def spec_of(name: str) -> ModelSpec:
    model_type, settings = SUPPORTED[name]
    return probe(tiny_config(model_type, **settings))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_paged_is_refused_by_name_and_reason(name: str) -> None:
    model_type, settings, reason = REFUSED[name]

    with pytest.raises(ModelUnsupported) as caught:
        probe(tiny_config(model_type, **settings))

    assert f"({model_type}) is not supported: it {reason}" in caught.value.message
    assert caught.value.message.count(". ") == 0
    assert caught.value.exit_code is ExitCode.MODEL


@pytest.mark.parametrize("name", GATHERED)
def test_what_cannot_be_paged_keeps_its_kv_in_pages_all_the_same(name: str) -> None:
    model_type, settings, reason = GATHERED[name]

    spec = probe(tiny_config(model_type, **settings))

    assert spec.gathered is not None
    assert spec.gathered.reason.startswith(reason)
    assert len(spec.gathered.calls) == len(spec.storing_layers) >= 2


def test_an_index_is_kept_beside_the_keys_that_it_chooses() -> None:
    model_type, settings, _ = GATHERED["deepseek_v32, sparse indexer"]

    spec = probe(tiny_config(model_type, **settings))

    assert spec.gathered is not None
    kept = zip(spec.gathered.calls, spec.layers, strict=True)
    sizes = {call.is_index: (layer.key_dim, layer.value_dim) for call, layer in kept}
    assert sizes[True] == (8, 8)  # an index in halves
    # A latent and its position; in older versions of transformers the keys and values of each head.
    assert sizes[False] in ((16, 8), (24, 12))


def test_positions_that_are_wrong_by_an_offset_are_caught_by_the_self_test(tmp_path, monkeypatch):
    """Positions that weigh little move every logit by little, which once passed."""
    monkeypatch.setattr(probe_module, "_OWN_POSITIONS", frozenset())
    # The results of a run are those of the whole probe.
    monkeypatch.setattr("kvchat.model.loader.probe_meta", probe_module.probe_meta)
    model_type, settings, _ = GATHERED["roberta"]
    model = tiny_model(model_type, **settings)
    with torch.no_grad():
        model.get_submodule("roberta.embeddings.position_embeddings").weight *= 0.003
    source = find_model(str(save_checkpoint(tmp_path, model)))
    loaded = load_model(source, ModelConfig(dtype="float32"), None, lambda _: None)
    assert loaded.spec.gathered is None
    assert compare_with_own(loaded) > 0.9999

    with pytest.raises(ModelUnsupported, match="differs from its own") as caught:
        ensure_trusted(loaded, NO_MEMORY)

    assert type(model).__name__ in caught.value.message


def test_a_refusal_comes_before_any_weight_is_read(tmp_path: Path) -> None:
    model_type, settings, reason = REFUSED["gemma3, both directions"]
    tiny_config(model_type, **settings).save_pretrained(tmp_path)
    save_file({"no tensor of it": torch.zeros(1)}, tmp_path / "model.safetensors")

    with pytest.raises(ModelUnsupported, match=reason):
        load_model(find_model(str(tmp_path)), ModelConfig(), None, lambda _: None)


def test_windows_are_read_layer_by_layer() -> None:
    spans = [layer.span for layer in spec_of("gemma3, mixed windows").layers]
    assert spans == [AttentionSpan(window=8), FULL] * 2

    assert {layer.span for layer in spec_of("mistral, window").layers} == {AttentionSpan(window=8)}
    assert {layer.span for layer in spec_of("llama").layers} == {FULL}


def test_a_window_that_lives_in_the_mask_only_is_read_from_it() -> None:
    spans = [layer.span for layer in spec_of("qwen2_moe, window in its mask only").layers]

    assert spans == [AttentionSpan(window=7), FULL]


def test_chunked_attention_is_read_as_chunks(tmp_path: Path) -> None:
    settings = {
        **GATHERED["llama4, temperature tuning"][1],
        "attn_temperature_tuning": False,
        "attention_chunk_size": 6,
    }
    model = tiny_model("llama4_text", **settings)
    source = find_model(str(save_checkpoint(tmp_path, model)))
    _, spec = inspect_model(source)
    assert spec is None, "this one needs its weights to run"

    loaded = load_model(source, ModelConfig(dtype="float32"), None, lambda _: None)
    ensure_trusted(loaded, NO_MEMORY)

    assert [layer.span for layer in loaded.spec.layers] == [AttentionSpan(chunk=6), FULL]


def test_layers_that_share_kv_use_the_pool_of_the_layer_that_stores_it() -> None:
    spec = spec_of("gemma3n, shared KV")

    assert [layer.stores_kv for layer in spec.layers] == [True, True, False, False]
    assert [layer.pool_index for layer in spec.layers] == [0, 1, 0, 1]
    assert len(spec.storing_layers) == 2


def test_keys_and_values_may_differ_in_width() -> None:
    spec = spec_of("deepseek_v3, wide keys")

    assert {(layer.key_dim, layer.value_dim) for layer in spec.layers} == {(24, 12)}


def test_sinks_and_softcaps_are_seen() -> None:
    assert all(layer.has_sinks for layer in spec_of("gpt_oss, sinks").layers)
    assert all(layer.has_softcap for layer in spec_of("gemma2, softcap").layers)
    plain = spec_of("llama").layers
    assert not any(layer.has_sinks or layer.has_softcap for layer in plain)


def test_the_facts_of_a_model_are_its_configurations() -> None:
    config = tiny_config("llama", max_position_embeddings=77)
    config.architectures = ["LlamaForCausalLM"]
    spec = probe(config)

    assert (spec.architecture, spec.model_type) == ("LlamaForCausalLM", "llama")
    assert (spec.vocab_size, spec.max_context) == (272, 77)
    assert spec.num_parameters == sum(p.numel() for p in tiny_model("llama").parameters())
    assert [layer.module_name for layer in spec.layers] == [
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    ]


def test_probing_leaves_the_configuration_and_the_default_dtype_alone() -> None:
    config = tiny_config("mistral", sliding_window=8)
    before = config.to_json_string()

    probe(config)

    assert config.to_json_string() == before
    assert config._attn_implementation is None or "kvchat" not in config._attn_implementation
    assert torch.get_default_dtype() == torch.float32


def test_a_model_that_needs_values_is_probed_with_its_weights(specimen):
    model_type, settings = SUPPORTED["llama, dynamic rope"]
    with pytest.raises(ProbeInconclusive):
        probe(tiny_config(model_type, **settings))

    assert len(specimen("llama, dynamic rope").loaded.spec.layers) == 2


@pytest.mark.parametrize("change", [{"is_causal": False}, {"num_hidden_layers": 0}], ids=str)
def test_configurations_of_a_good_family_can_be_refused(change: dict[str, object]) -> None:
    with pytest.raises(ModelUnsupported, match="LlamaConfig"):
        probe(tiny_config("llama", **change))


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "foo"},
        {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
        {"hidden_size": -4},
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_built_is_told(change: dict[str, object]) -> None:
    """A misspelt activation once went on to the weights, which were then said to be unreadable."""
    with pytest.raises(ModelUnsupported, match="cannot be built from its configuration"):
        probe(tiny_config("llama", **change))


def test_no_specimen_is_probed_differently_with_and_without_weights(specimen):
    loaded = specimen("gemma3, mixed windows").loaded

    assert loaded.spec.layers == spec_of("gemma3, mixed windows").layers
    assert isinstance(loaded.module, nn.Module)

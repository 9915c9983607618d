"""What rounding did is measured, kept and told; what 4 bits cost too much stays in 8."""

from pathlib import Path

import pytest
import torch

from kvchat.cli import models
from kvchat.core.config import ModelConfig
from kvchat.core.errors import ModelError
from kvchat.core.types import NO_MEMORY, Memory
from kvchat.model import rounding
from kvchat.model.checkpoint.identity import sample_digest
from kvchat.model.checkpoint.source import find_model
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.packed.quantise import pack_of
from kvchat.model.rounding import Effect, divergences, known_effect
from support.checkpoints import save_checkpoint, tiny_model

FEW, MANY = "self_attn.v_proj", "mlp.up_proj"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose predictions hang on one matrix of many levels: the values of attention."""
    model = tiny_model("llama", num_key_value_heads=1)
    with torch.no_grad():
        for layer in model.model.layers:
            values = layer.self_attn.v_proj.weight
            values[:, ::2] *= 40.0
            layer.self_attn.o_proj.weight.mul_(10.0)
        model.lm_head.weight.mul_(20.0)
    return save_checkpoint(tmp_path_factory.mktemp("m"), model)


@pytest.fixture(autouse=True)
def _measures_tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "_LEAST_PARAMETERS", 0)


def load(directory: Path, memory: Memory, weights: str = "int4") -> LoadedModel:
    config = ModelConfig(weights=weights, device="cpu")
    return load_model(find_model(str(directory)), config, 128, lambda _: None, memory)


def bits_of(loaded: LoadedModel, name: str) -> int:
    pack = pack_of(loaded.module.get_submodule(f"model.layers.0.{name}"))
    assert pack is not None
    return pack.weights.bits


def test_divergence_is_that_of_kullback_and_leibler() -> None:
    own = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    other = torch.tensor([[1.0, 2.0, 4.0], [5.0, 5.0, 5.0]])
    expected = torch.nn.functional.kl_div(
        other.log_softmax(-1), own.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    torch.testing.assert_close(divergences(own, other), expected)


def test_what_costs_much_stays_in_8_bits_and_the_user_is_told(directory, memory):
    """A small Gemma changed a fifth of its likeliest tokens without a word."""
    loaded = load(directory, memory)

    assert "v_proj" in loaded.in_8
    assert bits_of(loaded, FEW) == 8
    assert bits_of(loaded, MANY) == (8 if "up_proj" in loaded.in_8 else 4)
    [note] = [note for note in loaded.notes if "likeliest tokens" in note]
    assert "v_proj" in note
    assert load(directory, memory, "int8").in_8 == ()


def test_what_was_measured_is_kept(directory, monkeypatch, memory):
    first = load(directory, memory)

    def fail(*arguments: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(rounding, "_measured", fail)
    again = load(directory, memory)
    assert (again.in_8, again.notes) == (first.in_8, first.notes)
    [key] = [key for key in memory.texts if key[0] == "rounding"]
    memory.set(*key, {"x": 3})
    assert known_effect(sample_digest(again.source), "int4", again.dtype, memory) is None


def test_models_info_tells_what_rounding_did(directory, monkeypatch, memory):
    loaded = load(directory, memory)
    monkeypatch.setattr(models, "state_memory", lambda: memory)

    facts = models._rounding_facts(loaded.source, loaded.dtype)
    assert facts == {"int4": loaded.notes[0]}


def test_a_form_that_is_too_coarse_is_refused_unless_the_user_insists(directory, monkeypatch):
    monkeypatch.setattr(rounding, "_measured", lambda *_: Effect(0.3, 0.75, 256))
    with pytest.raises(ModelError, match=r"change 25% of 256 likeliest tokens \(KL 0.3000\)") as e:
        load(directory, NO_MEMORY)
    assert "KVCHAT_ROUNDING=any" in e.value.hint

    monkeypatch.setenv("KVCHAT_ROUNDING", "any")
    assert bits_of(load(directory, NO_MEMORY), FEW) == 4


def test_what_cannot_be_measured_is_rounded_as_before(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, tiny_model("llama"))
    (tmp_path / "tokenizer.json").unlink()
    loaded = load(tmp_path, NO_MEMORY)
    assert (loaded.in_8, loaded.notes) == ((), ())
    assert bits_of(loaded, FEW) == 4


def test_the_cheapest_kinds_are_kept_until_little_is_lost() -> None:
    costs = {"v_proj": 0.09, "up_proj": 0.06, "q_proj": 0.01, "lm_head": 0.0}
    sizes = {"v_proj": 100, "up_proj": 1000, "q_proj": 1000, "lm_head": 9000}
    assert rounding._to_keep(costs, sizes) == ("v_proj", "up_proj")
    assert rounding._to_keep({"a": 0.01, "b": 0.01}, {"a": 1, "b": 1}) == ()

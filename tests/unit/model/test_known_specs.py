"""What the probe found out is known at the next start, and only while all it depends on stays."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvchat.core.errors import ModelError
from kvchat.model import loader
from kvchat.model.checkpoint.source import find_model
from kvchat.model.hf import known_specs
from kvchat.model.hf.config_limits import ParameterLimit
from kvchat.model.hf.known_specs import KnownSpecs, spec_key
from kvchat.model.hf.model_class import MetaModel
from kvchat.model.hf.probe import probe, probe_meta
from kvchat.model.loader import inspect_model
from kvchat.model.spec import ModelSpec
from support.architectures import GATHERED, SUPPORTED
from support.checkpoints import save_checkpoint, tiny_config, tiny_model
from support.fact_memory import FactMemory
from support.stateful_models import STATEFUL

_LIMIT = ParameterLimit(1000, 1_000_000)
_ALL = {**SUPPORTED, **{name: each[:2] for name, each in GATHERED.items()}, **STATEFUL}


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the model types that were probed."""
    probed: list[str] = []

    def noting(model: MetaModel, limit: ParameterLimit) -> ModelSpec:
        probed.append(model.config.model_type)
        return probe_meta(model, limit)

    monkeypatch.setattr(loader, "probe_meta", noting)
    return probed


@pytest.mark.parametrize(
    "name",
    ["gemma3, mixed windows", "gemma3n, shared KV", "gpt_oss, sinks", "bloom", "qwen3_5", "lfm2"],
)
def test_a_spec_is_known_as_it_was_probed(name: str, memory: FactMemory) -> None:
    model_type, settings = _ALL[name]
    spec = probe(tiny_config(model_type, **settings))

    KnownSpecs(memory).note("key", spec)

    assert KnownSpecs(memory).find("key") == spec
    assert KnownSpecs(memory).find("another") is None


def test_a_model_is_probed_at_its_first_start_only(tmp_path, probes, memory):
    source = find_model(str(save_checkpoint(tmp_path / "model", tiny_model("llama"))))

    _, first = inspect_model(source, memory)
    _, second = inspect_model(source, memory)
    _, third = inspect_model(source)

    assert first == second == third
    assert probes == ["llama", "llama"], "without a memory each start probes"


def test_a_config_that_changed_is_probed_again(tmp_path, probes, memory):
    """A number of layers that the weights cannot hold is refused though the model was known."""
    directory = save_checkpoint(tmp_path / "model", tiny_model("llama"))
    inspect_model(find_model(str(directory)), memory)
    config = json.loads((directory / "config.json").read_text())

    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    _, spec = inspect_model(find_model(str(directory)), memory)
    (directory / "config.json").write_text(json.dumps({**config, "hidden_size": 1 << 14}))

    assert spec is not None
    assert len(spec.layers) == 1
    with pytest.raises(ModelError, match="larger model"):
        inspect_model(find_model(str(directory)), memory)
    assert probes == ["llama"] * 3


def test_a_parameter_that_modules_share_counts_once() -> None:
    """Every published Zamba2 was refused: nine of its layers have the weights of two."""
    with ParameterLimit(1, 100).guarded():
        one = torch.nn.Linear(10, 10, bias=False, device="meta")
        for _ in range(5):
            torch.nn.Module().register_parameter("weight", one.weight)
    with ParameterLimit(9, 100).guarded():
        torch.nn.Linear(10, 10, bias=False, device="meta")
        with pytest.raises(ModelError, match="larger model"):
            torch.nn.Linear(10, 10, bias=False, device="meta")


def test_the_key_tells_of_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, own = tiny_config("llama"), tmp_path / "probe.py"
    own.write_text("one")
    monkeypatch.setattr(known_specs, "__file__", str(tmp_path / "known_specs.py"))
    keys = [spec_key(config, _LIMIT), spec_key(config, ParameterLimit(1000, 5))]
    keys.append(spec_key(tiny_config("llama", num_hidden_layers=3), _LIMIT))
    for name in ("torch.__version__", "transformers.__version__"):
        with monkeypatch.context() as changed:
            changed.setattr(f"kvchat.model.hf.known_specs.{name}", "0.0")
            keys.append(spec_key(config, _LIMIT))
    assert spec_key(tiny_config("llama"), _LIMIT) == keys[0]
    own.write_text("another")
    keys.append(spec_key(config, _LIMIT))

    assert len(set(keys)) == len(keys) == 6


def _with(content: str, old: str, new: str) -> str:
    assert old in content
    return content.replace(old, new)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: "[]",
        lambda content: _with(content, '"num_heads": 4', '"num_heads": 5'),
        lambda content: _with(content, '"digest"', '"other"'),
    ],
)
def test_a_damaged_fact_is_a_miss_and_is_replaced(tmp_path, probes, damage, memory):
    source = find_model(str(save_checkpoint(tmp_path / "model", tiny_model("llama"))))
    _, sound = inspect_model(source, memory)
    [(key, text)] = memory.texts.items()
    memory.texts[key] = damage(text)

    assert [inspect_model(source, memory)[1] for _ in range(2)] == [sound, sound]
    assert probes == ["llama", "llama"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", "272"),
        ("vocab_size", True),
        ("max_context", None),
        ("layers", {}),
        ("layers", [{"module_name": "x"}]),
        ("gathered", {"reason": "x", "calls": [], "num_layers": 1.5}),
        ("state", [{"layer": 0, "kind": "x", "index": 0, "shape": [1], "dtype": "os.system"}]),
    ],
)
def test_content_of_other_types_is_a_miss_whatever_its_digest(name, value, memory):
    known = KnownSpecs(memory)
    known.note("key", probe(tiny_config("llama")))
    entry: Any = memory.get("specs", "key")
    entry["spec"][name] = value
    entry["digest"] = known_specs._digest(entry["spec"])
    memory.set("specs", "key", entry)

    assert known.find("key") is None

"""Layers run as scripts: the same operations in the same order, so the same bits, or Python's.

The plain twin is the layer as `FusedLayer` runs it without a script, on the same weights. Models
are not run as a whole here: see `test_whole_model.py`.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvchat.core.config import ModelConfig
from kvchat.model import fused_layers, fused_parts
from kvchat.model.batch import ForwardBatch, SequencePiece, build_batch
from kvchat.model.fused_layers import LayerParts, LayerScript, script_of
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.paged_model import PagedModel
from kvchat.model.source import find_model
from kvchat_kernels.paged_attention.cpu import FusedStep
from support.architectures import SUPPORTED
from support.checkpoints import save_checkpoint, tiny_model
from support.specimens import random_ids

CPU = torch.device("cpu")
BLOCK_SIZE = 8
# What decides a layer's form: biases, norms of heads, windows and norms of what is added, layers
# that do not rotate.
NAMES = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma3, mixed windows",
    "smollm3, some layers without positions",
]
# (new tokens, context, blocks) of each sequence of a step, and whether one script runs a layer, be
# its span what it may.
IN_PLACE = [(1, 30, range(1, 5))]
STEPS = {
    "one row": (IN_PLACE, True),
    "a verify of five": ([(5, 30, range(1, 5))], True),
    "blocks in two places": ([(1, 30, (7, 8, 2, 3))], True),
    "a verify over blocks in two places": ([(3, 30, (7, 8, 2, 3))], True),
    "blocks in more places than are looked at": ([(1, 150, range(39, 19, -1))], False),
    "three sequences": ([(1, 9, (1, 2)), (4, 33, range(3, 8)), (2, 2, (9,))], False),
}


@pytest.fixture(autouse=True)
def layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvchat.model.fuse.join_model", lambda *_: None)


@dataclass
class Decisions:
    """What was decided for the layers of a step."""

    made: list[FusedStep | None] = field(default_factory=list)


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> Decisions:
    seen, decide = Decisions(), fused_parts.fused_step

    def noting(*args: Any) -> FusedStep | None:
        seen.made.append(decide(*args))
        return seen.made[-1]

    monkeypatch.setattr(fused_parts, "fused_step", noting)
    return seen


def load(directory: Path, dtype: str = "bfloat16") -> LoadedModel:
    loaded = load_model(find_model(str(directory)), ModelConfig(dtype=dtype), 160, lambda _: None)
    assert loaded.fusing is not None
    assert loaded.fusing.wait().num_layers == len(loaded.spec.layers)
    return loaded


def plain(directory: Path, monkeypatch: pytest.MonkeyPatch, dtype: str = "bfloat16") -> LoadedModel:
    """Return the model of `directory` with its layers run by Python."""
    with monkeypatch.context() as patch:
        patch.setattr(fused_layers, "script_of", lambda _: None)
        return load(directory, dtype)


def saved(directory: Path, name: str) -> Path:
    model_type, settings = SUPPORTED[name]
    return save_checkpoint(directory, tiny_model(model_type, **settings))


def batch_of(step: list[tuple[int, int, Any]]) -> ForwardBatch:
    pieces = [SequencePiece(random_ids(n, seed=n), end - n, b, n) for n, end, b in step]
    return build_batch(pieces, BLOCK_SIZE, CPU)


def results(loaded: LoadedModel, batch: ForwardBatch) -> list[torch.Tensor]:
    """Return all logits of a step over random KV, and the pools after it."""
    generator = torch.Generator().manual_seed(0)

    def pool(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(40, BLOCK_SIZE, heads, dim, generator=generator).to(loaded.dtype)

    pools = [
        (pool(layer.num_kv_heads, layer.key_dim), pool(layer.num_kv_heads, layer.value_dim))
        for layer in loaded.spec.storing_layers
    ]
    logits = PagedModel(loaded, pools).forward(batch)
    return [logits, *(tensor for pair in pools for tensor in pair)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", NAMES)
def test_a_script_gives_what_python_gives_to_the_bit(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decisions: Decisions
) -> None:
    directory = saved(tmp_path, name)
    written = plain(directory, monkeypatch, dtype)
    decisions.made.clear()
    scripted = load(directory, dtype)
    assert decisions.made  # the comparisons at load ran what will run
    for step, is_one_script in STEPS.values():
        for _ in range(3):  # a script is made anew for what its first runs have met
            decisions.made.clear()
            ours = results(scripted, batch_of(step))
            assert len(decisions.made) == len(scripted.spec.layers)
            assert (None not in decisions.made) is is_one_script
            for one, other in zip(ours, results(written, batch_of(step)), strict=True):
                assert torch.equal(one, other)


def test_a_token_that_is_not_to_be_written_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decisions: Decisions
) -> None:
    directory = saved(tmp_path, "llama")
    written, scripted = plain(directory, monkeypatch), load(directory)
    batch = replace(batch_of(IN_PLACE), slot_mapping=torch.tensor([-1]))
    decisions.made.clear()

    ours = results(scripted, batch)

    assert set(decisions.made) == {None}
    for one, other in zip(ours, results(written, batch), strict=True):
        assert torch.equal(one, other)


def test_without_torchscript_layers_are_run_by_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decisions: Decisions
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("TorchScript is gone.")

    directory = saved(tmp_path, "llama")
    scripted = load(directory)
    monkeypatch.setattr("torch.jit.script", refuse)
    decisions.made.clear()
    written = load(directory)
    ours = results(written, batch_of(IN_PLACE))

    assert not decisions.made
    for one, other in zip(ours, results(scripted, batch_of(IN_PLACE)), strict=True):
        assert torch.equal(one, other)


def test_other_activations_and_weights_of_several_packs_are_left_to_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decisions: Decisions
) -> None:
    model_type, settings = SUPPORTED["llama"]
    other = tiny_model(model_type, **settings, hidden_act="tanh")
    loaded = [load(save_checkpoint(tmp_path / "tanh", other))]
    monkeypatch.setattr("kvchat.model.fused_parts._SLICE_ELEMENTS", 64 * 7)
    loaded.append(load(saved(tmp_path / "slices", "llama")))
    decisions.made.clear()  # checks in float32 have products of other kinds

    for one in loaded:
        results(one, batch_of(IN_PLACE))

    assert not decisions.made


def test_without_packed_products_weights_of_low_precision_are_scripted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decisions: Decisions
) -> None:
    monkeypatch.setattr("kvchat.model.fuse.has_half_products", lambda: False)
    directory = saved(tmp_path, "qwen3")
    written = plain(directory, monkeypatch)
    scripted = load(directory)
    decisions.made.clear()
    for step, _ in STEPS.values():
        for one, other in zip(
            results(scripted, batch_of(step)), results(written, batch_of(step)), strict=True
        ):
            assert torch.equal(one, other)
    assert decisions.made


def test_what_fails_in_a_script_is_told_in_the_words_python_has_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decisions: Decisions
) -> None:
    """The user is told an error's first line; TorchScript's own says only that something failed."""
    directory = saved(tmp_path, "llama")
    batch = replace(batch_of(IN_PLACE), slot_mapping=torch.tensor([40 * BLOCK_SIZE]))
    said = []
    for loaded in (plain(directory, monkeypatch), load(directory)):
        decisions.made.clear()
        with pytest.raises((RuntimeError, IndexError)) as failure:
            results(loaded, batch)
        said.append(str(failure.value).splitlines()[0])
    assert None not in decisions.made  # the second was one script
    assert decisions.made
    assert said[0] == said[1]


def test_queries_and_keys_of_a_prefill_are_let_go_before_its_mlp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were held until the layer was through, beside the widest there is of it."""
    held: list[weakref.ref[torch.Tensor]] = []
    num_held: list[int] = []

    def watched(layer: LayerParts) -> LayerScript | None:
        script = script_of(layer)
        assert script is not None

        def before(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            made = script.before(*args)
            held[:] = [weakref.ref(tensor) for tensor in made]
            return made

        def after(*args: Any) -> torch.Tensor:
            num_held.append(sum(tensor() is not None for tensor in held))
            return script.after(*args)

        return replace(script, before=before, after=after)

    monkeypatch.setattr(fused_layers, "script_of", watched)
    loaded = load(saved(tmp_path, "llama"), "float32")
    results(loaded, batch_of([(30, 30, range(1, 5))]))

    assert num_held == [0] * len(loaded.spec.layers)


def test_layers_that_are_built_alike_are_scripted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script for each layer took a model of 24 as long as laying out its weights."""
    made: list[int] = []

    def counted(layers: Sequence[LayerParts]) -> LayerScript | None:
        made.append(len(layers))
        return script_of(layers)

    monkeypatch.setattr(fused_layers, "script_of", counted)
    loaded = load(saved(tmp_path, "gemma3, mixed windows"))

    assert made == [len(loaded.spec.layers)]


def test_a_script_that_does_something_else_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decisions: Decisions
) -> None:
    def wrong(layers: Sequence[LayerParts]) -> LayerScript | None:
        script = script_of(layers)
        assert script is not None
        run = script.run
        return replace(script, run=lambda *args: run(*args[:-1], 0))  # each as the first layer

    directory = saved(tmp_path, "llama")
    written = plain(directory, monkeypatch)
    monkeypatch.setattr(fused_layers, "script_of", wrong)
    loaded = load(directory)
    decisions.made.clear()
    ours = results(loaded, batch_of(IN_PLACE))

    assert len(decisions.made) == 1  # the first layer is itself
    for one, other in zip(ours, results(written, batch_of(IN_PLACE)), strict=True):
        assert torch.equal(one, other)

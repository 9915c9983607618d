"""The compiled step of models with gated delta nets is the modules' own step, state included."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvchat.core.config import ModelConfig
from kvchat.model import self_test
from kvchat.model.batch import SequencePiece, StepAbandoned
from kvchat.model.compiled_step import CompiledStep
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.paged_model import StatefulModel
from kvchat.model.self_test import compare_with_own, ensure_trusted
from kvchat.model.source import find_model
from kvchat_kernels.state_buffer import StateBuffer
from support.checkpoints import save_checkpoint, tiny_model
from support.hybrid_files import write_hybrid
from support.stateful_models import STATEFUL, words

_PROMPT, _STEPS, _BLOCK = 7, 12, 8
# Models by their names: settings beside those of STATEFUL.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "as many key heads": ("qwen3_5, compiled", {"linear_num_key_heads": 4}),
    "fewer key heads": ("qwen3_5, compiled", {}),
    "wide": ("qwen3_5, compiled", {"linear_key_head_dim": 24, "linear_value_head_dim": 32}),
    "experts": ("qwen3_5_moe, compiled", {}),
}


def load(directory: Path, **config: str) -> LoadedModel:
    settings = ModelConfig(device="cpu", **config)
    return load_model(find_model(str(directory)), settings, 128, lambda _: None)


def saved(name: str, directory: Path) -> Path:
    family, more = _MODELS[name]
    model_type, settings = STATEFUL[family]
    return save_checkpoint(directory, tiny_model(model_type, **{**settings, **more}))


class Counted:
    """A compiled step that counts the steps it takes."""

    def __init__(self, step: CompiledStep) -> None:
        self._step = step
        self.num_taken = 0

    def logits(self, *arguments: Any) -> torch.Tensor | None:
        found = self._step.logits(*arguments)
        self.num_taken += found is not None
        return found


def decoded(loaded: LoadedModel, is_compiled: bool) -> tuple[torch.Tensor, StateBuffer, int]:
    """Run a prompt and single tokens; return all logits, the state and how many were compiled."""
    model = StatefulModel(loaded, self_test._small_pools(loaded, 5))
    assert model.compiled is not None
    counted = Counted(model.compiled)
    model.compiled = counted if is_compiled else None  # type: ignore[assignment]
    state, ids = model.state_io.new_buffer(), words(_PROMPT + _STEPS, seed=1)
    rows = []
    for start, end in ((0, _PROMPT), *((at, at + 1) for at in range(_PROMPT, len(ids)))):
        piece = SequencePiece(ids[start:end], start, range(1, 5), end - start, state)
        rows.append(model.forward_piece(piece, _BLOCK))
    return torch.cat(rows), state, counted.num_taken


@pytest.mark.parametrize("name", _MODELS)
def test_logits_and_state_are_those_of_the_modules(name: str, tmp_path: Path) -> None:
    loaded = load(saved(name, tmp_path), dtype="float32")

    ours, our_state, num_taken = decoded(loaded, is_compiled=True)
    theirs, their_state, _ = decoded(loaded, is_compiled=False)

    assert num_taken == _STEPS
    assert torch.allclose(ours, theirs, atol=2e-4, rtol=1e-4)
    assert our_state.num_tokens == their_state.num_tokens == _PROMPT + _STEPS
    for one, other in zip(our_state.views, their_state.views, strict=True):
        assert torch.allclose(one.float(), other.float(), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("config", "least"),
    [
        ({"dtype": "bfloat16"}, 0.999),
        ({"dtype": "float32", "weights": "int8"}, 0.9999),
        ({"dtype": "float32", "weights": "int4"}, 0.99),
    ],
)
def test_low_bits_take_the_compiled_step_too(
    config: dict[str, str], least: float, tmp_path: Path
) -> None:
    loaded = load(saved("fewer key heads", tmp_path), **config)

    ours, _, num_taken = decoded(loaded, is_compiled=True)
    theirs, _, _ = decoded(loaded, is_compiled=False)

    assert num_taken == _STEPS
    assert torch.cosine_similarity(ours, theirs).min() > least
    assert compare_with_own(loaded) > least


def test_blocks_of_a_file_take_it_too(tmp_path: Path) -> None:
    """Value heads and columns of the output are in another order in the file."""
    loaded = load(write_hybrid(tmp_path / "m.gguf", "qwen35", "Q8_0"))

    ours, _, num_taken = decoded(loaded, is_compiled=True)
    theirs, _, _ = decoded(loaded, is_compiled=False)

    assert loaded.weights == "blocks"
    assert num_taken == _STEPS
    assert torch.cosine_similarity(ours, theirs).min() > 0.999


def test_the_self_test_abandons_a_step_that_is_wrong(tmp_path: Path) -> None:
    """Most of its rows must be of compiled steps: with prompts alone it would see nothing."""
    loaded = load(saved("fewer key heads", tmp_path), dtype="float32")
    assert loaded.compiled is not None
    for layer in loaded.compiled._decoder.layers:
        if hasattr(layer.attention, "rates"):
            layer.attention.rates.mul_(0.5)

    ensure_trusted(loaded, None)

    assert loaded.compiled.is_off


def test_a_step_can_be_given_up_before_it_runs(tmp_path: Path) -> None:
    loaded = load(saved("fewer key heads", tmp_path), dtype="float32")
    model = StatefulModel(loaded, self_test._small_pools(loaded, 5))
    assert model.compiled is not None
    state = model.state_io.new_buffer()
    ids = words(_PROMPT, seed=1)
    model.forward_piece(SequencePiece(ids, 0, range(1, 5), 1, state), _BLOCK)

    model.compiled._num_pieces = 3
    with model.stopping(lambda: True), pytest.raises(StepAbandoned):
        model.forward_piece(SequencePiece([5], _PROMPT, range(1, 5), 1, state), _BLOCK)

    assert state.num_tokens == _PROMPT

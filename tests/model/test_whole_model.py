"""Small steps run as a whole: the logits and the KV of the model run layer by layer, to the bit."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvchat.core.config import ModelConfig
from kvchat.model.batch import ForwardBatch, SequencePiece, build_batch
from kvchat.model.fused_layers import Angles, WholeModel
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.paged_model import PagedModel
from kvchat.model.source import find_model
from support.architectures import SUPPORTED
from support.checkpoints import save_checkpoint, tiny_model
from support.specimens import random_ids

CPU = torch.device("cpu")
BLOCK_SIZE = 8
NUM_BLOCKS = 40
# Biases, norms of heads, two kinds of angles, layers without.
NAMES = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma3, mixed windows",
    "smollm3, some layers without positions",
]
# (new tokens, context, blocks, rows of logits)
STEPS = {
    "one row": (1, 30, range(1, 5), 1),
    "one row whose logits nobody wants": (1, 30, range(1, 5), 0),
    "a verify of five": (5, 30, range(1, 5), 5),
    "the last two of five": (5, 30, (7, 8, 2, 3), 2),
}


# As many rows as products of weights in float16 are made for, and more.
TWELVE, THIRTEEN = (12, 30, range(1, 5), 1), (13, 30, range(1, 5), 1)


@dataclass
class Runs:
    """How often a model was run in each way."""

    as_a_whole: int = 0
    by_layers: int = 0


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    seen, whole, layers = Runs(), WholeModel._run, PagedModel._run

    def run(self: WholeModel, *args: Any) -> torch.Tensor:
        seen.as_a_whole += 1
        return whole(self, *args)

    def run_layers(self: PagedModel, batch: ForwardBatch) -> torch.Tensor:
        seen.by_layers += 1
        return layers(self, batch)

    monkeypatch.setattr(WholeModel, "_run", run)
    monkeypatch.setattr(PagedModel, "_run", run_layers)
    return seen


def load(directory: Path, dtype: str = "bfloat16") -> LoadedModel:
    loaded = load_model(find_model(str(directory)), ModelConfig(dtype=dtype), 320, lambda _: None)
    assert loaded.fusing is not None
    loaded.fusing.wait()
    return loaded


def saved(directory: Path, name: str, **more: Any) -> Path:
    model_type, settings = SUPPORTED[name]
    return save_checkpoint(directory, tiny_model(model_type, **{**settings, **more}))


def batch_of(count: int, end: int, blocks: Any, num_rows: int) -> ForwardBatch:
    piece = SequencePiece(random_ids(count, seed=count), end - count, blocks, num_rows)
    return build_batch([piece], BLOCK_SIZE, CPU)


class Case:
    """A loaded model over random KV, which is the same for every `results`."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def results(self, batch: ForwardBatch, fill: float | None = None) -> list[torch.Tensor]:
        """Return a step's logits, and the pools after it, which were full of `fill` where given."""
        generator = torch.Generator().manual_seed(0)

        def pool(heads: int, dim: int) -> torch.Tensor:
            values = torch.randn(NUM_BLOCKS, BLOCK_SIZE, heads, dim, generator=generator)
            return (values if fill is None else values.fill_(fill)).to(self._loaded.dtype)

        pools = [
            (pool(layer.num_kv_heads, layer.key_dim), pool(layer.num_kv_heads, layer.value_dim))
            for layer in self._loaded.spec.storing_layers
        ]
        logits = PagedModel(self._loaded, pools).forward(batch)
        return [logits, *(tensor for pair in pools for tensor in pair)]

    def plain_results(self, batch: ForwardBatch, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Return the same, computed layer by layer."""
        with monkeypatch.context() as patch:
            patch.setattr(WholeModel, "logits", lambda _, batch, own: own(batch))
            return self.results(batch)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, plain) for mine, plain in zip(one, other, strict=True))


def checked(case: Case) -> Case:
    """Return a case whose first steps were checked, so that it runs as a whole."""
    for _ in range(2):
        case.results(batch_of(*STEPS["one row"]))
    return case


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_run_as_a_whole_gives_what_its_layers_give_to_the_bit(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Runs
) -> None:
    case = checked(Case(load(saved(tmp_path, name), dtype)))
    for step in (*STEPS.values(), TWELVE):
        batch = batch_of(*step)
        plain = case.plain_results(batch, monkeypatch)
        runs.by_layers = runs.as_a_whole = 0
        assert same(case.results(batch), plain)
        assert (runs.by_layers, runs.as_a_whole) == (0, 1)


@pytest.mark.parametrize("name", NAMES)
def test_many_keys_are_gathered(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Runs
) -> None:
    case = Case(load(saved(tmp_path, name)))
    step = (1, 299, (*range(20, 39), *range(1, 20)), 1)
    by_kernel = case.plain_results(batch_of(*step), monkeypatch)
    monkeypatch.setattr("kvchat_kernels.paged_attention.cpu._FEW_KEY_BYTES", 0)
    monkeypatch.setattr("kvchat_kernels.paged_attention.cpu.multiplies_in", lambda dtype: True)
    batch = batch_of(*step)  # how it is attended was decided once for the other
    plain = case.plain_results(batch, monkeypatch)
    runs.by_layers = runs.as_a_whole = 0
    ours = checked(case).results(batch)
    assert same(ours, plain)
    assert (runs.by_layers, runs.as_a_whole) == (2, 3)
    assert not torch.equal(ours[0], by_kernel[0])  # another order of additions
    assert (ours[0] - by_kernel[0]).norm() < 0.02 * by_kernel[0].norm()


def test_the_first_steps_run_both_ways(tmp_path: Path, runs: Runs) -> None:
    case = Case(load(saved(tmp_path, "llama")))
    for _ in range(3):
        case.results(batch_of(*STEPS["one row"]))
    assert (runs.by_layers, runs.as_a_whole) == (2, 3)


def test_the_first_verify_proves_nothing_any_more(tmp_path: Path, runs: Runs) -> None:
    """It did, took five times as long, and was held to be too dear to try again."""
    case = checked(Case(load(saved(tmp_path, "llama"))))
    runs.by_layers = runs.as_a_whole = 0
    case.results(batch_of(*STEPS["a verify of five"]))
    assert (runs.by_layers, runs.as_a_whole) == (0, 1)


@pytest.mark.parametrize("changed", ["logits", "embedding"])
def test_a_model_that_is_more_than_its_parts_goes_on_as_it_is(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Runs
) -> None:
    """Granite scales both: parts, each checked, do not make the model.

    The refuting step's KV was the whole's once, and went on into the cache.
    """
    loaded = load(saved(tmp_path, "llama"))
    if changed == "logits":
        scale_output(loaded.module, "logits")
    else:
        layers = loaded.module.model
        monkeypatch.setattr(layers, "forward", scaling_what_is_embedded(layers))
    case = Case(loaded)
    batch = batch_of(*STEPS["one row"])
    plain = case.plain_results(batch, monkeypatch)
    runs.by_layers = runs.as_a_whole = 0
    for _ in range(3):
        assert same(case.results(batch), plain)
    assert (runs.by_layers, runs.as_a_whole) == (3, 1)


def scale_output(module: Any, name: str) -> None:
    own = module.forward

    def scaled(**kwargs: Any) -> Any:
        output = own(**kwargs)
        return replace(output, **{name: getattr(output, name) * 0.5})

    module.forward = scaled


def scaling_what_is_embedded(layers: Any) -> Any:
    own = layers.forward

    def forward(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return own(**{**kwargs, "inputs_embeds": layers.embed_tokens(input_ids) * 12.0})

    return forward


def test_steps_nobody_wants_logits_of_prove_nothing(tmp_path: Path, runs: Runs) -> None:
    """No logits are equal to no logits, whatever was computed."""
    case = Case(load(saved(tmp_path, "llama")))
    silent = batch_of(*STEPS["one row whose logits nobody wants"])
    for _ in range(3):
        case.results(silent)
    assert (runs.by_layers, runs.as_a_whole) == (3, 0)
    case.results(batch_of(*STEPS["one row"]))
    assert (runs.by_layers, runs.as_a_whole) == (4, 1)


def test_a_step_of_more_rows_than_run_fused_refutes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Runs
) -> None:
    """Its layers ran their own code, and the whole did not: the two differ."""
    monkeypatch.setattr("kvchat.model.fused_parts.multiplies_in", lambda dtype: True)
    case = Case(load(saved(tmp_path, "llama")))
    batch = batch_of(*THIRTEEN)
    for _ in range(2):
        assert same(case.results(batch), case.plain_results(batch, monkeypatch))
    runs.by_layers = runs.as_a_whole = 0
    checked(case).results(batch)
    assert (runs.by_layers, runs.as_a_whole) == (3, 2)


def test_what_is_no_number_refutes_nothing(tmp_path: Path, runs: Runs) -> None:
    case = Case(load(saved(tmp_path, "llama")))
    beyond = batch_of(1, 30, range(1, 5), 1)
    case.results(beyond, fill=float("nan"))
    runs.by_layers = runs.as_a_whole = 0
    for _ in range(3):
        case.results(batch_of(*STEPS["one row"]))
    assert (runs.by_layers, runs.as_a_whole) == (2, 3)


def test_a_model_whose_parts_were_abandoned_runs_its_own_code(tmp_path: Path, runs: Runs) -> None:
    loaded = load(saved(tmp_path, "llama"))
    assert loaded.fusing is not None
    loaded.fusing.abandon()
    Case(loaded).results(batch_of(*STEPS["one row"]))
    assert (runs.by_layers, runs.as_a_whole) == (1, 0)


@pytest.mark.parametrize(
    "pieces",
    [
        [SequencePiece([1], 8, range(1, 3), 1), SequencePiece([2], 3, range(3, 5), 1)],
        [SequencePiece(random_ids(20, seed=1), 0, range(1, 4), 1)],
    ],
    ids=["two sequences", "a prefill"],
)
def test_steps_of_other_kinds_run_layer_by_layer(
    pieces: list[SequencePiece], tmp_path: Path, runs: Runs
) -> None:
    case = Case(load(saved(tmp_path, "llama")))
    case.results(build_batch(pieces, BLOCK_SIZE, CPU))
    assert (runs.by_layers, runs.as_a_whole) == (1, 0)


def test_a_failure_is_told_in_the_words_python_has_for_it(tmp_path: Path, runs: Runs) -> None:
    case = Case(load(saved(tmp_path, "llama")))
    batch = batch_of(*STEPS["one row"])
    for _ in range(2):
        case.results(batch)
    beyond = replace(batch, slot_mapping=torch.tensor([NUM_BLOCKS * BLOCK_SIZE]))
    runs.by_layers = 0
    with pytest.raises(RuntimeError) as failure:
        case.results(beyond)
    assert runs.by_layers == 0
    assert "TorchScript" not in str(failure.value).splitlines()[0]


def rotary(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = position_ids[..., None].float() * torch.tensor([1.0, 0.1, 1.0, 0.1])
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def test_angles_are_those_of_their_positions_however_far() -> None:
    angles = Angles(rotary, torch.zeros(1), torch.float32)
    for positions in ([0, 1], [1023], [5, 6, 1024], [16_383], [16_384], [70_000, 3]):
        cos, sin = angles.at(torch.tensor(positions), max(positions) + 1)
        own_cos, own_sin = rotary(torch.zeros(1), torch.tensor([positions]))
        assert torch.equal(cos[:, 0], own_cos[0])
        assert torch.equal(sin[:, 0, 2:], own_sin[0, :, 2:])
        assert torch.equal(sin[:, 0, :2], -own_sin[0, :, :2])


def test_a_module_that_gives_something_else_has_no_angles() -> None:
    with pytest.raises(ValueError, match="angles"):
        Angles(lambda x, _: x, torch.zeros(1), torch.float32)

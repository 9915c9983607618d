"""The compiled step of models with a state is the modules' own step, state included."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from kvchat.core.config import ModelConfig
from kvchat.core.types import NO_MEMORY
from kvchat.model import self_test
from kvchat.model.batch import SequencePiece, StepAbandoned
from kvchat.model.checkpoint.source import find_model
from kvchat.model.cpu.compiled_step import CompiledStep
from kvchat.model.cpu.recurrent_prefill import (
    DeltaPrefill,
    MambaPrefill,
    RecurrentPrefill,
    TimeMixingPrefill,
)
from kvchat.model.decoder.decoder import Decoder
from kvchat.model.decoder.reader import read_decoder
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.paged_model import StatefulModel
from kvchat.model.self_test import compare_with_own, ensure_trusted
from kvchat.model.state import StateIo
from kvchat_kernels.state_buffer import StateBuffer
from support.checkpoints import save_checkpoint, tiny_model
from support.hybrid_files import write_hybrid
from support.matrix import spread
from support.stateful_models import STATEFUL, words

_PROMPT, _STEPS, _BLOCK = 7, 12, 16
# Models by their names: settings beside those of STATEFUL. Whole vectors of wide heads are rotated.
_WIDE = {"head_dim": 64}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "as many key heads": ("qwen3_5", {**_WIDE, "linear_num_key_heads": 4}),
    "fewer key heads": ("qwen3_5", _WIDE),
    "wide": ("qwen3_5", {**_WIDE, "linear_key_head_dim": 24, "linear_value_head_dim": 32}),
    "experts": ("qwen3_5_moe", _WIDE),
    "parts of key heads together": ("qwen3_next", _WIDE),
    "parts of one key head": (
        "qwen3_next",
        {**_WIDE, "linear_num_key_heads": 1, "linear_value_head_dim": 24, "num_experts": 0},
    ),
    "inputs apart": ("olmo_hybrid", {"linear_allow_neg_eigval": True}),
    "inputs apart, small betas": ("olmo_hybrid", {"linear_allow_neg_eigval": False}),
    "channels decay": (
        "kimi_linear",
        {
            "mlp_layer_types": ["dense", "sparse"],
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "short convolutions": ("lfm2", {}),
    "short convolutions with biases": ("lfm2", {"conv_bias": True, "conv_L_cache": 4}),
    "factors that are sigmoids": ("lfm2_moe", {"norm_topk_prob": True}),
    "factors that are sigmoids, scaled": (
        "lfm2_moe",
        {"norm_topk_prob": False, "routed_scaling_factor": 2.5, "use_expert_bias": False},
    ),
    "mamba": ("granitemoehybrid", {"attention_multiplier": 0.2, "residual_multiplier": 0.7}),
    "mamba, groups and biases": (
        "granitemoehybrid",
        {
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "position_embedding_type": "rope",
        },
    ),
    "mamba, experts": ("granitemoehybrid", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mamba, prompts with limits": ("granitemoehybrid", {"time_step_limit": [0.3, 0.6]}),
    "mamba beside attention": (
        "falcon_h1",
        {
            "embedding_multiplier": 1.5,
            "lm_head_multiplier": 0.5,
            "mlp_multipliers": [0.9, 1.2],
            "key_multiplier": 0.8,
            "attention_in_multiplier": 1.1,
            "attention_out_multiplier": 0.7,
            "ssm_multipliers": [0.6, 1.3, 0.8, 1.4, 1.1],
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.9,
            "attention_bias": True,
            "mamba_proj_bias": True,
        },
    ),
    "mamba beside attention, normed": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2},
    ),
    "halves of layers": ("nemotron_h", {}),
    "experts without gates": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "moe", "attention", "mlp"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 96,
            "routed_scaling_factor": 2.5,
        },
    ),
    "mamba, no attention": ("mamba2, no attention", {"n_groups": 2}),
    "selective": ("mamba, no attention", {}),
    "selective, normed": ("falcon_mamba, no attention", {"use_bias": True, "use_conv_bias": False}),
    "selective, wide": (
        "mamba, no attention",
        {"state_size": 24, "time_step_rank": 32, "hidden_size": 96, "expand": 1},
    ),
    "selective beside attention": ("jamba, mamba-1", {"num_experts_per_tok": 2, "num_experts": 4}),
    "a transformer ahead": (
        "zamba2",
        {
            "adapter_rank": 32,
            "num_mem_blocks": 2,
            "num_hidden_layers": 6,
            "mamba_ngroups": 2,
            "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid", "hybrid"],
        },
    ),
    "a transformer ahead, rotated": (
        "zamba2",
        {
            "adapter_rank": 32,
            "use_mem_rope": True,
            "use_shared_attention_adapter": True,
            "num_key_value_heads": 4,
            "head_dim": 32,
        },
    ),
    "a transformer ahead, selective": ("zamba, mamba-1", {"n_mamba_heads": 4}),
    "averages over time": ("rwkv", {"num_hidden_layers": 4, "rescale_every": 2}),
    "averages over time, of more channels": (
        "rwkv",
        {"attention_hidden_size": 96, "intermediate_size": 160, "rescale_every": 0},
    ),
    "mamba, odd sizes": (
        "bamba",
        {**_WIDE, "mamba_d_head": 8, "mamba_n_heads": 16, "mamba_d_state": 24},
    ),
}
# Each kernel once.
_KINDS = [
    *("fewer key heads", "experts", "parts of key heads together", "short convolutions"),
    "inputs apart",
    "channels decay",
    *("factors that are sigmoids", "mamba", "mamba, groups and biases", "mamba beside attention"),
    *("selective", "selective, normed", "selective beside attention", "averages over time"),
]


# transformers limits the steps of Mamba's prompts, and not those of single rows: these prompts are
# left to the modules.
_LIMITED = {
    "mamba, prompts with limits",
    *("halves of layers", "experts without gates", "nemotron_h"),
    *("a transformer ahead", "a transformer ahead, rotated"),
}


def load(directory: Path, **config: str) -> LoadedModel:
    settings = ModelConfig(device="cpu", **config)
    return load_model(find_model(str(directory)), settings, 128, lambda _: None)


def saved(name: str, directory: Path) -> Path:
    """Save a model whose norms, biases and decays are all different numbers."""
    family, more = _MODELS[name]
    model_type, settings = STATEFUL[family]
    model = tiny_model(model_type, **{**settings, **more})
    generator = torch.Generator().manual_seed(7)
    for tensor in model.state_dict().values():
        if tensor.dim() == 1:
            tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
    return save_checkpoint(directory, model)


class Counted:
    """A compiled step that counts the steps it takes."""

    def __init__(self, step: CompiledStep) -> None:
        self._step = step
        self.num_taken = 0

    def logits(self, *arguments: Any) -> torch.Tensor | None:
        found = self._step.logits(*arguments)
        self.num_taken += found is not None
        return found


def assert_same_states(
    loaded: LoadedModel, ours: list[StateBuffer], theirs: list[StateBuffer]
) -> None:
    state_io = StateIo(loaded.module, loaded.spec.state, loaded.dtype, loaded.device)
    for pair in zip(ours, theirs, strict=True):
        views = [state_io._views(state.data) for state in pair]
        for one, other in zip(*views, strict=True):
            assert torch.allclose(one.float(), other.float(), atol=2e-4, rtol=1e-3)


# Steps of three sequences: how many rows each has. The third step is more than a program takes at
# once that is not wide, so that it ends within the second sequence, which goes on in the next.
_TOGETHER = ((3, 0, 1), (1, 1, 1), (2, 15, 1), (1, 1, 0), (1, 1, 1))


def run_together(
    loaded: LoadedModel, is_compiled: bool
) -> tuple[torch.Tensor, list[StateBuffer], int]:
    """Run the steps of `_TOGETHER`; return what `decoded` does."""
    model = StatefulModel(loaded, self_test._small_pools(loaded, 13))
    assert model.compiled is not None
    counted = Counted(model.compiled)
    model.compiled = counted if is_compiled else None  # type: ignore[assignment]
    states = [model.state_io.new_buffer() for _ in range(3)]
    rows = []
    for lengths in _TOGETHER:
        pieces = []
        for index, (state, length) in enumerate(zip(states, lengths, strict=True)):
            start, blocks = state.num_tokens, range(1 + 4 * index, 5 + 4 * index)
            ids = words(32, seed=index)[start : start + length]
            if length:
                pieces.append(SequencePiece(ids, start, blocks, length, state))
        rows.append(model.forward_pieces(pieces, _BLOCK))
    return torch.cat(rows), states, counted.num_taken


def decoded(
    loaded: LoadedModel, is_compiled: bool, prompt: tuple[int, ...] = (4, _PROMPT)
) -> tuple[torch.Tensor, StateBuffer, int]:
    """Run a prompt, in parts that end so, and single tokens.

    Return all logits, the state, and how many steps were compiled.
    """
    model = StatefulModel(loaded, self_test._small_pools(loaded, 9))
    assert model.compiled is not None
    counted = Counted(model.compiled)
    model.compiled = counted if is_compiled else None  # type: ignore[assignment]
    state, ids = model.state_io.new_buffer(), words(prompt[-1] + _STEPS, seed=1)
    rows = []
    # The second part of the prompt has a past.
    ends = (*prompt, *range(prompt[-1] + 1, len(ids) + 1))
    for start, end in pairwise((0, *ends)):
        piece = SequencePiece(ids[start:end], start, range(1, 9), end - start, state)
        rows.append(model.forward_pieces([piece], _BLOCK))
    return torch.cat(rows), state, counted.num_taken


@pytest.mark.parametrize("name", spread(_MODELS, _KINDS))
def test_logits_and_state_are_those_of_the_modules(name: str, tmp_path: Path) -> None:
    loaded = load(saved(name, tmp_path), dtype="float32")

    ours, our_state, num_taken = decoded(loaded, is_compiled=True)
    theirs, their_state, _ = decoded(loaded, is_compiled=False)

    assert num_taken == _STEPS + (0 if name in _LIMITED else 2)
    assert torch.allclose(ours, theirs, atol=2e-4, rtol=1e-4)
    assert our_state.num_tokens == their_state.num_tokens == _PROMPT + _STEPS
    assert_same_states(loaded, [our_state], [their_state])


@pytest.mark.parametrize("name", spread(_MODELS, _KINDS))
def test_rows_of_several_sequences_are_those_of_each_alone(name: str, tmp_path: Path) -> None:
    """A program takes all rows of each step at once."""
    loaded = load(saved(name, tmp_path), dtype="float32")

    ours, our_states, num_taken = run_together(loaded, is_compiled=True)
    theirs, their_states, _ = run_together(loaded, is_compiled=False)

    # With limits, each decode step of the others is taken alone beside a prompt.
    assert num_taken == (5 if name in _LIMITED else len(_TOGETHER))
    assert torch.allclose(ours, theirs, atol=2e-4, rtol=1e-4)
    assert_same_states(loaded, our_states, their_states)


@pytest.mark.parametrize("name", spread(_MODELS, _KINDS))
def test_a_state_reads_guesses_once_they_are_right(name: str, tmp_path: Path) -> None:
    """To the bit as rows that are read one by one; a copy and the modules go on from there too.

    A step that was given up changes nothing.
    """
    loaded = load(saved(name, tmp_path), dtype="float32")
    model = StatefulModel(loaded, self_test._small_pools(loaded, 9))
    ids = words(_PROMPT + 5, seed=1)

    def read(state: StateBuffer, end: int, num_guesses: int = 0) -> torch.Tensor:
        start = state.num_tokens
        count = end - start
        piece = SequencePiece(
            ids[start:end], start, range(1, 9), count, state, num_guesses=num_guesses
        )
        return model.forward_pieces([piece], _BLOCK)

    plain, state = model.state_io.new_buffer(), model.state_io.new_buffer()
    for each in (plain, state):
        read(each, _PROMPT)
    rows, states = [], []
    for end in range(_PROMPT + 1, len(ids) + 1):
        rows.append(read(plain, end))
        states.append(plain.copy().data)

    def give_up_a_step() -> None:
        before = state.copy()
        read(state, state.num_tokens + 2, num_guesses=1)
        state.become(before)

    give_up_a_step()
    assert torch.equal(read(state, _PROMPT + 4, num_guesses=3), torch.cat(rows[:4]))
    assert torch.equal(state.data, states[0])
    state.cut(_PROMPT + 3)
    copied, left = state.copy(), state.copy()
    give_up_a_step()
    assert torch.equal(copied.read_all(), states[2])
    assert copied.num_read == copied.num_tokens == _PROMPT + 3
    assert torch.equal(read(state, len(ids), num_guesses=1), torch.cat(rows[3:]))
    assert torch.equal(state.read_all(), states[4])
    model.compiled = None
    if name not in _LIMITED:  # there several rows are a prompt
        assert torch.allclose(read(left, len(ids)), torch.cat(rows[3:]), atol=2e-4, rtol=1e-4)
        assert_same_states(loaded, [left], [state])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fewer key heads", DeltaPrefill),
        ("parts of key heads together", DeltaPrefill),
        ("mamba", MambaPrefill),
        ("mamba beside attention", MambaPrefill),
        ("averages over time", TimeMixingPrefill),
    ],
)
def test_prompts_take_kernels_until_the_step_is_abandoned(name, kind, tmp_path, monkeypatch):
    loaded = load(saved(name, tmp_path), dtype="float32")
    num_rows: list[int] = []
    rule = kind._rule

    def counted(self: RecurrentPrefill | TimeMixingPrefill, *arguments: Any) -> Any:
        if self._layer == 0:
            num_rows.append(arguments[-1])
        return rule(self, *arguments)

    monkeypatch.setattr(kind, "_rule", counted)
    decoded(loaded, is_compiled=False, prompt=(20, 40))
    self_test._own_logits(loaded, torch.tensor(words(_PROMPT, seed=1)))
    assert not num_rows

    decoded(loaded, is_compiled=True, prompt=(20, 40))

    assert num_rows == [20, 20]


_FEWER_BITS: list[tuple[dict[str, str], float]] = [
    # Of the modules' prompts in 16 bits two experts have nearly equal scores in a few rows.
    ({"dtype": "bfloat16"}, 0.99),
    ({"dtype": "float32", "weights": "int8"}, 0.9999),
    ({"dtype": "float32", "weights": "int4"}, 0.99),
]


_IN_BITS = [
    *("fewer key heads", "parts of key heads together", "short convolutions", "mamba"),
    *("mamba, no attention", "selective, normed", "selective beside attention"),
    "averages over time",
]


@pytest.mark.parametrize(
    ("name", "bits"),
    spread(
        [(name, bits) for name in _IN_BITS for bits in range(3)],
        always=[(name, number % 3) for number, name in enumerate(_IN_BITS)],
    ),
)
def test_low_bits_take_the_compiled_step_too(name: str, bits: int, tmp_path: Path) -> None:
    config, least = _FEWER_BITS[bits]
    loaded = load(saved(name, tmp_path), **config)

    ours, _, num_taken = decoded(loaded, is_compiled=True)
    theirs, _, _ = decoded(loaded, is_compiled=False)

    assert num_taken == 2 + _STEPS
    assert torch.cosine_similarity(ours, theirs).median() > least
    assert compare_with_own(loaded) > least


@pytest.mark.parametrize(
    ("name", "of_gates"),
    spread(
        [
            *((name, "Q8_0") for name in ("qwen35", "qwen3next", "lfm2", "granitehybrid")),
            *((name, "Q8_0") for name in ("falcon-h1", "nemotron_h", "mamba2", "mamba", "jamba")),
            ("qwen3next", "Q4_0"),
        ],
        always=[(name, "Q8_0") for name in ("qwen35", "lfm2", "falcon-h1", "mamba")],
    ),
)
def test_blocks_of_a_file_take_it_too(name: str, of_gates: str, tmp_path: Path) -> None:
    """Of Qwen's, value heads and columns of the output are in another order in the file."""
    kind = lambda stored: of_gates if "attn_gate" in stored else "Q8_0"  # noqa: E731
    loaded = load(write_hybrid(tmp_path / "m.gguf", name, kind))

    ours, _, num_taken = decoded(loaded, is_compiled=True)
    theirs, _, _ = decoded(loaded, is_compiled=False)

    assert loaded.weights == "blocks"
    assert num_taken == _STEPS + (0 if name in _LIMITED else 2)
    # Where two experts have nearly equal scores, a few rows differ more.
    assert torch.cosine_similarity(ours, theirs).median() > 0.999


@pytest.mark.parametrize("name", ["qwen35", "lfm2", "granitehybrid", "mamba"])
def test_small_tensors_of_a_file_are_read_with_all_their_bits(name: str, tmp_path: Path) -> None:
    """Decays, steps, norms and filters were rounded to the 16 bits of the module's parameters."""
    path = write_hybrid(tmp_path / "m.gguf", name, "Q8_0")

    found = small_tensors(load(path, dtype="bfloat16"))

    expected = small_tensors(load(path, dtype="float32"))
    assert found.keys() == expected.keys() != set()
    assert all(torch.equal(found[each], expected[each]) for each in expected)
    assert any((values != values.bfloat16()).any() for values in expected.values())


def small_tensors(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """Return the numbers of the first layer that are no matrix, by name."""
    assert loaded.compiled is not None
    mixer: Any = loaded.compiled._decoder.layers[0].attention
    parts = [(mixer, ("rates", "step_bias", "skips")), (mixer.convolution, ("weights", "bias"))]
    if getattr(mixer, "norm", None) is not None:
        parts.append((mixer.norm, ("weight",)))
    values = {name: getattr(part, name, None) for part, names in parts for name in names}
    return {name: each for name, each in values.items() if each is not None}


def test_the_self_test_abandons_a_step_that_is_wrong(tmp_path: Path) -> None:
    """Most of its rows must be of compiled steps: with prompts alone it would see nothing."""
    loaded = load(saved("fewer key heads", tmp_path), dtype="float32")
    assert loaded.compiled is not None
    for layer in loaded.compiled._decoder.layers:
        if hasattr(layer.attention, "rates"):
            layer.attention.rates.mul_(0.5)

    ensure_trusted(loaded, NO_MEMORY)

    assert loaded.compiled.is_off


def test_a_step_can_be_given_up_before_it_runs(tmp_path: Path) -> None:
    loaded = load(saved("fewer key heads", tmp_path), dtype="float32")
    model = StatefulModel(loaded, self_test._small_pools(loaded, 5))
    assert model.compiled is not None
    state = model.state_io.new_buffer()
    ids = words(_PROMPT, seed=1)
    model.forward_pieces([SequencePiece(ids, 0, range(1, 5), 1, state)], _BLOCK)

    model.compiled._num_pieces = 3
    with model.stopping(lambda: True), pytest.raises(StepAbandoned):
        model.forward_pieces([SequencePiece([5], _PROMPT, range(1, 5), 1, state)], _BLOCK)

    assert state.num_tokens == _PROMPT


def test_factors_are_float32_while_another_thread_loads_a_model(tmp_path: Path) -> None:
    """Loading sets torch's default dtype for the whole process; factors had it, and the kernel read
    two of them as one number, and beyond the last."""
    loaded = load(saved("mamba beside attention", tmp_path), dtype="float32")
    torch.set_default_dtype(torch.bfloat16)
    try:
        decoder = read_decoder(loaded.module, loaded.spec)
    finally:
        torch.set_default_dtype(torch.float32)

    assert isinstance(decoder, Decoder)
    (layer, *_) = decoder.layers
    assert layer.attention is not None
    assert layer.beside is not None
    factors = [part.factors for part in (*layer.attention.matrices, *layer.beside.matrices)]
    assert [part.dtype for part in factors if part is not None] == [torch.float32] * 6


def test_a_layer_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    """Its MLP alone would be computed."""
    loaded = load(saved("short convolutions", tmp_path), dtype="float32")
    of_layers = loaded.module.model.layers
    without = next(layer for layer in of_layers if hasattr(layer, "conv"))
    without.other = without.conv
    del without.conv

    found = read_decoder(loaded.module, loaded.spec)

    assert found == "has a layer without attention and without a state"

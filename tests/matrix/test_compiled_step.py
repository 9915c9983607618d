"""The compiled step computes what transformers' own modules compute, for each family it knows."""

import ast
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from kvchat.cache.kv_pool import KvPool
from kvchat.core.config import CacheConfig, ModelConfig
from kvchat.core.types import NO_MEMORY
from kvchat.engine.kv_storage import kv_geometry
from kvchat.model.batch import SequencePiece, StepAbandoned, build_batch
from kvchat.model.checkpoint.source import find_model
from kvchat.model.cpu.step_inputs import embedding_into
from kvchat.model.cpu.step_operations import Activations, RoundedForm
from kvchat.model.decoder import decoder, families, reader
from kvchat.model.loader import load_model
from kvchat.model.paged_model import PagedModel
from kvchat.model.self_test import ensure_trusted
from kvchat_kernels.cpu.step import FEW_ROWS, MAX_ROWS
from kvchat_kernels.linear.blocks import Rounding
from support.checkpoints import save_checkpoint, tiny_model
from support.compiled_steps import BLOCK, CPU, batch_of, load, pools_of, run, threads
from support.every_type import every_config, every_model
from support.matrix import spread
from support.specimens import random_ids
from support.step_families import FAMILIES, ROUTED, STRUCTURES

# Families whose matrices are read as those of another here are, so that bits change nothing more.
_IN_FLOATS = [
    "arcee",
    "olmo",
    "nemotron",
    "jais2",
    "stablelm",
    "cohere2",
    "glm",
    "helium",
    "nanochat",
    "hyperclovax",
    "vaultgemma",
    "dots1",
    "solar_open",
    "minimax_m2",
]
_IN_BITS = [f for f in FAMILIES if f not in _IN_FLOATS and "," not in f]
_IN_BITS.append("solar_open, no shared expert")  # --weights int8 once divided by its width
# One of each manner in which a layer's matrices are stored.
_STRUCTURES_IN_BITS = [
    ("phi3", "int4"),
    ("gemma4_text", "int8"),
    ("starcoder2", "int4"),
    ("mixtral", "int8"),
    ("qwen2_moe", "int4"),
    ("solar_open, no shared expert", "int8"),
]
# New tokens and context of each sequence of a step.
STEPS = {
    "one row": [(1, 30)],
    "a verify of five": [(5, 30)],
    "three sequences": [(1, 9), (4, 33), (2, 2)],
    "a long context": [(2, 600), (1, 257), (1, 256)],
    "as many rows as there may be": [(MAX_ROWS - 3, 190), (3, 9)],
}


class _Scaled(torch.nn.Embedding):
    """A table with code of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(input)


@pytest.mark.parametrize("kind", [torch.nn.Embedding, _Scaled])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_embedded_rows_are_those_of_the_module(kind, dtype):
    embedding = kind(50, 24, dtype=dtype)
    stream = torch.full((16, 24), 7.0)
    ids = torch.tensor([3, 49, 0, 3])
    embed = embedding_into(embedding, stream)
    with torch.inference_mode():
        embed(ids)

        assert torch.equal(stream[:4], embedding(ids).float())
        assert bool((stream[4:] == 7.0).all())
        with pytest.raises(IndexError):
            embed(torch.tensor([50]))


@pytest.mark.parametrize(
    ("family", "weights"),
    spread(
        [(family, "auto") for family in FAMILIES]
        + [(family, weights) for family in _IN_BITS for weights in ("int8", "int4")],
        always=[*((family, "auto") for family in STRUCTURES), *_STRUCTURES_IN_BITS],
    ),
)
def test_logits_and_kv_are_those_of_the_modules(family: str, weights: str, tmp_path: Path) -> None:
    loaded = load(tmp_path, family, dtype="float32", weights=weights)
    for step in STEPS.values():
        logits, pools = run(loaded, batch_of(step), True)
        expected, expected_pools = run(loaded, batch_of(step), False)

        # Inputs that differ in their last bits may be rounded to other levels, of 16 or 8 bits.
        most = {"auto": 2e-5, "int8": 1e-3, "int4": 2e-2}[weights]
        assert (logits - expected).abs().max() <= most * expected.abs().max()
        for ours, theirs in zip(pools, expected_pools, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert torch.allclose(one, other, rtol=10 * most, atol=10 * most)


@pytest.mark.parametrize(
    "family", ["mixtral", "qwen2_moe", "minimax_m2", "ernie4_5_moe", "hunyuan_v1_moe", "phimoe"]
)
def test_a_step_leaves_nothing_behind_for_the_next(family: str, tmp_path: Path) -> None:
    """Shares once overwrote the scores beyond the last expert, which the next step then summed."""
    loaded = load(tmp_path, family, dtype="float32")
    model, batch = PagedModel(loaded, pools_of(loaded)), batch_of(STEPS["three sequences"])

    first = model.forward(batch)

    assert torch.equal(model.forward(batch), first)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3", "mixtral"])
def test_in_16_bits_it_is_nearer_to_float32_than_the_modules_are(family, dtype, tmp_path):
    """The oracle is the same rounded weights computed with in float32."""
    loaded = load(tmp_path, family, dtype=dtype)
    batch = batch_of(STEPS["three sequences"])
    (compiled, _), (plain, _) = run(loaded, batch, True), run(loaded, batch, False)
    for layer in loaded.module.modules():
        layer.__dict__.pop("forward", None)
    in_full = replace(loaded, module=loaded.module.float(), dtype=torch.float32, compiled=None)
    pools = [tuple(pool.float() for pool in pair) for pair in pools_of(loaded)]
    exact = PagedModel(in_full, pools).forward(batch)  # type: ignore[arg-type]

    assert 0 < (compiled - exact).norm() < (plain - exact).norm()


@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
@pytest.mark.parametrize("config", [{"dtype": "bfloat16"}, {"weights": "int4"}])
def test_a_row_does_not_depend_on_rows_beside_it_nor_on_threads(family, config, tmp_path):
    """A verify of several rows must accept what rows one by one would have drawn."""
    loaded = load(tmp_path, family, **config)
    pools = pools_of(loaded)
    model = PagedModel(loaded, pools)
    ids, blocks = random_ids(5, seed=1), range(1, 41)
    expected = [
        model.forward(build_batch([SequencePiece([token], 299 + i, blocks, 1)], BLOCK, CPU))
        for i, token in enumerate(ids)
    ]
    other = SequencePiece(random_ids(3, seed=2), 77, range(60, 70), 0)
    for count in (1, 3):
        with threads(count):
            together = model.forward(
                build_batch([other, SequencePiece(ids, 299, blocks, 5)], BLOCK, CPU)
            )
        assert torch.equal(together, torch.cat(expected))


def levels_of(numbers: torch.Tensor) -> torch.Tensor:
    """Return the stored numbers of KV; those of 4 bits lie two in a byte."""
    if numbers.dtype == torch.int8:
        return numbers.int()
    return torch.stack((numbers & 15, numbers >> 4)).int()


@pytest.mark.parametrize(
    ("family", "code"),
    spread(
        [
            *((family, "int8") for family in ("llama", "gemma2", "qwen3", "gemma3_text")),
            *(("gemma2", "k8v4"), ("llama", "int4"), ("gemma3_text", "int4")),
        ],
        always=[("qwen3", "int8"), ("gemma2", "k8v4"), ("gemma3_text", "int4")],
    ),
)
def test_over_coded_kv_logits_and_kv_are_those_of_the_modules(family, code, tmp_path):
    """A number at the middle of two levels may fall on either side, so KV is equal to a level."""
    loaded = load(tmp_path, family, dtype="float32")
    geometry = kv_geometry(loaded.spec, CacheConfig(BLOCK, kv_dtype=code), loaded.dtype)
    for step in STEPS.values():
        results, pools = [], []
        for is_compiled in (True, False):
            pool = KvPool(geometry, 128, CPU)
            for layer, (keys, values) in zip(pool.layers, pools_of(loaded), strict=True):
                slots = torch.arange(128 * BLOCK)
                layer.write(keys.flatten(0, 1), values.flatten(0, 1), slots)
            model = PagedModel(loaded, pool.layers)
            assert model.compiled is not None
            if not is_compiled:
                model.compiled = None
            results.append(model.forward(batch_of(step)))
            pools.append(pool)

        assert (results[0] - results[1]).abs().max() <= 2e-2 * results[1].abs().max()
        for one, other in zip(*(pool.layers for pool in pools), strict=True):
            for ours, theirs in zip(one.tensors[::2], other.tensors[::2], strict=True):
                off = (levels_of(ours) - levels_of(theirs)).abs()
                assert off.max() <= 1
                assert off.float().mean() < 1e-3


def test_many_sequences_are_computed_group_by_group(tmp_path: Path) -> None:
    """Forty clients decode: each has what it would have alone."""
    loaded = load(tmp_path, "llama", dtype="bfloat16")
    model = PagedModel(loaded, pools_of(loaded))
    assert model.compiled is not None
    pieces = [
        SequencePiece(random_ids(1 + index % 3, index), 20 + index, range(1 + 3 * index, 9), 1)
        if index < 2
        else SequencePiece([index], 20 + index % 10, [5 + 2 * index, 6 + 2 * index], index % 2)
        for index in range(40)
    ]
    alone = [model.forward(build_batch([piece], BLOCK, CPU)) for piece in pieces]

    together = model.compiled.logits(build_batch(pieces, BLOCK, CPU))

    assert together is not None
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_short_prompt_beside_others_is_computed_group_by_group(weights, tmp_path):
    """A prompt of 17 tokens took 3.6 times as long by the modules, one of 128 1.3 times."""
    loaded = load(tmp_path, "gemma2", weights=weights)
    ids, blocks = random_ids(45, seed=1), range(1, 41)
    first = SequencePiece(random_ids(3, seed=2), 77, range(60, 70), 1)
    last = SequencePiece(random_ids(1, seed=3), 33, range(80, 85), 1)
    model = PagedModel(loaded, expected_pools := pools_of(loaded))
    alone = [
        *(SequencePiece([token], 260 + index, blocks, 1) for index, token in enumerate(ids)),
        last,
    ]
    expected = [model.forward(build_batch([piece], BLOCK, CPU)) for piece in [first, *alone]]
    model = PagedModel(loaded, pools := pools_of(loaded))
    assert model.compiled is not None

    pieces = [first, SequencePiece(ids, 260, blocks, 20), last]
    together = model.compiled.logits(build_batch(pieces, BLOCK, CPU))

    assert together is not None
    assert torch.equal(together, torch.cat([expected[0], *expected[26:]]))
    for ours, theirs in zip(pools, expected_pools, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("config", "is_fast_by_torch", "is_taken"),
    [
        ({"weights": "int8"}, True, True),
        ({"dtype": "bfloat16"}, False, True),
        ({"dtype": "bfloat16"}, True, False),
    ],
)
def test_a_long_prompt_is_computed_group_by_group(
    config: dict[str, str],
    is_fast_by_torch: bool,
    is_taken: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts by the modules had a stream of bfloat16: a cached prompt got another answer."""
    step = "kvchat.model.cpu.compiled_step"
    monkeypatch.setattr(f"{step}.is_fast_by_torch", lambda dtype: is_fast_by_torch)
    loaded = load(tmp_path, "llama", **config)
    model = PagedModel(loaded, pools_of(loaded))
    ids, blocks = random_ids(2 * MAX_ROWS + 1, seed=1), range(1, 41)
    whole = build_batch([SequencePiece(ids, 0, blocks, 1)], BLOCK, CPU)
    assert model.compiled is not None

    logits = model.compiled.logits(whole)

    assert (logits is not None) == is_taken
    if logits is not None:
        expected = PagedModel(loaded, pools_of(loaded))
        expected.compiled = None
        by_modules = expected.forward(whole)
        assert (logits - by_modules).norm() <= 0.05 * by_modules.norm()


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
def test_groups_of_long_contexts_have_fewer_rows(family, tmp_path, monkeypatch):
    """128 sequences on 32,768 positions took 256 MiB for what attention makes of their parts."""
    step = "kvchat.model.cpu.compiled_step"
    loaded = load(tmp_path, family, weights="int8")
    batch = batch_of([(40, 60), (90, 600), (1, 300)], 1)
    taken: list[int] = []

    def groups() -> torch.Tensor:
        model = PagedModel(loaded, pools_of(loaded))
        assert model.compiled is not None
        run_group = model.compiled._run
        monkeypatch.setattr(
            model.compiled,
            "_run",
            lambda part, *rest: taken.append(len(part.token_ids)) or run_group(part, *rest),
        )
        logits = model.compiled.logits(batch)
        assert logits is not None
        return logits

    whole = groups()
    each = max(layer.num_heads * layer.value_dim for layer in loaded.spec.layers) * 4
    monkeypatch.setattr(f"{step}._RESULT_BYTES", 3 * each * 50)
    of_fewer = groups()
    monkeypatch.setattr(f"{step}._RESULT_BYTES", 1)
    of_few = groups()

    assert taken == [MAX_ROWS, 3, 50, 50, 31, *[FEW_ROWS] * 8, 3]
    assert torch.equal(whole, of_fewer)
    assert torch.equal(whole, of_few)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")
def test_memory_of_rows_that_no_step_has_is_not_taken() -> None:
    """A mixture's pairs of 128 rows are hundreds of megabytes; a decode step has a few rows."""

    def pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    before = pages()
    activations = Activations(1 << 16, 1 << 10)
    rounded = activations.rounded(RoundedForm(Rounding.SHORT, is_tiled=False))

    assert (pages() - before) * os.sysconf("SC_PAGE_SIZE") < 1 << 24  # of 440 MB
    assert activations.floats.shape == (1 << 10, 1 << 16)
    assert rounded.levels.shape == (1 << 10, 1, 1 << 16)
    assert not activations.floats[-1].any()
    assert all(part.data_ptr() % 64 == 0 for part in (activations.floats, rounded.levels))


def test_a_step_of_several_groups_can_be_abandoned_between_them(tmp_path, monkeypatch):
    monkeypatch.setattr("kvchat.model.cpu.compiled_step._RESULT_BYTES", 1)  # groups of FEW_ROWS
    loaded = load(tmp_path, "llama", weights="int8")
    model = PagedModel(loaded, pools_of(loaded))
    asked = iter([False, True])

    with pytest.raises(StepAbandoned), model.stopping(lambda: next(asked)):
        model.forward(batch_of([(3 * FEW_ROWS, 60)]))

    assert next(asked, None) is None


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_a_step_of_a_large_model_can_be_abandoned_in_a_group(weights, tmp_path, monkeypatch):
    """Esc waited for the end of a decode step, which takes a large model up to seconds."""
    monkeypatch.setattr("kvchat.model.cpu.compiled_step._WEIGHTS_PER_PIECE", 1 << 10)
    loaded = load(tmp_path, "llama", dtype="float32", weights=weights)
    batch = batch_of(STEPS["a verify of five"])
    model = PagedModel(loaded, pools_of(loaded))
    expected = model.forward(batch)
    asked: list[bool] = []

    for most in (1, 2, 9):
        with (
            pytest.raises(StepAbandoned),
            model.stopping(lambda: asked.append(True) or len(asked) == most),  # noqa: B023
        ):
            model.forward(batch)
        assert len(asked) == most
        asked.clear()

    with model.stopping(lambda: bool(asked.append(True))):
        assert torch.equal(model.forward(batch), expected)
    assert len(asked) > 9
    assert torch.equal(model.forward(batch), expected)


def test_a_step_goes_on_with_the_threads_that_are_set_within_it(tmp_path, monkeypatch):
    """A busy moment lowers the threads of a prompt, and a second later all are tried again. A step
    ran on as many as it began with: it looked as if most of them could not run, and prompts read
    at half of their speed until the program ended.
    """
    for limit in ("PIECE", "THREAD"):
        name = f"kvchat.model.cpu.compiled_step._WEIGHTS_PER_{limit}"
        monkeypatch.setattr(name, 1 << 10)
    loaded = load(tmp_path, "llama", dtype="float32")
    batch = batch_of(STEPS["a verify of five"])
    model = PagedModel(loaded, pools_of(loaded))
    expected = model.forward(batch)
    assert model.compiled is not None
    program, counts = model.compiled._parts.program, []
    parallel = program._parallel
    if parallel is None:
        pytest.skip("no OpenMP of GNU in this torch: one thread runs every step")

    def counted(function: int, run: int, num_threads: int, flags: int) -> None:
        counts.append(num_threads)
        parallel(function, run, num_threads, flags)

    program._parallel = counted
    wanted = iter((3, 2, 4))

    def asked() -> bool:
        torch.set_num_threads(next(wanted, 2))
        return False

    with threads(2), model.stopping(asked):
        assert torch.equal(model.forward(batch), expected)
    assert counts[:5] == [2, 3, 2, 4, 2]


@pytest.mark.parametrize("weights", ["auto", "int4"])
def test_another_thread_that_loads_a_model_changes_nothing(weights: str, tmp_path: Path) -> None:
    """Loading sets torch's default dtype for the whole process; kernels then wrote beyond memory
    that had 2 bytes a number, and the process was aborted."""
    loaded = load(tmp_path, "llama", dtype="float32", weights=weights)
    steps = [batch_of(step) for step in STEPS.values()]
    expected = [run(loaded, batch, True)[0] for batch in steps]
    pools = pools_of(loaded)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = PagedModel(loaded, pools)
        assert model.compiled is not None
        found = [model.forward(batch) for batch in steps]
        many = model.forward(batch_of([(MAX_ROWS + 4, 140)]))
    finally:
        torch.set_default_dtype(torch.float32)

    assert many.dtype == torch.float32
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        assert ours.shape == theirs.shape
    assert torch.equal(found[0], expected[0])


def test_a_step_that_wants_no_logits_writes_its_kv(tmp_path: Path) -> None:
    loaded = load(tmp_path, "llama", dtype="float32")
    logits, pools = run(loaded, batch_of(STEPS["a verify of five"], 0), True)
    _, expected = run(loaded, batch_of(STEPS["a verify of five"]), True)

    assert logits.shape == (0, loaded.spec.vocab_size)
    assert torch.equal(pools[0][0], expected[0][0])


def test_larger_steps_are_left_to_the_modules(tmp_path: Path) -> None:
    loaded = load(tmp_path, "llama", dtype="float32")
    model = PagedModel(loaded, pools_of(loaded))
    assert model.compiled is not None

    assert model.compiled.logits(batch_of([(FEW_ROWS + 1, 40)])) is None
    assert model.forward(batch_of([(FEW_ROWS + 1, 40)])).shape[0] == FEW_ROWS + 1


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {"hidden_size": 72, "intermediate_size": 100}),
        ("llama", {"head_dim": 12}),
        ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 1.0}),
        ("cohere", {"use_qk_norm": True}),
        ("phi", {"head_dim": None, "num_attention_heads": 2, "qk_layernorm": True}),
        ("glm4_moe", {**ROUTED, "n_group": 4, "topk_group": 1}),  # 3 experts of sets of 2
        ("olmo", {"clip_qkv": 1.0}),
        ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 3}),
        ("llama", {"hidden_act": "xielu"}),
        ("biogpt", {}),
    ],
)
def test_other_models_run_their_own_code(model_type, settings, tmp_path):
    source = find_model(str(save_checkpoint(tmp_path, tiny_model(model_type, **settings))))
    loaded = load_model(source, ModelConfig(), None, lambda _: None)

    assert PagedModel(loaded, pools_of(loaded)).compiled is None
    ensure_trusted(loaded, NO_MEMORY)


def test_a_sparse_mixture_whose_angles_depend_on_the_step_runs_its_own_code(tmp_path):
    """Phi-3.5-MoE's angles have the factor of the longest position of a step, which may be of
    another request; the two factors of the published models are equal."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 512,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "long_mscale": 1.25,
    }
    for short, is_compiled in ((1.0, False), (1.25, True)):
        settings = {"rope_parameters": {**rope, "short_mscale": short}, "num_local_experts": 4}
        model = tiny_model("phimoe", **settings)
        source = find_model(str(save_checkpoint(tmp_path / str(short), model)))
        loaded = load_model(source, ModelConfig(dtype="float32"), None, lambda _: None)

        assert (loaded.compiled is not None) == is_compiled


@pytest.mark.parametrize(
    ("model_type", "factor"),
    [("cohere2_vision", "logit_scale"), ("hyperclovax_vision_v2", "logits_scaling")],
)
def test_logits_have_the_factor_of_the_class_that_has_the_head(model_type, factor, tmp_path):
    """Cohere's image-text classes leave out the factor that the configuration of their text model
    names; one of HyperCLOVA X has it. Answers were drawn at a sixteenth of the temperature."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    config = every_config(model_type)
    setattr(config.text_config, factor, 0.25)
    source = find_model(str(save_checkpoint(tmp_path, every_model(config))))
    loaded = load_model(source, ModelConfig(dtype="float32"), None, lambda _: None)
    batch = batch_of(STEPS["a verify of five"])

    logits, _ = run(loaded, batch, True)

    assert torch.allclose(logits, run(loaded, batch, False)[0], rtol=1e-3, atol=1e-3)


def test_weights_are_held_once(tmp_path: Path) -> None:
    """Packed copies once doubled the memory of a model in 16 bits."""
    loaded = load(tmp_path, "llama", dtype="bfloat16")
    assert loaded.compiled is not None
    own = {p.data_ptr() for p in loaded.module.parameters() if p.dim() > 1}

    for layer in loaded.compiled._decoder.layers:
        assert isinstance(layer.mlp, decoder.Mlp)
        matrices = (*layer.attention.qkv, layer.attention.out, *layer.mlp.gate_up, layer.mlp.down)
        for matrix in matrices:
            assert isinstance(matrix.weights, torch.Tensor)
            assert matrix.weights.data_ptr() in own


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_family_that_is_read_wrongly_fails_the_self_test(dtype, tmp_path, monkeypatch):
    """The weights of Gemma's norms are offsets from one."""
    monkeypatch.setitem(families.FAMILIES, "gemma", families.FAMILIES["llama"])
    loaded = load(tmp_path, "gemma", dtype=dtype)
    assert loaded.compiled is not None

    ensure_trusted(loaded, NO_MEMORY)

    assert loaded.compiled.is_off
    assert PagedModel(loaded, pools_of(loaded)).compiled is None


def test_a_machine_without_a_compiler_runs_the_modules(tmp_path, monkeypatch):
    def fails(*_: object) -> None:
        raise RuntimeError("no target")

    monkeypatch.setattr("kvchat.model.cpu.compiled_step.StepProgram", fails)
    loaded = load(tmp_path, "llama", dtype="float32")

    assert PagedModel(loaded, pools_of(loaded)).compiled is None
    ensure_trusted(loaded, NO_MEMORY)


def test_what_a_family_differs_in_is_in_its_row() -> None:
    """A type named elsewhere was forgotten by the next one that is built alike."""
    source = ast.parse(Path(reader.__file__).read_text())
    texts = {node.value for node in ast.walk(source) if isinstance(node, ast.Constant)}

    assert not texts & set(families.COMPILED_TYPES)

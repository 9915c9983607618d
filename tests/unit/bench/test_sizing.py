"""Sizes of models, what a memory holds of their sessions, and predictions beside measurements."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvchat.bench import probe
from kvchat.bench.engines import complete, new_engine, random_ids
from kvchat.bench.plan import Plan, run_small
from kvchat.bench.probe import machine_speed
from kvchat.cli.sizing import Fit, PlanRequest, fit_of, in_order, run_fit, run_plan
from kvchat.core.config import CacheConfig, ModelConfig
from kvchat.core.errors import UsageError
from kvchat.core.text import Size
from kvchat.core.types import Fact, Memory
from kvchat.engine.kv_storage import kv_geometry
from kvchat.engine.sizing import (
    AlikeLayers,
    MachineSpeed,
    ModelSize,
    known_model,
    known_models,
    size_of,
    with_weights_of,
)
from kvchat.model.checkpoint.source import find_model
from support.checkpoints import never_stopping, save_checkpoint, tiny_model

GIB = 1 << 30
SPEED = MachineSpeed(25.0e9, 2.057e12)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = never_stopping(tiny_model("llama", max_position_embeddings=4096))
    return save_checkpoint(tmp_path_factory.mktemp("sizing"), model)


# A published claim: of a 7 B model (14 GB) a card of 24 GB holds 3 to 4 contiguous sessions of
# 2,000 tokens, or 10 to 12 paged ones.


def seven_b(reserve: float, num_tokens: int = 2048) -> Plan:
    known = known_model("llama-2-7b-chat")
    assert known is not None
    size = with_weights_of(known, 2.0)
    return Plan(size, 24 * GIB, int(reserve * 24 * GIB), num_tokens, size.max_context)


def test_a_card_of_24_gb_holds_the_sessions_that_are_claimed_under_two_assumptions() -> None:
    """Whole sessions fit 10 to 12 times where nothing is kept free, and then 5 contiguous ones of
    4,096 tokens; with a tenth kept free 3 to 4 contiguous ones fit, and 10 to 12 of 1,600 tokens.
    """
    nothing_free, tenth_free = seven_b(0.0), seven_b(0.1)

    assert nothing_free.size.weight_bytes == pytest.approx(13.5e9, rel=0.01)
    assert nothing_free.session_bytes == GIB
    assert (nothing_free.num_contiguous, nothing_free.num_paged) == (5, 11)
    assert (tenth_free.num_contiguous, tenth_free.num_paged) == (4, 9)
    assert seven_b(0.1, 1600).num_paged == 11
    assert seven_b(0.2).num_contiguous == 3


@pytest.mark.parametrize("reserve", [0.0, 0.1])
def test_a_real_pool_of_as_many_blocks_holds_as_many(reserve: float) -> None:
    plan = seven_b(reserve)

    assert run_small(plan) == (plan.num_contiguous, plan.num_paged)


def test_a_tiny_model_keeps_as_many_sessions_as_are_planned(checkpoint: Path) -> None:
    """Scaled down by running: after all have been read, the planned number is still whole."""
    source = find_model(str(checkpoint))
    size = replace(size_of(source), weight_bytes=0)
    blocks = 11 * 8 + 4  # eleven sessions of 128 tokens, and half of a twelfth
    block_bytes = size.kv_bytes(16)
    plan = Plan(size, blocks * block_bytes, 0, 128, 256)
    cache = CacheConfig(
        device_bytes=Size(num_bytes=(blocks + 2) * block_bytes), kv_dtype="bfloat16"
    )
    assembled = new_engine(source, ModelConfig(str(checkpoint)), cache)
    vocabulary = assembled.loaded.spec.vocab_size

    sessions = [random_ids(128, vocabulary, seed=n) for n in range(20)]
    for ids in sessions:
        complete(assembled.engine, ids, 1)
    whole = [ids for ids in sessions if assembled.engine.cache.num_cached_tokens(ids) >= 127]

    assert plan.num_paged == 11
    assert len(whole) == 11
    assert plan.num_contiguous == 5


# Sizes


def test_a_local_models_kv_is_what_its_pool_takes(checkpoint: Path) -> None:
    from kvchat.model.loader import inspect_model

    source = find_model(str(checkpoint))
    _, spec = inspect_model(source)
    assert spec is not None
    for code, dtype in (("auto", torch.bfloat16), ("int8", torch.bfloat16)):
        geometry = kv_geometry(spec, CacheConfig(kv_dtype=code), dtype)
        assert size_of(source).kv_bytes(16, code) == geometry.block_bytes


def test_windows_bound_a_contexts_kv() -> None:
    size = known_model("Gemma-3-1B")
    assert size is not None
    a_layer = 2 * 2 * 256

    assert size.kv_bytes(100) == 26 * 100 * a_layer
    assert size.kv_bytes(32768) == (4 * 32768 + 22 * 512) * a_layer


def test_the_table_is_sound() -> None:
    names = [size.name.lower() for size in known_models()]
    assert len(names) == len(set(names)) >= 30
    for size in known_models():
        assert 0 < size.body < 1e11, size.name
        assert size.read_bytes <= size.weight_bytes
        assert size.kv_bytes(4096) > 0
        assert size.command.startswith("kvchat -m "), size.name


# Predictions beside what was measured: two cores of a Xeon with AMX, 25 GB/s, 2.06 TFLOP/s


SMOL = ModelSize(
    "SmolLM2-135M Q4_1",
    96_600_000,
    96_600_000,
    106_203_456,
    576,
    (AlikeLayers(30, 3, 64, 64),),
    34_560,
    8192,
)
GEMMA = ModelSize(
    "Gemma-3-270M Q4_K_M",
    246_800_000,
    246_800_000,
    100_326_016,
    640,
    (AlikeLayers(15, 1, 256, 256, 512), AlikeLayers(3, 1, 256, 256)),
    6144,
    32768,
)
QWEN = ModelSize(
    "Qwen2.5-Coder-0.5B Q4_K_M",
    485_500_000,
    392_500_000,
    357_898_112,
    896,
    (AlikeLayers(24, 2, 64, 64),),
    43_008,
    32768,
)


@pytest.mark.parametrize(
    ("size", "prompts", "answers"),
    [(SMOL, (928, 919), (260, 195)), (GEMMA, (1099, 977), (84, 76)), (QWEN, (372, 327), (51, 45))],
    ids=lambda x: x.name if isinstance(x, ModelSize) else "",
)
def test_predictions_are_within_a_quarter_of_what_was_measured(size, prompts, answers):
    for context, prompt, answer in zip((128, 1024), prompts, answers, strict=True):
        read = context / SPEED.first_token_s(size, context)
        assert read == pytest.approx(prompt, rel=0.25)
        assert SPEED.decode_rate(size, context + 32) == pytest.approx(answer, rel=0.25)


class OneMemory(Memory):
    def __init__(self) -> None:
        self.facts: dict[tuple[str, str], Fact] = {}

    def get(self, kind: str, key: str) -> Fact:
        return self.facts.get((kind, key))

    def set(self, kind: str, key: str, fact: Fact) -> None:
        self.facts[kind, key] = fact


def test_a_machine_is_measured_once_and_not_remembered_while_it_is_busy(monkeypatch):
    measured: list[float] = []

    def measure(device: torch.device) -> MachineSpeed:
        measured.append(1.0)
        return MachineSpeed(1e9 * len(measured), 1e12)

    monkeypatch.setattr(probe, "_measured", measure)
    memory, cpu = OneMemory(), torch.device("cpu")

    assert machine_speed(memory, cpu, load=9.0).read == 1e9
    assert machine_speed(memory, cpu, load=0.1).read == 2e9
    assert machine_speed(memory, cpu, load=9.0).read == 2e9


# The commands


def test_models_that_run_well_come_first_the_largest_of_them_first() -> None:
    fits = in_order([fit_of(size, SPEED, 8 * GIB) for size in known_models()])

    verdicts = list(dict.fromkeys(fit.verdict for fit in fits))
    assert verdicts == ["well", "slowly", "no room"]
    well = [fit.size.body for fit in fits if fit.verdict == "well"]
    assert well == sorted(well, reverse=True)
    assert all(fit.tokens_per_s >= 10 for fit in fits[: len(well)])


def test_fit_says_what_a_model_needs_and_how_to_get_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(probe, "_measured", lambda device: SPEED)

    run_fit(("qwen3-0.6b",), as_json=False)
    page = capsys.readouterr().out
    run_fit(("Qwen3-0.6B",), as_json=True)
    [document] = json.loads(capsys.readouterr().out)

    assert "kvchat -m unsloth/Qwen3-0.6B-GGUF:Q4_K_M" in page
    assert "KV of 32,768 tokens: 3.5 GiB" in page
    assert document["kv_bytes"]["4096"] == 28 * 8 * 256 * 2 * 4096
    with pytest.raises(UsageError, match="no model 'nothing' here, nor in the table"):
        run_fit(("nothing",), as_json=False)


def test_a_plan_says_what_fits_and_what_a_resume_costs(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(probe, "_measured", lambda device: SPEED)
    request = PlanRequest("Llama-2-7B-Chat", 24 * GIB, 0, 20, 2048, bits=16, runs=True)

    run_plan(request)

    page = capsys.readouterr().out
    assert "11, so 11 of 20" in page
    assert "5 where each reserves 4,096 tokens" in page
    assert "11 in blocks, 5 reserved whole" in page
    assert "2.15 s at assumed 0.5 GB/s" in page
    assert "predicted for this machine" in page
    with pytest.raises(UsageError, match="leaves no room for KV"):
        run_plan(replace(request, memory_bytes=8 * GIB))


def test_a_fit_without_room_says_so() -> None:
    size = known_model("Llama-3.3-70B-Instruct")
    assert size is not None
    assert fit_of(size, SPEED, 8 * GIB).verdict == "no room"
    assert isinstance(fit_of(size, SPEED, 8 * GIB), Fit)

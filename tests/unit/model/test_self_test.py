"""The self-test finds faults that no other check finds, and runs once per model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvchat.cache.kv_pool import KvPool
from kvchat.core.config import CacheConfig, ModelConfig
from kvchat.core.errors import ModelError, ModelUnsupported
from kvchat.core.types import NO_MEMORY, Memory
from kvchat.engine.kv_storage import kv_geometry
from kvchat.model import self_test
from kvchat.model.batch import ForwardBatch
from kvchat.model.checkpoint.source import find_model
from kvchat.model.cpu.compiled_step import CompiledStep
from kvchat.model.gpu.fused_parts import FusedAttention
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.paged_model import PagedModel
from kvchat.model.self_test import compare_with_own, ensure_faster_reads, ensure_trusted
from kvchat_kernels.kv_layer import KvLayer
from support.checkpoints import save_checkpoint, tiny_model
from support.fact_memory import FactMemory
from support.fused_models import load_fused
from support.specimens import Specimen

GetSpecimen = Callable[[str], Specimen]


@pytest.fixture
def specimen(specimen: GetSpecimen) -> GetSpecimen:
    """Specimens without a compiled step, whose comparison is made once."""

    def get(name: str) -> Specimen:
        made = specimen(name)
        return replace(made, loaded=replace(made.loaded, compiled=None))

    return get


class CountsItsOwnPositions(torch.nn.Module):
    """A fake family: a llama that numbers the tokens it is given instead of reading positions."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.inner = module
        self.config = module.config

    def forward(  # type: ignore[no-untyped-def]
        self, input_ids, position_ids=None, use_cache=False, logits_to_keep=0
    ):
        counted = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return self.inner(
            input_ids=input_ids,
            position_ids=counted,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
        )

    def set_attn_implementation(self, name: str) -> None:
        self.inner.set_attn_implementation(name)


def counting_positions(loaded: LoadedModel) -> LoadedModel:
    layers = tuple(
        replace(layer, module_name=f"inner.{layer.module_name}") for layer in loaded.spec.layers
    )
    return replace(
        loaded,
        module=CountsItsOwnPositions(loaded.module),
        spec=replace(loaded.spec, layers=layers),
    )


def test_a_model_that_ignores_its_positions_is_refused(specimen: GetSpecimen) -> None:
    loaded = counting_positions(specimen("llama").loaded)

    with pytest.raises(ModelUnsupported, match="keeps positions or state outside its attention"):
        ensure_trusted(loaded, NO_MEMORY)


@pytest.mark.parametrize("change", [{"has_softcap": False}, {"span": None}], ids=str)
def test_a_layer_read_wrongly_is_refused(change: dict[str, Any], specimen: GetSpecimen) -> None:
    from kvchat_kernels.paged_attention import FULL

    made = specimen("gemma2, softcap")
    wrong = made.with_layers(**({"span": FULL} if "span" in change else change))

    with pytest.raises(ModelUnsupported, match="differs from its own"):
        ensure_trusted(wrong, NO_MEMORY)
    ensure_trusted(made.loaded, NO_MEMORY)


def test_in_full_precision_a_single_wrong_row_is_enough(specimen: GetSpecimen) -> None:
    """The median of the rows let a model pass that was wrong in the last ones alone, as one whose
    window is a little shorter than the test."""
    from kvchat_kernels.paged_attention import AttentionSpan

    wrong = specimen("llama").with_layers(span=AttentionSpan(window=22))

    assert compare_with_own(wrong) < 0.9999
    with pytest.raises(ModelUnsupported):
        ensure_trusted(wrong, NO_MEMORY)


def test_logits_that_are_no_numbers_are_refused(specimen: GetSpecimen) -> None:
    """NaN compares false with every limit: a model of damaged weights was once trusted."""
    loaded = specimen("qwen2").loaded
    weight = loaded.module.model.norm.weight.data
    kept = weight.clone()
    weight[0] = float("nan")
    try:
        with pytest.raises(ModelError, match="computes NaN in float32"):
            ensure_trusted(loaded, NO_MEMORY)
    finally:
        weight.copy_(kept)
    ensure_trusted(loaded, NO_MEMORY)


class CountedTest:
    """Stands in for the comparison; counts how often it is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, similarity: float = 1.0) -> None:
        self.count = 0
        self.similarity = similarity
        monkeypatch.setattr(self_test, "compare_with_own", self)

    def __call__(self, loaded: LoadedModel, compiled: bool = True, own: Any = None) -> float:
        self.count += 1
        return self.similarity


def test_a_verdict_is_remembered_for_the_same_configuration_and_versions(
    specimen: GetSpecimen, monkeypatch: pytest.MonkeyPatch, memory: FactMemory
) -> None:
    test = CountedTest(monkeypatch)
    loaded = specimen("llama").loaded
    for _ in range(3):
        ensure_trusted(loaded, memory)
    assert test.count == 1

    ensure_trusted(specimen("qwen3").loaded, memory)
    ensure_trusted(replace(loaded, dtype=torch.bfloat16), memory)
    assert test.count == 3
    monkeypatch.setattr(self_test.transformers, "__version__", "5.99.0")
    ensure_trusted(loaded, memory)
    assert test.count == 4
    ensure_trusted(loaded, NO_MEMORY)
    assert test.count == 5


@pytest.mark.parametrize("change", ["GPU", "Triton"])
def test_another_gpu_or_triton_is_tested_anew(change, specimen, monkeypatch, memory):
    """The verdict on kernels that one GPU or one compiler had made was believed of another's."""
    test = CountedTest(monkeypatch)
    loaded = replace(specimen("llama").loaded, device=torch.device("cuda", 0))
    names = {"GPU": "Small GPU", "Triton": "3.6.0"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names["GPU"])
    monkeypatch.setattr("kvchat.model.device.version", lambda package: names["Triton"])
    ensure_trusted(loaded, memory)
    ensure_trusted(loaded, memory)
    assert test.count == 1

    names[change] = "another"
    ensure_trusted(loaded, memory)

    assert test.count == 2


def test_a_compiled_step_that_a_model_has_since_is_tested(tmp_path, monkeypatch, memory):
    """What had passed by its modules once vouched for the compiled steps of later versions."""
    source = find_model(str(save_checkpoint(tmp_path / "model", tiny_model("glm"))))
    loaded = load_model(source, ModelConfig(dtype="float32"), None, lambda _: None)
    test = CountedTest(monkeypatch)
    ensure_trusted(replace(loaded, compiled=None), memory)
    assert test.count == 1

    ensure_trusted(loaded, memory)

    assert test.count == 3  # the modules, and the step


def test_a_failure_is_not_remembered(specimen, monkeypatch, memory):
    test = CountedTest(monkeypatch, similarity=0.5)
    for _ in range(2):
        with pytest.raises(ModelUnsupported):
            ensure_trusted(specimen("llama").loaded, memory)
    assert test.count == 2
    assert memory.facts("self-test") == []


def raises(*_: Any) -> torch.Tensor:
    raise ValueError("not enough values to unpack (expected 2, got 1)")


def forgets(step: CompiledStep, batch: ForwardBatch) -> torch.Tensor:
    return torch.zeros(len(batch.logit_rows), 272)


_LOGITS = CompiledStep.logits


def halves(step: CompiledStep, batch: ForwardBatch, *rest: Any) -> torch.Tensor | None:
    """Return logits that lack a factor: their direction is right, and greedy answers are."""
    logits = _LOGITS(step, batch, *rest)
    return None if logits is None else logits / 2


@pytest.mark.parametrize("failing", [raises, forgets, halves])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_compiled_step_that_is_wrong_is_not_run_and_that_is_remembered(
    dtype: str,
    failing: Callable[..., torch.Tensor | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    memory: FactMemory,
) -> None:
    source = find_model(str(save_checkpoint(tmp_path / "model", tiny_model("llama"))))

    def load() -> LoadedModel:
        return load_model(source, ModelConfig(dtype=dtype), None, lambda _: None)

    first, again = load(), load()
    monkeypatch.setattr(CompiledStep, "logits", failing)
    for loaded in (first, again):
        assert loaded.compiled is not None
        ensure_trusted(loaded, memory)
        assert loaded.compiled.is_off
        assert compare_with_own(loaded) > 0.98
        # The second time nothing is compared.
        CountedTest(monkeypatch)
        monkeypatch.setattr(self_test, "_passes", raises)


def test_the_modules_are_tested_beside_the_compiled_step(tmp_path, monkeypatch, memory):
    """Large steps run the modules, and no step of the test is large."""
    source = find_model(str(save_checkpoint(tmp_path / "model", tiny_model("llama"))))
    loaded = load_model(source, ModelConfig(), None, lambda _: None)
    monkeypatch.setattr(PagedModel, "_logits", lambda model, batch, **_: forgets(None, batch))  # type: ignore[arg-type]

    with pytest.raises(ModelUnsupported):
        ensure_trusted(loaded, memory)


def check_over_rounded_kv(loaded: LoadedModel, memory: Memory) -> None:
    """Run the test of the compiled step over KV of 8 bits."""

    def new_kv(num_blocks: int, block_size: int) -> Sequence[KvLayer]:
        config = CacheConfig(block_size, kv_dtype="int8")
        geometry = kv_geometry(loaded.spec, config, loaded.dtype)
        return KvPool(geometry, num_blocks, loaded.device).layers

    ensure_faster_reads(loaded, "int8", new_kv, memory)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_compiled_step_over_rounded_kv_passes_once(
    model_type: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: FactMemory
) -> None:
    source = find_model(str(save_checkpoint(tmp_path / "model", tiny_model(model_type))))
    loaded = load_model(source, ModelConfig(dtype=dtype), None, lambda _: None)
    assert loaded.compiled is not None

    check_over_rounded_kv(loaded, memory)
    monkeypatch.setattr(self_test, "_agrees_over", raises)
    check_over_rounded_kv(loaded, memory)

    assert not loaded.compiled.is_off


_LOGITS = CompiledStep.logits


def halves(step: CompiledStep, batch: ForwardBatch, *rest: Any) -> torch.Tensor:
    """Return logits that lack a factor: their direction is right, and greedy answers are."""
    logits = _LOGITS(step, batch, *rest)
    assert logits is not None
    return logits / 2


@pytest.mark.parametrize("failing", [raises, forgets, halves])
def test_a_compiled_step_that_misreads_rounded_kv_is_not_run_over_it(
    failing: Callable[..., torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    memory: FactMemory,
) -> None:
    source = find_model(str(save_checkpoint(tmp_path / "model", tiny_model("llama"))))
    first, again, plain = (
        load_model(source, ModelConfig(), None, lambda _: None) for _ in range(3)
    )

    with monkeypatch.context() as broken:
        broken.setattr(CompiledStep, "logits", failing)
        check_over_rounded_kv(first, memory)
    check_over_rounded_kv(again, memory)
    ensure_trusted(plain, memory)

    assert "compiled step over kv=int8" in caplog.text
    is_off = [loaded.compiled is None or loaded.compiled.is_off for loaded in (first, again, plain)]
    assert is_off == [True, True, False]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2, softcap"])
def test_fused_layers_over_rounded_kv_pass_once(name, tmp_path, monkeypatch, memory):
    """Over any KV but plain, every module of a GPU's model once ran its own code."""
    loaded = load_fused(tmp_path / "model", name, "float32")
    assert loaded.fusing is not None
    assert str(loaded.fusing.fusion).startswith("2 layers")

    check_over_rounded_kv(loaded, memory)
    monkeypatch.setattr(self_test, "_agrees_over", raises)
    check_over_rounded_kv(loaded, memory)

    assert not loaded.fusing.is_off


def test_fused_layers_that_misread_rounded_kv_are_not_run_over_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    memory: FactMemory,
) -> None:
    loaded = load_fused(tmp_path / "model", "llama", "float32")
    assert loaded.fusing is not None

    with monkeypatch.context() as broken:
        broken.setattr(FusedAttention, "_attended", lambda part, query, *rest: query * 0)
        check_over_rounded_kv(loaded, memory)

    assert loaded.fusing.is_off
    assert "fused layers over kv=int8" in caplog.text
    assert compare_with_own(loaded) > 0.9999

"""FlashInfer over our pools, by a fake with its signatures: what is passed is what it expects."""

import inspect
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvchat_kernels.paged_attention as package
from kvchat_kernels.paged_attention import (
    FULL,
    AttentionSpan,
    DeviceSequences,
    Implementation,
    LayerShape,
    Scoring,
    paged_attention,
)
from kvchat_kernels.paged_attention.adopted import ADOPTED, LayerRule, StepKind, adopt, step_kind
from kvchat_kernels.paged_attention.flashinfer_gpu import FlashInfer, installed_version, refusal
from kvchat_kernels.paged_attention.race import checked_scene, difference
from kvchat_kernels.paged_attention.reference import paged_attention_reference
from support.fake_flashinfer import BatchPrefillWithPagedKVCacheWrapper as FakePrefill
from support.fake_flashinfer import FakeFlashInfer

CPU = torch.device("cpu")
SHAPE = LayerShape(4, 2, 64, 64, torch.bfloat16)
RULES = [
    LayerRule(SHAPE, FULL, False),
    LayerRule(SHAPE, AttentionSpan(window=9), False),
    LayerRule(
        replace(SHAPE, num_kv_heads=1, dtype=torch.float16), AttentionSpan(window=800), False
    ),
]


@pytest.fixture(autouse=True)
def nothing_adopted() -> Iterator[None]:
    ADOPTED.clear()
    yield
    ADOPTED.clear()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"window {rule.span.window}")
@pytest.mark.parametrize("step", StepKind)
def test_it_computes_what_the_reference_does(step: StepKind, rule: LayerRule) -> None:
    """Contexts longer than the window too, and NaN in every slot that no sequence has."""
    kernels = FlashInfer(FakeFlashInfer, CPU)

    assert difference(kernels.function(step), step, rule, 16, CPU) is None


def test_a_prefill_takes_softcaps_and_any_block_size() -> None:
    rule = LayerRule(SHAPE, FULL, True)

    kernels = FlashInfer(FakeFlashInfer, CPU)
    assert difference(kernels.prefill, StepKind.PREFILL, rule, 8, CPU) is None


def test_a_kernel_that_is_off_is_found_out() -> None:
    """A window that is off by one token, as of a package that counts it otherwise."""
    kernels = FlashInfer(FakeFlashInfer, CPU)

    def off_by_one(query: Any, keys: Any, values: Any, sequences: Any, scoring: Any) -> Any:
        wider = AttentionSpan(window=scoring.span.window + 1)
        return kernels.decode(query, keys, values, sequences, replace(scoring, span=wider))

    found = difference(off_by_one, StepKind.DECODE, RULES[1], 16, CPU)
    assert found is not None
    assert found.startswith("it differs by up to")


def test_layers_alike_share_a_plan_and_others_have_their_own() -> None:
    kernels, rules = FlashInfer(FakeFlashInfer, CPU), RULES[:2]
    scene = checked_scene(StepKind.PREFILL, RULES[0], 16, CPU)
    before = FakePrefill.num_plans

    for _ in range(3):
        for rule in rules:
            replace(scene, rule=rule).attend(kernels.prefill, 0)
    assert FakePrefill.num_plans == before + 2

    again = replace(scene, steps=(replace(scene.steps[0]),))
    again.attend(kernels.prefill, 0)
    assert FakePrefill.num_plans == before + 3, "another step was run by an old plan"


def test_a_plan_that_failed_is_not_taken_for_made(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = FlashInfer(FakeFlashInfer, CPU)
    scene = checked_scene(StepKind.PREFILL, RULES[0], 16, CPU)
    expected = scene.attend(kernels.prefill, 0)

    def fail(self: Any, **arguments: Any) -> None:
        raise RuntimeError("Failed to plan")

    other = replace(scene, steps=(replace(scene.steps[0]),))
    with monkeypatch.context() as patch:
        patch.setattr(FakePrefill, "plan", fail)
        with pytest.raises(RuntimeError):
            other.attend(kernels.prefill, 0)
    assert torch.equal(scene.attend(kernels.prefill, 0), expected)


def test_a_plan_is_not_changed_before_it_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """While /model raced a model, the other one read ahead: it attended by the plan of the race."""
    kernels = FlashInfer(FakeFlashInfer, CPU)
    scene = checked_scene(StepKind.PREFILL, RULES[0], 16, CPU)
    expected = scene.attend(kernels.prefill, 0)
    step = scene.steps[0]
    swapped = replace(step, block_tables=step.block_tables.flip(0).contiguous())
    reader = threading.Thread(
        target=replace(scene, steps=(swapped,)).attend, args=(kernels.prefill, 0)
    )
    plan, has_planned = FakePrefill.plan, threading.Event()

    def plan_beside_a_reader(self: Any, **arguments: Any) -> None:
        plan(self, **arguments)
        if threading.current_thread() is reader:
            has_planned.set()
            return
        reader.start()
        has_planned.wait(0.2)  # the reader has to wait for the run

    monkeypatch.setattr(FakePrefill, "plan", plan_beside_a_reader)
    found = replace(scene, steps=(replace(step),)).attend(kernels.prefill, 0)
    reader.join()

    assert has_planned.is_set()
    assert torch.equal(found, expected)


def test_a_decode_reads_lengths_on_the_device_only() -> None:
    """As a captured step does: the same launch is right for other contents of its tensors."""
    kernels = FlashInfer(FakeFlashInfer, CPU)
    scene = checked_scene(StepKind.DECODE, RULES[0], 16, CPU)
    own = scene.steps[0]
    count = own.num_tokens
    sequences = DeviceSequences(
        count, 1, own.query_starts, own.context_lens_device, own.block_tables, 16
    )
    arguments = (scene.queries[0], scene.key_pool, scene.value_pool, sequences, Scoring(0.1))

    kernels.decode(*arguments)
    sequences.context_lens.copy_(torch.tensor([1, 5, 33, 690]))
    changed = kernels.decode(*arguments)

    expected = paged_attention_reference(*arguments[:3], sequences.read(), Scoring(0.1))
    assert torch.allclose(changed.float(), expected.float(), atol=0.02)


def test_what_it_is_not_tried_for_says_why() -> None:
    def why(step: StepKind = StepKind.PREFILL, block: int = 16, sm: int = 9, **rule: Any) -> Any:
        shape = {key: rule.pop(key) for key in ("key_dim", "dtype") if key in rule}
        made = replace(RULES[0], shape=replace(SHAPE, **shape), **rule)
        return refusal(step, made, block, (sm, 0))

    assert why() is None
    assert why(StepKind.DECODE) is None
    assert why(sm=8) is None
    assert why(has_softcap=True) is None
    assert why(StepKind.DECODE, has_softcap=True) == "its decode kernel has no softcap"
    assert why(StepKind.DECODE, sm=8) == "its decode kernel is not for compute capability 8.0"
    assert why(StepKind.DECODE, block=8) == "its decode kernel does not take blocks of 8 tokens"
    assert why(sm=7) == "the GPU is older than Ampere"
    assert why(dtype=torch.float32) == "its kernels are not for float32"
    assert why(key_dim=80) == "its kernels are not for heads of 80 and 64"
    assert why(span=AttentionSpan(chunk=64)) == "it has no chunked attention"


def test_kinds_of_steps() -> None:
    """A verification stays with our kernels: it is short, and its lengths are on the device."""
    assert step_kind(checked_scene(StepKind.DECODE, RULES[0], 16, CPU).steps[0]) == StepKind.DECODE
    prefill = checked_scene(StepKind.PREFILL, RULES[0], 16, CPU).steps[0]
    assert step_kind(prefill) == StepKind.PREFILL
    short = replace(prefill, query_lens=(16, 1, 2, 5))
    assert step_kind(short) is None
    tables, starts = torch.zeros(4, 2, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    lengths = torch.zeros(4, dtype=torch.int32)
    assert step_kind(DeviceSequences(4, 1, starts, lengths, tables, 16)) == StepKind.DECODE
    assert step_kind(DeviceSequences(10, 5, starts, lengths, tables, 16)) is None


def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers on a CPU be chosen for as on a GPU; the reference stands for our kernels."""
    monkeypatch.setattr(package, "implementation_for", lambda *_: Implementation("triton"))
    monkeypatch.setattr(package, "implementation", lambda name: paged_attention_reference)


def attend(scene: Any, **settings: Any) -> torch.Tensor:
    pools = scene.key_pool, scene.value_pool
    return paged_attention(scene.queries[0], *pools, scene.steps[0], Scoring(0.1, **settings))


def test_an_adopted_kernel_computes_its_layers_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_triton(monkeypatch)
    scene, calls = checked_scene(StepKind.DECODE, RULES[0], 16, CPU), []

    def other(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(rest)
        return torch.zeros_like(query)

    own = attend(scene)
    adopt(CPU, StepKind.DECODE, RULES[0], 16, other)

    assert not attend(scene).any()
    assert torch.equal(attend(scene, sinks=torch.full((4,), -1e9)), own), "it has no sinks"
    assert torch.equal(attend(scene, softcap=1e6), own)
    assert attend(scene, span=AttentionSpan(window=5)).any()
    assert len(calls) == 1


def test_an_adopted_kernel_that_fails_is_dropped_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_triton(monkeypatch)
    scene, calls = checked_scene(StepKind.DECODE, RULES[0], 16, CPU), []

    def fail(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        raise RuntimeError("no kernel image\nis available")

    own = attend(scene)
    adopt(CPU, StepKind.DECODE, RULES[0], 16, fail)

    assert torch.equal(attend(scene), own)
    assert torch.equal(attend(scene), own)
    assert len(calls) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "kvchat's own attention from now on, decode: RuntimeError: no kernel image"
    ]


def test_the_fake_has_the_signatures_of_the_real_package() -> None:
    """Where FlashInfer can be imported: every parameter's name, kind and default."""
    real = pytest.importorskip("flashinfer", reason="FlashInfer is not installed")

    def parameters(function: Any) -> list[tuple[str, Any, Any]]:
        found = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in found]

    ours, theirs = FakePrefill, real.BatchPrefillWithPagedKVCacheWrapper
    for name in ("__init__", "plan", "run"):
        assert parameters(getattr(ours, name)) == parameters(getattr(theirs, name)), name
    fake, own = (x.decode.xqa_batch_decode_with_kv_cache for x in (FakeFlashInfer, real))
    assert parameters(fake) == parameters(own)


def test_without_the_package_there_is_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    found = "kvchat_kernels.paged_attention.flashinfer_gpu"
    monkeypatch.setattr(f"{found}.find_spec", lambda name: None)
    assert installed_version() is None
    monkeypatch.setattr(f"{found}.find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(f"{found}.version", lambda name: "0.7.2")
    assert installed_version() == "0.7.2"

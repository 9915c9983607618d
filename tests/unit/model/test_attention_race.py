"""FlashInfer is raced with our attention at load: it wins if it is right and faster."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvchat.core.types import NO_MEMORY, Memory
from kvchat.model.gpu import attention_race
from kvchat.model.gpu.attention_race import (
    Pass,
    Race,
    RaceMemory,
    RaceTimes,
    contests_of,
    race_attention,
)
from kvchat.model.spec import LayerSpec
from kvchat_kernels.paged_attention import FULL, AttentionSpan, Implementation
from kvchat_kernels.paged_attention.adopted import ADOPTED, StepKind
from kvchat_kernels.paged_attention.flashinfer_gpu import FlashInfer
from kvchat_kernels.paged_attention.reference import paged_attention_reference
from support.fact_memory import FactMemory
from support.fake_flashinfer import FakeFlashInfer

LAYER = LayerSpec("layers.0.attn", 4, 2, 64, 64, FULL, False, False, 0, True)
WINDOW = replace(LAYER, span=AttentionSpan(window=20))
DECODE = "decode of 4/2 heads of 64, bfloat16, blocks of 16"
PREFILL = "prefill of 4/2 heads of 64, bfloat16, blocks of 16"


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our kernels are chosen for, and the reference stands for them; timed steps are small."""
    monkeypatch.setattr(attention_race, "implementation_for", lambda *_: Implementation("triton"))
    race = "kvchat_kernels.paged_attention.race"
    monkeypatch.setattr(attention_race, "implementation", lambda name: paged_attention_reference)
    monkeypatch.setattr(f"{race}._TIMED", {StepKind.DECODE: (1, 20), StepKind.PREFILL: (18, 20)})
    monkeypatch.setattr(f"{race}._PASS_BYTES", dict.fromkeys(StepKind, 0))
    ADOPTED.clear()
    yield
    ADOPTED.clear()


@dataclass
class Clock:
    """A stopwatch that runs each pass once; ours takes 10 us, the other `theirs_us`."""

    theirs_us: float = 5.0
    num_timed: int = 0

    def now_s(self) -> float:
        return 0.0

    def times_s(self, passes: Sequence[Pass], num_repeats: int) -> list[list[float]]:
        self.num_timed += 1
        for one in passes:
            one()
        return [[1e-5] * num_repeats, [self.theirs_us * 1e-6] * num_repeats]


@dataclass
class Load:
    """Loads of a model with these layers, on a GPU with FlashInfer."""

    memory: Memory
    layers: tuple[LayerSpec, ...] = (LAYER,)
    clock: Clock = field(default_factory=Clock)
    rival: Callable[[torch.device], Any] = lambda device: FlashInfer(FakeFlashInfer, device)
    num_imports: int = 0
    said: list[str] = field(default_factory=list)

    def __call__(self, kv_dtype: torch.dtype = torch.bfloat16) -> tuple[str, ...]:
        def rival(device: torch.device) -> Any:
            self.num_imports += 1
            return self.rival(device)

        loaded: Any = SimpleNamespace(
            device=torch.device("cpu"), spec=SimpleNamespace(layers=self.layers, gathered=None)
        )
        race = Race(rival, lambda device: self.clock, lambda device: (9, 0))
        say = lambda event: self.said.append(event.stage)  # noqa: E731
        return race_attention(loaded, kv_dtype, 16, self.memory, say, race)


def test_what_is_right_and_faster_is_adopted(memory: FactMemory) -> None:
    load = Load(memory)

    assert load() == (DECODE, PREFILL)
    assert {key[1] for key in ADOPTED} == set(StepKind)
    assert load.said == ["trying FlashInfer's attention"]


@pytest.mark.parametrize("theirs_us", [9.8, 10.0, 30.0])
def test_what_is_no_faster_by_a_margin_is_not_imported_again(
    theirs_us: float, memory: FactMemory
) -> None:
    load = Load(memory, clock=Clock(theirs_us))

    assert [load() for _ in range(3)] == [()] * 3
    assert not ADOPTED
    assert load.num_imports == 1
    assert load.clock.num_timed == 2


def test_a_winner_is_compared_at_each_load_and_timed_once(memory: FactMemory) -> None:
    load = Load(memory)

    assert load() == load() == (DECODE, PREFILL)
    assert load.clock.num_timed == 2
    load.rival = lambda device: Rival(wrong_rows)
    assert load() == ()
    assert not ADOPTED, "a kernel stayed that has become wrong"


@dataclass
class Rival:
    """Kernels of which the decode is `function`, and the prefill wrong."""

    decode: Any
    released: list[StepKind] = field(default_factory=list)

    def function(self, step: StepKind) -> Any:
        return self.decode if step is StepKind.DECODE else wrong_rows

    def release(self, step: StepKind) -> None:
        self.released.append(step)


def wrong_rows(query: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.zeros_like(query)


def no_numbers(query: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.full_like(query, float("nan"))


def other_shape(query: torch.Tensor, *rest: Any) -> torch.Tensor:
    return query[:-1]


def raises(*arguments: Any) -> torch.Tensor:
    raise OSError("nvcc was not found\nin PATH")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (wrong_rows, "it differs by up to"),
        (no_numbers, "it differs by up to nan"),
        (other_shape, "its output has another shape"),
        (raises, "OSError: nvcc was not found"),
    ],
)
def test_a_wrong_or_failing_kernel_is_one_line_and_is_tried_again(
    function: Any, why: str, caplog: pytest.LogCaptureFixture, memory: FactMemory
) -> None:
    """What it lacked, a compiler say, may be there at the next load."""
    load = Load(memory, rival=lambda device: Rival(function))

    assert load() == ()
    assert not ADOPTED
    lines = [record.getMessage() for record in caplog.records if DECODE in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith(f"FlashInfer is not used for {DECODE}: {why}")
    load()
    assert load.num_imports == 2


def test_memory_of_kernels_that_are_not_adopted_is_given_back(memory: FactMemory) -> None:
    """An adopted decode keeps its own: captured steps use it, those of another model too."""
    kernels = FlashInfer(FakeFlashInfer, torch.device("cpu"))
    rival = Rival(kernels.decode)
    load = Load(memory, rival=lambda device: rival)

    assert load() == (DECODE,)
    assert rival.released == [StepKind.PREFILL]
    load.layers = (replace(LAYER, num_heads=2),)  # a draft model, for which it is slower
    load.clock = Clock(30.0)
    assert load() == ()
    assert rival.released == [StepKind.PREFILL] * 2

    load = Load(FactMemory(), rival=lambda device: rival)
    assert load() == (DECODE,)
    rival.decode = raises  # with two models on a card its memory ran out
    assert load() == ()
    assert StepKind.DECODE not in rival.released

    kernels.release(StepKind.DECODE)
    assert kernels._decode_workspace is None


def test_an_import_that_fails_is_one_line(
    caplog: pytest.LogCaptureFixture, memory: FactMemory
) -> None:
    def fail(device: torch.device) -> FlashInfer:
        raise ImportError("libcudart.so.13: cannot open shared object file")

    assert Load(memory, rival=fail)() == ()
    assert [record.getMessage() for record in caplog.records] == [
        "FlashInfer is not used: ImportError: libcudart.so.13: cannot open shared object file"
    ]


def test_where_nothing_may_be_written_it_is_not_imported() -> None:
    """Incognito: the package makes a directory in the user's home when it is imported."""
    load = Load(NO_MEMORY)
    assert load() == ()
    assert load.num_imports == 0


def test_layers_that_it_has_no_kernels_for_import_nothing(memory: FactMemory) -> None:
    load = Load(memory, layers=(replace(LAYER, has_sinks=True),))
    assert load() == ()
    assert load(torch.float32) == ()
    load.layers = (replace(LAYER, key_dim=20, value_dim=20),)
    assert load() == ()
    assert load.num_imports == 0
    assert not load.said


def test_each_kind_of_layer_is_a_contest_of_its_own() -> None:
    loaded: Any = SimpleNamespace(
        device=torch.device("cpu"),
        spec=SimpleNamespace(layers=(LAYER, WINDOW, LAYER, replace(WINDOW, has_softcap=True))),
    )

    found = [str(x) for x in contests_of(loaded, torch.bfloat16, 16, (9, 0))]

    assert found == [
        DECODE,
        PREFILL,
        "decode of 4/2 heads of 64, bfloat16, window 20, blocks of 16",
        "prefill of 4/2 heads of 64, bfloat16, window 20, blocks of 16",
        "prefill of 4/2 heads of 64, bfloat16, window 20, softcap, blocks of 16",
    ]


SOME = {DECODE: RaceTimes(1e-5, 2e-5), PREFILL: RaceTimes(3e-4, 1e-4)}


def test_times_are_those_of_their_machine(memory: FactMemory) -> None:
    RaceMemory(memory, "H200, flashinfer 0.7.2").write(SOME)
    RaceMemory(memory, "L4, flashinfer 0.7.2").write({})

    assert RaceMemory(memory, "H200, flashinfer 0.7.2").read() == SOME
    assert RaceMemory(memory, "H200, flashinfer 0.7.3").read() == {}
    RaceMemory(NO_MEMORY, "H200").write(SOME)
    assert RaceMemory(NO_MEMORY, "H200").read() == {}


@pytest.mark.parametrize("value", ["[0, 1]", "[1]", '"fast"', "[1, -2]", "[NaN, 1]", "{}", "null"])
def test_impossible_times_are_none(value: str, memory: FactMemory) -> None:
    memory.texts["attention race", "H200"] = f'{{"x": {value}}}'
    assert RaceMemory(memory, "H200").read() == {}

"""What `kvchat doctor` says of attention kernels on a GPU, from the times that were measured."""

import pytest
import torch

from kvchat.cli import doctor
from kvchat.core.types import Memory
from kvchat.model.gpu.attention_race import RaceMemory, RaceTimes
from support.fact_memory import FactMemory

FLASHINFER = "kvchat_kernels.paged_attention.flashinfer_gpu.installed_version"


def facts(monkeypatch: pytest.MonkeyPatch, memory: Memory, version: str | None) -> list[str]:
    monkeypatch.setattr(FLASHINFER, lambda: version)
    monkeypatch.setattr(doctor, "state_memory", lambda: memory)
    monkeypatch.setattr("kvchat.model.device.machine_name", lambda device: "H200")
    findings = list(doctor._attention(torch.device("cpu")))
    assert not any(finding.advice for finding in findings)
    return [finding.fact for finding in findings]


def test_the_winner_of_each_race_is_told(
    monkeypatch: pytest.MonkeyPatch, memory: FactMemory
) -> None:
    times = RaceMemory(memory, "H200, flashinfer 0.7.2")
    times.write({"decode of x": RaceTimes(2e-5, 1e-5), "prefill of x": RaceTimes(2e-5, 3e-5)})

    assert facts(monkeypatch, memory, "0.7.2") == [
        "decode of x: FlashInfer (FlashInfer 10 us, own 20 us)",
        "prefill of x: kvchat (FlashInfer 30 us, own 20 us)",
    ]


def test_without_races_there_is_a_line_only_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, memory: FactMemory
) -> None:
    assert facts(monkeypatch, memory, None) == []
    assert facts(monkeypatch, memory, "0.7.2") == [
        "FlashInfer 0.7.2: not raced before a model is loaded"
    ]

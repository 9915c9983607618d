"""What `kvchat doctor` says of attention kernels on a GPU, and of the shared cache."""

from pathlib import Path

import pytest
import torch

from kvchat.cli import doctor
from kvchat.cli.doctor import Finding
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


def told_of_shared_cache(monkeypatch: pytest.MonkeyPatch, **variables: str) -> list[Finding]:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return list(doctor._run(doctor._shared))


KEY = {"KVCHAT_SHARED_KEY": "a secret of the team"}


def test_the_shared_cache_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert told_of_shared_cache(monkeypatch) == []
    url = f"file://{tmp_path}/nas"

    [found] = told_of_shared_cache(
        monkeypatch, KVCHAT_SHARED_CACHE=url, KVCHAT_SHARED_DEADLINE="10000", **KEY
    )

    assert found.fact.startswith(f"{url}: ")
    assert found.fact.endswith(" ms a round trip, encrypted")
    assert not found.advice
    assert not [path for path in (tmp_path / "nas").rglob("*") if path.is_file()]


def test_a_shared_cache_that_fails_has_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    away = {"KVCHAT_SHARED_CACHE": "valkey://user:secret@127.0.0.1:1", **KEY}
    shared, box = told_of_shared_cache(monkeypatch, KVCHAT_PREFILL_AT="http://127.0.0.1:1", **away)

    assert shared.fact == "valkey://127.0.0.1:1: it cannot be reached"
    assert box.fact == "http://127.0.0.1:1: it cannot be reached"
    assert shared.advice
    assert box.advice


def test_a_shared_cache_without_a_key_has_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    [shared] = told_of_shared_cache(monkeypatch, KVCHAT_SHARED_CACHE="file:///nas")
    assert "needs the team's key" in shared.fact
    assert shared.advice

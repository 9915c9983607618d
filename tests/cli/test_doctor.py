"""What `kvchat doctor` says of attention kernels on a GPU, from the times that were measured."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvchat.cli import doctor
from kvchat.model.gpu.attention_race import RaceMemory, RaceTimes

FLASHINFER = "kvchat_kernels.paged_attention.flashinfer_gpu.installed_version"


def facts(monkeypatch: pytest.MonkeyPatch, state: Path, version: str | None) -> list[str]:
    monkeypatch.setattr(FLASHINFER, lambda: version)
    monkeypatch.setattr(doctor, "user_paths", lambda: SimpleNamespace(state=state))
    monkeypatch.setattr("kvchat.model.device.machine_name", lambda device: "H200")
    findings = list(doctor._attention(torch.device("cpu")))
    assert not any(finding.advice for finding in findings)
    return [finding.fact for finding in findings]


def test_the_winner_of_each_race_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    memory = RaceMemory(tmp_path, "H200, flashinfer 0.7.2")
    memory.write({"decode of x": RaceTimes(2e-5, 1e-5), "prefill of x": RaceTimes(2e-5, 3e-5)})

    assert facts(monkeypatch, tmp_path, "0.7.2") == [
        "decode of x: FlashInfer (FlashInfer 10 us, own 20 us)",
        "prefill of x: kvchat (FlashInfer 30 us, own 20 us)",
    ]


def test_without_races_there_is_a_line_only_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert facts(monkeypatch, tmp_path, None) == []
    assert facts(monkeypatch, tmp_path, "0.7.2") == [
        "FlashInfer 0.7.2: not raced before a model is loaded"
    ]

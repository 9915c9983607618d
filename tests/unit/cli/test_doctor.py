"""What `kvchat doctor` says of a GPU and of the shared cache."""

from pathlib import Path

import pytest
import torch

from kvchat.cli import doctor
from kvchat.cli.doctor import Finding
from kvchat.model import device
from kvchat_kernels import launch


@pytest.mark.parametrize("refusal", [None, "Triton does not work here: there is no C compiler"])
def test_kernels_are_tried_on_a_gpu(refusal: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them a model runs all the same, many times as slow, and nothing looked wrong."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(device, "free_bytes", lambda device: 3 << 30)
    monkeypatch.setattr(launch, "kernel_refusal", lambda device: refusal)

    *_, gpu, kernels = doctor._run(doctor._devices)

    assert gpu == Finding("GPU", "a GPU, 3 GiB free")
    assert kernels.fact == (refusal or "Triton compiles them")
    assert bool(kernels.advice) == (refusal is not None)


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

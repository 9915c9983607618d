"""What `kvchat doctor` says of the shared cache."""

from pathlib import Path

import pytest

from kvchat.cli import doctor
from kvchat.cli.doctor import Finding


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

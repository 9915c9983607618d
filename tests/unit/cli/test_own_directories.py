"""Every command finds a home, and closes kvchat's own directories to other users."""

import os
import sys

import pytest

from kvchat.cli import main


@pytest.fixture(autouse=True)
def no_places_of_the_tester(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("CONFIG", "DATA", "STATE", "CACHE"):
        monkeypatch.delenv(f"XDG_{kind}_HOME", raising=False)
    monkeypatch.setattr(sys, "argv", ["kvchat", "config", "path"])
    monkeypatch.setattr(main, "set_library_environment", lambda: None)


def test_own_directories_that_exist_are_closed_to_others(tmp_path, monkeypatch):
    """An earlier version had made ~/.cache/kvchat for all to read."""
    monkeypatch.setenv("HOME", str(tmp_path))
    own = [tmp_path / part / "kvchat" for part in (".cache", ".config", ".local/share")]
    own.append(tmp_path / ".local/state/kvchat")
    for directory in own:
        directory.mkdir(parents=True)
        directory.chmod(0o777)
    before = (tmp_path / ".cache").stat().st_mode

    assert main._run() == 0

    assert {directory.stat().st_mode & 0o777 for directory in own} == {0o700}
    assert (tmp_path / ".cache").stat().st_mode == before


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_a_command_runs_without_a_home(home, monkeypatch, capsys):
    """It ended in a traceback, whatever it was."""
    monkeypatch.setenv("HOME", home or "")
    if home is None:
        monkeypatch.delenv("HOME")

    assert main._run() == 0
    assert os.path.isabs(capsys.readouterr().out.strip())

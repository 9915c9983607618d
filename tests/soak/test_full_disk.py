"""A disk that is really full: a small file system in memory, mounted for the test.

Where mounting is not allowed this is skipped; `tests/contract/test_scripts.py` has disks that are
full for one file.
"""

import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from kvchat.chat.store import SessionStore
from kvchat.core.errors import ExitCode
from support.fork_server import ForkedShell
from support.outside import Outside
from support.soak_sizes import short_and_long
from support.victim import (
    Run,
    Victim,
    assert_every_token_is_the_models,
    assert_nothing_was_lost,
    user_texts,
)

SIZE = 2 << 20
# 4 KiB of KV a token: a turn fills most of the disk.
LINE = " and on" * 40


@pytest.fixture
def full(shell: ForkedShell) -> Iterator[Path]:
    """Where KV and sessions are kept: a file system of 2 MiB."""
    place = shell.home / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount")
    if done.returncode:
        pytest.skip(f"mounting is not allowed: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@short_and_long(1, 12)
def test_a_full_disk_costs_kv_but_no_word_that_was_not_told(
    shell: ForkedShell,
    model: Path,
    reference: PreTrainedModel,
    full: Path,
    totals: Counter[str],
    size: int,
) -> None:
    """KV has all of the disk but what the sessions take, and more: they share it."""
    outside = Outside(shell.home)
    places = ("--cache-dir", f"{full}/kv", "--sessions-dir", f"{full}/sessions")
    flags = (*places, "--max-tokens", "30", "--disk-cache", "16M")
    runs: list[Run] = []
    session: str | None = None
    for number in range(size):
        ballast = full / "ballast"
        with ballast.open("wb") as file:  # leaves what the next life can still write at first
            free = _free_bytes(full)
            file.write(bytes(max(0, free - (number % 4) * (256 << 10))))
        victim = Victim(shell, model, session, [f"{number}{LINE}", f"{number}b"], *flags)
        run = victim.finish((ExitCode.OK, ExitCode.STORE))
        assert all(has_ended for _, has_ended in run.answers)
        is_told = "saved" in run.complaint
        ballast.unlink()
        totals["lives on a full disk"] += 1
        totals["lives on a full disk whose user was told"] += is_told
        if not is_told:
            assert run.session is not None
            session = run.session
            runs.append(run)
            assert_nothing_was_lost(_store(full).read(session).conversation, runs)
        for path in full.rglob("*"):
            assert path.lstat().st_mode & 0o077 == 0, "only its owner may read it"

    last = Victim(shell, model, session, ["and on"], *flags).finish()
    assert "saved" not in last.complaint
    conversation = _store(full).read(_store(full).latest(takes_one_shots=True)).conversation
    assert user_texts(conversation)[-1] == "and on"
    assert_every_token_is_the_models(reference, conversation)
    outside.assert_untouched()


def _store(full: Path) -> SessionStore:
    return SessionStore(full / "sessions")


def _free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize

"""The shared cache from the command line: two homes are two machines, a directory is the store."""

from dataclasses import replace

import pytest

from kvchat.cli import shared_cache
from support.commands import Shell
from support.direct_shell import DirectShell

MANUAL = "Of the twelve ships in the harbour three are red and nine are blue. " * 4
KEY = {"KVCHAT_SHARED_KEY": "a secret of the team"}


def test_what_one_machine_read_comes_home_to_another(shell, tiny, tmp_path):
    """`prefill` and `push` write to the store, `pull` brings it to a disk that has none of it."""
    store = {**KEY, "KVCHAT_SHARED_CACHE": f"file://{tmp_path}/nas"}
    (tmp_path / "other").mkdir()
    other = replace(shell, home=tmp_path / "other")
    manual = tmp_path / "manual.txt"
    manual.write_text(MANUAL)

    read = shell.run("prefill", "-m", tiny, str(manual), **store)
    assert "are in the shared cache" in read.stdout.decode(), read.stderr
    assert shell.run("-m", tiny, "-p", MANUAL, "--max-tokens", "2").returncode == 0
    assert other.run("-m", tiny, "-p", "Hi", "--max-tokens", "2").returncode == 0
    [session] = (shell.home / ".local/share/kvchat/sessions").glob("*.jsonl")

    pushed = shell.run("cache", "push", session.stem, **store)
    priced = other.run("cache", "pull", session.stem, "--price", **store)
    pulled = other.run("cache", "pull", session.stem, **store)

    assert "went to the shared cache." in pushed.stdout.decode(), pushed.stderr
    assert " to copy; " in priced.stdout.decode(), priced.stderr
    assert "went to the disk." in pulled.stdout.decode(), pulled.stderr
    again = other.run("cache", "pull", session.stem, **store)
    assert again.stdout.decode().endswith("tokens are there already.\n")


@pytest.mark.parametrize(
    ("arguments", "variables", "told"),
    [
        (("prefill", "x"), {}, "There is no shared cache to read for."),
        (("cache", "push", "x"), {}, "There is no shared cache."),
        (("serve", "--role", "prefill"), {}, "--role prefill writes to a shared cache."),
        (("--prefill-at", "http://box:1", "-p", "Hi"), {}, "--prefill-at needs a shared cache"),
        (
            ("--shared-cache", "file:///x", "--prefill-at", "box:8642", "-p", "Hi"),
            KEY,
            "--prefill-at is 'box:8642', but must be http://HOST:PORT.",
        ),
        (
            ("--shared-cache", "ftp://x", "-p", "Hi"),
            KEY,
            "ftp: is not the beginning of a shared cache's address.",
        ),
        (("cache", "--shared-cache", "file:///x", "pull", "x"), {}, "needs the team's key."),
        (
            ("cache", "--shared-cache", "file:///x", "pull", "x"),
            {"KVCHAT_SHARED_KEY": "short"},
            "has less than 16 characters.",
        ),
        (
            ("cache", "--shared-cache", "file:///x", "--shared-key-file", "gone", "pull", "x"),
            {},
            "gone cannot be read",
        ),
    ],
)
def test_what_cannot_be_shared_is_one_sentence(direct, arguments, variables, told):
    done = direct.run(*arguments, **variables)

    assert done.returncode
    assert told in done.stderr.decode()
    assert len(done.stderr.decode().splitlines()) == 1


def test_a_missing_package_is_said_at_once(direct, monkeypatch):
    """A short answer had ended before the store was opened, and nothing was said."""
    monkeypatch.setattr(shared_cache, "find_spec", lambda package: None)

    done = direct.run("--shared-cache", "valkey://box", "-p", "Hi", **KEY)

    assert done.returncode == 2
    assert "kvchat[shared]" in done.stderr.decode()


def test_lists_need_no_key(direct: DirectShell) -> None:
    for command in ("sessions", "cache"):
        assert direct.run(command, KVCHAT_SHARED_CACHE="valkey://box").returncode == 0


def test_an_address_is_shown_without_its_password(shell: Shell) -> None:
    address = "rediss://user:secret@box:6380/2"

    shown = shell.run("config", "show", KVCHAT_SHARED_CACHE=address).stdout.decode()

    assert "rediss://box:6380/2" in shown
    assert "secret" not in shown

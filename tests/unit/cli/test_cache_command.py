"""`kvchat cache`: what it prints, its exit codes, and that it never loads a model."""

import errno
import fcntl
import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from kvchat.cli import doctor
from kvchat_kernels.cpu.object_cache import KERNEL_CACHE_VARIABLE, ObjectCache
from support.commands import ROOT, Shell
from support.direct_shell import DirectShell
from support.failing_files import Faults
from support.fork_server import ForkedShell
from support.pack_chains import LAYOUT
from support.pty_screen import PtyScreen
from support.stored_packs import StoredPacks, stored_packs

GREEDY = ("--temperature", "0", "--max-tokens", "12")


@pytest.fixture
def store(shell: Shell) -> StoredPacks:
    """A store where the command looks for it."""
    return stored_packs(shell.home / ".cache/kvchat/kv")


def test_the_status_says_where_how_much_and_when(shell: Shell, store: StoredPacks) -> None:
    kernels = {KERNEL_CACHE_VARIABLE: str(shell.home / "kernels")}
    ObjectCache(shell.home / "kernels").save(f"norm-{1:032x}.o", bytes(4064))

    done = shell.run("cache", "--disk-cache", "1G", **kernels)

    path, total, *model_dirs, compiled = done.stdout.decode().splitlines()
    assert done.returncode == 0
    assert path == str(store.directory)
    assert total.endswith("KiB of 1 GiB used: 5 packs, 22 tokens")
    assert len(model_dirs) == 2
    assert all("last used 20" in line for line in model_dirs)
    assert compiled == "compiled kernels: 4 KiB more"
    assert done.stderr == b""
    assert shell.run("cache", "--disk-cache", "1G", "status", **kernels).stdout == done.stdout
    assert shell.run("--disk-cache", "1G", "cache", **kernels).stdout == done.stdout


def test_the_status_is_an_object_for_scripts(direct: DirectShell, store: StoredPacks) -> None:
    store.spoil_table()

    none = {KERNEL_CACHE_VARIABLE: str(direct.home / "none")}

    done = direct.run("cache", "--disk-cache", "1G", "status", "--json", **none)

    status = json.loads(done.stdout)

    assert set(status) == {
        *("directory", "used_bytes", "limit_bytes", "packs", "tokens", "trouble", "pins"),
        *("uncoded_bytes", "generations", "packed_weights_bytes", "compiled_kernels_bytes"),
    }
    assert (status["packs"], status["tokens"]) == (4, 14)
    assert status["used_bytes"] == sum(g["bytes"] for g in status["generations"])
    assert "not a database" in status["trouble"]
    again = direct.run("cache", "--disk-cache", "1G", "--json", **none)
    assert status == json.loads(again.stdout)


def test_the_tree_shows_branches_and_counts(shell: Shell, store: StoredPacks) -> None:
    tree = shell.run("cache", "tree", PYTHONIOENCODING="utf-8").stdout.decode()

    for expected in ("├─ 6 tokens, 117 KiB", "│  ├─ 2 tokens", "│  └─ 2 tokens", "└─ 4 tokens"):
        assert f"  {expected}" in tree
    assert shell.run("cache", "tree", PYTHONIOENCODING="ascii").stdout.isascii()


def test_verifying_fails_once_where_something_was_damaged(direct, store):
    assert direct.run("cache", "verify").stdout == b"5 packs read, none is damaged.\n"
    store.damage()
    store.spoil_table()

    done = direct.run("cache", "verify")

    assert done.returncode == 1
    assert b"3 packs sound, 1 damaged and gone now, 1 damaged table gone" in done.stdout
    again = direct.run("cache", "verify")
    assert (again.returncode, again.stdout) == (0, b"3 packs read, none is damaged.\n")


def test_the_limit_is_kept_when_asked(direct: DirectShell, store: StoredPacks) -> None:
    assert direct.run("cache", "gc").stdout == b"There was nothing to free.\n"
    assert b"KiB freed." in direct.run("cache", "--disk-cache", "300K", "gc").stdout
    assert b"nothing is kept" in direct.run("cache").stdout


def test_a_script_that_clears_says_that_it_means_it(direct, store):
    refused = direct.run("cache", "clear", stdin=b"yes\n")
    assert refused.returncode == 2
    assert refused.stderr.count(b"\n") == 1
    assert b"--yes" in refused.stderr
    assert b"5 packs" in direct.run("cache").stdout

    done = direct.run("cache", "clear", "--yes")

    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"KiB deleted.\n")
    assert not list(store.directory.rglob("*.kv"))
    assert direct.run("cache", "clear", "--yes").stdout == b"There was nothing to delete.\n"


@pytest.mark.parametrize(("typed", "is_kept"), [("", True), ("n", True), ("y", False)])
def test_a_person_is_asked(shell, store, typed, is_kept, fork_server):
    asked = ("kvchat", ("cache", "clear"))
    screen = PtyScreen(fork_server, *asked, environment=shell.environment, columns=200)
    with closing(screen):
        screen.wait_for("[y/N]").type(f"{typed}\r")
        screen.wait_for("Nothing is deleted." if is_kept else "KiB deleted.")
        assert screen.finish() == 0
    assert bool(list(store.directory.rglob("*.kv"))) == is_kept


def test_the_path_is_all_that_path_prints(direct: DirectShell) -> None:
    assert direct.run("cache", "path").stdout.decode() == f"{direct.home}/.cache/kvchat/kv\n"
    assert direct.run("cache", "path", KVCHAT_CACHE_DIR="/some/where").stdout == b"/some/where\n"
    assert direct.run("--cache-dir", "/else", "cache", "path").stdout == b"/else\n"


@pytest.mark.parametrize("deed", [["status"], ["tree"], ["verify"], ["gc"], ["clear", "--yes"]])
def test_no_store_is_fine_and_an_unusable_one_is_one_sentence(direct, deed):
    missing = direct.run("cache", *deed)
    assert (missing.returncode, missing.stderr) == (0, b"")
    assert not (direct.home / ".cache/kvchat").exists()

    (direct.home / "file").write_text("")
    refused = direct.run("cache", "--cache-dir", "file", *deed)
    assert refused.returncode == 6
    assert refused.stdout == b""
    assert refused.stderr == (
        b"kvchat: Cannot use the directory file: Not a directory. "
        b"Check its permissions or choose another directory.\n"
    )


def test_what_a_chat_keeps_is_seen_and_can_go_while_it_runs(shell: ForkedShell, tiny: str) -> None:
    chat = shell.start("-m", tiny, *GREEDY, "--input-format", "lines", "--json")

    def ask(text: str) -> dict[str, object]:
        chat.stdin.write(f"{text}\n".encode())
        chat.stdin.flush()
        return json.loads(chat.stdout.readline())

    try:
        ask("My name is Ada, and I like to count ships in the harbour when it is foggy.")
        for deed in (["status"], ["tree"], ["verify"], ["gc"], ["clear", "--yes"]):
            done = shell.run("cache", *deed)
            assert (done.returncode, done.stderr) == (0, b""), deed
        assert ask("What is my name?")["text"]
        assert ask("And what do I count?")["text"]
    finally:
        _, stderr = chat.communicate(timeout=60)
    assert chat.returncode == 0
    assert b"disk cache" not in stderr
    assert json.loads(shell.run("cache", "--json").stdout)["tokens"] > 0


def test_a_chat_that_meets_damage_says_so_and_goes_on(shell: Shell, tiny: str) -> None:
    shell.run("-m", tiny, *GREEDY, "-p", "My name is Ada, and I like to count ships.")
    [table] = (shell.home / ".cache").rglob("cache.db")
    with sqlite3.connect(table) as connection:
        connection.execute("UPDATE Pack SET payload = zeroblob(length(payload))")
    connection.close()

    done = shell.patient.run(
        "-m", tiny, *GREEDY, "-c", "--last", "--json", "-p", "What is my name?"
    )

    told = b"kvchat: the disk cache: a stored block was damaged (checksum); the chat goes on.\n"
    assert done.returncode == 0
    assert json.loads(done.stdout)["usage"]["cached_tokens"]["disk"] == 0
    assert done.stderr.count(told) == 1
    assert shell.run("cache", "verify").returncode == 0, "it is gone, and written anew"


def test_a_chat_whose_cache_cannot_be_used_says_so_once(shell: Shell, tiny: str) -> None:
    """It was silent: the tier was never opened, and the reason was not asked."""
    (shell.home / "file").write_text("")

    done = shell.run(
        *("-m", tiny, *GREEDY, "--cache-dir", "file", "--input-format", "lines"),
        stdin=b"Hello\nAgain\nOnce more\n/stats\n",
    )

    assert done.returncode == 0
    [told, *statistics] = [line for line in done.stderr.splitlines() if b"disk cache" in line]
    assert told.startswith(b"kvchat: the disk cache failed: Cannot use the directory ")
    assert told.endswith(b"; the chat goes on without it.")
    assert len(statistics) == 1
    quiet = shell.run("-m", tiny, *GREEDY, "--cache-dir", "file", "-q", "-p", "Hello")
    assert (quiet.returncode, quiet.stderr) == (0, b"")


def test_a_place_where_nothing_can_be_written_is_told_of(shell: Shell, tiny: str) -> None:
    """Ten percent of nothing is nothing, and that was taken for the user's wish to keep nothing;
    then it was called a lack of free space.
    """
    done = shell.run("-m", tiny, *GREEDY, "--cache-dir", "/proc/kv", "-p", "Hello")

    told = b"kvchat: the disk cache failed: Cannot use the directory /proc/kv: "
    assert done.returncode == 0
    assert done.stderr.count(told) == 1
    off = ("--cache-dir", "/proc/kv", "--disk-cache", "0")
    assert b"disk cache" not in shell.run("-m", tiny, *GREEDY, *off, "-p", "Hello").stderr


def test_neither_help_nor_the_deeds_load_torch(store: StoredPacks) -> None:
    lines = [["--help"], ["status"], ["tree"], ["verify"], ["gc"], ["clear", "--yes"]]
    check = (
        "import sys\n"
        "from kvchat.cli.app import app\n"
        f"for line in {lines!r}:\n"
        f"    sys.argv = ['kvchat', 'cache', '--cache-dir', {str(store.directory)!r}, *line]\n"
        "    try: app()\n"
        "    except SystemExit: pass\n"
        "    loaded = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "    print(line[0], *loaded, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", check],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "HOME": str(store.directory)},
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stderr.splitlines() == [line[0] for line in lines]


def test_the_doctor_looks_at_it(shell: Shell, store: StoredPacks) -> None:
    line = next(
        line for line in shell.run("doctor").stdout.decode().splitlines() if "KV" in line.split()
    )
    assert line.startswith("ok  KV ")
    assert line.endswith(f"used in {store.directory}")

    # It was silent on KV in another dtype than the model's, which `kvchat cache` names.
    assert b", KV in int8\n" in shell.run("doctor", KVCHAT_KV_DTYPE="int8").stdout

    store.spoil_table()
    done = shell.run("doctor")
    assert done.returncode == 1
    assert b"!!  KV " in done.stdout
    assert b"`kvchat cache verify` drops what is damaged." in done.stdout


def test_what_an_earlier_kvchat_left_is_said_to_be_left_alone(direct, store):
    older = store.directory / ("0b" * 16)
    older.mkdir()
    (older / "cache.db").write_bytes(b"of an earlier version")

    told = direct.run("cache", "clear", "--yes"), direct.run("cache")

    line = f"Not made by this kvchat, and left alone: {older.name}."
    assert told[1].stdout.decode().splitlines()[-1] == line
    assert (older / "cache.db").read_bytes() == b"of an earlier version"
    assert not (store.directory / LAYOUT.identity.hex()).exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
def test_the_doctor_does_not_send_for_a_new_kvchat_where_the_disk_is_at_fault(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk it said `Reinstall.`, which needs the disk too."""
    for name in ("DATA", "STATE", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    on_disk = [c for c in doctor._checks(None) if c.__name__ in ("_directories", "_kv", "sessions")]
    faults = Faults()
    faults.install(monkeypatch)

    def found() -> list[doctor.Finding]:
        return [finding for check in on_disk for finding in doctor._run(check)]

    with faults.armed():
        assert [finding.subject for finding in found()] == ["state", "cache", "KV", "sessions"]
    advice: list[str] = []
    for fail_at in range(faults.num_calls):
        with faults.armed(fail_at, code, lasting=True):
            advice += [finding.advice for finding in found()]

    assert "Reinstall." not in advice
    expected = {errno.ENOSPC: "free some space", errno.EDQUOT: "free some space", errno.EIO: "disk"}
    assert any(expected.get(code, "cannot be written to") in each for each in advice)


def test_the_doctor_says_when_nothing_can_be_kept(direct: DirectShell, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = direct.run("doctor", KVCHAT_CACHE_DIR=str(tmp_path / "file"))

    assert done.returncode == 1
    assert b"Cannot use the directory" in done.stdout


@pytest.mark.parametrize("command", [("cache",), ("sessions",), ("sessions", "list")], ids=str)
@pytest.mark.parametrize("flag", ["--kv-dtype", "--dtype", "--weights", "--block-size"])
def test_how_kv_is_made_counts_where_it_stands_before_the_command(direct, flag, command):
    """What is ready depends on it."""
    done = direct.run(flag, "3", *command)

    assert done.returncode == 2
    assert f"{flag} is ".encode() in done.stderr


def test_models_and_conversations_are_named_and_why_is_told(shell: Shell, tiny: str) -> None:
    """Digests of 32 digits were all that told whose KV it was."""
    asked = ("-m", tiny, *GREEDY, "-p", "Of the twelve ships in the harbour three are red.")
    blocks = ("--block-size", "8")
    shell.run(*asked, "--title", "Ships", *blocks)
    name = tiny.rstrip("/").rpartition("/")[2]
    listed = json.loads(shell.run(*blocks, "sessions", "list", "--json").stdout)

    assert listed["next_message"]["cached"] > 0
    ready = f"({name}, ready in 0.1 s)".encode()
    assert ready in shell.run(*blocks, "sessions", "list").stdout
    status = shell.run("cache").stdout.decode()
    assert f"{name}: " in status
    tree = shell.run("cache", "tree").stdout.decode()
    assert f"{name}: " in tree
    assert ", Ships" in tree
    why = shell.run(*blocks, "cache", "why", listed["session"])
    assert (why.returncode, why.stderr) == (0, b"")
    assert why.stdout.startswith(b"Ships: ready: ")
    why = shell.run("cache", "why", listed["session"])
    assert why.stdout.startswith(b"Ships: cold: ")
    assert b"read: --kv-dtype or --block-size changed, and KV is kept" in why.stdout

    shell.run("cache", "clear", "--yes")

    why = shell.run("cache", "why", listed["session"])
    assert why.stdout.startswith(b"Ships: cold: ")
    assert b"have to be read: the cache on disk was cleared." in why.stdout
    path = shell.home / ".local/share/kvchat/sessions" / f"{listed['session']}.jsonl"
    os.utime(shell.home / ".cache/kvchat/kv/kvchat.cleared", (1.0, 1.0))
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        why = shell.run("cache", "why", listed["session"])
    assert b"another kvchat has this conversation open" in why.stdout, "a kill was blamed"
    nobody = shell.run("cache", "why", "nobody")
    assert nobody.returncode == 5
    assert nobody.stderr.count(b"\n") == 1

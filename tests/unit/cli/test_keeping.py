"""--incognito, and what a person is asked before something is forgotten: the real command."""

import json
import shutil
from pathlib import Path

from kvchat.chat.store import SessionStore
from support.commands import Shell

GREEDY = ("--temperature", "0", "--max-tokens", "12", "--block-size", "4")


def test_incognito_changes_no_file_at_all(shell: Shell, tiny: str) -> None:
    """Not even of what was there before: a saved conversation, gone on with, stays as it is."""
    lines = ("-m", tiny, *GREEDY, "--input-format", "lines")
    assert shell.run(*lines, stdin=b"I like ships.\n").returncode == 0
    before = snapshot(shell.home)
    for flags in ((), ("-c", "--last")):
        said = b"Grimstad.\n/retry\n/undo\n/pin\n/forget yes\n"

        done = shell.run(*lines, "--incognito", *flags, stdin=said)

        assert b"keeps no KV on disk" in done.stderr
        assert b"Forgotten: the conversation.\n" in done.stderr
        assert snapshot(shell.home) == before
    assert len(SessionStore(shell.home / ".local/share/kvchat/sessions").ids()) == 1


def test_without_a_cache_every_turn_is_read_whole_and_no_kv_is_kept(shell, tiny):
    lines = ("-m", tiny, *GREEDY, "--input-format", "lines", "--json")
    said = b"I like ships.\nDo you?\n"
    warm = shell.run(*lines, stdin=said)
    shutil.rmtree(shell.home / ".cache")

    cold = shell.run(*lines, "--no-cache", stdin=said)

    answers = [[json.loads(line) for line in run.stdout.splitlines()] for run in (warm, cold)]
    texts = [[answer["text"] for answer in run] for run in answers]
    cached = [[answer["usage"]["cached_tokens"]["total"] for answer in run] for run in answers]
    assert texts[0] == texts[1]
    assert cached[0][1] > 0
    assert cached[1] == [0, 0]
    assert not list((shell.home / ".cache").rglob("cache.db*"))
    assert len(shell.sessions) == 2, "words are kept all the same"


def test_a_pin_is_attached_by_its_name_from_the_command_line(shell: Shell, tiny: str) -> None:
    """-f knew paths alone, though /file and @ knew the names of pins."""
    docs = shell.home / "docs"
    docs.mkdir()
    for name in ("a.md", "b.md"):
        (docs / name).write_text(f"{name}: twelve ships lie here, and three of them are red.\n")
    chat = ("-m", tiny, *GREEDY)
    pinned = shell.run(
        *chat, "--input-format", "lines", stdin=f"/pin manual {docs}/a.md {docs}/b.md\n".encode()
    )
    assert b"without a system prompt that begins with the same files starts" in pinned.stderr

    by_name = shell.run(*chat, "--json", "-f", "manual", "How many are red?")

    answer = json.loads(by_name.stdout)
    assert answer["usage"]["cached_tokens"]["disk"] > 100, by_name.stderr
    [session] = [path for path in shell.sessions if "b.md:" in path.read_text()]
    assert "a.md:" in session.read_text()

    (docs / "b.md").write_text("All are green.")
    changed = shell.run(*chat, "--json", "-f", "manual", "How many are red?")
    assert b"Since it was pinned, b.md changed" in changed.stderr
    (docs / "a.md").unlink()
    gone = shell.run(*chat, "--json", "-f", "manual", "How many are red?")
    assert (gone.returncode, gone.stdout) == (6, b"")
    assert b"The pin manual needs all its files" in gone.stderr


def snapshot(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Return every path below a directory, with what changes when it does."""
    paths = [directory, *directory.rglob("*")]
    infos = {str(path): path.lstat() for path in paths}
    return {name: (i.st_ino, i.st_mtime_ns, i.st_size) for name, i in infos.items()}

"""--incognito, and what a person is asked before something is forgotten: the real command."""

from pathlib import Path

from kvchat.chat.store import SessionStore
from support.commands import Shell

GREEDY = ("--temperature", "0", "--max-tokens", "12", "--block-size", "4")


def test_incognito_changes_no_file_at_all(shell: Shell, tiny: str) -> None:
    """Not even of what was there before: a saved conversation, gone on with, stays as it is."""
    lines = ("-m", tiny, *GREEDY, "--input-format", "lines")
    assert shell.run(*lines, stdin=b"I like ships.\n").returncode == 0
    before = snapshot(shell.home)
    for flags in ((), ("-c",)):
        said = b"Grimstad.\n/retry\n/undo\n/pin\n/forget yes\n"

        done = shell.run(*lines, "--incognito", *flags, stdin=said)

        assert b"keeps no KV on disk" in done.stderr
        assert b"Forgotten: the conversation.\n" in done.stderr
        assert snapshot(shell.home) == before
    assert len(SessionStore(shell.home / ".local/share/kvchat/sessions").ids()) == 1


def snapshot(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Return every path below a directory, with what changes when it does."""
    paths = [directory, *directory.rglob("*")]
    infos = {str(path): path.lstat() for path in paths}
    return {name: (i.st_ino, i.st_mtime_ns, i.st_size) for name, i in infos.items()}

"""Files beside kvchat's own, and whether anything touched them."""

import hashlib
import os
from pathlib import Path

# What is kvchat's own below a home directory.
_OWN = (
    *(".cache/kvchat/kv", ".local/share/kvchat/sessions", ".local/state/kvchat"),
    *(".config/kvchat", ".cache/torch", ".cache/huggingface", "small"),
)
_PLANTED = (
    *("Documents/letter.txt", "Documents/photos/one.kv", ".cache/kvchat/kv-of-mine/cache.db"),
    *(".cache/kvchat/lock", ".cache/neighbour/lock", ".local/share/kvchat/sessions.bak/a.jsonl"),
    *(".local/share/kvchat/notes.jsonl", ".local/state/other/weights.json"),
)


class Outside:
    """Plants files in a home directory, and says whether they are all that is there, unchanged."""

    def __init__(self, home: Path) -> None:
        self._home = home
        for number, name in enumerate(_PLANTED):
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_bytes(f"{name}\n".encode() * (1 + 500 * number))
        (home / ".cache/kvchat/shortcut").symlink_to(home / "Documents", target_is_directory=True)
        self._before = self._seen()

    @property
    def num_files(self) -> int:
        return len(self._before)

    def assert_untouched(self) -> None:
        """Every file and link is as it was, and there is no other."""
        assert self._seen() == self._before

    def _seen(self) -> dict[str, tuple[int, int, str]]:
        seen = {}
        for top, directories, names in os.walk(self._home):
            here = Path(top)
            directories[:] = [d for d in directories if not self._is_own(here / d)]
            for path in (here / name for name in (*names, *directories)):
                if path.is_symlink() or not path.is_dir():
                    status = path.lstat()
                    told = str(path.readlink()) if path.is_symlink() else _digest(path)
                    name = str(path.relative_to(self._home))
                    seen[name] = (status.st_mode, status.st_mtime_ns, told)
        return seen

    def _is_own(self, path: Path) -> bool:
        return str(path.relative_to(self._home)) in _OWN


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

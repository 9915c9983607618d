"""Small JSON files of the state directory: read whatever is there, replaced in one piece.

A file that is missing, damaged, of another version or another user's reads as empty. Several
processes may write at once: the last one stands.
"""

import json
import logging
import os
import threading
from contextlib import suppress
from pathlib import Path

from kvchat.core.errors import StoreError
from kvchat.core.paths import open_private, private_directory

MOST_BYTES = 1 << 20

_log = logging.getLogger(__name__)


def read_state(path: Path, version: int, name: str) -> dict[str, object]:
    """Return the object called `name` in a state file of this version, else an empty one."""
    try:
        descriptor = open_private(path, os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as file:
            found = json.loads(file.read(MOST_BYTES))
        content = found[name] if found["version"] == version else {}
        return {str(key): value for key, value in content.items()}
    except (StoreError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
    except RecursionError:
        return {}


def write_state(path: Path, version: int, name: str, content: dict[str, object]) -> bool:
    """Replace a state file; false, and a line in the log, if that is not possible."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        private_directory(path.parent)
        descriptor = open_private(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"version": version, name: content}, file)
        fresh.replace(path)
    except (StoreError, OSError) as error:
        _log.warning("%s not written: %s", path.name, error)
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        return False
    return True

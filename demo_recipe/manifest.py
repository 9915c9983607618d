"""The list of shipped files with their digests, and how they were made.

Knows files and versions; knows no network.
"""

import hashlib
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDERS = ("target", "draft")


def write_manifest(home: Path, made: dict[str, Any], scores: dict[str, Any]) -> None:
    """Write manifest.json beside the model folders: how they were built and what they reach."""
    document = {
        "files": digests(home),
        "made": made | {"versions": versions()},
        "scores": scores,
    }
    text = json.dumps(document, indent=2) + "\n"
    (home / "manifest.json").write_text(text, encoding="utf-8")


def digests(home: Path) -> dict[str, str]:
    """SHA-256 of every shipped file, by its path below `home`."""
    files = sorted(path for folder in FOLDERS for path in (home / folder).iterdir())
    return {
        path.relative_to(home).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def versions() -> dict[str, str]:
    """What the weights were made with."""
    packages = ("torch", "tokenizers", "safetensors")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}

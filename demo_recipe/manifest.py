"""The list of shipped files with their digests, how they were made, and what they reach.

Knows files, versions and dates; knows no network.
"""

import hashlib
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from demo_recipe.card import write_card

FOLDERS = ("target", "draft")


def write_manifest(home: Path, made: dict[str, Any], scores: dict[str, Any]) -> None:
    """Write manifest.json beside the model folders: how they were built and what they reach."""
    document = {
        "files": digests(home),
        "made": made | {"versions": versions()},
        "scores": scores,
    }
    _write(home, document)


def renew_scores(home: Path, report: dict[str, Any], day: str) -> None:
    """Put a report of tests measured on `day` into the manifest and the cards; no weight changes.

    Tests that the report lacks keep their scores. The share of replies that end and the speculation
    are those of many tests, so only a report of all tests renews them.
    """
    document = json.loads((home / "manifest.json").read_text(encoding="utf-8"))
    scores, fresh = document["scores"], report["tests"]
    if scores["tests"].keys() <= fresh.keys():
        scores["ends by itself"] = report["ends by itself"]
        scores["speculation"] = report["speculation"] or scores["speculation"]
    scores["tests"] |= fresh
    scores["measured"] = scores.get("measured", {}) | dict.fromkeys(fresh, day)
    write_card(home, scores, document["made"])
    document["files"] = digests(home)
    _write(home, document)


def _write(home: Path, document: dict[str, Any]) -> None:
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

"""What a run of the bench found, kept as two files beside each other: one to read, one to parse.

Knows how a report is laid out and what it is named after: the device it was measured on.
"""

import io
import json
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from kvchat.bench.report import Result, machine, print_result
from kvchat.core.errors import UsageError

_NAMED_SO = re.compile(r"[^a-z0-9]+")


def record(
    results: Sequence[Result], directory: Path, device: torch.device, command: str
) -> tuple[Path, Path]:
    """Write `<device>.md` and `<device>.json`; return their paths. An earlier run's are replaced.

    `command` is what was typed. Raises UsageError where the directory cannot be written to.
    """
    facts = {**machine(), "commit": _commit(), "date": time.strftime("%Y-%m-%d")}
    name = str(facts["gpu"] if device.type == "cuda" else facts["processor"] or "cpu")
    stem = _NAMED_SO.sub("-", name.lower()).strip("-")
    document = {
        "machine": facts,
        "command": command,
        "results": [asdict(result) for result in results],
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        text = directory / f"{stem}.md"
        text.write_text(_page(name, facts, results, command), encoding="utf-8")
        data = directory / f"{stem}.json"
        data.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The report cannot be written: {error}.", "Name another place.") from None
    return text, data


def _page(name: str, facts: dict[str, object], results: Sequence[Result], command: str) -> str:
    tables = io.StringIO()
    for result in results:
        print_result(result, tables)
    rest = ", ".join(f"{key} {value}" for key, value in facts.items() if value != "")
    return f"# {name}\n\n{rest}.\n\n```\n$ {command}\n{tables.getvalue()}```\n"


def _commit() -> str:
    """Return the commit of the sources that run; nothing where they are no checkout's."""
    try:
        found = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()

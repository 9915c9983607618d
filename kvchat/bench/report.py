"""The results of a benchmark run, as a table, as one JSON line, and as two report files.

The files are named after the measured device.
"""

import io
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from kvchat import __version__
from kvchat.bench.measure import Sample
from kvchat.core.errors import StoreError

# How many of a unit are a second, a byte a second or a FLOP a second; of any other unit 1.
_SCALES = {"ms": 1e3, "us": 1e6, "GB/s": 1e-9, "TFLOP/s": 1e-12}


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number, `value` in `unit`.

    `beside` is a peer's or ceiling's value in the same unit from the same run, named by
    `beside_name`. `ratio` compares both, as `ratio_name` says; `must` is its required bound, empty
    if there is none. `spread` is that of the Sample. None means unknown.
    """

    name: str
    value: float
    unit: str
    beside: float | None = None
    beside_name: str = ""
    ratio: float | None = None
    ratio_name: str = ""
    must: str = ""
    spread: float | None = None


def over(
    name: str,
    value: float,
    unit: str,
    other: tuple[str, float],
    ratio_name: str = "times that",
    must: str = "",
    spread: float | None = None,
) -> Figure:
    """Return a value beside another one in the same unit, which has a name, and their ratio.

    Beside 0 there is none: NaN would make a record that is no JSON.
    """
    beside_name, beside = other
    if not beside:
        return Figure(name, value, unit, beside, beside_name, must=must, spread=spread)
    ratio = value / beside
    return Figure(name, value, unit, beside, beside_name, ratio, ratio_name, must, spread)


def compared(
    name: str,
    ours: Sample,
    theirs: Sample,
    unit: str,
    beside_name: str,
    ratio_name: str = "times that",
    must: str = "",
) -> Figure:
    """Return the medians of two samples in `unit`, and ours over theirs.

    Samples in "ms", "us", "GB/s" and "TFLOP/s" are in seconds, bytes and FLOP a second.
    """
    mine, other = (each.median * _SCALES.get(unit, 1.0) for each in (ours, theirs))
    return over(name, mine, unit, (beside_name, other), ratio_name, must, ours.spread)


def times_as_fast(
    name: str, ours_s: float, theirs_s: float, unit: str, theirs: str, must: str = ""
) -> Figure:
    """Return our seconds in `unit` beside those of `theirs`, and how many of ours these are."""
    ours, beside, ratio = ours_s * _SCALES[unit], theirs_s * _SCALES[unit], theirs_s / ours_s
    return Figure(name, ours, unit, beside, theirs, ratio, "times as fast", must)


def beside_ceiling(
    name: str, rate: float, unit: str, ceiling: tuple[str, float], spread: float | None = None
) -> Figure:
    """Return a rate beside the highest one that is possible, which has a name, and its share.

    Rates in "GB/s" and "TFLOP/s" are in bytes and FLOP a second.
    """
    scale, (most_name, most) = _SCALES[unit], ceiling
    return over(name, rate * scale, unit, (most_name, most * scale), "of that", spread=spread)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one scenario. If `refusal` is set, it says why there are no valid figures."""

    scenario: str
    settings: dict[str, Any]
    figures: tuple[Figure, ...] = ()
    refusal: str = ""
    notes: tuple[str, ...] = field(default_factory=tuple)


def machine() -> dict[str, Any]:
    """Return the facts that figures depend on: processor, threads, device, versions, load."""
    facts: dict[str, Any] = {
        "kvchat": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0].partition(":")[2].strip() if names else platform.processor()


def print_result(result: Result, out: TextIO) -> None:
    """Print one scenario's table."""
    settings = " ".join(f"{key}={value}" for key, value in result.settings.items())
    out.write(f"\n{result.scenario}   {settings}\n")
    if result.refusal:
        out.write(f"  no figures: {result.refusal}\n")
    if result.figures:
        _print_rows([_HEADER, *(_row(figure) for figure in result.figures)], out)
    for note in result.notes:
        out.write(f"  {note}\n")
    out.flush()


_HEADER = ("", "measured", "beside it", "", "ratio", "", "must")


def _row(figure: Figure) -> tuple[str, ...]:
    beside = "" if figure.beside is None else f"{_number(figure.beside)} {figure.unit}"
    return (
        figure.name,
        f"{_number(figure.value)} {figure.unit}",
        beside,
        figure.beside_name,
        "" if figure.ratio is None else f"{figure.ratio:.2f}",
        figure.ratio_name,
        figure.must,
    )


def _print_rows(rows: Sequence[tuple[str, ...]], out: TextIO) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        out.write("  " + "  ".join(cells).rstrip() + "\n")


def _number(value: float) -> str:
    if value == 0 or 0.01 <= abs(value) < 1e6:
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:.3g}"


def print_json(results: Sequence[Result], out: TextIO) -> None:
    """Print everything as one JSON document on the last line."""
    document = {"machine": machine(), "results": [asdict(result) for result in results]}
    out.write("\n" + json.dumps(document) + "\n")
    out.flush()


_NAMED_SO = re.compile(r"[^a-z0-9]+")


def record(
    results: Sequence[Result], directory: Path, device: torch.device, command: str
) -> tuple[Path, Path]:
    """Write `<device>.md` and `<device>.json` and return their paths; overwrites earlier ones.

    `command` is the command line. Raises StoreError if the directory cannot be written.
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
        raise StoreError(f"The report cannot be written: {error}.", "Name another place.") from None
    return text, data


def _page(name: str, facts: dict[str, object], results: Sequence[Result], command: str) -> str:
    tables = io.StringIO()
    for result in results:
        print_result(result, tables)
    rest = ", ".join(f"{key} {value}" for key, value in facts.items() if value != "")
    return f"# {name}\n\n{rest}.\n\n```\n$ {command}\n{tables.getvalue()}```\n"


def _commit() -> str:
    """Return the git commit of the running sources; empty outside a checkout."""
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

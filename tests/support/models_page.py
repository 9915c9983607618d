"""The table of verdicts on every model type, and the page of the manual that is made from it.

python -m support.models_page             write docs/models.md from the table
python -m support.models_page --measure   measure every type first, and write the table
python -m support.models_page --measure TYPE...    measure these types only
"""

import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from kvchat.model.decoder.families import COMPILED_TYPES
from kvchat.model.hf.gathered import WITH_WINDOWS
from support.every_type import causal_types, image_text_types
from support.type_matrix import EXACT, NOT_BUILT, REFUSED, Verdict, verdict_of

_HERE = Path(__file__).resolve()
TABLE = _HERE.with_name("type_verdicts.json")
PAGE = _HERE.parents[2] / "docs" / "models.md"

_HEAD = """# Which models run

Made by `make model-table` from transformers {version}; do not edit it by hand.

Every type of model that transformers knows is built tiny, with random weights, and saved as a
checkpoint. kvchat then holds a conversation with it: three turns, a fork, an edit, a batch, a
restart, and speculation by n-grams where it is offered. A type is **exact** if every greedy token
is that of a full recompute by transformers' own eager forward pass in float32, and every logit
differs by less than 0.0002 of the largest.

Two paths lead there. On the *paged* path, attention reads the cache's pages where they lie, and
sequences share a step. On the *gathered* path, the model's own attention runs on keys and values
copied out of the pages, one sequence at a time; it is slower, and serves what cannot run on the
paged one. `kvchat models info` says which path a model takes, and why. Layers with a window hold
only a window on the device: on the paged path, and on the gathered one of
{windowed}.

Types with recurrent layers keep snapshots of their state beside the pages. They run one sequence
after another, but for compiled steps on a CPU, which take several at once. There a state reads a
draft once it is known to be right. Elsewhere a step with a wrong draft is taken back, and the next
one reads again what was right.

A model that also reads images or sound runs as a text model.
"""

_COMPILED = """
## Compiled steps

Small steps on a CPU are one compiled program for these {count} types, and for image-text types
whose text model is of one of them. A model with settings that the program does not have, or with
sizes that fill no vector, runs its own modules, which are slower; `--debug` says why.

{types}
"""
_INSTEAD = """
## Refused types

kvchat refuses these when it starts, in one sentence. What reads in both directions, takes no cache
of keys and values or keeps its state in its modules runs in transformers itself (`generate`);
of most families there is also a type above that is exact.
"""


def load_table() -> dict[str, Verdict]:
    content = json.loads(TABLE.read_text())["verdicts"]
    return {name: Verdict(**verdict) for name, verdict in content.items()}


def save_table(verdicts: dict[str, Verdict]) -> None:
    """Write the table, one type a line."""
    lines = [
        f"    {json.dumps(name)}: {json.dumps(asdict(verdicts[name]))}" for name in sorted(verdicts)
    ]
    body = ",\n".join(lines)
    version = json.dumps(transformers.__version__)
    TABLE.write_text(f'{{\n  "transformers": {version},\n  "verdicts": {{\n{body}\n  }}\n}}\n')


def page(verdicts: dict[str, Verdict], version: str, causal: list[str]) -> str:
    """Return the text of docs/models.md."""
    windowed = ", ".join(f"`{name}`" for name in sorted(WITH_WINDOWS))
    parts = [_HEAD.format(version=version, windowed=windowed)]
    groups = {
        "Causal language models": [name for name in verdicts if name in causal],
        "The text of image-text models": [name for name in verdicts if name not in causal],
    }
    for title, names in groups.items():
        counts = Counter(verdicts[name].outcome for name in names)
        parts.append(f"\n## {title}\n\n{_counted(counts, len(names))}\n")
        for path in ("paged", "gathered"):
            parts.append(_paragraph(path, verdicts, names))
    compiled = ", ".join(f"`{name}`" for name in COMPILED_TYPES)
    parts.append(_COMPILED.format(count=len(COMPILED_TYPES), types=compiled))
    parts.append(_INSTEAD)
    parts.append(_rows(verdicts, REFUSED))
    parts.append("\n## Not built\n\nOf these types the test makes no tiny checkpoint.\n")
    parts.append(_rows(verdicts, NOT_BUILT))
    return "".join(parts)


def _counted(counts: Counter[str], total: int) -> str:
    return (
        f"{counts[EXACT]} of {total} types are exact, {counts[REFUSED]} are refused, and "
        f"{counts[NOT_BUILT]} are not built."
    )


def _paragraph(path: str, verdicts: dict[str, Verdict], names: list[str]) -> str:
    exact = [f"`{n}`" for n in names if is_exact_on(path, verdicts[n])]
    return f"\n**Exact, {path}** ({len(exact)}): {', '.join(exact)}\n" if exact else ""


def is_exact_on(path: str, verdict: Verdict) -> bool:
    return verdict.outcome == EXACT and verdict.why.startswith(path)


def _rows(verdicts: dict[str, Verdict], outcome: str) -> str:
    rows = [f"| `{n}` | {_cell(v.why)} |" for n, v in verdicts.items() if v.outcome == outcome]
    return "\n".join(["\n| type | reason |", "|---|---|", *rows, ""])


def _cell(why: str) -> str:
    return why.replace("|", "/").rstrip(".")


def measured(names: list[str]) -> dict[str, Verdict]:
    """Try types, one after another; print each verdict."""
    torch.set_num_threads(1)
    verdicts = {}
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            verdicts[name] = verdict_of(name, Path(directory))
        sys.stdout.write(f"{name}: {verdicts[name].outcome}: {verdicts[name].why}\n")
        sys.stdout.flush()
    return verdicts


def main(arguments: list[str]) -> None:
    known = load_table() if TABLE.exists() else {}
    if arguments[:1] == ["--measure"]:
        names = arguments[1:] or causal_types() + image_text_types()
        known = (known if arguments[1:] else {}) | measured(names)
        save_table(known)
        known = load_table()
    version = json.loads(TABLE.read_text())["transformers"]
    PAGE.write_text(page(known, version, causal_types()))


if __name__ == "__main__":
    main(sys.argv[1:])

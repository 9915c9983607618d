"""RaceMemory: outcomes of the race, kept from one run to the next.

A file of the user's own, written anew as a whole. One that cannot be read, or says what no outcome
can be, is as good as none. Races nothing.
"""

import json
import logging
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kvchat.core.errors import StoreError
from kvchat.core.paths import open_private, private_directory
from kvchat.model.linear_race import ROW_BUCKETS, LinearShape, Outcome, Outcomes

_NAME = "linear_race.json"
_VERSION = 1
_MAX_MACHINES = 16
_MAX_OUTCOMES = 1000
_MAX_BYTES = 4 << 20
_SHAPE = re.compile(r"(\d{1,9})x(\d{1,9}) (\w+)( with bias)?, (\d{1,2}) rows")

_log = logging.getLogger(__name__)


class RaceMemory:
    """The outcomes on one `machine`, a device and what runs on it, in `directory`; None keeps none.

    The last to write wins where two processes do: what is lost is raced again.
    """

    def __init__(self, directory: Path | None, machine: str) -> None:
        self._path = directory / _NAME if directory is not None else None
        self._machine = machine

    def read(self) -> dict[tuple[LinearShape, int], Outcome]:
        """Return the outcomes kept, by shape and bucket of rows."""
        return _parsed(self._read_all().get(self._machine))

    def write(self, outcomes: Outcomes) -> None:
        """Keep outcomes beside those kept already. What cannot be written is raced again."""
        if self._path is None:
            return
        machines = self._read_all()
        known = {**_parsed(machines.pop(self._machine, None)), **outcomes}
        newest = list(known.items())[-_MAX_OUTCOMES:]
        machines[self._machine] = {
            f"{shape}, {num_rows} rows": found.refusal or [found.torch_s, found.kernel_s]
            for (shape, num_rows), found in newest
        }
        kept = dict(list(machines.items())[-_MAX_MACHINES:])
        fresh = self._path.with_name(f"{_NAME}.{os.getpid()}")
        try:
            private_directory(self._path.parent)
            descriptor = open_private(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({"version": _VERSION, "machines": kept}, file)
            fresh.replace(self._path)
        except (StoreError, OSError) as error:
            _log.warning("outcomes of the race not kept: %s", error)
            with suppress(OSError):
                fresh.unlink(missing_ok=True)

    def _read_all(self) -> dict[str, object]:
        if self._path is None:
            return {}
        try:
            descriptor = open_private(self._path, os.O_RDONLY)
            with os.fdopen(descriptor, "rb") as file:
                found = json.loads(file.read(_MAX_BYTES))
            return dict(found["machines"]) if found["version"] == _VERSION else {}
        except (StoreError, OSError, ValueError, LookupError, TypeError, RecursionError):
            return {}


def _parsed(kept: object) -> dict[tuple[LinearShape, int], Outcome]:
    """Leave out what no outcome can be."""
    outcomes = {}
    for name, value in kept.items() if isinstance(kept, Mapping) else ():
        match, outcome = _SHAPE.fullmatch(str(name)), _outcome(value)
        if match is None or outcome is None or int(match[5]) not in ROW_BUCKETS:
            continue
        shape = LinearShape(int(match[1]), int(match[2]), match[3], match[4] is not None)
        outcomes[shape, int(match[5])] = outcome
    return outcomes


def _outcome(value: object) -> Outcome | None:
    if isinstance(value, str) and value:
        return Outcome(refusal=value)
    if not isinstance(value, list) or len(value) != 2:
        return None
    if not all(isinstance(x, int | float) and math.isfinite(x) and x > 0 for x in value):
        return None
    return Outcome(float(value[0]), float(value[1]))

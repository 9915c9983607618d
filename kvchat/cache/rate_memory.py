"""RateMemory: how fast this machine has shown itself, kept from one run to the next.

A file of the user's own, written anew as a whole. One that cannot be read, or says what no rate can
be, is as good as none. Knows numbers by name; knows not what they mean.
"""

import json
import logging
import math
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kvchat.core.errors import StoreError
from kvchat.core.paths import open_private, private_directory

_NAME = "rates.json"
_VERSION = 1
_MAX_SUBJECTS = 64
_MAX_BYTES = 1 << 20
# Rates that differ by less are the same.
_NEWS = 0.1

_log = logging.getLogger(__name__)


class RateMemory:
    """The rates of one `subject`, a model on a device, in `directory`; None keeps none.

    Several may keep rates of the same subject, of different names or measured alike, and several
    processes or threads write at once: the last one stands. Each memory is used by one at a time.
    """

    def __init__(self, directory: Path | None, subject: str) -> None:
        self._path = directory / _NAME if directory is not None else None
        self._subject = subject
        self._written = self.read()

    def read(self) -> dict[str, float]:
        """Return the rates kept, by name."""
        return self._read_all().get(self._subject, {})

    def write(self, rates: Mapping[str, float]) -> None:
        """Keep rates, where they are news, and leave those of other names as they are.

        What cannot be written costs the next run some time.
        """
        if self._path is None or not self._is_news(rates):
            return
        subjects = self._read_all()
        known = {**subjects.pop(self._subject, {}), **rates}
        newest = dict([*subjects.items(), (self._subject, known)][-_MAX_SUBJECTS:])
        fresh = self._path.with_name(f"{_NAME}.{os.getpid()}.{threading.get_ident()}")
        try:
            private_directory(self._path.parent)
            descriptor = open_private(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({"version": _VERSION, "rates": newest}, file)
            fresh.replace(self._path)
            self._written = known
        except (StoreError, OSError) as error:
            _log.warning("rates not kept: %s", error)
            with suppress(OSError):
                fresh.unlink(missing_ok=True)

    def _is_news(self, rates: Mapping[str, float]) -> bool:
        known = self._written
        return any(
            name not in known or abs(rate / known[name] - 1) > _NEWS for name, rate in rates.items()
        )

    def _read_all(self) -> dict[str, dict[str, float]]:
        if self._path is None:
            return {}
        try:
            descriptor = open_private(self._path, os.O_RDONLY)
            with os.fdopen(descriptor, "rb") as file:
                found = json.loads(file.read(_MAX_BYTES))
            if found["version"] != _VERSION:
                return {}
            return {str(name): _sound(rates) for name, rates in found["rates"].items()}
        except (StoreError, OSError, ValueError, LookupError, TypeError, AttributeError):
            return {}
        except RecursionError:
            return {}


def _sound(rates: Mapping[str, object]) -> dict[str, float]:
    """Leave out what no rate can be."""
    return {
        str(name): float(rate)
        for name, rate in rates.items()
        if isinstance(rate, int | float) and math.isfinite(rate) and rate > 0
    }

"""Reads JSON as the standard has it: without NaN and infinite numbers, which Python accepts."""

import json
import math
from typing import Any, NoReturn


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _finite(text: str) -> float:
    """Parse a number; refuse one that is too large, as it would be written as Infinity."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def read_json_text(text: str | bytes, has_raw_controls: bool = False) -> Any:
    """Return the value of a JSON text; raises ValueError, RecursionError if it is too deep.

    With `has_raw_controls` line ends and tabs may stand within strings, as many models write them.
    """
    return json.loads(
        text, strict=not has_raw_controls, parse_constant=_no_constant, parse_float=_finite
    )

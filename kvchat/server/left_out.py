"""LeftOutNotes: tells of the parts of requests that the model does not get."""

import logging
from collections.abc import Sequence
from typing import TypeVar

from starlette.responses import Response

R = TypeVar("R", bound=Response)

_HEADER = "x-kvchat-left-out"
_MOST_TOLD = 32  # types in a header, and types of one server in its log
_log = logging.getLogger(__name__)


class LeftOutNotes:
    """Names them in a header of each response, and in the log the first time."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def tell(self, response: R, left_out: Sequence[str]) -> R:
        """Return the response, with the header if types were left out of its request."""
        if left_out:
            response.headers[_HEADER] = ", ".join(left_out[:_MOST_TOLD])
        for kind in left_out:
            if kind not in self._logged and len(self._logged) < _MOST_TOLD:
                self._logged.add(kind)
                _log.warning("requests have parts of the type %s, which are left out", kind)
        return response

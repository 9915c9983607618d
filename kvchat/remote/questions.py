"""Questions: short questions to a server of this machine, over one connection that stays.

They go to the server's own interface, and need no HTTP library but Python's: a chat that asks only
a few begins sooner.
"""

import http.client
import json
import os
import socket
import stat
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from kvchat.remote.address import Address

_MOST_BYTES = 64 << 20
_TRIES = 2  # a server closes a connection that was not used for half a minute


class Questions:
    """Asks one server; each question takes `limit_s` seconds at most. Thread-safe."""

    def __init__(self, address: Address, limit_s: float = 10.0) -> None:
        self._headers = {"Content-Type": "application/json", **address.headers}
        self._connection = _connection(address, limit_s)
        self._lock = threading.Lock()

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Return the status and the object that answers a GET, or a POST with a body.

        Raises OSError if no answer comes, or none that is an object. A question may be asked twice.
        """
        data = json.dumps(body) if body is not None else None
        with self._lock:
            for number in range(_TRIES):
                try:
                    return self._asked(path, data)
                except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
                    self._connection.close()
                    is_old = isinstance(error, http.client.RemoteDisconnected | BrokenPipeError)
                    if number + 1 == _TRIES or not is_old:
                        raise OSError(f"the server gave no answer: {error!r}") from error
        raise AssertionError("every try returns or raises")

    def _asked(self, path: str, data: str | None) -> tuple[int, dict[str, Any]]:
        method = "GET" if data is None else "POST"
        self._connection.request(method, path, body=data, headers=self._headers)
        response = self._connection.getresponse()
        text = response.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError("the answer is too long")
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("the answer is no object")
        return response.status, found

    def close(self) -> None:
        with self._lock, suppress(OSError):
            self._connection.close()


def _connection(address: Address, limit_s: float) -> http.client.HTTPConnection:
    place = urlsplit(address.url)
    if address.socket:
        return _SocketConnection(address.socket, limit_s)
    return http.client.HTTPConnection(place.hostname or "", place.port, timeout=limit_s)


class _SocketConnection(http.client.HTTPConnection):
    """A connection through a socket that is a file of this user."""

    def __init__(self, path: str, limit_s: float) -> None:
        super().__init__("localhost", timeout=limit_s)
        self._path = path

    def connect(self) -> None:
        require_own_socket(self._path)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self.timeout)
            connection.connect(self._path)
        except OSError:
            connection.close()
            raise
        self.sock = connection


def require_own_socket(path: str) -> None:
    """Raise OSError for a path that is no socket of this user, which could be another's server."""
    status = os.lstat(path)
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{path} is no socket of yours")

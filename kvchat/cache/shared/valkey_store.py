"""ValkeyStore: records in a Valkey or Redis server; a lookup is one MGET."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from kvchat.cache.shared.store import (
    MOST_HEAD_BYTES,
    Deadlines,
    Payload,
    SharedStore,
    StoreTrouble,
)
from kvchat.cache.shared.team_key import missing_extra
from kvchat.core.errors import UsageError

try:
    import valkey
    from valkey._parsers.resp2 import _RESP2Parser
    from valkey._parsers.socket import SocketBuffer
except ImportError as error:
    raise missing_extra("valkey") from error

_PREFIX = "kvchat"
# Names of one MGET: those of a prompt of 16,384 blocks.
_MOST_NAMES = 1 << 14
# A server's answer that is larger is not read. A pack has 4 MiB, or one block that is larger.
_MOST_BYTES = 1 << 28
_MOST_LINE_BYTES = 1 << 16
# A command with a larger part takes the line's time to be sent.
_MOST_SMALL_BYTES = 1 << 16
_END = b"\r\n"


class _TimedConnection:
    """What a connection of the client gets: a whole command has a deadline, and a large one takes
    the time that it needs within that.

    `socket_timeout` is the time for a first byte. That of a pack leaves, and the answer comes, only
    once the line has carried it.
    """

    whole_s: float
    until_s = math.inf
    _sock: Any

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if not self._sock:
            self.connect()  # type: ignore[attr-defined]
        parts = [command] if isinstance(command, str | bytes) else command
        is_large = max(map(len, parts)) > _MOST_SMALL_BYTES
        self.until_s = time.monotonic() + self.whole_s
        self._sock.settimeout(self.whole_s if is_large else self.socket_timeout)  # type: ignore[attr-defined]
        super().send_packed_command(command, check_health)  # type: ignore[misc]


class _BoundedBuffer(SocketBuffer):
    """Reads nothing that a server announces as larger than any record, and nothing for longer than
    a command may take.

    What is larger than a head is read into memory that the next such answer overwrites: fresh
    memory and copies take longer than the socket.
    """

    def __init__(self, connection: Any, socket_read_size: int) -> None:
        super().__init__(connection._sock, socket_read_size, connection.socket_timeout)
        self._connection = connection
        self._memory = memoryview(bytearray())

    def read(self, length: int) -> Any:
        if length > _MOST_BYTES:
            raise valkey.ConnectionError("the answer is too large")
        whole = length + len(_END)
        is_large = length > MOST_HEAD_BYTES
        view = self._reused(whole) if is_large else memoryview(bytearray(whole))
        num_read = self._buffer.readinto(view)
        while num_read < whole:
            self._require_time()
            try:
                count = self._sock.recv_into(view[num_read:])
            except TimeoutError as error:
                raise valkey.TimeoutError from error
            if not count:
                raise valkey.ConnectionError("the connection is closed")
            num_read += count
        return view[:length] if is_large else bytes(view[:length])

    def _reused(self, num_bytes: int) -> memoryview:
        if len(self._memory) < num_bytes:
            self._memory = memoryview(bytearray(num_bytes))
        return self._memory[:num_bytes]

    def readline(self) -> bytes:
        data = self._buffer.readline()
        while not data.endswith(_END):
            if len(data) > _MOST_LINE_BYTES:
                raise valkey.ConnectionError("the answer is too large")
            self._require_time()
            self._read_from_socket()
            data += self._buffer.readline()
        line: bytes = data[:-2]
        return line

    def _require_time(self) -> None:
        if time.monotonic() > self._connection.until_s:
            raise valkey.TimeoutError


class _BoundedParser(_RESP2Parser):
    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)
        self._buffer = _BoundedBuffer(connection, self.socket_read_size)


class ValkeyStore(SharedStore):
    """Records of a server; `url` is what its client takes, `valkeys` and `rediss` mean TLS."""

    def __init__(self, url: str, deadlines: Deadlines) -> None:
        scheme = {"redis": "valkey", "rediss": "valkeys"}.get(urlsplit(url).scheme)
        url = url if scheme is None else f"{scheme}:{url.partition(':')[2]}"
        try:
            self._client = valkey.Valkey.from_url(
                url,
                socket_connect_timeout=deadlines.first_s,
                socket_timeout=deadlines.first_s,
                socket_keepalive=True,
                retry=None,
                parser_class=_BoundedParser,
            )
        except ValueError as error:
            raise UsageError(f"The shared cache's address cannot be used: {error}.") from error
        pool = self._client.connection_pool
        pool.connection_class = type(
            "TimedConnection",
            (_TimedConnection, pool.connection_class),
            {"whole_s": deadlines.whole_s},
        )

    def ping(self) -> None:
        self._ask("PING")

    def heads(self, group: str, names: Sequence[str]) -> Mapping[str, bytes]:
        found: dict[str, bytes] = {}
        for start in range(0, len(names), _MOST_NAMES):
            part = names[start : start + _MOST_NAMES]
            values = self._ask("MGET", *(_head(group, name) for name in part))
            if not isinstance(values, list) or len(values) != len(part):
                raise StoreTrouble("it gave no list")
            found |= {
                name: value
                for name, value in zip(part, values, strict=True)
                if isinstance(value, bytes) and len(value) <= MOST_HEAD_BYTES
            }
        return found

    def payload(self, group: str, name: str, most_bytes: int) -> Payload | None:
        value = self._ask("GET", _payload(group, name))
        is_some = isinstance(value, bytes | memoryview) and 0 < len(value) <= most_bytes
        return value if is_some else None

    def put(
        self, group: str, name: str, head: bytes, payload: bytes | memoryview, ttl_s: int
    ) -> None:
        self._ask("SET", _payload(group, name), payload, "EX", ttl_s)
        self._ask("SET", _head(group, name), head, "EX", ttl_s)

    def remove(self, group: str, names: Sequence[str]) -> None:
        for start in range(0, len(names), _MOST_NAMES):
            part = names[start : start + _MOST_NAMES]
            own = [key(group, name) for name in part for key in (_head, _payload)]
            self._ask("UNLINK", *own)

    def close(self) -> None:
        self._client.close()

    def _ask(self, *command: Any) -> Any:
        try:
            return self._client.execute_command(*command, NEVER_DECODE=True)
        except (valkey.ValkeyError, OSError, ValueError) as error:
            raise StoreTrouble(_reason(error)) from error


def _reason(error: Exception) -> str:
    """Return an error's text without the address, which may have a password."""
    if isinstance(error, valkey.TimeoutError):
        return "it did not answer in time"
    if isinstance(error, valkey.AuthenticationError):
        return "it refuses the password"
    if isinstance(error, valkey.ResponseError):
        return f"it refuses: {str(error)[:80]}"
    return "it cannot be reached"


def _head(group: str, name: str) -> str:
    return f"{_PREFIX}:{group}:{name}:head"


def _payload(group: str, name: str) -> str:
    return f"{_PREFIX}:{group}:{name}:kv"

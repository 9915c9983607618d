"""ValkeyStore: records in a Valkey or Redis server; a lookup is one MGET."""

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
_END = b"\r\n"


class _BoundedBuffer(SocketBuffer):
    """Reads nothing that a server announces as larger than any record.

    What is larger than a head is read into memory that the next such answer overwrites: fresh
    memory and copies take longer than the socket.
    """

    def __init__(self, sock: Any, socket_read_size: int, socket_timeout: float) -> None:
        super().__init__(sock, socket_read_size, socket_timeout)
        self._memory = memoryview(bytearray())

    def read(self, length: int) -> Any:
        if length > _MOST_BYTES:
            raise valkey.ConnectionError("the answer is too large")
        return self._read_large(length) if length > MOST_HEAD_BYTES else super().read(length)

    def _read_large(self, length: int) -> memoryview:
        whole = length + len(_END)
        if len(self._memory) < whole:
            self._memory = memoryview(bytearray(whole))
        view = self._memory[:whole]
        num_read = self._buffer.readinto(view)
        while num_read < whole:
            try:
                count = self._sock.recv_into(view[num_read:])
            except TimeoutError as error:
                raise valkey.TimeoutError from error
            if not count:
                raise valkey.ConnectionError("the connection is closed")
            num_read += count
        return view[:length]

    def readline(self) -> bytes:
        data = self._buffer.readline()
        while not data.endswith(_END):
            if len(data) > _MOST_LINE_BYTES:
                raise valkey.ConnectionError("the answer is too large")
            self._read_from_socket()
            data += self._buffer.readline()
        line: bytes = data[:-2]
        return line


class _BoundedParser(_RESP2Parser):
    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)
        self._buffer = _BoundedBuffer(
            connection._sock, self.socket_read_size, connection.socket_timeout
        )


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

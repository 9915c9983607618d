"""MooncakeStore: records in a Mooncake Store, the pool of several machines' memory.

Its calls may block for ever, so each has a thread of its own and is given up after its deadline.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from kvchat.cache.shared.store import MOST_HEAD_BYTES, Deadlines, SharedStore, StoreTrouble
from kvchat.cache.shared.team_key import missing_extra
from kvchat.core.errors import UsageError

T = TypeVar("T")

# The client's log would be written into the chat.
_QUIET = {"GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR"}
# Memory through which values pass, in bytes; the pool gets none of this machine's own.
_BUFFER_BYTES = 64 << 20
# Joining a pool takes longer than a call.
_JOINING_S = 10.0
_ADDRESS = "mooncake://MASTER:PORT?metadata=http://HOST:PORT/metadata&host=THIS_HOST"


class MooncakeStore(SharedStore):
    """Records of the pool that a master manages; the master evicts them as it likes.

    `url` names the master. Its query has `metadata`, the address of the pool's metadata server, and
    may have `host`, under which others reach this machine.
    """

    def __init__(self, url: str, deadlines: Deadlines) -> None:
        parts, query = urlsplit(url), parse_qs(urlsplit(url).query)
        if not parts.netloc or "metadata" not in query:
            raise UsageError("The address of a Mooncake Store has a metadata server.", _ADDRESS)
        self._deadlines = deadlines
        self._master = parts.netloc
        self._metadata = query["metadata"][0]
        self._host = query.get("host", ["127.0.0.1"])[0]
        self._new_client = _new_client()
        self._client: Any = None
        self._running: threading.Thread | None = None

    def ping(self) -> None:
        self._ask(lambda client: client.is_exist("kvchat"))

    def heads(self, group: str, names: Sequence[str]) -> Mapping[str, bytes]:
        own = [_head(group, name) for name in names]
        is_there = self._ask(lambda client: client.batch_is_exist(own))
        found = [name for name, there in zip(names, is_there, strict=True) if there == 1]
        keys = [_head(group, name) for name in found]
        values = self._ask(lambda client: client.get_batch(keys)) if keys else []
        return {
            name: bytes(value)
            for name, value in zip(found, values, strict=True)
            if 0 < len(value) <= MOST_HEAD_BYTES
        }

    def payload(self, group: str, name: str, most_bytes: int) -> bytes | None:
        key = _payload(group, name)

        def get(client: Any) -> bytes | None:
            size = client.get_size(key)
            return client.get(key) if 0 < size <= most_bytes else None

        return self._ask(get, self._deadlines.whole_s) or None

    def put(
        self, group: str, name: str, head: bytes, payload: bytes | memoryview, ttl_s: int
    ) -> None:
        def put(client: Any) -> None:
            for key, value in ((_payload(group, name), payload), (_head(group, name), head)):
                if (code := client.upsert(key, bytes(value))) != 0:
                    raise StoreTrouble(f"it refuses with code {code}")

        self._ask(put, self._deadlines.whole_s)

    def remove(self, group: str, names: Sequence[str]) -> None:
        keys = [key(group, name) for name in names for key in (_head, _payload)]

        # Also what was read a moment ago, which the pool would keep for a while.
        self._ask(lambda client: client.batch_remove(keys, True), self._deadlines.whole_s)

    def close(self) -> None:
        with suppress(StoreTrouble):
            if self._client is not None:
                self._ask(lambda client: client.close())

    def _ask(self, call: Callable[[Any], T], timeout_s: float | None = None) -> T:
        timeout_s = self._deadlines.first_s if timeout_s is None else timeout_s
        if self._client is None:
            self._client = self._within(_JOINING_S, self._join)
        return self._within(timeout_s, lambda: call(self._client))

    def _join(self) -> Any:
        client = self._new_client()
        code = client.setup(self._host, self._metadata, 0, _BUFFER_BYTES, "tcp", "", self._master)
        if code != 0:
            raise StoreTrouble(f"its pool cannot be joined, code {code}")
        return client

    def _within(self, timeout_s: float, call: Callable[[], T]) -> T:
        """Return what a call returns; raise StoreTrouble if it fails or takes too long."""
        if self._running is not None and self._running.is_alive():
            raise StoreTrouble("it has not answered yet")
        results: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                results.append(call())
            except Exception as error:
                errors.append(error)

        self._running = threading.Thread(target=run, name="kvchat-mooncake", daemon=True)
        self._running.start()
        self._running.join(timeout_s)
        if errors:
            trouble = str(errors[0]) if isinstance(errors[0], StoreTrouble) else "it fails"
            raise StoreTrouble(trouble) from errors[0]
        if not results:
            raise StoreTrouble("it did not answer in time")
        return results[0]


def _new_client() -> Callable[[], Any]:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:  # of its own libraries too: libibverbs1, libnuma1
        raise missing_extra("mooncake-transfer-engine-non-cuda", "mooncake") from error
    client: Callable[[], Any] = MooncakeDistributedStore
    return client


def _head(group: str, name: str) -> str:
    return f"kvchat/{group}/{name}/head"


def _payload(group: str, name: str) -> str:
    return f"kvchat/{group}/{name}/kv"

"""BucketStore: records as objects in a bucket of S3, GCS or Azure, or as files in a directory.

Heads that are looked up are read in parallel: an object store has no call for several.
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from kvchat.cache.shared.store import MOST_HEAD_BYTES, Deadlines, SharedStore, StoreTrouble
from kvchat.cache.shared.team_key import missing_extra
from kvchat.core.errors import UsageError

try:
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import LocalStore, from_url
except ImportError as error:
    raise missing_extra("obstore") from error

T = TypeVar("T")

_PREFIX = "kvchat"
# Objects that are asked for at the same time.
_AT_ONCE = 64


class BucketStore(SharedStore):
    """Objects below `kvchat/` of what a URL names.

    Objects do not end by themselves: a rule of the bucket does that, or who owns the directory. An
    expired one is a miss, for the head says when it was written.
    """

    def __init__(self, url: str, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        try:
            self._store = _opened(url, deadlines)
        except (BaseError, ValueError, OSError) as error:
            raise UsageError(f"The shared cache's address cannot be used: {error}.") from error

    def ping(self) -> None:
        self._run(self._read(f"{_PREFIX}/ping", 1), self._deadlines.first_s)

    def heads(self, group: str, names: Sequence[str]) -> Mapping[str, bytes]:
        async def read_all() -> list[bytes | None]:
            places = asyncio.Semaphore(_AT_ONCE)

            async def read(name: str) -> bytes | None:
                async with places:
                    return await self._read(_head(group, name), MOST_HEAD_BYTES)

            return await asyncio.gather(*map(read, names))

        rounds = 1 + len(names) // _AT_ONCE
        found = self._run(read_all(), 2 * rounds * self._deadlines.first_s)
        return {name: head for name, head in zip(names, found, strict=True) if head is not None}

    def payload(self, group: str, name: str, most_bytes: int) -> bytes | None:
        return self._run(self._read(_payload(group, name), most_bytes), self._deadlines.whole_s)

    def put(
        self, group: str, name: str, head: bytes, payload: bytes | memoryview, ttl_s: int
    ) -> None:
        async def put() -> None:
            await obstore.put_async(self._store, _payload(group, name), payload)
            await obstore.put_async(self._store, _head(group, name), head)

        self._run(put(), self._deadlines.whole_s)

    def remove(self, group: str, names: Sequence[str]) -> None:
        async def remove(path: str) -> None:
            try:
                await obstore.delete_async(self._store, path)
            except FileNotFoundError:
                return

        async def remove_all() -> None:
            paths = [path(group, name) for name in names for path in (_head, _payload)]
            for start in range(0, len(paths), _AT_ONCE):
                await asyncio.gather(*map(remove, paths[start : start + _AT_ONCE]))

        self._run(remove_all(), self._deadlines.whole_s)

    async def _read(self, path: str, most_bytes: int) -> bytes | None:
        """Return an object of at most `most_bytes`; None if there is none, or a larger one."""
        try:
            found = await obstore.get_async(self._store, path)
        except FileNotFoundError:
            return None
        if found.meta["size"] > most_bytes:
            return None
        parts, num_bytes = [], 0
        async for part in found.stream():
            parts.append(bytes(part))
            num_bytes += len(part)
            if num_bytes > most_bytes:
                return None
        return b"".join(parts)

    def _run(self, work: Awaitable[T], timeout_s: float) -> T:
        async def within() -> T:
            async with asyncio.timeout(timeout_s):
                return await work

        try:
            return asyncio.run(within())
        except TimeoutError:
            raise StoreTrouble("it did not answer in time") from None
        except (BaseError, OSError, ValueError) as error:
            raise StoreTrouble(type(error).__name__) from error


def _opened(url: str, deadlines: Deadlines) -> Any:
    if urlsplit(url).scheme == "file":
        path = unquote(urlsplit(url).path)
        return LocalStore(path, mkdir=True)
    first = timedelta(seconds=max(deadlines.first_s, 0.001))
    whole = timedelta(seconds=deadlines.whole_s)
    return from_url(
        url,
        client_options={"connect_timeout": first, "timeout": whole, "allow_http": True},
        retry_config={"max_retries": 0, "retry_timeout": whole},
    )


def _head(group: str, name: str) -> str:
    return f"{_PREFIX}/{group}/{name}.head"


def _payload(group: str, name: str) -> str:
    return f"{_PREFIX}/{group}/{name}.kv"

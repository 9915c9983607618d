"""SharedStore: what a shared tier needs of a store of named records.

A record is two values: a small head and a payload. A lookup reads heads, many in one round trip.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvchat.core.errors import UsageError

# No head is larger; a store that says so is not believed.
MOST_HEAD_BYTES = 1 << 20


Payload = bytes | memoryview


# The beginnings of addresses, by the kind of store.
SERVERS, BUCKETS, POOLS = (
    ("valkey", "valkeys", "redis", "rediss"),
    ("file", "s3", "gs", "az"),
    ("mooncake",),
)


def scheme_of(url: str) -> str:
    """Return the beginning of a store's address. Raises UsageError for that of no store."""
    scheme = urlsplit(url).scheme
    if scheme not in (*SERVERS, *BUCKETS, *POOLS):
        raise UsageError(
            f"{scheme or url}: is not the beginning of a shared cache's address.",
            "Give valkey://, redis://, rediss://, s3://, gs://, az://, mooncake:// or file://.",
        )
    return scheme


class StoreTrouble(Exception):
    """A store did not do what it was asked; `str()` of the error says why, in a few words."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a call may wait, in seconds.

    first_s      for a connection or the first byte of an answer
    whole_s      for all of a payload
    """

    first_s: float = 0.05
    whole_s: float = 10.0


class SharedStore(ABC):
    """Records by name, in a store that is not trusted. One thread uses it at a time.

    Every call ends within the store's deadlines, and raises StoreTrouble where it failed. Nothing
    is read that is larger than the caller allows.
    """

    @abstractmethod
    def ping(self) -> None:
        """Ask the store for something small, so that the time of a round trip is known."""

    @abstractmethod
    def heads(self, group: str, names: Sequence[str]) -> Mapping[str, bytes]:
        """Return the heads that there are of records of a group, by name."""

    @abstractmethod
    def payload(self, group: str, name: str, most_bytes: int) -> Payload | None:
        """Return a payload of at most `most_bytes`; None if there is none.

        The next call may overwrite its memory.
        """

    @abstractmethod
    def put(
        self, group: str, name: str, head: bytes, payload: bytes | memoryview, ttl_s: int
    ) -> None:
        """Store a record, the payload first; it may go after `ttl_s` seconds."""

    @abstractmethod
    def remove(self, group: str, names: Sequence[str]) -> None:
        """Remove records; those that are not there are no error."""

    def close(self) -> None:  # noqa: B027
        """End the connections."""

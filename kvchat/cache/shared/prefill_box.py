"""PrefillBox: the machine that prefills prompts on request, as `kvchat serve --role prefill` does.

Token ids go there sealed with the team's key; KV comes through the shared store.
"""

import json
import math
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

from kvchat.cache.keys import KEY_BYTES, TOKEN_BYTES
from kvchat.cache.shared.store import StoreTrouble
from kvchat.cache.shared.team_key import SEAL_BYTES, TeamKey
from kvchat.cache.tier import DamagedRecord, Layout
from kvchat.core.stats import num_like_first
from kvchat.core.text import one_line

PATH = "/kvchat/prefill"
_MOST_ANSWER_BYTES = 1 << 16
# Waiting costs a chat no time: it computes meanwhile.
_CONNECTING_S, _OFFERING_S, _PREFILLING_S = 2.0, 10.0, 3600.0
_PART, _PLACE = b"prompt", Layout(b"kvchat prefill  ", 1, 1)
_MOST_REASON_CHARS = 200


class PromptKey:
    """Seals the token ids that go to a box, and names who may ask it. `secret` is the team's."""

    def __init__(self, secret: str) -> None:
        # Prompts are encrypted even where the records of a store are not.
        self._key = TeamKey(secret, _PLACE)

    @property
    def bearer(self) -> str:
        """The API key of the box: who has the team's key has it too."""
        return self._key.name(b"bearer")

    def seal(self, encoded: bytes) -> bytes:
        return self._key.seal(_PART, b"", encoded)

    def opened(self, sealed: bytes) -> list[int] | None:
        """Return the token ids of a sealed prompt; None if it is none of this team's."""
        if len(sealed) <= SEAL_BYTES - 1 - TOKEN_BYTES:
            return None
        try:
            content = self._key.open(_PART, b"", sealed)
        except DamagedRecord:
            return None
        return list(content.cast("i")) if not len(content) % TOKEN_BYTES else None


@dataclass(frozen=True, slots=True)
class Offer:
    """What a box computes: `root` is the key of the empty context there, `form` says in words how
    its KV is stored, and `tokens_per_s` with `half_context` how fast it prefills, if it knows.
    """

    root: bytes
    form: Mapping[str, str] = field(default_factory=dict)
    tokens_per_s: float | None = None
    half_context: float = math.inf

    @classmethod
    def of(cls, told: object) -> "Offer":
        """Return the offer in a JSON object; raises StoreTrouble if it is none."""
        fields = told if isinstance(told, dict) else {}
        form, rate = fields.get("form"), fields.get("tokens_per_s")
        half = fields.get("half_context")
        try:
            root = bytes.fromhex(str(fields.get("root")))
        except ValueError:
            root = b""
        if len(root) != KEY_BYTES or not isinstance(form, dict):
            raise StoreTrouble("it does not prefill for others")
        words = {str(name): one_line(str(value), 40) for name, value in form.items()}
        return cls(root, words, _positive(rate), _positive(half) or math.inf)

    def seconds_for(self, num_tokens: int) -> float | None:
        """Return how long it takes to prefill a prompt; None if that is not known."""
        if self.tokens_per_s is None:
            return None
        return num_like_first(0, num_tokens, self.half_context) / self.tokens_per_s


def _positive(value: object) -> float | None:
    is_number = isinstance(value, int | float) and math.isfinite(value) and value > 0
    return float(value) if is_number else None  # type: ignore[arg-type]


class PrefillBox:
    """The box at `url`; `secret` is the team's. One thread asks it; any may interrupt that.

    Every call raises StoreTrouble where the box does not do what it was asked.
    """

    def __init__(self, url: str, secret: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port
        self._path = parts.path.rstrip("/") + PATH
        self._new = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._key = PromptKey(secret)
        self._connection: HTTPConnection | None = None
        self._is_interrupted = False

    def offer(self) -> Offer:
        """Return what the box computes."""
        return Offer.of(self._ask("GET", b"", _OFFERING_S))

    def prefill(self, encoded: bytes) -> int:
        """Have the box prefill encoded token ids; return how many of them the store then has.

        That takes as long as it does: `interrupt` ends it.
        """
        told = self._ask("POST", self._key.seal(encoded), _PREFILLING_S)
        count = told.get("num_tokens") if isinstance(told, dict) else None
        if not isinstance(count, int) or not count:
            raise StoreTrouble("it put nothing into the shared cache")
        return count

    def interrupt(self) -> None:
        """End the call that waits, on any thread: the box sees that and stops computing."""
        self._is_interrupted = True
        connection = self._connection
        sock = connection.sock if connection is not None else None
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _ask(self, method: str, body: bytes, within_s: float) -> object:
        connection = self._new(self._host, self._port, timeout=_CONNECTING_S)
        self._connection = connection
        headers = {
            "Authorization": f"Bearer {self._key.bearer}",
            "Content-Type": "application/octet-stream",
        }
        try:
            connection.connect()
            if self._is_interrupted:  # before there was a socket to shut
                raise StoreTrouble("it was interrupted")
            connection.sock.settimeout(within_s)
            connection.request(method, self._path, body, headers)
            response = connection.getresponse()
            told = _json(response.read(_MOST_ANSWER_BYTES + 1))
        except TimeoutError as error:
            raise StoreTrouble("it did not answer in time") from error
        except (OSError, HTTPException, ValueError) as error:
            raise StoreTrouble("it cannot be reached") from error
        finally:
            self._connection, self._is_interrupted = None, False
            connection.close()
        if response.status != 200:
            raise StoreTrouble(_refusal(response.status, told))
        return told


def _json(data: bytes) -> object:
    if len(data) > _MOST_ANSWER_BYTES:
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _refusal(status: int, told: object) -> str:
    """Return why a box refuses, in a few words."""
    if status == 401:
        return "it has another team's key"
    error = told.get("error") if isinstance(told, dict) else None
    reason = error.get("message") if isinstance(error, dict) else None
    words = one_line(reason, _MOST_REASON_CHARS).rstrip(".") if isinstance(reason, str) else ""
    return f"it refuses: {words}" if words else f"it refuses with status {status}"

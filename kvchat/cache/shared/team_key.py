"""TeamKey: names and seals the records of a shared store, for those who have the same secret.

A store is not trusted. A record's name tells nothing of what it holds: it is a keyed hash of a
chain key. Its bytes are encrypted with AES-256-GCM (NIST SP 800-38D) or, where that is refused,
signed with HMAC-SHA256 (RFC 2104). Either holds only for the place that the record was sealed for:
a record under another name, of another model or of another shape of KV does not open.
"""

import hashlib
import hmac
import os
from collections.abc import Callable
from typing import Protocol

from kvchat.cache.tier import DamagedRecord, Layout
from kvchat.core.errors import UsageError

LEAST_SECRET = 16
_MAGIC = b"kvchat1"
_ENCRYPTED, _SIGNED = b"e", b"s"
_NONCE_BYTES, _TAG_BYTES, _MAC_BYTES = 12, 16, 32
# More than a sealed part has beside its content.
SEAL_BYTES = len(_MAGIC) + 1 + _NONCE_BYTES + _MAC_BYTES
# The cost of a guess at a secret (RFC 7914): 16 MiB and some 50 ms.
_COST = {"n": 1 << 14, "r": 8, "p": 1}


def _fresh(num_bytes: int) -> memoryview:
    return memoryview(bytearray(num_bytes))


def require_secret(secret: str) -> None:
    """Raise UsageError for a secret that is guessed too easily."""
    if len(secret) < LEAST_SECRET:
        raise UsageError(
            f"The key of the shared cache has less than {LEAST_SECRET} characters.",
            "`openssl rand -hex 32` makes one.",
        )


class _Cipher(Protocol):
    """AES-GCM, as `cryptography` has it."""

    def encrypt(self, nonce: bytes, data: memoryview, associated_data: bytes | None) -> bytes:
        """Return the encrypted bytes and their tag."""

    def decrypt_into(
        self, nonce: bytes, data: memoryview, associated_data: bytes | None, buf: memoryview
    ) -> int:
        """Write the bytes to `buf`, which has as many as they are; raises InvalidTag."""


class TeamKey:
    """Seals and opens the parts of records for one layout. Any thread may use it.

    `secret` is what the team shares, `LEAST_SECRET` characters at least. What this key seals is
    encrypted if `encrypts`; it opens both forms, which only the secret's owners can make.
    """

    def __init__(self, secret: str, layout: Layout, encrypts: bool = True) -> None:
        require_secret(secret)
        whole = hashlib.scrypt(secret.encode(), salt=_MAGIC, dklen=96, **_COST)
        self._naming, self._signing = whole[:32], whole[32:64]
        self._cipher = _cipher(whole[64:])
        self._encrypts = encrypts
        shape = f"{layout.block_size} {layout.block_bytes}".encode()
        self._place = _MAGIC + layout.identity + shape

    def name(self, key: bytes) -> str:
        """Return the name of the record that begins with the block of a chain key."""
        return hmac.new(self._naming, self._place + key, "sha256").hexdigest()[:40]

    def seal(self, part: bytes, key: bytes, content: bytes | memoryview) -> bytes:
        """Return the sealed bytes of a part of the record of `key`."""
        form = _ENCRYPTED if self._encrypts else _SIGNED
        place = self._place + form + part + key
        if not self._encrypts:
            mac = hmac.new(self._signing, place, "sha256")
            mac.update(content)
            return b"".join((_MAGIC, form, mac.digest(), content))
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, memoryview(content), place)
        return b"".join((_MAGIC, form, nonce, sealed))

    def open(
        self,
        part: bytes,
        key: bytes,
        sealed: bytes | memoryview,
        new_buffer: Callable[[int], memoryview] = _fresh,
    ) -> memoryview:
        """Return the content of a sealed part, in what `new_buffer` returns for its size.

        Raises DamagedRecord if it was not sealed with this key, as this part of that record.
        """
        view = memoryview(sealed)
        start = len(_MAGIC) + 1
        form = bytes(view[len(_MAGIC) : start])
        if bytes(view[: len(_MAGIC)]) != _MAGIC or form not in (_ENCRYPTED, _SIGNED):
            raise DamagedRecord("of another form")
        place = self._place + form + part + key
        if form == _SIGNED:
            return self._verified(place, view[start:], new_buffer)
        return self._decrypted(place, view[start:], new_buffer)

    def _decrypted(
        self, place: bytes, view: memoryview, new_buffer: Callable[[int], memoryview]
    ) -> memoryview:
        from cryptography.exceptions import InvalidTag

        if len(view) < _NONCE_BYTES + _TAG_BYTES:
            raise DamagedRecord("truncated")
        nonce, data = bytes(view[:_NONCE_BYTES]), view[_NONCE_BYTES:]
        content = new_buffer(len(data) - _TAG_BYTES)
        try:
            self._cipher.decrypt_into(nonce, data, place, content)
        except InvalidTag:
            raise DamagedRecord("of another key") from None
        return content

    def _verified(
        self, place: bytes, view: memoryview, new_buffer: Callable[[int], memoryview]
    ) -> memoryview:
        mac, signed = bytes(view[:_MAC_BYTES]), view[_MAC_BYTES:]
        content = new_buffer(len(signed))
        content[:] = signed
        own = hmac.new(self._signing, place, "sha256")
        own.update(content)
        if not hmac.compare_digest(own.digest(), mac):
            raise DamagedRecord("of another key")
        return content


def _cipher(key: bytes) -> _Cipher:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise missing_extra("cryptography") from error
    return AESGCM(key)


def missing_extra(package: str, extra: str = "shared") -> UsageError:
    """Return the error for a package that the shared cache needs, and that is not installed."""
    return UsageError(
        f"The shared cache needs the package {package}, which is not installed.",
        f"pip install 'kvchat[{extra}]' installs it.",
    )

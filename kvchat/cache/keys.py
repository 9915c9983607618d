"""Token ids as bytes, and the chain keys of blocks.

A block's key is a hash of its token ids and the key of the block before it. Equal keys mean equal
contexts up to and including the block, under one identity.
"""

import hashlib
import threading
from array import array
from collections import deque

from kvchat.core.types import TokenIds

TOKEN_BYTES = array("i").itemsize
# An id that no context holds.
NO_TOKEN = -1


def encode_ids(token_ids: TokenIds) -> bytes:
    """Return token ids as the tree stores and compares them: native 32-bit integers."""
    if isinstance(token_ids, array) and token_ids.typecode == "i":
        return token_ids.tobytes()
    return array("i", token_ids).tobytes()


def common_tokens(one: bytes, other: bytes) -> int:
    """Return how many leading token ids two encoded sequences share."""
    length = min(len(one), len(other)) // TOKEN_BYTES
    low, high = 0, length
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * TOKEN_BYTES] == other[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


KEY_BYTES = 16


def root_key(identity: bytes) -> bytes:
    """Return the key of the empty context of an identity."""
    return hashlib.blake2b(identity, digest_size=KEY_BYTES, person=b"kvchat root").digest()


def chain_keys(parent: bytes, encoded: bytes, block_bytes: int) -> list[bytes]:
    """Return the key of every full block of `encoded` token ids that follow `parent`.

    `block_bytes` is the length of a block's encoded ids; an incomplete last block has no key.
    """
    keys = []
    for start in range(0, len(encoded) - block_bytes + 1, block_bytes):
        ids = encoded[start : start + block_bytes]
        parent = hashlib.blake2b(parent + ids, digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys


# The root of keys that stay within this process, so they need no model identity.
LOCAL_ROOT = root_key(b"")
# Contexts remembered: those that grow at the same time; a chat has a few.
_MAX_CONTEXTS = 8


class KeyMemo:
    """Remembers the chain keys of recent contexts, so that a grown context hashes only new blocks.

    A block has `block_bytes` encoded bytes. Any thread may use it.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._contexts: dict[bytes, deque[tuple[bytes, list[bytes]]]] = {}  # by their roots

    def keys_of(self, root: bytes, encoded: bytes) -> list[bytes]:
        """Return the key of each full block of encoded token ids that begin at a root, as
        `chain_keys` does.
        """
        encoded = encoded[: len(encoded) // self._block_bytes * self._block_bytes]
        with self._lock:
            contexts = self._contexts.setdefault(root, deque(maxlen=_MAX_CONTEXTS))
            beginning: list[bytes] = []
            for context in contexts:
                known, keys = context
                if known.startswith(encoded):
                    return keys[: len(encoded) // self._block_bytes]
                if encoded.startswith(known):
                    contexts.remove(context)
                    beginning = keys
                    break
            rest = encoded[len(beginning) * self._block_bytes :]
            parent = beginning[-1] if beginning else root
            keys = [*beginning, *chain_keys(parent, rest, self._block_bytes)]
            if keys:
                contexts.appendleft((encoded, keys))
            return keys[:]

    def local(self, encoded: bytes) -> list[bytes]:
        """Return the keys that are used within this process."""
        return self.keys_of(LOCAL_ROOT, encoded)

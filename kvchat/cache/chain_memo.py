"""ChainMemo: the chain keys of contexts that grow, each block hashed once.

A conversation asks for the keys of nearly the same ids again and again. Knows bytes only; its plain
twin is `chain_keys`.
"""

from collections import deque

from kvchat.cache.block_key import chain_keys

# Contexts remembered: those that grow at the same time, in a chat a handful.
_MAX_CONTEXTS = 8


class ChainMemo:
    """Chain keys below `root` of blocks of `block_bytes` packed bytes. One thread owns a memo."""

    def __init__(self, root: bytes, block_bytes: int) -> None:
        self._root = root
        self._block_bytes = block_bytes
        self._contexts: deque[tuple[bytes, list[bytes]]] = deque(maxlen=_MAX_CONTEXTS)

    def keys_of(self, packed: bytes) -> list[bytes]:
        """Return what `chain_keys` would: the key of each full block of packed token ids."""
        packed = packed[: len(packed) // self._block_bytes * self._block_bytes]
        for context in self._contexts:
            known, keys = context
            if known.startswith(packed):
                return keys[: len(packed) // self._block_bytes]
            if packed.startswith(known):
                self._contexts.remove(context)
                return self._remembered(packed, [*keys, *self._more(keys, packed)])
        return self._remembered(packed, self._more([], packed))

    def _more(self, keys: list[bytes], packed: bytes) -> list[bytes]:
        parent = keys[-1] if keys else self._root
        return chain_keys(parent, packed[len(keys) * self._block_bytes :], self._block_bytes)

    def _remembered(self, packed: bytes, keys: list[bytes]) -> list[bytes]:
        if keys:
            self._contexts.appendleft((packed, keys))
        return keys[:]

"""Chain keys: a block's name is made of its token ids and the name of the block before it.

Equal keys mean equal contexts up to and including the block, under one identity. Knows bytes only.
"""

import hashlib

KEY_BYTES = 16


def root_key(identity: bytes) -> bytes:
    """Return the key of the empty context of an identity."""
    return hashlib.blake2b(identity, digest_size=KEY_BYTES, person=b"kvchat root").digest()


def chain_keys(parent: bytes, packed: bytes, block_bytes: int) -> list[bytes]:
    """Return the key of every full block of `packed` token ids that follow `parent`.

    `block_bytes` is the length of a block's packed ids; what is left over has no key.
    """
    keys = []
    for start in range(0, len(packed) - block_bytes + 1, block_bytes):
        ids = packed[start : start + block_bytes]
        parent = hashlib.blake2b(parent + ids, digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys

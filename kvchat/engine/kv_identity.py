"""What stored KV is good for: a digest of all that decides the numbers in a block.

Weights that differ in one value, another dtype, block size or frozen position encoding give another
identity, and so never meet each other's KV. Knows facts and their digest; reads nothing.
"""

import hashlib
import json

from kvchat.cache.codec import FORMAT_VERSION
from kvchat.cache.kv_pool import KvGeometry
from kvchat.model.device import dtype_name
from kvchat.model.loader import LoadedModel

# Raise it whenever what a slot holds for the same token changes: the layout of a block image, or
# what the attention writes to it.
_KV_VERSION = 3


def kv_identity(loaded: LoadedModel, geometry: KvGeometry, content_digest: str) -> bytes:
    """Return 16 bytes that name the KV a model computes, as this engine stores it."""
    facts = {
        "version": _KV_VERSION,
        "format": FORMAT_VERSION,
        "content": content_digest,
        "dtype": dtype_name(loaded.dtype),
        "weights": loaded.weights,
        "kv_dtype": dtype_name(geometry.dtype),
        "block_size": geometry.block_size,
        "layers": [(x.num_kv_heads, x.key_dim, x.value_dim) for x in geometry.layers],
        "rope": [*loaded.frozen_rope, loaded.max_context] if loaded.frozen_rope else [],
    }
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).digest()

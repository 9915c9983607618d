"""Plans: how many sessions fit in memory, in contiguous reservations and in blocks; a small run.

A contiguous cache reserves for each session the longest context that it may get. One of blocks
holds what sessions have, rounded up to a block. `run_small` fills a real pool and counts.
"""

from dataclasses import dataclass

import torch

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.kv_pool import KvGeometry, KvPool, LayerGeometry
from kvchat.engine.sizing import ModelSize

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """What a memory of `memory_bytes` holds of sessions of so many tokens.

    reserve_bytes   kept free for activations and the program itself
    reserved_tokens   the context that a contiguous cache reserves for each session
    """

    size: ModelSize
    memory_bytes: int
    reserve_bytes: int
    num_tokens: int
    reserved_tokens: int
    kv_dtype: str = "auto"

    @property
    def kv_budget(self) -> int:
        """Bytes left for KV."""
        return max(0, self.memory_bytes - self.reserve_bytes - self.size.weight_bytes)

    @property
    def session_bytes(self) -> int:
        """Bytes of a session's KV in whole blocks."""
        return self.size.kv_bytes(_whole_blocks(self.num_tokens), self.kv_dtype)

    @property
    def num_contiguous(self) -> int:
        return self.kv_budget // self.size.kv_bytes(self.reserved_tokens, self.kv_dtype)

    @property
    def num_paged(self) -> int:
        return self.kv_budget // self.session_bytes


def _whole_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def run_small(plan: Plan) -> tuple[int, int]:
    """Return how many sessions a real pool holds, reserved whole and in blocks.

    The pool has the plan's blocks, with a few bytes a token; sessions are taken until it is full.
    """
    num_blocks = plan.kv_budget // plan.size.kv_bytes(BLOCK_TOKENS, plan.kv_dtype)
    geometry = KvGeometry((LayerGeometry(1, 1, 1),), torch.bfloat16, BLOCK_TOKENS)
    counts = []
    for tokens in (plan.reserved_tokens, plan.num_tokens):
        # One block of a pool is scratch.
        cache = CacheManager(KvPool(geometry, num_blocks + 1, torch.device("cpu")))
        counts.append(_fill(cache, tokens))
    return counts[0], counts[1]


def _fill(cache: CacheManager, num_tokens: int) -> int:
    """Return how many sessions of so many tokens find room beside each other."""
    count = 0
    while cache.reserve(cache.match([count]), 0, num_tokens):
        count += 1
    return count

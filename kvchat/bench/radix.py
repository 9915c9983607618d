"""Scenario `radix`: the time of a prefix match of a long prompt among many cached blocks.

Measures the radix tree alone, without KV.
"""

from kvchat.bench.engines import random_ids
from kvchat.bench.measure import timed
from kvchat.bench.report import Result, compared
from kvchat.bench.setup import BenchSetup
from kvchat.cache.keys import encode_ids
from kvchat.cache.radix_tree import RadixTree

_NUM_BLOCKS = 100_000
_PROMPT_TOKENS = 32_768
_SHARED_TOKENS = 512
_VOCAB_SIZE = 32_000


def run(setup: BenchSetup) -> Result:
    """Measure a match, and for comparison only its first part, the packing of the ids."""
    block_size = setup.cache.block_size
    num_blocks = _NUM_BLOCKS // 32 if setup.is_quick else _NUM_BLOCKS
    prompt = random_ids(setup.scaled(_PROMPT_TOKENS), _VOCAB_SIZE, seed=0)
    tree = _grown_tree(prompt, num_blocks, block_size)
    found = len(tree.match(encode_ids(prompt)).blocks) * block_size
    if found != len(prompt) // block_size * block_size:
        return Result("radix", {}, refusal=f"{found} of {len(prompt)} tokens were found")
    match = timed(lambda: tree.match(encode_ids(prompt)), max(20, setup.repeats * 4))
    packing = timed(lambda: encode_ids(prompt), max(20, setup.repeats * 4))
    beside = "packing the ids alone"
    return Result(
        "radix",
        {"block_size": block_size, "blocks": tree.num_blocks, "prompt_tokens": len(prompt)},
        (compared("match", match, packing, "ms", beside, "match over packing", "5 ms"),),
    )


def _grown_tree(prompt: list[int], num_blocks: int, block_size: int) -> RadixTree:
    """Return a tree of many conversations with the prompt, split into nodes as turns split it."""
    tree = RadixTree(block_size)
    length = len(prompt) // block_size * block_size
    step = max(block_size, length // 64 // block_size * block_size)
    for end in range(step, length + 1, step):
        _insert(tree, prompt[:end], block_size)
    _insert(tree, prompt[:length], block_size)
    seed = 1
    while tree.num_blocks < num_blocks:
        shared = prompt[: min(_SHARED_TOKENS, length) // block_size * block_size]
        own = random_ids(4096 // block_size * block_size, _VOCAB_SIZE, seed)
        _insert(tree, shared + own, block_size)
        seed += 1
    return tree


def _insert(tree: RadixTree, token_ids: list[int], block_size: int) -> None:
    """Insert as a request does after a match. The locks keep the node from growing in place."""
    found = tree.match(encode_ids(token_ids))
    known = len(found.blocks)
    rest = token_ids[known * block_size :]
    first = tree.num_blocks + 1
    tree.lock(found.node)
    tree.lock(found.node)
    tree.insert(found.node, encode_ids(rest), list(range(first, first + len(rest) // block_size)))
    tree.unlock(found.node)
    tree.unlock(found.node)

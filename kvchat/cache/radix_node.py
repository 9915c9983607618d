"""Node of the radix tree, and token ids in the packed form the tree compares.

Knows how a run of token ids is stored and compared. Knows no tree: matching, splitting and evicting
are `radix_tree.py`'s.
"""

from array import array
from collections.abc import Iterator

from kvchat.core.types import TokenIds

TOKEN_BYTES = array("i").itemsize


def pack(token_ids: TokenIds) -> bytes:
    """Return token ids as the tree stores and compares them: native 32-bit integers."""
    if isinstance(token_ids, array) and token_ids.typecode == "i":
        return token_ids.tobytes()
    return array("i", token_ids).tobytes()


class Node:
    """An edge of the tree: `key` holds the packed token ids of `blocks`, in order.

    A tail is a leaf of one block whose key is shorter than a block. `lock_count` counts locks taken
    at this node or below it.
    """

    __slots__ = ("blocks", "children", "key", "last_used", "lock_count", "parent", "tails")

    def __init__(self, parent: "Node | None", key: bytes, blocks: list[int], now: int) -> None:
        self.parent = parent
        self.key = key
        self.blocks = blocks
        self.children: dict[bytes, Node] = {}
        self.tails: list[Node] = []
        self.lock_count = 0
        self.last_used = now

    @property
    def is_leaf(self) -> bool:
        return not self.children and not self.tails

    @property
    def is_root(self) -> bool:
        return self.parent is None


def path_to_root(node: Node) -> Iterator[Node]:
    """Yield `node` and its ancestors, the root included."""
    current: Node | None = node
    while current is not None:
        yield current
        current = current.parent


def common_tokens(one: bytes, other: bytes) -> int:
    """Return how many leading token ids two packed runs share."""
    length = min(len(one), len(other)) // TOKEN_BYTES
    low, high = 0, length
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * TOKEN_BYTES] == other[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low

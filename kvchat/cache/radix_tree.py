"""RadixTree: maps prefixes of token ids to the blocks that hold their KV.

A compressed trie over token ids, whose nodes end at block boundaries. It holds block numbers and
encoded token ids; tensors and reference counts are elsewhere. The tests compare it with a dict of
prefixes.

The idea is RadixAttention (Zheng et al., SGLang, 2024). Two things differ: a leaf may hold a partly
filled block (a *tail*), and a match may end inside a block, whose head the caller can copy.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from kvchat.cache.keys import TOKEN_BYTES, common_tokens


class Node:
    """An edge of the tree: `key` holds the encoded token ids of `blocks`, in order.

    A tail is a leaf of one block whose key is shorter than a block. `lock_count` counts locks taken
    at this node or below it.
    """

    __slots__ = (
        "blocks",
        "children",
        "key",
        "last_used",
        "lock_count",
        "parent",
        "tails",
    )

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


# With more children than this, the search for a shared head costs more than the few tokens it
# could save.
_MAX_HEADS_COMPARED = 64


@dataclass(frozen=True, slots=True)
class TreeMatch:
    """The longest known prefix of some token ids.

    node     the node whose end is the end of the matched full blocks
    blocks   the full blocks, in order
    head     a further block whose first `head_len` tokens match, or None
    """

    node: Node
    blocks: tuple[int, ...]
    head: int | None
    head_len: int


@dataclass(frozen=True, slots=True)
class TreeInsert:
    """The result of an insertion.

    node        the node whose end is the end of the inserted blocks
    kept        the tree's blocks for the inserted ids; a block that differs from the one offered
                means that the tree already had those ids
    displaced   blocks of tails that the inserted ids contain; no longer in the tree
    """

    node: Node
    kept: tuple[int, ...]
    displaced: tuple[int, ...]


class RadixTree:
    """Longest-prefix lookup over blocks of `block_size` token ids. One thread owns a tree.

    The tree does not own references to blocks: its owner acquires what `insert` keeps and releases
    what `insert`, `insert_tail` and `evict` hand back.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self._ticks = count(1)
        self._serial = count()
        self._num_blocks = 0
        self._num_locked_blocks = 0
        # Candidates for eviction, oldest first; entries go stale and are checked when popped.
        self._candidates: list[tuple[int, int, Node]] = []
        self.root = Node(None, b"", [], 0)
        self._moved_roots: dict[str, Node] = {}

    def moved_root(self, name: str) -> Node:
        """Return the root of the moved contexts of this name: a match that begins at `root` never
        finds them. One without blocks and locks may go when another one is made.
        """
        if name not in self._moved_roots:
            roots = self._moved_roots.items()
            self._moved_roots = {n: r for n, r in roots if not r.is_leaf or r.lock_count}
            self._moved_roots[name] = Node(None, b"", [], 0)
        return self._moved_roots[name]

    @property
    def moved_names(self) -> list[str]:
        """The names under which there may be moved contexts."""
        return list(self._moved_roots)

    @property
    def _roots(self) -> list[Node]:
        return [self.root, *self._moved_roots.values()]

    @property
    def num_locks(self) -> int:
        """The locks that are taken, on nodes of all contexts."""
        return sum(root.lock_count for root in self._roots)

    @property
    def num_blocks(self) -> int:
        """Blocks the tree holds, tails included."""
        return self._num_blocks

    @property
    def num_locked_blocks(self) -> int:
        """Blocks that cannot be evicted because their node, or one below it, is locked."""
        return self._num_locked_blocks

    # Looking up

    def match(self, encoded: bytes, root: Node | None = None) -> TreeMatch:
        """Find the longest known prefix of encoded token ids, of moved ones if `root` is theirs.

        Splits at most one node, so that `node` ends where the match ends, and marks the path as
        used now. The caller locks `node` before the next change to the tree.
        """
        node, matched, blocks = self._walk(encoded, root)
        if matched < len(node.blocks):
            node = self._split(node, matched)
        self._touch(node)
        head, head_len = self._best_head(node, encoded[len(blocks) * self._block_bytes :])
        return TreeMatch(node, tuple(blocks), head, head_len)

    def blocks_of(self, encoded: bytes, below: Node | None = None) -> list[int]:
        """Return the full blocks a match would find; changes nothing. With `below`, `encoded`
        continues the context that ends with that node, which may be a root of moved contexts.
        """
        return self._walk(encoded, below)[2]

    def find(self, encoded: bytes) -> tuple[Node, int]:
        """Return the last node that a match would enter, and the number of matching blocks; changes
        nothing. The node may end after the match.
        """
        node, _, blocks = self._walk(encoded)
        return node, len(blocks)

    def touch_below(self, node: Node, first_block: bytes) -> None:
        """Mark the context of `node` as used now, and its child that begins with `first_block`."""
        self._touch(node.children[first_block])

    def _walk(self, encoded: bytes, below: Node | None = None) -> tuple[Node, int, list[int]]:
        """Return the last node entered, how many of its blocks match, and all matching blocks."""
        node = below if below is not None else self.root
        matched, blocks = len(node.blocks), []
        position = 0
        while matched == len(node.blocks):
            child = node.children.get(encoded[position : position + self._block_bytes])
            if child is None:
                break
            node = child
            matched = self._common_blocks(node.key, encoded, position)
            blocks.extend(node.blocks[:matched])
            position += matched * self._block_bytes
        return node, matched, blocks

    def _common_blocks(self, key: bytes, encoded: bytes, position: int) -> int:
        """Return how many leading blocks of `key` equal `encoded` at `position`."""
        if encoded.startswith(key, position):
            return len(key) // self._block_bytes
        low, high = 0, len(key) // self._block_bytes
        while high - low > 1:
            middle = (low + high) // 2
            if encoded.startswith(key[: middle * self._block_bytes], position):
                low = middle
            else:
                high = middle
        return low

    def _best_head(self, node: Node, rest: bytes) -> tuple[int | None, int]:
        """Find the block below `node` that shares the most leading tokens with `rest`."""
        best, best_len = None, 0
        wanted = rest[: self._block_bytes]
        for candidate in self._heads(node):
            length = common_tokens(candidate.key[: self._block_bytes], wanted)
            if length > best_len:
                best, best_len = candidate, length
        if best is None:
            return None, 0
        if best in node.tails:
            best.last_used = next(self._ticks)
            self._note_candidate(best)
        return best.blocks[0], best_len

    def _heads(self, node: Node) -> Iterator[Node]:
        yield from node.tails
        if len(node.children) <= _MAX_HEADS_COMPARED:
            yield from node.children.values()

    # Growing

    def insert(self, node: Node, encoded: bytes, blocks: list[int]) -> TreeInsert:
        """Add full blocks below `node`; `encoded` holds their token ids.

        If the tree already has some of the ids, it keeps its own blocks for them. The caller holds
        a lock on `node`, moves it to the returned node, and still owns blocks not in `kept`.
        """
        assert len(encoded) == len(blocks) * self._block_bytes
        kept: list[int] = []
        displaced: list[int] = []
        num_own_locks = 1
        while len(kept) < len(blocks):
            position = len(kept) * self._block_bytes
            child = node.children.get(encoded[position : position + self._block_bytes])
            if child is None:
                rest = blocks[len(kept) :]
                node, gone = self._append(node, encoded[position:], rest, num_own_locks)
                kept.extend(rest)
                displaced.extend(gone)
            else:
                matched = self._common_blocks(child.key, encoded, position)
                node = self._split(child, matched) if matched < len(child.blocks) else child
                kept.extend(node.blocks)
                num_own_locks = 0
        self._touch(node)
        return TreeInsert(node, tuple(kept), tuple(displaced))

    def _append(
        self, node: Node, key: bytes, blocks: list[int], num_own_locks: int
    ) -> tuple[Node, list[int]]:
        """Add unknown blocks below `node`: to the node itself if it is a leaf that has no lock
        but the caller's.
        """
        displaced = self._drop_tails(node, key)
        self._num_blocks += len(blocks)
        if node.is_leaf and not node.is_root and node.lock_count == num_own_locks:
            node.key += key
            node.blocks.extend(blocks)
            self._num_locked_blocks += len(blocks) if num_own_locks else 0
            return node, displaced
        child = Node(node, key, list(blocks), next(self._ticks))
        node.children[key[: self._block_bytes]] = child
        self._note_candidate(child)
        return child, displaced

    def _drop_tails(self, node: Node, key: bytes) -> list[int]:
        """Remove the tails of `node` that `key` contains; return their blocks."""
        covered = [tail for tail in node.tails if key.startswith(tail.key)]
        for tail in covered:
            node.tails.remove(tail)
            tail.parent = None
            self._num_blocks -= 1
        return [tail.blocks[0] for tail in covered]

    def insert_tail(self, node: Node, encoded: bytes, block: int) -> tuple[bool, list[int]]:
        """Add a partly filled block below `node`.

        Returns whether the tree keeps it, and the blocks of shorter tails that it replaces. The
        tree does not keep it if it already has those ids.
        """
        assert 0 < len(encoded) < self._block_bytes
        if any(head.key.startswith(encoded) for head in (*node.tails, *node.children.values())):
            return False, []
        displaced = self._drop_tails(node, encoded)
        tail = Node(node, encoded, [block], next(self._ticks))
        node.tails.append(tail)
        self._num_blocks += 1
        self._note_candidate(tail)
        return True, displaced

    def _split(self, node: Node, num_blocks: int) -> Node:
        """Split `node` after `num_blocks`; return the new upper node.

        The old object becomes the lower node: a lock refers to a node's end, so the caller's
        handles stay valid.
        """
        assert node.parent is not None
        assert 0 < num_blocks < len(node.blocks)
        cut = num_blocks * self._block_bytes
        upper = Node(node.parent, node.key[:cut], node.blocks[:num_blocks], node.last_used)
        upper.lock_count = node.lock_count
        node.parent.children[node.key[: self._block_bytes]] = upper
        node.parent = upper
        node.key = node.key[cut:]
        node.blocks = node.blocks[num_blocks:]
        upper.children[node.key[: self._block_bytes]] = node
        return upper

    # Locking and evicting

    def lock(self, node: Node) -> None:
        """Keep `node` and its ancestors from eviction until `unlock`."""
        for ancestor in path_to_root(node):
            if ancestor.lock_count == 0:
                self._num_locked_blocks += len(ancestor.blocks)
            ancestor.lock_count += 1

    def unlock(self, node: Node) -> None:
        """Take back one `lock` of the same node."""
        for ancestor in path_to_root(node):
            assert ancestor.lock_count > 0
            ancestor.lock_count -= 1
            if ancestor.lock_count == 0:
                self._num_locked_blocks -= len(ancestor.blocks)
                self._note_candidate(ancestor)

    def evict(
        self,
        num_blocks: int,
        is_shared: Callable[[int], bool],
        on_leaving: Callable[[bytes, list[int]], None] | None = None,
    ) -> list[int]:
        """Remove up to `num_blocks` blocks from the tree; return them.

        Only leaves are evicted: the least recently used first, a leaf's last blocks first. Locked
        nodes stay. A block for which `is_shared` is true stays, and all blocks before it.
        `on_leaving` is called for full blocks, with the encoded ids of the context that ends with
        them and the blocks in order; not for those of moved contexts.
        """
        evicted: list[int] = []
        skipped = []
        while self._candidates and len(evicted) < num_blocks:
            entry = heapq.heappop(self._candidates)
            node = entry[2]
            if entry[0] != node.last_used or not self._is_evictable(node):
                self._note_candidate(node)
                continue
            context = self._context_of(node) if on_leaving is not None else None
            blocks = self._trim(node, num_blocks - len(evicted), is_shared)
            evicted.extend(blocks)
            is_whole = context is not None and len(context) % self._block_bytes == 0
            if on_leaving is not None and context is not None and blocks and is_whole:
                on_leaving(context, blocks[::-1])
            if not blocks:
                skipped.append(entry)
            elif node.blocks:
                self._note_candidate(node)
        for entry in skipped:
            heapq.heappush(self._candidates, entry)
        return evicted

    def _context_of(self, node: Node) -> bytes | None:
        """Return the encoded ids of everything from the root to a node's end; None if moved."""
        parts = list(path_to_root(node))
        return b"".join(part.key for part in reversed(parts)) if parts[-1] is self.root else None

    def _trim(self, node: Node, most: int, is_shared: Callable[[int], bool]) -> list[int]:
        """Remove up to `most` blocks from the end of a leaf; remove the leaf if it is empty."""
        blocks: list[int] = []
        while node.blocks and len(blocks) < most and not is_shared(node.blocks[-1]):
            blocks.append(node.blocks.pop())
        self._num_blocks -= len(blocks)
        if node.blocks:
            node.key = node.key[: len(node.blocks) * self._block_bytes]
        elif blocks:
            self._remove(node)
        return blocks

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        if node in parent.tails:
            parent.tails.remove(node)
        else:
            del parent.children[node.key[: self._block_bytes]]
        node.parent = None
        self._note_candidate(parent)

    def cut(self, encoded: bytes, num_blocks: int) -> list[int]:
        """Remove the blocks of `encoded` after its first `num_blocks`, and all blocks that continue
        them; return those blocks. If a part of that is locked, nothing is removed.
        """
        node, matched, blocks = self._walk(encoded[: (num_blocks + 1) * self._block_bytes])
        if len(blocks) <= num_blocks or node.lock_count:
            return []
        if matched > 1:
            self._split(node, matched - 1)
        self._remove(node)
        return self._drop([node])

    def cut_moved(self, name: str | None = None) -> list[int]:
        """Remove the moved contexts of a name, or all; return their blocks. If any of a name's is
        locked, none of them is removed.
        """
        names = self.moved_names if name is None else [name]
        free = [each for each in names if not self.moved_root(each).lock_count]
        return self._drop([self._moved_roots.pop(each) for each in free])

    def _drop(self, pending: list[Node]) -> list[int]:
        """Drop nodes that no parent has any more, and all below them; return their blocks."""
        gone: list[int] = []
        while pending:
            lower = pending.pop()
            lower.parent = None
            gone.extend(lower.blocks)
            pending.extend((*lower.children.values(), *lower.tails))
        self._num_blocks -= len(gone)
        return gone

    def _is_evictable(self, node: Node) -> bool:
        return node.parent is not None and node.is_leaf and node.lock_count == 0

    def _note_candidate(self, node: Node) -> None:
        if not self._is_evictable(node):
            return
        heapq.heappush(self._candidates, (node.last_used, next(self._serial), node))
        if len(self._candidates) > 2 * self._num_blocks + 64:
            self._drop_stale_candidates()

    def _drop_stale_candidates(self) -> None:
        newest = {id(e[2]): e for e in self._candidates if e[0] == e[2].last_used}
        self._candidates = [e for e in newest.values() if self._is_evictable(e[2])]
        heapq.heapify(self._candidates)

    def _touch(self, node: Node) -> None:
        """Mark `node` and its ancestors as used now: a parent is as recent as its newest child."""
        now = next(self._ticks)
        for ancestor in path_to_root(node):
            ancestor.last_used = now
        self._note_candidate(node)

    # Checking

    def nodes(self) -> Iterator[Node]:
        """Yield every node, roots and tails included."""
        pending = self._roots
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())
            pending.extend(node.tails)

    def check(self) -> None:
        """Check every invariant; raises AssertionError with the values that disagree."""
        seen: set[int] = set()
        candidates = {id(node) for stamp, _, node in self._candidates if stamp == node.last_used}
        for node in self.nodes():
            self._check_node(node)
            assert seen.isdisjoint(node.blocks), "a block stands in two nodes"
            seen.update(node.blocks)
            if self._is_evictable(node):
                assert id(node) in candidates, "an evictable leaf is not a candidate"
        assert len(seen) == self._num_blocks, (len(seen), self._num_blocks)
        locked = sum(len(node.blocks) for node in self.nodes() if node.lock_count)
        assert locked == self._num_locked_blocks, (locked, self._num_locked_blocks)

    def _check_node(self, node: Node) -> None:
        assert node.lock_count >= sum(child.lock_count for child in node.children.values())
        assert node.last_used >= max((c.last_used for c in node.children.values()), default=0)
        for first, child in node.children.items():
            assert child.parent is node
            assert child.blocks, "an empty child"
            assert len(child.key) == len(child.blocks) * self._block_bytes
            assert child.key[: self._block_bytes] == first
        for tail in node.tails:
            assert tail.parent is node
            assert tail.is_leaf
            assert tail.lock_count == 0
            assert len(tail.blocks) == 1
            assert 0 < len(tail.key) < self._block_bytes
            others = [*node.children.values(), *(t for t in node.tails if t is not tail)]
            assert not any(other.key.startswith(tail.key) for other in others)

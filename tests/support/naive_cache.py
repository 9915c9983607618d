"""NaivePrefixCache: the oracle for the radix tree, a dict of every known prefix."""

from collections.abc import Sequence


class NaivePrefixCache:
    """Knows every prefix ever inserted, and forgets one only when told."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._prefixes: dict[tuple[int, ...], int] = {}

    def insert(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Remember each full-block prefix, and the block that ends it; the first one wins."""
        for index, block in enumerate(blocks):
            prefix = tuple(token_ids[: (index + 1) * self.block_size])
            self._prefixes.setdefault(prefix, block)

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """Return the blocks of the longest known prefix."""
        blocks = []
        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
            block = self._prefixes.get(tuple(token_ids[:end]))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def forget(self, blocks: Sequence[int]) -> None:
        """Drop the prefixes that end in `blocks`; no longer prefix may remain."""
        gone = set(blocks)
        self._prefixes = {p: b for p, b in self._prefixes.items() if b not in gone}
        for prefix in self._prefixes:
            parent = prefix[: -self.block_size]
            assert not parent or parent in self._prefixes, "a prefix outlived its parent"

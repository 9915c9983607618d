"""Stores with packs of several models in them, as chats would have left them."""

import os
from dataclasses import dataclass
from pathlib import Path

from kvchat.cache.tier import Layout
from support.pack_chains import LAYOUT, open_tier, payload_files, save

OTHER = Layout(identity=b"another model...", block_size=4, block_bytes=80_000)
_NO_LIMIT = 1 << 40


@dataclass(frozen=True)
class StoredPacks:
    """Two models' packs: four of one, 14 tokens, two of which continue a third; one of 8 tokens."""

    directory: Path

    def damage(self) -> None:
        """Flip a bit in one payload of the model that has four packs."""
        path = payload_files(self.directory / LAYOUT.identity.hex())[0]
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    def spoil_table(self) -> None:
        """Put something else in the place of the other model's table."""
        (self.directory / OTHER.identity.hex() / "cache.db").write_bytes(b"no table at all" * 999)

    def age(self, seconds: float) -> None:
        """Have the other model's packs last used so long before now."""
        table = self.directory / OTHER.identity.hex() / "cache.db"
        used_s = table.stat().st_mtime - seconds
        os.utime(table, (used_s, used_s))


def stored_packs(directory: Path) -> StoredPacks:
    """Make a store; it is not open."""
    tier = open_tier(directory, _NO_LIMIT)
    for ids in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 9, 9], [7, 7, 7, 7]):
        save(tier, ids)
    tier.close()
    other = open_tier(directory, _NO_LIMIT, OTHER)
    save(other, [1, 2, 3, 4, 5, 6, 7, 8], OTHER)
    other.close()
    return StoredPacks(directory)

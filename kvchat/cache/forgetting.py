"""What goes when blocks are forgotten: they, and all that continues them. Pure functions."""

from collections.abc import Collection, Mapping

from kvchat.cache.retention import KnownPack, eviction_order


def cuts(packs: Mapping[bytes, KnownPack], keys: Collection[bytes]) -> list[tuple[bytes, int]]:
    """Return the packs that lose blocks and how many of each stay, what continues others
    first.

    Blocks after a forgotten one are no good without it, in the same pack and behind it.
    """
    gone = set(keys)
    num_kept: dict[bytes, int] = {}
    pending = dict(packs)
    while True:
        hit = {name: cut for name, pack in pending.items() if (cut := _cut(pack, gone)) is not None}
        if not hit:
            order = eviction_order(packs, b"")
            return [(name, num_kept[name]) for name in order if name in num_kept]
        for name, cut in hit.items():
            gone.update(pending.pop(name).keys[cut:])
        num_kept.update(hit)


def _cut(pack: KnownPack, gone: set[bytes]) -> int | None:
    """Return how many of a pack's blocks stay, None where all do."""
    if pack.parent in gone:
        return 0
    return next((number for number, key in enumerate(pack.keys) if key in gone), None)

"""Moves the KV of a context's end to other positions, for a context from which messages were left
out (StreamingLLM, Xiao et al. 2024, by whole messages).

The blocks of the shorter context are new ones, filled slot by slot: its beginning as it is, and
behind it the end of the longer one, whose keys are turned to their new positions. Its tokens have
still read what was left out, so this is not the KV of the ids alone. It is in the tree below a root
of its own, by the name of its conversation: a match that does not ask by that name never finds it,
and it goes to no slower tier.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.block_table import BlockTable
from kvchat.cache.keys import NO_TOKEN
from kvchat.core.types import TokenIds
from kvchat_kernels.key_rotation import KeyRotation

Match = Callable[[TokenIds, str], BlockTable]


@dataclass(frozen=True, slots=True)
class Moving:
    """Which KV becomes that of another context.

    sources    a context whose KV is there
    targets    the context that it is to become
    num_own    how many tokens `targets` begins with whose KV is its own, and there. Those after
               them are the end of `sources`
    name       of the moved contexts that the result joins. KV of `sources` may be among them
    """

    sources: TokenIds
    targets: TokenIds
    num_own: int
    name: str

    def __post_init__(self) -> None:
        num_moved = len(self.targets) - self.num_own
        assert num_moved >= 0
        assert self.num_back >= 0
        assert list(self.targets[self.num_own :]) == list(self.sources)[-num_moved or None :]

    @property
    def num_back(self) -> int:
        """How many positions earlier the moved tokens stand."""
        return len(self.sources) - len(self.targets)


def move(manager: CacheManager, moving: Moving, rotations: Sequence[KeyRotation]) -> int:
    """Make the KV of `moving.targets`, and return of how many of its tokens; 0 if nothing is moved.

    Nothing is where the device lacks the beginning or all of the end, has no room, or where layers
    with a window lack a part that the next token sees. `rotations` has one for each storing layer.
    """
    end = _longest(manager.match, moving.sources, moving.name, manager)
    lowest = manager.hold_windows(end) * manager.block_size - moving.num_back
    # Layers with a window need nothing of the beginning where the end is longer than that.
    match = manager.match_without_windows if lowest > moving.num_own else manager.match
    begin = _longest(match, moving.targets[: moving.num_own], moving.name, manager)
    if lowest <= moving.num_own:
        lowest = manager.hold_windows(begin) * manager.block_size
    try:
        num_tokens, first = end.cached_len - moving.num_back, -(-lowest // manager.block_size)
        if begin.cached_len < moving.num_own or num_tokens <= moving.num_own:
            return 0
        if first > max(0, num_tokens // manager.block_size - manager.window_blocks):
            return 0
        is_filled = _fill(manager, moving, (begin, end), num_tokens, first, rotations)
        return num_tokens if is_filled else 0
    finally:
        manager.release(begin, [])
        manager.release(end, [])


def _longest(match: Match, ids: TokenIds, name: str, manager: CacheManager) -> BlockTable:
    """Match a whole context, or the moved one of a name where more of that is there."""
    whole = [*ids, NO_TOKEN]
    own = match(whole, "")
    if own.cached_len == len(ids):
        return own
    moved = match(whole, name)
    shorter, longer = sorted((own, moved), key=lambda table: table.cached_len)
    manager.release(shorter, [])
    return longer


def _fill(
    manager: CacheManager,
    moving: Moving,
    tables: tuple[BlockTable, BlockTable],
    num_tokens: int,
    first_window: int,
    rotations: Sequence[KeyRotation],
) -> bool:
    """Copy the KV of both tables to new blocks of moved contexts; false if there is no room."""
    begin, end = tables
    num_own, num_back = moving.num_own, moving.num_back
    target = manager.match([NO_TOKEN], moving.name)
    num_filled = 0
    try:
        if manager.extend(target, -(-num_tokens // manager.block_size), first_window):
            slots, move_slots = target.slots(0, num_tokens), manager.kv_pool.move_slots
            moved = end.slots(num_own + num_back, num_tokens + num_back)
            move_slots(begin.slots(0, num_own), slots[:num_own])
            move_slots(moved, slots[num_own:], rotations, num_back)
            num_filled = num_tokens
    finally:
        manager.release(target, moving.targets[:num_filled])
    return bool(num_filled)

"""KvMover: finds out how a model turns its keys, moves KV to other positions by that, and has it
replaced by the context's own KV.

A token that attends to itself alone has the same hidden states at every position. So two of them,
computed at two positions, show in every layer whether keys at one are those at the other, turned as
one of the model's rotary modules says. A layer of which no rotation is true is one of a model whose
KV cannot be moved: learned positions, or embeddings of another kind.

While nothing else runs, the engine reads the last context that was moved, or answered over moved
KV: the next request then finds KV of its own.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.block_table import BlockTable
from kvchat.cache.keys import NO_TOKEN
from kvchat.cache.kv_pool import CodedFormat
from kvchat.cache.moved_kv import Moving, move
from kvchat.engine.request import RequestSpec
from kvchat.engine.runner import Runner
from kvchat.model.batch import SequencePiece
from kvchat.model.loader import LoadedModel
from kvchat_kernels.key_rotation import KeyRotation
from kvchat_kernels.kv_code import Form
from kvchat_kernels.slot_positions import SlotPositions

_log = logging.getLogger(__name__)

# How far a turned key, or a value, may be off, of its length: rounding to 16 bits or whole
# numbers of 8, and to 4 bits or floats of 8.
_TOLERANCE, _COARSE_TOLERANCE = 0.03, 0.3


class KvMover:
    """Moves KV of one engine's cache. `possible` returns the rotations that its layers may have.

    `has_inexact` says that a context may be left to read exactly.
    `max_position` is the last position of a context, `token` any usual one. The engine's thread
    owns it.
    """

    def __init__(
        self,
        cache: CacheManager,
        runner: Runner,
        max_position: int,
        token: int,
        possible: Callable[[], Sequence[KeyRotation]],
    ) -> None:
        self._cache = cache
        self._runner = runner
        self._positions = max_position, max_position // 3
        self._token = token
        self._possible = possible
        self._rotations: list[KeyRotation] | None = None
        self._inexact: Sequence[int] = ()
        self._inexact_name = ""
        self._num_exact = -1  # of these, before they were last to be read

    @property
    def has_inexact(self) -> bool:
        return bool(self._inexact)

    def note_inexact(self, token_ids: Sequence[int], name: str) -> None:
        """Note a context whose KV is moved, by the name of its conversation."""
        self._inexact, self._inexact_name, self._num_exact = token_ids, name, -1

    def to_read(self) -> RequestSpec | None:
        """Return the request that goes on to read the noted context exactly; None if that is done,
        gets no further, or has no room beside the moved KV.
        """
        ids, size = self._inexact, self._cache.block_size
        num_exact = self._cache.num_cached_tokens(ids)
        is_done = len(ids) - num_exact < size
        has_room = 2 * (1 + len(ids) // size) < self._cache.num_available
        if is_done or num_exact <= self._num_exact or not has_room:
            self._inexact = ()
            if is_done:
                self._cache.forget_moved(self._inexact_name)
            return None
        self._num_exact = num_exact
        return RequestSpec(tuple(ids), max_tokens=0)

    def move(self, moving: Moving) -> int:
        """Move KV as `cache.moved_kv.move` does; 0 also where the keys of a layer cannot be, or
        where moving them fails.
        """
        if not self._cache.reuse or self._cache.has_state:
            return 0
        try:
            if self._rotations is None:
                self._rotations = self._found()
            num_tokens = move(self._cache, moving, self._rotations) if self._rotations else 0
        except Exception:  # a model's own code can fail with anything
            _log.exception("no KV could be moved")
            return 0
        if num_tokens:
            self.note_inexact(moving.targets[:num_tokens], moving.name)
        return num_tokens

    def _found(self) -> list[KeyRotation] | None:
        """Return the rotation of each storing layer, empty if a layer has none; None without room
        to find out.
        """
        possible = [r for r in self._possible() if self._fits(r)]
        if not possible:
            return []
        with ExitStack() as stack:
            tables = [self._held(stack, position) for position in self._positions]
            tables.append(self._held(stack, self._positions[1]))
            if not all(table.blocks for table in tables):
                return None
            pieces = [
                SequencePiece(
                    [self._token], position, table.blocks, 1, table_positions=table.positions
                )
                for table, position in zip(tables[:2], self._positions, strict=True)
            ]
            self._runner.run_pieces(pieces)
            late, early, moved = (table.blocks[0] for table in tables)
            errors = torch.stack([self._errors(late, early, moved, each) for each in possible])
        keys, values = errors[:, 0::2].min(dim=0), errors[0, 1::2]
        tolerance = self._tolerance
        is_right = bool((keys.values < tolerance).all() and (values < tolerance).all())
        _log.info("keys can be moved=%s error=%.1e", is_right, float(keys.values.max()))
        return [possible[index] for index in keys.indices.tolist()] if is_right else []

    def _fits(self, rotation: KeyRotation) -> bool:
        return all(rotation.fits(each.key_dim) for each in self._cache.kv_pool.geometry.layers)

    def _held(self, stack: ExitStack, position: int) -> BlockTable:
        """Return the table of a sequence of one token at a position, without a block if there is no
        room.
        """
        table = self._cache.match([NO_TOKEN])
        stack.callback(self._cache.release, table, [])
        self._cache.make_private(table, (), SlotPositions((), position))
        self._cache.reserve(table, position, position + 1)
        return table

    def _errors(self, late: int, early: int, moved: int, rotation: KeyRotation) -> torch.Tensor:
        """Return how far the token of block `late` is from that of `early` if `rotation` moves it:
        relative to the length, of the key and then the value of each layer.
        """
        pool, size = self._cache.kv_pool, self._cache.block_size
        rotations = [rotation] * len(pool.layers)
        num_back = self._positions[0] - self._positions[1]
        pool.move_slots([late * size], [moved * size], rotations, num_back)
        off, _, length = pool.kv_error(early, moved, 0).unbind(dim=1)
        return torch.where(length > 0, off / length, torch.inf).sqrt()

    @property
    def _tolerance(self) -> float:
        kv_format = self._cache.kv_pool.geometry.format
        if isinstance(kv_format, CodedFormat):
            code = kv_format.code
            is_fine = code.keys.form is code.values.form is Form.INT8
            return _TOLERANCE if is_fine else _COARSE_TOLERANCE
        return _TOLERANCE


_FREQUENCIES = "inv_freq"


def possible_rotations(loaded: LoadedModel) -> list[KeyRotation]:
    """Return no rotation, and those by the frequencies of the model's rotary modules.

    Empty for a model that cannot compute a token alone at any position, and for one with recurrent
    state: then no key can be moved.
    """
    if loaded.spec.gathered is not None or loaded.spec.state:
        return []
    known: list[torch.Tensor] = []
    for module in loaded.module.modules():
        for frequencies in _frequencies_in(module):
            if not any(torch.equal(frequencies, each) for each in known):
                known.append(frequencies)
    return [
        KeyRotation(torch.empty(0, dtype=torch.float64)),
        *(
            KeyRotation(frequencies * sign, neighbours)
            for frequencies in known
            for neighbours in (False, True)
            for sign in (1, -1)
        ),
    ]


def _frequencies_in(module: Any) -> list[torch.Tensor]:
    """Return a module's frequencies, one vector for each type of layers: [num_pairs] float64."""
    buffers = module.named_buffers(recurse=False)
    found = (buffer for name, buffer in buffers if name.endswith(_FREQUENCIES))
    return [buffer.detach().double().cpu() for buffer in found if buffer.dim() == 1]

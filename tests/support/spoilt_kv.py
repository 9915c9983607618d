"""KV that came back wrong: how it can be, and whether proving it finds that.

Images of a context's blocks are taken from an engine that computed them, spoilt, and brought back
into its emptied device tier, as a restore does. Nothing is written anywhere.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvchat.cache.arrivals import RestoredContext
from kvchat.cache.tier import LogitFingerprint
from kvchat.engine.engine import Engine
from kvchat.engine.kv_verifier import KvVerifier, fingerprint_of
from kvchat.model.batch import SequencePiece
from support.cached_contexts import images_of
from support.greedy_answer import greedy_answer

# [num_blocks, num_layers, 2, block_size, num_heads, dim]: what all layers alike hold of a context.
Kv = torch.Tensor
Spoil = Callable[[Kv, random.Random], None]


@dataclass
class _Arrivals:
    """Where the verifier asks what is to be verified."""

    unverified: list[RestoredContext]

    @property
    def has_unverified(self) -> bool:
        return bool(self.unverified)

    def take_unverified(self, of_all: bool) -> list[RestoredContext]:
        due, self.unverified = self.unverified, []
        return due


@dataclass
class _Chain:
    arrivals: _Arrivals
    has_slow = True


@dataclass(frozen=True)
class Context:
    """A context an engine has computed: whole blocks of it, their images and the fingerprint."""

    ids: list[int]
    image: bytes
    fingerprint: LogitFingerprint


class Prover:
    """Brings contexts back into one engine's device tier, and says whether they are believed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._arrivals = _Arrivals([])
        chain = _Chain(self._arrivals)
        self._kv_verifier = KvVerifier(engine.cache, chain, engine._runner.dtype)  # type: ignore[arg-type]

    def compute(self, prompt: list[int], num_drawn: int = 20) -> Context:
        """Have a prompt answered; return its whole blocks, and the answer's."""
        self._engine.cache.clear()
        answer, _ = greedy_answer(self._engine, prompt, num_drawn)
        size = self._engine.cache.block_size
        ids = [*prompt, *answer[:-1]]
        ids = ids[: len(ids) // size * size]
        image = images_of(self._engine.cache, ids, 0, len(ids) // size)
        fingerprint = fingerprint_of(self._last_logits(ids))
        assert fingerprint is not None
        return Context(ids, image, fingerprint)

    def _last_logits(self, ids: list[int]) -> torch.Tensor:
        cache = self._engine.cache
        table = cache.match([*ids, -1])
        assert cache.reserve(table, len(ids) - 1, len(ids))
        logits = self._run([SequencePiece(ids[-1:], len(ids) - 1, table.blocks, 1)])[0]
        cache.release(table, [])
        return logits

    def _run(self, pieces: Sequence[SequencePiece]) -> torch.Tensor:
        return self._engine._runner.run((), pieces)

    def view(self, image: bytearray) -> Kv:
        geometry = self._engine.cache.kv_pool.geometry
        layer = geometry.layers[0]
        shape = (-1, len(geometry.layers), 2, geometry.block_size, layer.num_kv_heads)
        return torch.frombuffer(image, dtype=geometry.dtype).view(*shape, layer.key_dim)

    def believes(
        self, context: Context, image: bytearray | None = None, beside: Sequence[int] = ()
    ) -> bool:
        """Whether a context that comes back as `image`, its own where that is None, is believed;
        the first step computes the ids `beside` it.
        """
        cache = self._engine.cache
        cache.clear()
        size = cache.block_size
        brought = image if image is not None else bytearray(context.image)
        assert cache.adopt(context.ids, 0, brought) == len(context.ids) // size
        self._arrivals.unverified = [RestoredContext(list(context.ids), 0, context.fingerprint)]
        failed = self._kv_verifier.begin(self._run, of_all=True)
        prompt = cache.match([*context.ids, *beside])
        pieces = self._kv_verifier.pieces
        if beside:
            start = len(context.ids)
            assert cache.reserve(prompt, start, start + len(beside))
            pieces = [SequencePiece(list(beside), start, prompt.blocks, 1), *pieces]
        logits = self._run(pieces)[bool(beside) :]
        failed += self._kv_verifier.end(logits, self._run)
        cache.release(prompt, [])
        return not failed


def zeroed(count: int) -> Spoil:
    """Zero so many values that lie together."""

    def spoil(kv: Kv, rng: random.Random) -> None:
        flat = kv.view(-1)
        start = rng.randrange(len(flat) - count)
        flat[start : start + count] = 0

    return spoil


def zeroed_head(kv: Kv, rng: random.Random) -> None:
    kv[:, rng.randrange(kv.shape[1]), rng.randrange(2), :, rng.randrange(kv.shape[4])] = 0


def zeroed_block(kv: Kv, rng: random.Random) -> None:
    kv[rng.randrange(len(kv))] = 0


def scaled(part: int, factor: float) -> Spoil:
    """Scale the keys (0) or the values (1) of one layer."""

    def spoil(kv: Kv, rng: random.Random) -> None:
        kv[:, rng.randrange(kv.shape[1]), part] *= factor

    return spoil


def swapped_blocks(kv: Kv, rng: random.Random) -> None:
    one, other = rng.sample(range(len(kv)), 2)
    kv[[one, other]] = kv[[other, one]]


def shifted_layer(kv: Kv, rng: random.Random) -> None:
    """Have one layer's KV stand one position later."""
    layer = kv[:, rng.randrange(kv.shape[1])]  # [num_blocks, 2, block_size, num_heads, dim]
    tokens = layer.transpose(0, 1).reshape(2, -1, *kv.shape[4:])
    layer.copy_(tokens.roll(1, dims=1).view(2, len(kv), *kv.shape[3:]).transpose(0, 1))


SPOILT: dict[str, Spoil] = {
    "1 value zeroed": zeroed(1),
    "8 values zeroed": zeroed(8),
    "64 values zeroed": zeroed(64),
    "a head zeroed": zeroed_head,
    "a block zeroed": zeroed_block,
    "keys x1.02": scaled(0, 1.02),
    "keys x1.08": scaled(0, 1.08),
    "keys x1.5": scaled(0, 1.5),
    "values x1.02": scaled(1, 1.02),
    "values x1.08": scaled(1, 1.08),
    "values x1.5": scaled(1, 1.5),
    "two blocks swapped": swapped_blocks,
    "a layer a position late": shifted_layer,
}

"""The training stream: chats drawn, encoded and packed into rows, in legs that can be replayed.

A leg is a fixed number of steps whose rows depend only on the seed and the leg's number, so that a
resumed run sees what an uninterrupted one would have. Knows no network.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from demo_recipe.conversation import Conversations, Shape
from demo_recipe.network import Rows
from demo_recipe.tokenizer import ChatTokenizer, Encoded

ROW_LENGTHS = (256, 512, 1024, 2048, 4096)
OPEN_ROWS = 8  # rows of one length that a chat may still join


@dataclass(frozen=True, slots=True)
class Mix:
    """What one phase of training is made of.

    shapes     kinds of chats and the share of each, counted in chats
    jump_rate  share of chats whose positions jump between messages: long distances, cheaply
    key_weight how much a token counts that any good reply must have: a recalled value, an item
    """

    shapes: tuple[tuple[Shape, float], ...]
    jump_rate: float = 0.0
    key_weight: float = 1.0


@dataclass(slots=True)
class Row:
    """One row being packed: encoded chats and their positions."""

    chats: list[tuple[Encoded, list[int]]] = field(default_factory=list)
    used: int = 0


class Leg:
    """One leg's batches."""

    def __init__(
        self, tokenizer: ChatTokenizer, mix: Mix, *, seed: int, leg: int, batch_tokens: int
    ) -> None:
        self._tokenizer, self._mix, self._batch_tokens = tokenizer, mix, batch_tokens
        self._rng = random.Random(f"{seed}/{leg}/shapes")
        self._chats = Conversations(self._rng.getrandbits(48))
        self._open: dict[int, list[Row]] = {length: [] for length in ROW_LENGTHS}
        self._longest = ROW_LENGTHS[-1]

    def batches(self) -> Iterator[Rows]:
        """Batches without end, of about `batch_tokens` tokens each."""
        while True:
            length = self._place(self._draw())
            if (rows := self._full_batch(length)) is not None:
                yield as_rows(rows, length, self._tokenizer.pad_id, self._mix.key_weight)

    def _draw(self) -> tuple[Encoded, list[int]]:
        shapes, weights = zip(*self._mix.shapes, strict=True)
        chat = self._chats.draw(self._rng.choices(shapes, weights)[0])
        encoded = clip(self._tokenizer.encode_chat(chat), self._longest)
        if self._rng.random() < self._mix.jump_rate:
            return encoded, jumping_positions(encoded, self._longest, self._rng)
        return encoded, list(range(len(encoded.ids)))

    def _place(self, chat: tuple[Encoded, list[int]]) -> int:
        """Put a chat where it leaves the least room, or into a new row; the row's length."""
        size = len(chat[0].ids)
        length, row = min(
            (
                (length, row)
                for length, rows in self._open.items()
                for row in rows[-OPEN_ROWS:]
                if row.used + size <= length
            ),
            key=lambda place: place[0] - place[1].used,
            default=(0, None),
        )
        if row is None:
            length, row = next(length for length in ROW_LENGTHS if size <= length), Row()
            self._open[length].append(row)
        row.chats.append(chat)
        row.used += size
        return length

    def _full_batch(self, length: int) -> list[Row] | None:
        """The fullest rows as a batch, once enough others stay open for chats to come."""
        rows, num_rows = self._open[length], max(1, self._batch_tokens // length)
        if len(rows) < num_rows + OPEN_ROWS:
            return None
        rows.sort(key=lambda row: -row.used)
        batch, self._open[length] = rows[:num_rows], rows[num_rows:]
        return batch


def as_rows(rows: list[Row], length: int, pad_id: int, key_weight: float = 1.0) -> Rows:
    """Packed rows as tensors; the target of a token is the next one if that belongs to a reply."""
    ids = torch.full((len(rows), length), pad_id)
    positions = torch.zeros_like(ids)
    segments = torch.zeros_like(ids)
    targets = torch.full_like(ids, -100)
    weights = torch.ones(ids.shape)
    for number, row in enumerate(rows):
        at = 0
        for segment, (encoded, places) in enumerate(row.chats, start=1):
            end = at + len(encoded.ids)
            ids[number, at:end] = torch.tensor(encoded.ids)
            positions[number, at:end] = torch.tensor(places)
            segments[number, at:end] = segment
            learnt = [
                token if is_answer else -100
                for token, is_answer in zip(encoded.ids[1:], encoded.is_answer[1:], strict=True)
            ]
            targets[number, at : end - 1] = torch.tensor(learnt)
            counts = [key_weight if is_key else 1.0 for is_key in encoded.is_key[1:]]
            weights[number, at : end - 1] = torch.tensor(counts)
            at = end
    return Rows(ids, positions, segments, targets, weights)


def clip(encoded: Encoded, length: int) -> Encoded:
    """The first `length` tokens of a chat."""
    if len(encoded.ids) <= length:
        return encoded
    starts = [start for start in encoded.starts if start < length]
    return Encoded(
        encoded.ids[:length], encoded.is_answer[:length], starts, encoded.is_key[:length]
    )


def jumping_positions(encoded: Encoded, limit: int, rng: random.Random) -> list[int]:
    """Positions that skip ahead at some messages, staying below `limit`.

    A reply still follows its message closely, but earlier turns lie as far back as in a long chat.
    After D. Zhu et al., "PoSE: efficient context window extension via positional skip-wise
    training" (2023).
    """
    starts = encoded.starts[::2] if len(encoded.starts) > 2 else encoded.starts
    jumps = rng.sample(starts, min(len(starts), rng.choice((1, 2, 4))))
    room = rng.randrange(limit - len(encoded.ids) + 1)
    cuts = sorted(rng.randrange(room + 1) for _ in range(len(jumps) - 1))
    sizes = [end - start for start, end in zip([0, *cuts], [*cuts, room], strict=True)]
    jump_at = dict(zip(jumps, sizes, strict=True))
    positions, place = [], 0
    for index in range(len(encoded.ids)):
        place += jump_at.get(index, 0)
        positions.append(place)
        place += 1
    return positions

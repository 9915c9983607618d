"""What a step's tokens and positions give its program: embedded rows, angles, and factors of Q."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from kvchat.model.cpu.step_operations import Unfit, floats
from kvchat.model.decoder.decoder import Decoder, QueryScale
from kvchat.model.packed.quantise import packed_table, unpacked_rows
from kvchat_kernels.linear.table_rows import TableRows, can_read

# Rows of a table in blocks that numpy reads faster than torch: those of a decode step.
_FEW_ROWS = 16
_TABLES = (torch.float32, torch.float16, torch.bfloat16)


def embedding_into(embedding: nn.Module, stream: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Return what writes the embedded rows of token ids to the beginning of a float32 stream.

    Rows of a table in blocks, and the factor of Gemma's, are not rounded to the model's dtype.
    """
    factor = getattr(embedding, "scalar_embed_scale", None)
    table: Any = embedding.weight
    is_known = factor is not None or type(embedding) is nn.Embedding
    if not is_known or table.dtype not in _TABLES:

        def embed(token_ids: torch.Tensor) -> None:
            stream[: token_ids.shape[0]] = embedding(token_ids[None])[0]

        return embed
    write = _rows_into(embedding, stream)
    if factor is None:
        return write

    numbers = stream.numpy()

    def write_scaled(token_ids: torch.Tensor) -> None:
        write(token_ids)
        rows = numbers[: token_ids.shape[0]]
        rows *= factor

    return write_scaled


def _rows_into(embedding: nn.Module, stream: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Return what writes rows of a table as they are.

    A plain table is read by numpy. The operators of torch for it took a tenth of a small model's
    step: all that they run has left the processor's caches since the step before.
    """
    table: Any = embedding.weight
    blocks = packed_table(embedding)
    if blocks is not None:
        few = TableRows(blocks) if can_read(blocks) else None
        numbers = stream.numpy()

        def unpack(token_ids: torch.Tensor) -> None:
            num_rows = token_ids.shape[0]
            if few is not None and num_rows <= _FEW_ROWS:
                few.write(token_ids.numpy(), numbers[:num_rows])
            else:
                stream[:num_rows].copy_(unpacked_rows(blocks, token_ids))

        return unpack
    if table.dtype != torch.bfloat16:
        numbers, out = table.detach().numpy(), stream.numpy()

        def read(token_ids: torch.Tensor) -> None:
            out[: token_ids.shape[0]] = numbers.take(token_ids.numpy(), 0)

        return read
    # numpy has no such numbers: they are the upper halves of float32.
    halves, words = table.detach().view(torch.uint16).numpy(), stream.numpy().view(np.uint32)

    def widen(token_ids: torch.Tensor) -> None:
        rows = words[: token_ids.shape[0]]
        rows[:] = halves.take(token_ids.numpy(), 0)
        rows <<= 16

    return widen


Table = np.ndarray[Any, np.dtype[np.float32]]


class Angles:
    """Cosines and sines of a step's positions, from a table made once for many positions."""

    _FIRST, _MOST = 1024, 1 << 14

    def __init__(self, decoder: Decoder, kind: str | None) -> None:
        self._sign = -1.0 if decoder.turns_back else 1.0
        self._come_once = decoder.has_half_angles
        self._rotary, self._kinds = decoder.rotary, () if kind is None else (kind,)
        # It has positions in a grid for images: transformers 5.17 takes no others for text either.
        self._has_grid = hasattr(self._rotary, "mrope_section")
        self._like = torch.zeros(1, dtype=torch.float32)
        self._table = self._made(torch.arange(self._FIRST))
        self.half = self._table[0].shape[1]
        self.cosines, self.sines = (floats(self.half) for _ in range(2))
        self._out = self.cosines.numpy(), self.sines.numpy()

    def set(self, positions: torch.Tensor) -> None:
        """Renew both for `positions`."""
        table, rows = self._table, positions.numpy()
        end = int(rows.max()) + 1
        if end > self._MOST:
            table, rows = self._made(positions), np.arange(len(rows))
        elif end > len(table[0]):
            table = self._table = self._made(torch.arange(min(2 * end, self._MOST)))
        for values, out in zip(table, self._out, strict=True):
            values.take(rows, 0, out[: len(rows)], "clip")  # the only mode that needs no copy

    def _made(self, positions: torch.Tensor) -> tuple[Table, Table]:
        given = positions[None, None] if self._has_grid else positions[None]
        try:
            made = self._rotary(self._like, given, *self._kinds)
        except Exception as error:  # a model's own code raises any type
            raise Unfit("makes no angles of positions alone") from error
        if isinstance(made, torch.Tensor) and made.is_complex():  # DeepSeek V2's
            return made[0].real.numpy().copy(), (made[0].imag * self._sign).numpy()
        if not (isinstance(made, tuple) and len(made) == 2):
            raise Unfit("has angles of another kind")
        cos, sin = (part[0].float() for part in made)
        if self._come_once:
            return cos.contiguous().numpy(), (sin * self._sign).numpy()
        half = cos.shape[-1] // 2
        # A model that turns neighbours may have each angle twice in a row.
        for first, second in (
            (slice(half), slice(half, None)),
            (slice(0, None, 2), slice(1, None, 2)),
        ):
            if torch.equal(cos[:, first], cos[:, second]):
                sin = sin[:, first] * self._sign
                return cos[:, first].contiguous().numpy(), sin.numpy()
        raise Unfit("has angles that do not repeat")


class QueryFactors:
    """What Q is multiplied with at a step's positions, float32 [rows]."""

    def __init__(self, scale: QueryScale) -> None:
        self._scale = scale
        self.values = floats(1)[:, 0]

    def set(self, positions: torch.Tensor) -> None:
        """Renew them for `positions`."""
        periods = torch.floor(positions / self._scale.length)
        self.values[: len(positions)] = 1 + self._scale.beta * torch.log1p(periods)

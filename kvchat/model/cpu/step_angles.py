"""What a step's positions change: cosines and sines of their angles, and factors of Q."""

from typing import Any

import numpy as np
import torch

from kvchat.model.cpu.step_operations import Unfit, floats
from kvchat.model.decoder.decoder import Decoder, QueryScale

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

    def set(self, positions: torch.Tensor, end: int) -> None:
        """Renew both for `positions`, all below `end`."""
        table, rows = self._table, positions.numpy()
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

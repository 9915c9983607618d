"""The embedded rows of a step's tokens, written to its stream."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

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

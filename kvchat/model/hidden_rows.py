"""HiddenRows: what the head of a model reads, which is a text's meaning as numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kvchat.core.errors import UsageError
from kvchat.model.paged_model import PagedModel


@contextmanager
def collecting(model: PagedModel) -> Iterator[list[torch.Tensor]]:
    """Run the block's steps by the modules; yield a list that gets the hidden states of each step's
    wanted rows, [num_rows, width] float32 behind the last norm.

    Raises UsageError for a model whose head is no module of its own.
    """
    head = model.loaded.module.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise UsageError("This model shows no hidden states, so it has no embeddings.")
    found: list[torch.Tensor] = []

    def collect(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        rows = inputs[0]
        found.append(rows.detach().reshape(-1, rows.shape[-1]).float())
        # The logits are not read: one row of them is enough where the model picks rows itself.
        return (rows[..., :1, :], *inputs[1:]) if model.keeps_rows else None

    compiled, model.compiled = model.compiled, None
    hook = head.register_forward_pre_hook(collect)
    try:
        yield found
    finally:
        hook.remove()
        model.compiled = compiled

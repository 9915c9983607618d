"""LastHidden: the last hidden states of a model's steps, for a head for the next token.

They are normed, as the model's own head reads them. Only a model that is asked to keeps them.
"""

from typing import Any

import torch


class LastHidden:
    """Collects the rows of each step of a transformers' causal model; one thread uses it.

    A step by the modules passes their last norm; a compiled step gives its stream to `add_stream`.
    """

    def __init__(self, module: Any) -> None:
        """Raises AttributeError for a module whose last norm is not found."""
        self._norm = module.get_decoder().norm
        self._norm.register_forward_hook(self._add)
        self._rows: list[torch.Tensor] = []

    def _add(self, norm: Any, inputs: Any, output: torch.Tensor) -> None:
        self._rows.append(output.reshape(-1, output.shape[-1]))

    def add_stream(self, stream: torch.Tensor) -> None:
        """Add the rows of a step before the last norm, [rows, hidden]; the caller keeps them."""
        self._add(None, None, self._norm.forward(stream))

    def clear(self) -> None:
        """Drop the rows of a step that failed, or whose rows are not read."""
        self._rows.clear()

    def take(self) -> torch.Tensor:
        """Return the rows since the last call, in order, [rows, hidden]."""
        rows = torch.cat(self._rows) if len(self._rows) > 1 else self._rows[0]
        self._rows.clear()
        return rows

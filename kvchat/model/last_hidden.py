"""LastHidden: hidden states of a model's steps, for a head that drafts.

They are the last ones, normed as the model's own head reads them, or the streams before some of the
layers, side by side. Only a model that is asked to keeps them.
"""

from collections.abc import Iterator
from typing import Any

import torch


class LastHidden:
    """Collects the rows of each step of a transformers' causal model; one thread uses it.

    A step by the modules passes its hooks; a compiled step gives its rows to `add_stream`.
    """

    def __init__(self, module: Any, before: tuple[int, ...] = ()) -> None:
        """`before` are numbers of layers, the number of all layers for the end of the last; none
        for the last hidden states. Raises AttributeError for a module without these parts.
        """
        decoder = module.get_decoder()
        self._norm = decoder.norm
        self._places = [*decoder.layers, self._norm]
        self._rows: list[torch.Tensor] = []
        self._before = before
        self._streams: dict[int, torch.Tensor] = {}
        self._hooks: list[Any] = []
        self.switch(is_on=True)

    @property
    def is_on(self) -> bool:
        """Whether rows are collected."""
        return bool(self._hooks)

    def switch(self, *, is_on: bool) -> None:
        """Collect rows from now on, or none."""
        if is_on == self.is_on:
            return
        while self._hooks:
            self._hooks.pop().remove()
        self._hooks = list(self._hooked()) if is_on else []

    def _hooked(self) -> Iterator[Any]:
        """Yield the handles of hooks, which are there from then on."""
        if not self._before:
            yield self._norm.register_forward_hook(self._add_normed)
            return
        last = len(self._places) - 1
        for index in (*sorted({*self._before} - {last}), last):
            place = self._places[index]
            yield place.register_forward_pre_hook(self._noting(index), with_kwargs=True)
        yield self._norm.register_forward_pre_hook(self._add_noted)

    def _add_normed(self, norm: Any, inputs: Any, output: torch.Tensor) -> None:
        self._rows.append(output.reshape(-1, output.shape[-1]))

    def _noting(self, index: int) -> Any:
        def note(part: Any, inputs: Any, others: Any) -> None:
            stream = inputs[0] if inputs else others["hidden_states"]
            self._streams[index] = stream.reshape(-1, stream.shape[-1])

        return note

    def _add_noted(self, norm: Any, inputs: Any) -> None:
        self._rows.append(torch.cat([self._streams[index] for index in self._before], dim=1))
        self._streams.clear()

    def add_stream(self, stream: torch.Tensor) -> None:
        """Add the rows of a compiled step: those before the last norm, [rows, hidden], or the
        streams that are wanted, side by side, which the caller changes no more.
        """
        self._rows.append(stream if self._before else self._norm.forward(stream))

    def clear(self) -> None:
        """Drop the rows of a step that failed, or whose rows are not read."""
        self._rows.clear()
        self._streams.clear()

    def take(self) -> torch.Tensor:
        """Return the rows since the last call, in order, [rows, width]."""
        rows = torch.cat(self._rows) if len(self._rows) > 1 else self._rows[0]
        self._rows.clear()
        return rows

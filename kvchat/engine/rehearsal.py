"""Rehearsal: a model's first small steps, run for nobody, while nobody waits for a first token.

A model that has yet to prove that it may run as a whole computes its first steps twice. Whoever
weighs what steps cost must not find that in them: drafts were held to be too dear for as long as a
process's first answers lasted. Knows blocks and rows; knows no request.
"""

import logging
from typing import Protocol

import torch

from kvchat.cache.block_pool import SCRATCH_BLOCK
from kvchat.model.batch import ForwardBatch, SequencePiece, build_batch

_log = logging.getLogger(__name__)

_TOKEN = 0  # any that every vocabulary has
_NUM_ROWS = (3, 1)  # a verify and a plain step, which read what the verify has written


class Rehearsed(Protocol):
    """A model, as far as a rehearsal knows it."""

    @property
    def device(self) -> torch.device:
        """Where its batches lie."""

    @property
    def is_proven(self) -> bool:
        """Whether its steps are computed once, as they always will be from now on."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run a step."""


class Rehearsal:
    """The first steps of one model over blocks of `block_size` tokens.

    They write to the scratch block, which nobody else reads.
    """

    def __init__(self, model: Rehearsed, block_size: int) -> None:
        self._model = model
        self._block_size = block_size
        self._is_over = False

    def hold(self) -> None:
        """Run the steps, once. A model that fails in them will say so where it is asked."""
        if self._is_over:
            return
        self._is_over = True
        if self._model.is_proven:
            return
        start, blocks = 0, [SCRATCH_BLOCK] * sum(_NUM_ROWS)
        for num_rows in _NUM_ROWS:
            piece = SequencePiece([_TOKEN] * num_rows, start, blocks, num_logit_rows=num_rows)
            try:
                self._model.forward(build_batch([piece], self._block_size, self._model.device))
            except Exception as error:
                _log.warning("a rehearsal failed", exc_info=error)
                return
            start += num_rows

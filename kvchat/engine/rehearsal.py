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

_NUM_ROWS = (8, 1)  # a verify and a plain step, which reads what the verify has written
_NUM_TOKENS = sum(_NUM_ROWS)


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
    """The first steps of one model: tokens below `vocab_size` in blocks of `block_size` tokens.

    They write to the scratch block, which nobody else reads. Where it has not room for them all,
    the first real steps prove what there is to prove.
    """

    def __init__(self, model: Rehearsed, vocab_size: int, block_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._is_over = block_size < _NUM_TOKENS

    def hold(self) -> None:
        """Run the steps, once. A model that fails in them will say so where it is asked."""
        if self._is_over:
            return
        self._is_over = True
        try:
            if not self._model.is_proven:
                self._run()
        except Exception as error:
            _log.warning("a rehearsal failed", exc_info=error)

    def _run(self) -> None:
        # Each token is another: equal ones would have equal values, and whatever attention does to
        # those gives the same.
        ids = [(2 * i + 1) * self._vocab_size // (2 * _NUM_TOKENS) for i in range(_NUM_TOKENS)]
        start = 0
        for num_rows in _NUM_ROWS:
            tokens = ids[start : start + num_rows]
            piece = SequencePiece(tokens, start, [SCRATCH_BLOCK], num_logit_rows=num_rows)
            self._model.forward(build_batch([piece], self._block_size, self._model.device))
            start += num_rows

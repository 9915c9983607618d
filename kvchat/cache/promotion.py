"""Promotion: one prompt's KV on its way up from host memory, and pieces that have been copied.

Plain records; what is done with them is `host_swap.py`'s.
"""

from dataclasses import dataclass

import torch

from kvchat.cache.block_table import BlockTable
from kvchat.cache.host_tier import Loan
from kvchat.core.types import TokenIds


@dataclass(slots=True, eq=False)
class Promotion:
    """One prompt's KV on its way up from host memory. The engine's thread owns it.

    # [0, num_known)                            tokens that the device had
    # [num_known, num_known + num_tokens)       tokens that came up so far; `table` holds all of it

    `num_sent` counts the rows of the loan that were given to the transfer thread.
    """

    ids: TokenIds
    num_known: int
    loan: Loan
    table: BlockTable
    deadline_s: float
    num_sent: int = 0
    num_in_flight: int = 0
    num_tokens: int = 0
    is_given_up: bool = False
    is_ended: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.is_given_up or self.is_ended

    def give_up(self) -> None:
        self.is_given_up = True


@dataclass(frozen=True, slots=True)
class Sunk:
    """A piece that went down, or did not."""

    loan: Loan
    num_bytes: int
    seconds: float
    is_there: bool


@dataclass(frozen=True, slots=True)
class Risen:
    """A piece that came up, or did not: then there are no images."""

    promotion: Promotion
    images: torch.Tensor | None
    num_blocks: int
    seconds: float

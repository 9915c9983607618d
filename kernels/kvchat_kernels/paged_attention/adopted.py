"""Attention kernels of other packages, adopted for layers that they were right and faster for.

While nothing is adopted, which is so on every machine without such a package, a step pays for one
look at an empty table. An adopted kernel that raises is dropped, and ours run from then on.
"""

import logging
from dataclasses import dataclass
from enum import StrEnum

import torch

from kvchat_kernels.paged_attention.sequences import (
    AttentionFunction,
    AttentionSpan,
    DeviceSequences,
    Scoring,
    Sequences,
)
from kvchat_kernels.paged_attention.tiles import LayerShape

_log = logging.getLogger(__name__)

# Queries of up to this many tokens, other than single ones, are our split kernel's.
_SHORT_QUERY = 16


class StepKind(StrEnum):
    """The kinds of steps that other kernels may be adopted for."""

    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class LayerRule:
    """A layer's sizes, what a token sees, and whether its scores are bounded."""

    shape: LayerShape
    span: AttentionSpan
    has_softcap: bool


_Key = tuple[torch.device, StepKind, LayerRule, int]
ADOPTED: dict[_Key, AttentionFunction] = {}


def step_kind(sequences: Sequences) -> StepKind | None:
    """Return the kind of a step; None for one that stays with our kernels: a verification, and a
    step with a private table.

    A decode has one token in every sequence. A prefill has its lengths on the host, and a sequence
    of more tokens than a verification has.
    """
    if isinstance(sequences, DeviceSequences):
        one_each = sequences.num_tokens == sequences.block_tables.shape[0]
        return StepKind.DECODE if one_each and sequences.max_query_len == 1 else None
    if sequences.positions is not None:
        return None
    longest = max(sequences.query_lens)
    if longest == 1:
        return StepKind.DECODE
    return StepKind.PREFILL if longest > _SHORT_QUERY else None


def adopt(
    device: torch.device,
    step: StepKind,
    rule: LayerRule,
    block_size: int,
    function: AttentionFunction,
) -> None:
    """Let `function` compute such layers in such steps, over blocks of `block_size` tokens."""
    ADOPTED[device, step, rule, block_size] = function


def drop(device: torch.device, step: StepKind, rule: LayerRule, block_size: int) -> None:
    """Let our kernels compute such layers in such steps again."""
    ADOPTED.pop((device, step, rule, block_size), None)


def is_adopted(device: torch.device, step: StepKind) -> bool:
    """Return whether any layer on a device has another kernel in such steps."""
    return any(key[:2] == (device, step) for key in ADOPTED)


def attend_adopted(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    sequences: Sequences,
    shape: LayerShape,
    scoring: Scoring,
) -> torch.Tensor | None:
    """Attend by the adopted kernel; None if there is none for the layer and step, or it failed."""
    step = step_kind(sequences)
    if step is None or scoring.sinks is not None:
        return None
    rule = LayerRule(shape, scoring.span, scoring.softcap is not None)
    key = query.device, step, rule, sequences.block_size
    function = ADOPTED.get(key)
    if function is None:
        return None
    try:
        return function(query, key_pool, value_pool, sequences, scoring)
    except Exception as error:  # another package's launcher and compiler raise any type
        drop(*key)
        line = (str(error).strip().splitlines() or [""])[0]
        name = type(error).__name__
        _log.warning("kvchat's own attention from now on, %s: %s: %s", step, name, line[:200])
        return None

"""The torch reference of the write in 8 bits: round, then scatter."""

import torch

# Numbers of a group, the largest that divides a head.
_GROUPS = (32, 16, 8)
MOST = 127
# A group with smaller numbers is stored as zeros: its scale has too few bits.
LEAST = 1e-30

# Keys, their scales, values, their scales: the tensors of an `Int8Kv`.
Int8Pools = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def group_size(dim: int) -> int:
    """Return how many numbers of a head of `dim` share a scale; all where no group divides it."""
    return next((size for size in _GROUPS if dim % size == 0), dim)


def quantised(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return floats [..., dim] as numbers [..., dim] int8 and scales [..., dim / group] bfloat16.

    A group with a NaN or infinity gets a scale that is not finite, so that it is not read as right.
    """
    groups = values.float().unflatten(-1, (-1, group_size(values.shape[-1])))
    peaks = groups.abs().amax(dim=-1)
    scales = torch.where(peaks < LEAST, 0.0, peaks / MOST).to(torch.bfloat16)
    divisors = scales.float()[..., None]
    is_usable = (divisors > 0) & divisors.isfinite()
    levels = torch.where(is_usable, groups / divisors, 0.0).round().clamp(-MOST, MOST)
    return levels.to(torch.int8).flatten(-2), scales


def restored(
    numbers: torch.Tensor, scales: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return numbers times their scales, in float32, or in `out`'s dtype and memory.

    `numbers` and `out` are contiguous. Of float32 the result is exact, of bfloat16 it is rounded
    once.
    """
    if out is None:
        out = torch.empty(numbers.shape, dtype=torch.float32, device=numbers.device)
    shape = (*scales.shape, -1)
    groups = out.view(shape)
    groups.copy_(numbers.view(shape))  # exact: 8 bits are fewer than a float's
    groups.mul_(scales.to(out.dtype)[..., None])
    return out


def int8_kv_write_reference(
    key: torch.Tensor, value: torch.Tensor, pools: Int8Pools, slot_mapping: torch.Tensor
) -> None:
    """Store new keys and values, rounded; see `int8_kv_write` for the shapes."""
    is_written = slot_mapping >= 0
    if not bool(is_written.all()):
        key, value, slot_mapping = (x[is_written] for x in (key, value, slot_mapping))
    parts = (*quantised(key), *quantised(value))
    for tensor, part in zip(pools, parts, strict=True):
        tensor.flatten(0, 1).index_copy_(0, slot_mapping, part)

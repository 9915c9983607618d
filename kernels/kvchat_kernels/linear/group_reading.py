"""Reads stored groups of columns by compiled code, each tensor once: into blocks, or as floats.

The plain forms are `Grouped.blocks` and `Grouped.weight` of `kvchat/model/packed/unpacking.py`.
"""

import torch

from kvchat_kernels.cpu_products import compiled_calls
from kvchat_kernels.linear.blocks import COLUMNS, BlockWeights
from kvchat_kernels.linear.stored_groups import StoredGroups


def read_groups(stored: StoredGroups, is_interleaved: bool = False) -> BlockWeights | None:
    """Return a matrix in blocks that hold it exactly; half precision is used where it holds all.

    None where blocks cannot hold its groups, and where nothing can be compiled. Reads no memory
    but that of the tensors, whatever these contain.
    """
    if compiled_calls() is None or not stored.is_sound() or not stored.fits_blocks():
        return None
    from kvchat_kernels.cpu import group_calls

    return group_calls.read(stored, is_interleaved)


def read_floats(stored: StoredGroups, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a matrix [out, in] in float32, bfloat16 or float16, rounded once from float32.

    Beside it there are its scales and zeros in float32, and 1 MiB of levels. None where columns are
    no whole blocks of 32, and where nothing can be compiled. Reads no memory but the tensors'.
    """
    calls = compiled_calls()
    if calls is None or not stored.is_sound() or stored.num_in % COLUMNS:
        return None
    group_of = stored.groups_of_columns() if calls.takes_floats(dtype) else None
    if group_of is None:
        return None
    from kvchat_kernels.cpu import group_calls

    return group_calls.read_floats(stored, group_of, dtype)

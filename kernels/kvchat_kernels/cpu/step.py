"""The header of a step, which all kernels of a program read: what changes from step to step."""

from enum import IntEnum


class Header(IntEnum):
    """The places of the header's 64-bit numbers.

    NUM_ROWS   rows of activations, at most MAX_ROWS
    SLOTS      address of the slot of each row's KV, int64; -1 writes nothing
    ROWS       address of the rows of the stream that a norm reads, int64; 0: row i is row i
    STATE      address of what recurrent layers keep of the one sequence
    """

    NUM_ROWS = 0
    SLOTS = 1
    ROWS = 2
    STATE = 3


NUM_HEADERS = 4
# Rows that a step has memory for. More at once gain nothing where vectors have 512 bits.
MAX_ROWS = 128
# Rows of a step elsewhere. With more, products of matrices are faster than these kernels.
FEW_ROWS = 16

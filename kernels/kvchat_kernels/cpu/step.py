"""The header of a step, which all kernels of a program read: what changes from step to step."""

from enum import auto
from typing import Any

from kvchat_kernels.cpu.code import I64, Code, Value
from kvchat_kernels.cpu.task import Place


class Header(Place):
    """The header's numbers.

    NUM_ROWS   rows of activations, at most MAX_ROWS
    ARE_MANY   1 if block weights are read once for all of them (`many_rows.py`), else 0
    SLOTS      address of the slot of each row's KV, int64; -1 writes nothing
    ROWS       address of the rows of the stream that a norm reads, int64; 0: row i is row i
    SEQUENCES  address of the sequences whose rows these are, in order, int64
               [sequences, NUM_OF_SEQUENCE]; read by recurrent layers only
    EXPERT, FIRST_PAIR   of the pairs of one expert, which have a header of their own
    """

    NUM_ROWS = auto()
    ARE_MANY = auto()
    SLOTS = auto()
    ROWS = auto()
    SEQUENCES = auto()
    EXPERT = auto()
    FIRST_PAIR = auto()


class OfSequence(Place):
    """The numbers of a sequence: its first row, how many it has, and the address of its state."""

    FIRST = auto()
    COUNT = auto()
    STATE = auto()


NUM_HEADERS = len(Header)
NUM_OF_SEQUENCE = len(OfSequence)
# Rows that a step has memory for: larger steps are computed in groups. More at once gain nothing.
MAX_ROWS = 128
# Rows of a small step. A group has as many at least, however long their contexts are.
FEW_ROWS = 16
# So many rows are many for block weights, whose levels are read once for all of them if a row has
# no more blocks than this: four rows of levels of 16 bits are 256 KB then.
MANY_ROWS, MOST_BLOCKS = 12, 1024


def set_num_rows(header: Any, num_rows: int, num_matrices: int = 1) -> None:
    """Write the number of rows, which are those of `num_matrices` together, to a header."""
    header[Header.NUM_ROWS] = num_rows
    header[Header.ARE_MANY] = num_rows >= MANY_ROWS * num_matrices


def has_many(code: Code) -> Value:
    """Return 1 if rows are many for block weights, else 0: what rounds them decides alike."""
    return (code.header(Header.ARE_MANY) > 0) & (code.task.num_blocks < MOST_BLOCKS + 1)


def read_sequence(code: Code, number: Value) -> tuple[Value, Value, Value]:
    """Read a sequence's first row, the row behind its last, and the address of its state."""
    address = code.header(Header.SEQUENCES) + number * (8 * NUM_OF_SEQUENCE)
    first, count, state = (code.load(address, 8 * place, I64) for place in OfSequence)
    return first, first + count, state

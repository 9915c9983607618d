"""The header of a step, which all kernels of a program read: what changes from step to step."""

from enum import IntEnum

from kvchat_kernels.cpu.code import I64, Code, Value


class Header(IntEnum):
    """The places of the header's 64-bit numbers.

    NUM_ROWS   rows of activations, at most MAX_ROWS
    SLOTS      address of the slot of each row's KV, int64; -1 writes nothing
    ROWS       address of the rows of the stream that a norm reads, int64; 0: row i is row i
    SEQUENCES  address of the sequences whose rows these are, in order, int64
               [sequences, NUM_OF_SEQUENCE]; read by recurrent layers only
    """

    NUM_ROWS = 0
    SLOTS = 1
    ROWS = 2
    SEQUENCES = 3


class OfSequence(IntEnum):
    """The numbers of a sequence: its first row, how many it has, and the address of its state."""

    FIRST = 0
    COUNT = 1
    STATE = 2


NUM_HEADERS = 4
NUM_OF_SEQUENCE = len(OfSequence)
# Rows that a step has memory for: larger steps are computed in groups. More at once gain nothing.
MAX_ROWS = 128
# Rows of a small step. A group has as many at least, however long their contexts are.
FEW_ROWS = 16


def read_sequence(code: Code, number: Value) -> tuple[Value, Value, Value]:
    """Read a sequence's first row, the row behind its last, and the address of its state."""
    address = code.header(Header.SEQUENCES) + number * (8 * NUM_OF_SEQUENCE)
    first, count, state = (code.load(address, 8 * place, I64) for place in OfSequence)
    return first, first + count, state

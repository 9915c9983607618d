"""The header of a step, which all kernels of a program read: what changes from step to step."""

from enum import auto

from kvchat_kernels.cpu.code import I64, Code, Value
from kvchat_kernels.cpu.task import Place


class Header(Place):
    """The header's numbers.

    NUM_ROWS   rows of activations, at most MAX_ROWS
    SLOTS      address of the slot of each row's KV, int64; -1 writes nothing
    ROWS       address of the rows of the stream that a norm reads, int64; 0: row i is row i
    SEQUENCES  address of the sequences whose rows these are, in order, int64
               [sequences, NUM_OF_SEQUENCE]; read by recurrent layers only
    EXPERT, FIRST_PAIR   of the pairs of one expert, which have a header of their own
    """

    NUM_ROWS = auto()
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


def read_sequence(code: Code, number: Value) -> tuple[Value, Value, Value]:
    """Read a sequence's first row, the row behind its last, and the address of its state."""
    address = code.header(Header.SEQUENCES) + number * (8 * NUM_OF_SEQUENCE)
    first, count, state = (code.load(address, 8 * place, I64) for place in OfSequence)
    return first, first + count, state

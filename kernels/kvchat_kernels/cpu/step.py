"""The header of a step, which all kernels of a program read: what changes from step to step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import auto
from typing import Any

from kvchat_kernels.cpu.code import I64, Code, Value, kernel
from kvchat_kernels.cpu.maths import copy_floats
from kvchat_kernels.cpu.task import Memory, Place, Task


class Header(Place):
    """The header's numbers.

    NUM_ROWS   rows of activations, at most MAX_ROWS
    ARE_MANY   1 if block weights are read once for all of them (`many_rows.py`), else 0
    SLOTS      address of the slot of each row's KV, int64; -1 writes nothing
    ROWS       address of the rows of the stream that a norm reads, int64; 0: row i is row i
    SEQUENCES  address of the sequences whose rows these are, in order, int64
               [sequences, NUM_OF_SEQUENCE]; read by recurrent layers only
    GUESS_BYTES   what the inputs of a guess take that all recurrent layers keep
    EXPERT, FIRST_PAIR   of the pairs of one expert, which have a header of their own
    """

    NUM_ROWS = auto()
    ARE_MANY = auto()
    SLOTS = auto()
    ROWS = auto()
    SEQUENCES = auto()
    GUESS_BYTES = auto()
    EXPERT = auto()
    FIRST_PAIR = auto()


class OfSequence(Place):
    """The numbers of a sequence.

    FIRST, COUNT       its first row, and how many it has
    STATE              address of its state
    NUM_SURE           how many of its rows change the state; those after them are guesses
    RIGHT, NUM_RIGHT   address of the inputs of earlier guesses that were right, and how many these
                       are: the state reads them before its rows
    GUESSES            where the inputs of this step's guesses go
    """

    FIRST = auto()
    COUNT = auto()
    STATE = auto()
    NUM_SURE = auto()
    RIGHT = auto()
    NUM_RIGHT = auto()
    GUESSES = auto()


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


class InputsTask(Task):
    """The inputs of a layer with a state.

    inputs        float32 [rows, width], a row of which follows another after `stride` bytes
    stride        bytes
    place         bytes from a guess's inputs, a row of each layer, to the row of this layer
    """

    inputs: Memory
    stride: int
    place: int


@dataclass(frozen=True, slots=True)
class StateRow:
    """A row that a state reads: `offset` leads from where `inputs` begin to its own inputs.

    `row` is its number in the step; a guess of the step before, which `is_earlier`, has none. The
    state `before` it and `after` it may be the same memory.
    """

    row: Value
    is_earlier: Value
    offset: Value
    before: Value
    after: Value


@contextmanager
def rows_of_state(
    code: Code, number: Value, state_offset: Value, room: Value
) -> Iterator[StateRow]:
    """Write a loop over the rows that a sequence's state reads: right guesses, then its own.

    The part of the state at `state_offset` has its value after the rows that are sure; guesses
    change a copy in the `room`.
    """
    task, address = code.task, code.header(Header.SEQUENCES) + number * (8 * NUM_OF_SEQUENCE)
    first, count, state, num_sure, right, num_right, _ = (
        code.load(address, 8 * place, I64) for place in OfSequence
    )
    state, num_sure = state + state_offset, num_right + num_sure
    right, guess_bytes = right + task.place - task.inputs, code.header(Header.GUESS_BYTES)
    with code.loop(0, num_right + count) as index:
        is_earlier, row = index < num_right, first + index - num_right
        offset = code.select(is_earlier, right + index * guess_bytes, row * task.stride)
        before = code.select(index < num_sure + 1, state, room)
        yield StateRow(row, is_earlier, offset, before, code.select(index < num_sure, state, room))


@kernel("guesses", InputsTask)
def guesses_kernel(code: Code, width: int) -> None:
    """Keep the inputs of guesses, of so many numbers each, in whole vectors. Units: sequences."""
    task = code.task
    address = code.header(Header.SEQUENCES) + code.unit * (8 * NUM_OF_SEQUENCE)
    first, count, num_sure, guesses = (
        code.load(address, 8 * place, I64)
        for place in (OfSequence.FIRST, OfSequence.COUNT, OfSequence.NUM_SURE, OfSequence.GUESSES)
    )
    with code.loop(num_sure, count) as index:
        source = task.inputs + (first + index) * task.stride
        place = guesses + task.place + (index - num_sure) * code.header(Header.GUESS_BYTES)
        copy_floats(code, source, place, width)

"""The task of compiled code: an array of 64-bit numbers, most of them addresses."""

from enum import IntEnum


class Place(IntEnum):
    """The places of a task's numbers.

    NEXT                          the next row that a thread takes
    NUM_OUT                       the row after the last
    NUM_BLOCKS                    blocks of 32 columns of a row; to round: of all rows
    NUM_ROWS                      activation rows
    LEVELS, SCALES, MINIMUMS      addresses of the weights
    X, X_SCALES, X_SUMS           addresses of the activations in 16 bits
    OUT                           address of the result; to round: of the values
    """

    NEXT = 0
    NUM_OUT = 1
    NUM_BLOCKS = 2
    NUM_ROWS = 3
    LEVELS = 4
    SCALES = 5
    MINIMUMS = 6
    X = 7
    X_SCALES = 8
    X_SUMS = 9
    OUT = 10


NUM_PLACES = 16

"""Finds an answer that has become one short passage over and over, and would not end by itself."""

from array import array

# A passage of at most so many tokens is looked for. Rules of dashes, rows of zeros and what else
# people ask for consist of one or two tokens, or repeat less often.
MOST_PERIOD = 64
_SHORT_PERIOD = 2
# A longer passage is repeated for so many times the limit.
_LONG_FACTOR = 2
# Looking costs a few hundred microseconds.
_EVERY = 32


def only_repeats(ids: "array[int]", num_generated: int, limit: int) -> bool:
    """Return whether the end of an answer is one passage over and over; to ask after each token.

    The answer is the last `num_generated` of `ids`. A passage of one or two tokens has to fill the
    last `limit` tokens, a longer one twice as many. A `limit` of 0 never finds one.
    """
    if not limit or num_generated < limit or num_generated % _EVERY:
        return False
    if _has_period(ids[-limit:], range(1, _SHORT_PERIOD + 1)):
        return True
    num_long = _LONG_FACTOR * limit
    longer = range(_SHORT_PERIOD + 1, MOST_PERIOD + 1)
    return num_generated >= num_long and _has_period(ids[-num_long:], longer)


def _has_period(tail: "array[int]", periods: range) -> bool:
    return any(tail[period:] == tail[:-period] for period in periods if period < len(tail))

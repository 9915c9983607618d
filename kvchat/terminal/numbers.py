"""Numbers that users type. Knows digits; knows nothing that is counted."""

_MAX_DIGITS = 9


def whole_number(text: str) -> int | None:
    """Return the number that decimal digits spell, None for anything else and for absurd lengths.

    `str.isdigit` is true of superscripts, and `int` raises ValueError for thousands of digits.
    """
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else None

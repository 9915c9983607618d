"""What was typed before the prompt was there, which the terminal has kept.

The terminal has turned its Enter into a line feed, and to the prompt that is another key: so it is
read apart, once the terminal is raw. Knows file descriptors; knows no prompt.
"""

import os
import re
import select

_READ_BYTES = 65536


def typed_ahead(descriptor: int) -> tuple[list[str], str]:
    """Return the complete lines waiting in a terminal, and the beginning of one after them."""
    if not os.isatty(descriptor):
        return [], ""
    data = b""
    while select.select([descriptor], [], [], 0)[0]:
        piece = os.read(descriptor, _READ_BYTES)
        data += piece
        if not piece:
            break
    *lines, rest = re.split(r"\r\n|\r|\n", data.decode(errors="replace"))
    return lines, "".join(character for character in rest if character.isprintable())

"""The gist of a turn, for lists, trees and recitals: what was said, without the files sent along.

Knows how an attached file looks at the beginning of a message; a file whose name has no suffix
passes for words, because words that end in a colon would pass for it.
"""

import re

from kvchat.chat.conversation import Role, Turn
from kvchat.chat.thinking import split_thinking
from kvchat.terminal.wrap import one_row

_ATTACHED = re.compile(r"([^\n]*\.\w+):\n(`{3,})\n.*?\n\2\n\n", re.DOTALL)


def split_attached(text: str) -> tuple[list[str], str]:
    """Return the names of the files at the beginning of a message, and the words after them."""
    names: list[str] = []
    while (match := _ATTACHED.match(text)) is not None:
        names.append(match[1])
        text = text[match.end() :]
    return names, text


def gist(turn: Turn, room: int) -> str:
    """Return what was said in one line of at most `room` cells."""
    if turn.role is Role.ASSISTANT:
        return one_row(split_thinking(turn.text)[1], room)
    names, words = split_attached(turn.text)
    return one_row(words if words.strip() else ", ".join(names), room)

"""TextStream: what turns the ids of an answer to text while they come."""

from typing import Protocol


class TextStream(Protocol):
    """Decodes ids to text one by one, and never splits a character."""

    def feed(self, token_id: int) -> str:
        """Take the next id; return the text that it completes, often empty."""

    def flush(self) -> str:
        """Return the text of an incomplete character at the end."""

"""Picker: the state of a list to choose from: arrows move the cursor, typing filters.

`prompt.py` draws it; `keys.py` handles its keys.
"""

from collections.abc import Sequence

from rich.cells import cell_len

from kvchat.core.text import whole_number
from kvchat.terminal.paint import Fragments
from kvchat.terminal.theme import Glyphs
from kvchat.terminal.view import Choice
from kvchat.terminal.wrap import first_cells, one_row, wrapped_rows


class Picker:
    """An open picker. `result` is the index of the current choice in the unfiltered list."""

    def __init__(self, title: str, choices: Sequence[Choice], current: int = 0) -> None:
        assert choices
        self.title = title
        self.filter = ""
        self._choices = choices
        self._shown = list(range(len(choices)))
        self._position = min(max(0, current), len(choices) - 1)

    @property
    def result(self) -> int | None:
        """The index of the choice at the cursor, None if no choice matches the filter."""
        return self._shown[self._position] if self._shown else None

    def move(self, step: int) -> None:
        """Move the cursor; it wraps around at the ends."""
        if self._shown:
            self._position = (self._position + step) % len(self._shown)

    def type(self, text: str) -> None:
        """Add to the filter: only choices that contain the typed words are shown."""
        self._filter_by(self.filter + text)

    def erase(self) -> None:
        """Remove the last character of the filter."""
        self._filter_by(self.filter[:-1])

    def _filter_by(self, text: str) -> None:
        self.filter = text
        words = text.lower().split()
        before = self.result
        self._shown = [
            index
            for index, choice in enumerate(self._choices)
            if all(word in f"{choice.label} {choice.detail}".lower() for word in words)
        ]
        self._position = self._shown.index(before) if before in self._shown else 0

    def height(self, max_rows: int) -> int:
        """Return how many rows the picker takes."""
        return 1 + max(1, min(len(self._shown), max_rows - 1))

    def _title(self, width: int) -> Fragments:
        """Return the title, wrapped where it is too long for a row, and the hint after it."""
        rows = wrapped_rows(self.title, width)
        hint = self.filter or "type to filter, Enter picks, Esc does not"
        room = width - cell_len(rows[-1])
        title: Fragments = [("class:picker.title", "\n".join(rows))]
        if cell_len(hint) + 2 > room and not self.filter:
            return title
        return [*title, ("class:picker.detail", first_cells(f"  {hint}", room))]

    def fragments(self, max_rows: int, width: int, glyphs: Glyphs) -> Fragments:
        """Return the picker as formatted text: a title, then the choices around the cursor."""
        fragments = self._title(width)
        if not self._shown:
            return [*fragments, ("", "\n  "), ("class:picker.detail", "nothing like that")]
        room = max(1, max_rows - 1)
        first = min(max(0, self._position - room // 2), max(0, len(self._shown) - room))
        for place in range(first, min(first + room, len(self._shown))):
            fragments += self._line(place, width, glyphs)
        return fragments

    def _line(self, place: int, width: int, glyphs: Glyphs) -> Fragments:
        choice = self._choices[self._shown[place]]
        is_current = place == self._position
        mark = glyphs.selected if is_current else " "
        label = one_row(choice.label, max(8, width - cell_len(choice.detail) - 6))
        detail = f"  {choice.detail}" if choice.detail else ""
        style = "class:picker.current" if is_current else ""
        return [
            ("", f"\n{mark} "),
            (style, label),
            ("class:picker.detail", first_cells(detail, width - cell_len(label) - 4)),
        ]


def pick_by_number(text: str, count: int) -> int | None:
    """Return the index of a typed number, None for any other text."""
    number = whole_number(text.strip())
    return number - 1 if number is not None and 1 <= number <= count else None

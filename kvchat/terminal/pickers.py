"""Picker: the state of a list to choose from: arrows move the cursor, typing filters.

A list may come with actions: then two lines of preview stand below it, its entries can be renamed
and deleted, and some are hidden until a key shows them. `prompt.py` draws it; `keys.py` handles its
keys.
"""

from collections.abc import Sequence

from rich.cells import cell_len

from kvchat.core.text import whole_number
from kvchat.terminal.paint import Fragments
from kvchat.terminal.status import plural
from kvchat.terminal.theme import Glyphs
from kvchat.terminal.view import Choice, PickerActions
from kvchat.terminal.wrap import first_cells, last_cells, one_row, rows_apart, wrapped_rows

_PREVIEW_ROWS = 2
_FEW = 4  # so few choices, as yes and no, need no search
PAGE_ROWS = 8
_HINT = "Enter picks, Esc cancels"
SEPARATOR = " · "  # between the parts of a choice's detail, the most important first


class Picker:
    """An open picker. `result` is the index of the current choice in the unfiltered list.

    `choices` may change while it is open, but for their number; `refresh` then looks at them again.
    """

    def __init__(
        self,
        title: str,
        choices: Sequence[Choice],
        current: int = 0,
        actions: PickerActions | None = None,
    ) -> None:
        assert choices
        self.title = title
        self.filter = ""
        self.shows_hidden = False
        self.entry: str | None = None  # the new title, while one is typed
        self.is_deleting = False  # whether the next key says if to delete
        self._choices = choices
        self._actions = actions
        self._shown: list[int] = []
        self._position = 0
        self._told: int | None = None
        self.refresh(min(max(0, current), len(choices) - 1))

    @property
    def result(self) -> int | None:
        """The index of the choice at the cursor, None if no choice matches the filter."""
        return self._shown[self._position] if self._shown else None

    @property
    def is_asking(self) -> bool:
        """Whether keys go to a new title, or to the question whether to delete."""
        return self.entry is not None or self.is_deleting

    def refresh(self, current: int | None = None) -> None:
        """Look at the choices again; the cursor stays at `current`, by default where it is."""
        wanted = self.result if current is None else current
        found = self._found()
        visible = [index for index in found if not self._choices[index].is_hidden]
        # A search that finds hidden choices alone shows them: "nothing" would not be true.
        shows_all = self.shows_hidden or (self.filter.strip() and not visible)
        self._shown = found if shows_all else visible
        self._position = self._shown.index(wanted) if wanted in self._shown else 0
        self._tell_highlighted()

    def _found(self) -> list[int]:
        """Return the choices with all words of the filter, hidden ones too."""
        words = self.filter.lower().split()
        return [
            index
            for index, choice in enumerate(self._choices)
            if not choice.is_gone and all(word in choice.searched_text for word in words)
        ]

    @property
    def count(self) -> int:
        """How many choices are shown."""
        return len(self._shown)

    def move(self, step: int, wraps: bool = True) -> None:
        """Move the cursor; at the ends it stays or `wraps` around."""
        if self._shown:
            position, last = self._position + step, self.count - 1
            self._position = position % self.count if wraps else min(max(0, position), last)
            self._tell_highlighted()

    def move_to_end(self, direction: int) -> None:
        """Move the cursor to the first choice (-1) or to the last (+1)."""
        self.move(direction * self.count, wraps=False)

    def type(self, text: str) -> None:
        """Add to the filter, so that only choices with the typed words are shown; while a new title
        is typed, add to that.
        """
        if self.is_deleting:
            self._end_deleting(is_sure=text.lower() == "y")
        else:
            self._set_typed(self._typed + text)

    def erase(self) -> None:
        """Remove the last character of the filter, or of the new title."""
        self._set_typed(self._typed[:-1])

    def erase_word(self) -> None:
        """Remove the last word of the filter, or of the new title."""
        self._set_typed(self._typed.rstrip().rpartition(" ")[0])

    def erase_all(self) -> None:
        """Remove the filter, or the new title."""
        self._set_typed("")

    @property
    def _typed(self) -> str:
        return self.filter if self.entry is None else self.entry

    def _set_typed(self, text: str) -> None:
        if self.entry is not None:
            self.entry = text
        else:
            self.filter = text
            self.refresh()

    # Actions

    def show_hidden(self) -> None:
        """Show the hidden choices, or hide them again."""
        self.shows_hidden = not self.shows_hidden
        self.refresh()

    def begin_renaming(self) -> None:
        if self._actions is not None and self.result is not None:
            self.entry = self._choices[self.result].name

    def begin_deleting(self) -> None:
        self.is_deleting = self._actions is not None and self.result is not None

    def end_asking(self, is_wanted: bool) -> None:
        """Rename if a title was typed and `is_wanted`; delete nothing."""
        entry, self.entry, self.is_deleting = self.entry, None, False
        if is_wanted and entry and entry.strip() and self._actions and self.result is not None:
            self._actions.rename(self.result, entry.strip())
            self.refresh()

    def _end_deleting(self, is_sure: bool) -> None:
        self.is_deleting = False
        if is_sure and self._actions is not None and self.result is not None:
            position = self._position
            self._actions.delete(self.result)
            self.refresh()
            self._position = max(0, min(position, len(self._shown) - 1))
            self._tell_highlighted()

    def _tell_highlighted(self) -> None:
        if self._actions is not None and self.result != self._told:
            self._told = self.result
            self._actions.highlighted(self.result)

    # Drawing

    def _title_rows(self, width: int, most: int) -> list[str]:
        """Return the title in at most `most` rows, the last cut where it is longer."""
        rows = wrapped_rows(self.title, width)
        if len(rows) > most:
            rows = [*rows[: most - 1], one_row(" ".join(rows[most - 1 :]), width)]
        return rows

    def _title(self, rows: Sequence[str], width: int, room: int) -> Fragments:
        """Return the title's rows, and after them what was typed or a hint, and the place in a list
        that is longer than `room`.
        """
        fragments: Fragments = [("class:picker.title", "\n".join(rows))]
        cells = width - 1 - cell_len(rows[-1])
        place = f"  {self._position + 1} of {self.count}" if self.count > room else ""
        if self.filter:
            typed = last_cells(self.filter, max(1, cells - 2 - cell_len(place)))
            return [*fragments, ("class:picker.detail", f"  {typed}{place}")]
        is_long = len(self._choices) > _FEW or self._actions is not None
        hints = (f"  type to search, {_HINT}" if is_long else f"  {_HINT}", f"  {_HINT}", "")
        after = next((hint + place for hint in hints if cell_len(hint + place) <= cells), "")
        return [*fragments, ("class:picker.detail", after)]

    def fragments(self, max_rows: int, width: int, glyphs: Glyphs) -> Fragments:
        """Return the picker as formatted text: a title, the choices around the cursor, and with
        actions a preview and the keys.
        """
        left = max(2, max_rows - self._num_rows_below(max_rows))
        title = self._title_rows(width, left - 1)  # a choice is in sight, however long it is
        room = left - len(title)
        fragments = self._title(title, width, room)
        if not self._shown:
            fragments += [
                ("", "\n  "),
                ("class:picker.detail", one_row(f"no match{SEPARATOR}Esc cancels", width - 3)),
            ]
        first = min(max(0, self._position - room // 2), max(0, len(self._shown) - room))
        places = range(first, min(first + room, len(self._shown)))
        for place, label in zip(places, self._labels(places, width), strict=True):
            fragments += self._line(place, label, width, glyphs)
        if self._actions is not None:
            fragments += self._below(max_rows, width, glyphs)
        return fragments

    def _num_rows_below(self, max_rows: int) -> int:
        if self._actions is None:
            return 0
        return 1 + (_PREVIEW_ROWS if max_rows > _PREVIEW_ROWS + 3 else 0)

    def _labels(self, places: Sequence[int], width: int) -> list[str]:
        """Return the labels of these rows, cut for the width so that they still differ."""
        choices = [self._choices[self._shown[place]] for place in places]
        details = [choice.detail.split(SEPARATOR) for choice in choices]
        most = max(map(len, details), default=0)
        least = max(8, width // 3)
        # What is left beside as many parts of the details as leave the labels enough.
        rooms = (width - 6 - _widest(details, count) for count in range(most, 0, -1))
        room = next((room for room in rooms if room >= least), least)
        return rows_apart([choice.label for choice in choices], room)

    def _line(self, place: int, label: str, width: int, glyphs: Glyphs) -> Fragments:
        choice = self._choices[self._shown[place]]
        is_current = place == self._position
        mark = glyphs.selected if is_current else " "
        room = width - cell_len(label) - 6
        detail = one_row(_fitting(choice.detail, room), room)
        detail = f"  {detail}" if detail else ""
        style = "class:picker.current" if is_current else ""
        return [("", f"\n{mark} "), (style, label), ("class:picker.detail", detail)]

    def _below(self, max_rows: int, width: int, glyphs: Glyphs) -> Fragments:
        """Return the rows below the choices: the preview of the current one, and the keys."""
        preview = self._choices[self.result].preview if self.result is not None else ()
        num_previewed = self._num_rows_below(max_rows) - 1
        rows = [*preview[:num_previewed], *[""] * (num_previewed - len(preview))]
        fragments: Fragments = [
            (
                "class:picker.detail",
                f"\n  {first_cells(glyphs.thinking + ' ', 2)}{cut}" if cut else "\n",
            )
            for cut in (one_row(row, width - 5) for row in rows)
        ]
        style = "class:notice" if self.is_asking else "class:picker.detail"
        return [*fragments, ("", "\n"), (style, one_row(self._keys(glyphs, width - 1), width - 1))]

    def _keys(self, glyphs: Glyphs, width: int) -> str:
        if self.entry is not None:
            label, keys = "New title: ", "  (Enter renames, Esc cancels)"
            room = width - len(label) - 1
            if cell_len(self.entry) > room - len(keys):
                keys = ""
            return f"{label}{last_cells(self.entry, room)}_{keys}"
        if self.is_deleting:
            question = "Delete it for good? y deletes, any other key does not"
            return question if cell_len(question) <= width else "Delete it for good? y deletes"
        num_hidden = sum(choice.is_hidden and not choice.is_gone for choice in self._choices)
        hidden = "hide" if self.shows_hidden else "show"
        parts = ["Ctrl-R renames", "Ctrl-X deletes"]
        parts += [f"Ctrl-O {hidden}s {plural(num_hidden, 'one-shot')}"] if num_hidden else []
        keys = glyphs.separator.join(parts)
        if cell_len(keys) <= width:
            return keys
        shorter = ["^R rename", "^X delete", *(["^O one-shots"] if num_hidden else [])]
        return glyphs.separator.join(shorter)


def _widest(details: Sequence[Sequence[str]], count: int) -> int:
    """Return the cells of the widest detail, each with so many of its parts."""
    return max(cell_len(SEPARATOR.join(parts[:count])) for parts in details)


def _fitting(detail: str, width: int) -> str:
    """Return the leading parts of a detail that fit."""
    while cell_len(detail) > width and SEPARATOR in detail:
        detail = detail.rpartition(SEPARATOR)[0]
    return detail


def pick_by_number(text: str, count: int) -> int | None:
    """Return the index of a typed number, None for any other text."""
    number = whole_number(text.strip())
    return number - 1 if number is not None and 1 <= number <= count else None

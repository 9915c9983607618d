"""The layout of the live region, from top to bottom, in prompt_toolkit's containers."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from prompt_toolkit.filters import Condition, has_completions
from prompt_toolkit.formatted_text.utils import fragment_list_to_text
from prompt_toolkit.layout import (
    BufferControl,
    ConditionalContainer,
    Container,
    Dimension,
    FormattedTextControl,
    HSplit,
    Layout,
    Window,
)
from prompt_toolkit.layout.menus import CompletionsMenuControl
from prompt_toolkit.layout.processors import (
    AppendAutoSuggestion,
    HighlightIncrementalSearchProcessor,
    HighlightSelectionProcessor,
    Processor,
    ShowArg,
    Transformation,
    TransformationInput,
)
from prompt_toolkit.widgets import SearchToolbar

from kvchat.terminal.paint import Fragments, Row
from kvchat.terminal.pickers import Picker
from kvchat.terminal.theme import Role
from kvchat.terminal.view import LiveState
from kvchat.terminal.wrap import one_row, places_of_simple_emoji, simple_emoji, wrapped_rows

if TYPE_CHECKING:
    from kvchat.terminal.prompt import LivePrompt

# Of a longer line, only the part around the cursor is laid out: each key would take seconds in a
# pasted line of a megabyte. Far more than the prompt's rows have room for.
_MAX_LINE_CHARS = 8192
# Of such a line that the cursor is not in, so much: more would leave no room for the cursor's line.
_OTHER_LINE_CHARS = 160
_ELLIPSIS = "…"


class ShortenLongLine(Processor):
    """Shows a part of a long line, in steps of half a part, so that it rarely moves."""

    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        text = fragment_list_to_text(transformation_input.fragments)
        if len(text) <= _MAX_LINE_CHARS:
            return Transformation(transformation_input.fragments)
        document = transformation_input.document
        start, end = 0, _OTHER_LINE_CHARS
        if document.cursor_position_row == transformation_input.lineno:
            half = _MAX_LINE_CHARS // 2
            start = max(0, (document.cursor_position_col // half - 1) * half)
            end = start + _MAX_LINE_CHARS + half
        head = _ELLIPSIS if start else ""
        tail = _ELLIPSIS if end < len(text) else ""
        lead = len(head) - start
        return Transformation(
            [("", head + text[start:end] + tail)],
            lambda source: min(max(source + lead, 0), len(head) + end - start),
            lambda shown: min(max(shown - lead, 0), len(text)),
        )


class SimplifyEmoji(Processor):
    """Shows emoji that take the same cells everywhere: else edits leave parts of earlier rows."""

    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        text = fragment_list_to_text(transformation_input.fragments)
        shown = simple_emoji(text)
        if shown == text:
            return Transformation(transformation_input.fragments)
        places = places_of_simple_emoji(text)
        return Transformation(
            [("", shown)],
            lambda source: bisect_left(places, source),
            lambda position: places[min(position, len(places) - 1)],
        )


_MAX_MENU_ROWS = 8
_MAX_QUEUE_ROWS = 4
_MAX_QUEUED_CHARS = 2000
# What stands around the rows that wait for the end of an answer: its tail, the prompt, the toolbar.
ROWS_BELOW_ANSWER = 4
_ROWS_AROUND_HELD = 8
_LEAST_HELD_ROWS = 3


@dataclass(slots=True)
class LiveRegion:
    """The content to draw: the dialogue's live state, and the picker while one is open.

    held   rows that wait for the end of an answer
    """

    state: LiveState = field(default_factory=LiveState)
    picker: Picker | None = None
    held: list[Row] = field(default_factory=list)


def build_layout(prompt: "LivePrompt") -> Layout:
    """Return the region's layout, the prompt focused."""
    region = prompt.region
    is_picking = Condition(lambda: region.picker is not None)
    search = SearchToolbar(ignore_case=True)
    input_control = BufferControl(
        buffer=prompt.buffer,
        search_buffer_control=search.control,
        preview_search=True,
        include_default_input_processors=False,
        input_processors=[
            ShortenLongLine(),
            SimplifyEmoji(),
            HighlightIncrementalSearchProcessor(),
            HighlightSelectionProcessor(),
            AppendAutoSuggestion(),
            ShowArg(),
        ],
    )
    input_window = Window(
        input_control,
        wrap_lines=True,
        dont_extend_height=True,
        height=lambda: Dimension(min=1, max=max(3, prompt.size.rows // 3)),
        get_line_prefix=lambda line, wrap: _line_prefix(prompt, line, wrap),
    )
    body = HSplit(
        [
            _lines(lambda: prompt.painter.fragments(region.state.tail), lambda: region.state.tail),
            _lines(
                lambda: [("class:progress", region.state.progress)], lambda: region.state.progress
            ),
            _lines(list, lambda: region.held and region.state.tail, is_gap=True),
            _lines(lambda: _held(prompt), lambda: region.held),
            _lines(lambda: _queue(prompt), lambda: _has_queue(region)),
            _lines(list, lambda: region.state.tail or _has_queue(region), is_gap=True),
            ConditionalContainer(_picker(prompt), is_picking),
            ConditionalContainer(input_window, ~is_picking),
            # The left filter remembers the combination: has_completions would do so for ever.
            ConditionalContainer(_menu(), ~is_picking & has_completions),
            search,
            _toolbar(prompt),
        ]
    )
    return Layout(body, input_window)


def _lines(
    text: Callable[[], Fragments], is_there: Callable[[], object], is_gap: bool = False
) -> Container:
    """Return a container for text that is hidden while it is empty."""
    control = FormattedTextControl(text)
    height = 1 if is_gap else None
    window = Window(control, height=height, wrap_lines=not is_gap, dont_extend_height=True)
    return ConditionalContainer(window, Condition(lambda: bool(is_there())))


def _line_prefix(prompt: "LivePrompt", line: int, wrap: int) -> Fragments:
    if line == 0 and wrap == 0:
        return [("class:glyph", f"{prompt.painter.look.glyphs.prompt} ")]
    return [("", "  ")]


def _held(prompt: "LivePrompt") -> Fragments:
    """Return the rows that wait for the end of an answer, as many as there is room for."""
    painter = prompt.painter
    rows = painter.refit(prompt.region.held, prompt.render_context.width)
    while rows and not rows[-1].plain:
        rows.pop()
    num_shown = max(_LEAST_HELD_ROWS, num_below_answer(prompt, rows))
    if len(rows) <= num_shown:
        return painter.fragments(rows)
    num_more = len(rows) - num_shown + 1
    more = f"{painter.look.glyphs.ellipsis} {num_more} more rows, after the answer"
    return painter.fragments([*rows[: num_shown - 1], painter.text(more, Role.DIM)])


def num_below_answer(prompt: "LivePrompt", rows: Sequence[Row]) -> int:
    """Return how many of these rows there is room for below an answer that streams.

    A terminal that becomes narrower wraps them, and what has no room then stays in its scrollback
    for good: there is room for the rows that a window of 75% of the width could show too.
    """
    room = prompt.size.rows - _ROWS_AROUND_HELD - len(_queue_lines(prompt))
    narrow = max(1, prompt.size.columns * 3 // 4)
    needs = accumulate(max(1, -(-row.cell_len // narrow)) for row in rows)
    return sum(need <= room for need in needs)


def _has_queue(region: LiveRegion) -> bool:
    return bool(region.state.queue or region.state.commands)


def _queue(prompt: "LivePrompt") -> Fragments:
    return [("class:queue", "\n".join(_queue_lines(prompt)))]


def _queue_lines(prompt: "LivePrompt") -> list[str]:
    """Return what waits, one a line, commands first; if there is much, a count of the last."""
    state = prompt.region.state
    room = max(8, prompt.size.columns - 14)
    lines = [f"waiting: {one_row(text, room)}" for text in state.commands]
    for number, text in enumerate(state.queue):
        mark = "editing" if number == state.edited else "queued"
        lines.append(f"{mark} {number + 1}: {one_row(text[:_MAX_QUEUED_CHARS], room)}")
    more = len(lines) - _MAX_QUEUE_ROWS
    return [*lines[:_MAX_QUEUE_ROWS], *([f"and {more} more"] if more > 0 else [])]


def _picker(prompt: "LivePrompt") -> Window:
    def max_rows() -> int:
        rows = prompt.size.rows  # of a few, all but the toolbar's: four choices are in sight
        return max(2, min(12, max(rows - 3, min(rows - 1, 5))))

    def text() -> Fragments:
        picker = prompt.region.picker
        if picker is None:
            return []
        return picker.fragments(max_rows(), prompt.size.columns, prompt.painter.look.glyphs)

    return Window(FormattedTextControl(text, show_cursor=False), dont_extend_height=True)


def _menu() -> Window:
    return Window(
        CompletionsMenuControl(),
        height=Dimension(min=1, max=_MAX_MENU_ROWS),
        dont_extend_height=True,
        style="class:completion-menu",
    )


def _toolbar(prompt: "LivePrompt") -> Window:
    """Return the toolbar's row, or the notice if there is one, in as many rows as it takes."""

    def text() -> Fragments:
        width = prompt.size.columns - 1
        state = prompt.region.state
        if state.notice:
            return [("class:notice", "\n".join(wrapped_rows(state.notice, width)))]
        return [("class:toolbar", state.toolbar(width))]

    return Window(FormattedTextControl(text), dont_extend_height=True)

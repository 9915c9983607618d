"""How a line of the prompt is displayed, where that is not as it is typed: long lines, emoji.

What is sent is what was typed.
"""

from bisect import bisect_left

from prompt_toolkit.formatted_text.utils import fragment_list_to_text
from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput

from kvchat.terminal.wrap import places_of_simple_emoji, simple_emoji

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

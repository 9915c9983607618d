"""LiveApplication: prompt_toolkit's application, made to redraw at once and to survive a resize.

The one place that leans on prompt_toolkit's inside (3.0.51 to 3.0.53). Knows the renderer; knows
no layout.
"""

from typing import Any

from prompt_toolkit.application import Application

from kvchat.terminal.held_output import HeldOutput


class LiveApplication(Application[None]):
    """`reflows` tells that the terminal breaks earlier lines anew when it gets narrower."""

    def __init__(self, reflows: bool, held_output: HeldOutput, **settings: Any) -> None:
        self._reflows = reflows
        self._held_output = held_output
        self._drawn_columns = 0
        super().__init__(**settings)
        self.after_render += self._remember_width

    def redraw_now(self) -> None:
        """Draw before returning, where `invalidate` would draw some time later."""
        self._redraw()

    def _remember_width(self, sender: object) -> None:
        self._drawn_columns = self.output.get_size().columns

    def _on_resize(self) -> None:
        """Erase the region where it is now, which may be higher than where it was drawn."""
        with self._held_output.stroke():
            self.output.cursor_up(self._num_rows_added())
            super()._on_resize()

    def _num_rows_added(self) -> int:
        """Return how many rows above the cursor a narrower terminal has broken in two.

        Where it is not known that the terminal does that, going up would erase what is not ours;
        a stale row is the lesser evil.
        """
        columns = self.output.get_size().columns
        screen = self.renderer.last_rendered_screen
        if not self._reflows or screen is None or columns >= self._drawn_columns:
            return 0
        cursor = screen.get_cursor_position(self.layout.current_window)
        added = cursor.x // columns
        for number in range(cursor.y):
            row = screen.data_buffer[number]
            used = max((x for x, cell in row.items() if cell.char != " "), default=0) + 1
            added += (used - 1) // columns
        return added

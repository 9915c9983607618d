"""Writes `docs/screen.svg`: what two chats with the demo model show, one after the other.

Run it by `make recording`. Each chat is a process of its own in a terminal of 80 columns, with the
home of a new user; the second goes on with the conversation of the first. The picture has the
characters and colours of that terminal, and nothing else.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from pyte.screens import Char

from support.fork_server import ForkServer
from support.pty_screen import PtyScreen

OUTPUT = Path(__file__).with_name("screen.svg")
CHATS = (
    ("kvchat", (), ("My name is Ada and my dog is called Rex.", "What is a KV cache?")),
    ("kvchat -c  # later, in another process", ("-c",), ("What is my dog called?",)),
)
COLUMNS, ROWS = 80, 40
CELL, LINE, MARGIN = 8.4, 19, 16  # pixels: a character's width at 14, a row's height
FOREGROUND, BACKGROUND = "#d8dee9", "#1e222a"
COLOURS = {
    "black": "#4c566a",
    "red": "#bf616a",
    "green": "#a3be8c",
    "brown": "#ebcb8b",
    "blue": "#81a1c1",
    "magenta": "#b48ead",
    "cyan": "#88c0d0",
    "white": "#e5e9f0",
}
Row = Sequence[Char]


def recorded_rows(home: Path) -> Iterator[Row]:
    """Chat, and yield the rows that each terminal shows at the end."""
    for command, arguments, messages in CHATS:
        yield [Char("$", fg="green"), Char(" "), *(Char(letter, bold=True) for letter in command)]
        yield from _without_empty_ends(_rows_of_chat(arguments, messages, home))
        yield []


def _rows_of_chat(arguments: Sequence[str], messages: Sequence[str], home: Path) -> list[Row]:
    server = ForkServer(Path(tempfile.mkdtemp(dir=home)))
    screen = PtyScreen(server, "kvchat", arguments, COLUMNS, ROWS, {"HOME": str(home)})
    try:
        for number, message in enumerate(messages):
            screen.wait_for(lambda text, n=number: _is_ready(text, n)).enter(message)
        screen.wait_for(lambda text: _is_ready(text, len(messages)))
        rows = [_cells(screen.screen.buffer[number]) for number in range(ROWS)]
        screen.enter("/exit").finish()
    finally:
        screen.close()
        server.close()
    return rows


def _is_ready(text: str, num_answers: int) -> bool:
    """So many answers are complete, and the prompt behind them is empty."""
    return text.count("· context ") == num_answers and text.rstrip().endswith("❯")


def _cells(row: Mapping[int, Char]) -> Row:
    return [row[column] for column in range(COLUMNS)]


def _without_empty_ends(rows: Sequence[Row]) -> Sequence[Row]:
    numbers = [n for n, row in enumerate(rows) if _text(row).strip(" ❯")]
    return rows[numbers[0] : numbers[-1] + 1]


def _text(row: Row) -> str:
    return "".join(cell.data for cell in row)


def picture(rows: Sequence[Row]) -> str:
    """Return an SVG of rows of characters."""
    width = COLUMNS * CELL + 2 * MARGIN
    height = len(rows) * LINE + 2 * MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14" '
        f'fill="{FOREGROUND}" xml:space="preserve">',
        "<title>Two chats with the demo model</title>",
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
        *(line for number, row in enumerate(rows) for line in _texts(number, row)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _texts(number: int, row: Row) -> Iterator[str]:
    """Yield the pieces of a row that have one style each, at their columns."""
    column = 0
    for style, cells in groupby(row, lambda cell: (cell.fg, cell.bold, cell.italics)):
        text = _text(list(cells))
        shown = text.strip()
        if shown:
            x = MARGIN + (column + text.index(shown)) * CELL
            y = MARGIN + (number + 0.75) * LINE
            yield (
                f'<text x="{x:g}" y="{y:g}" textLength="{len(shown) * CELL:g}"'
                f"{_attributes(*style)}>{escape(shown, quote=False)}</text>"
            )
        column += len(text)


def _attributes(colour: str, is_bold: bool, is_italic: bool) -> str:
    fill = COLOURS.get(colour.removeprefix("bright"), f"#{colour}" if len(colour) == 6 else "")
    return "".join(
        (
            f' fill="{fill}"' if fill and colour != "default" else "",
            ' font-weight="bold"' if is_bold else "",
            ' font-style="italic"' if is_italic else "",
        )
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        rows = list(recorded_rows(Path(home)))
    OUTPUT.write_text(picture(rows[:-1]))


if __name__ == "__main__":
    main()

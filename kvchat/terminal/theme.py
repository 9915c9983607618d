"""Look and theme: what the terminal can do, and every colour and glyph kvchat draws.

Colours are the terminal's own sixteen, so that they fit a light and a dark background. The caller
passes in the environment variables.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rich.style import Style


class Role(StrEnum):
    """The kinds of text that have a style of their own."""

    PLAIN = "plain"
    USER = "user"
    DIM = "dim"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"
    TITLE = "title"
    HEADING_1 = "heading-1"
    HEADING = "heading"
    STRONG = "strong"
    EMPHASIS = "emphasis"
    STRIKE = "strike"
    CODE = "code"
    LINK = "link"
    THINKING = "thinking"


_STYLES: dict[Role, str] = {
    Role.PLAIN: "none",
    Role.USER: "bold",
    Role.DIM: "dim",
    Role.NOTE: "dim",
    Role.WARNING: "yellow",
    Role.ERROR: "red",
    Role.TITLE: "bold",
    Role.HEADING_1: "bold underline cyan",
    Role.HEADING: "bold cyan",
    Role.STRONG: "bold",
    Role.EMPHASIS: "italic",
    Role.STRIKE: "strike",
    Role.CODE: "cyan",
    Role.LINK: "underline",
    Role.THINKING: "dim italic",
}

# prompt_toolkit's half of the theme, by style class.
PROMPT_STYLES: dict[str, str] = {
    "glyph": "ansicyan bold",
    "toolbar": "dim",
    "toolbar.key": "bold",
    "queue": "dim italic",
    "progress": "ansicyan",
    "notice": "ansiyellow",
    "auto-suggestion": "dim",
    "picker.title": "bold",
    "picker.detail": "dim",
    "picker.current": "reverse",
    "completion-menu": "noinherit",
    "completion-menu.completion": "noinherit",
    "completion-menu.completion.current": "noinherit reverse",
    "completion-menu.meta.completion": "noinherit dim",
    "completion-menu.meta.completion.current": "noinherit reverse",
    "scrollbar.background": "noinherit",
    "scrollbar.button": "noinherit reverse",
}


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The symbols, in Unicode or in plain ASCII."""

    prompt: str = "❯"
    bullet: str = "•"
    quote: str = "▎"
    thinking: str = "┊"
    rule: str = "─"
    separator: str = " · "
    ellipsis: str = "…"
    bar_full: str = "▰"
    bar_empty: str = "▱"
    selected: str = "❯"
    branch: str = "├─ "
    last_branch: str = "└─ "
    trunk: str = "│  "
    tip: str = "●"


ASCII_GLYPHS = Glyphs(
    prompt=">",
    bullet="-",
    quote="|",
    thinking=":",
    rule="-",
    separator=" | ",
    ellipsis="...",
    bar_full="#",
    bar_empty="-",
    selected=">",
    branch="|- ",
    last_branch="`- ",
    trunk="|  ",
    tip="*",
)

# Glyphs that a screen reader speaks well or skips.
_SPOKEN_GLYPHS = Glyphs(
    prompt="",
    bullet="-",
    quote=">",
    thinking="",
    rule="",
    separator=", ",
    selected="",
    branch="- ",
    last_branch="- ",
    trunk="  ",
    tip="(here)",
)


@dataclass(frozen=True, slots=True)
class Look:
    """The terminal's features that kvchat uses.

    has_colour       colours may be used
    is_plain         lines only: no escape sequence of any kind, no toolbar, nothing redrawn
    is_spoken        output for a screen reader: labels in words, no drawn lines
    has_unicode      symbols beyond ASCII can be shown
    reflows          the terminal wraps earlier lines again when it becomes narrower; this decides
                     how much is erased on a resize, and must be false if not known
    """

    has_colour: bool = True
    is_plain: bool = False
    is_spoken: bool = False
    has_unicode: bool = True
    reflows: bool = False

    @property
    def glyphs(self) -> Glyphs:
        if self.is_spoken:
            return _SPOKEN_GLYPHS
        return Glyphs() if self.has_unicode else ASCII_GLYPHS

    def style(self, role: Role) -> Style:
        """Return the Rich style of a role; without colours only attributes remain."""
        style = Style.parse(_STYLES[role])
        return style if self.has_colour else style.without_color

    def prompt_styles(self) -> dict[str, str]:
        """Return prompt_toolkit styles by class."""
        if self.has_colour:
            return dict(PROMPT_STYLES)
        return {name: _without_colour(style) for name, style in PROMPT_STYLES.items()}

    @classmethod
    def choose(
        cls, color: str, accessible: bool, environment: Mapping[str, str], encoding: str = "utf-8"
    ) -> "Look":
        """Return the look for an interactive terminal.

        `color` is auto, always or never. `environment` is the process's: NO_COLOR, TERM,
        ACCESSIBLE and the marks terminals leave there are looked at.
        """
        is_spoken = accessible or environment.get("ACCESSIBLE", "") not in ("", "0")
        is_dumb = environment.get("TERM", "") in ("dumb", "unknown", "")
        forbids_colour = color == "never" or (color == "auto" and bool(environment.get("NO_COLOR")))
        return cls(
            has_colour=not (forbids_colour or is_dumb or is_spoken),
            is_plain=is_dumb or is_spoken,
            is_spoken=is_spoken,
            has_unicode=is_utf8(encoding),
            reflows=_is_known_to_reflow(environment),
        )


def is_utf8(encoding: str) -> bool:
    """Whether an encoding, by any of its spellings, is UTF-8."""
    return encoding.lower().replace("-", "").replace("_", "") == "utf8"


_REFLOWING_TERMS = ("foot", "alacritty", "xterm-kitty", "xterm-ghostty", "wezterm", "contour")
_REFLOWING_PROGRAMS = ("iTerm.app", "Apple_Terminal", "WezTerm", "vscode", "ghostty", "Hyper")
_REFLOWING_MARKS = ("TMUX", "VTE_VERSION", "KITTY_WINDOW_ID", "ALACRITTY_WINDOW_ID", "WT_SESSION")


def _is_known_to_reflow(environment: Mapping[str, str]) -> bool:
    if environment.get("STY"):  # GNU screen cuts lines instead, whatever it runs in
        return False
    return (
        environment.get("TERM", "").startswith(_REFLOWING_TERMS)
        or environment.get("TERM_PROGRAM", "") in _REFLOWING_PROGRAMS
        or any(environment.get(mark) for mark in _REFLOWING_MARKS)
    )


def _without_colour(style: str) -> str:
    return " ".join(word for word in style.split() if "ansi" not in word)

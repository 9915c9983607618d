"""AnswerView: renders one reply's events as rows: thinking, answer and figures.

The first sample is shown as it streams; other samples are shown when they are complete.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rich.text import Text

from kvchat.chat.conversation import ROOT
from kvchat.chat.events import (
    AnswerCall,
    AnswerEnded,
    AnswerFailed,
    AnswerText,
    ChatEvent,
    ReadingPrompt,
    SavingFailed,
)
from kvchat.chat.thinking import whole_passages
from kvchat.chat.thinning import dropped_in_words
from kvchat.core.errors import ContextTooLong
from kvchat.core.types import FinishReason
from kvchat.terminal.markdown import MarkdownStream
from kvchat.terminal.paint import Painter, RenderContext, Row, prefixed
from kvchat.terminal.status import WAYS_OUT, PrefillMeter, StatsLevel, detail_line, stats_line
from kvchat.terminal.theme import Role
from kvchat.terminal.view import View

# Only a prefill that takes longer than this gets a bar.
_BAR_AFTER_S = 0.4


class AnswerRenderer:
    """Renders an answer's text as rows: dimmed thinking below a separate line, then the answer.

    `feed` and `finish` return final rows; `tail` returns rows that may still change.
    """

    def __init__(self, painter: Painter) -> None:
        self._painter = painter
        self._stream = MarkdownStream()
        self.is_thinking = False
        self._has_rows = False

    def feed(self, text: str, is_thinking: bool, ctx: RenderContext) -> list[Row]:
        rows: list[Row] = []
        if is_thinking != self.is_thinking:
            rows = self._turn_over(is_thinking, ctx)
        return rows + self._styled(self._stream.feed(text, self._inner(ctx)))

    def tail(self, ctx: RenderContext) -> list[Row]:
        return self._styled(self._stream.tail(self._inner(ctx)), is_final=False)

    def finish(self, ctx: RenderContext) -> list[Row]:
        rows = self._styled(self._stream.finish(self._inner(ctx)))
        self._stream = MarkdownStream()
        return rows

    def _turn_over(self, is_thinking: bool, ctx: RenderContext) -> list[Row]:
        rows = self.finish(ctx)
        gap = [Text(end="")] if self._has_rows or rows else []
        self.is_thinking = is_thinking
        spoken = self._painter.look.is_spoken
        label = "Thinking:" if is_thinking else "Answer:"
        return [*rows, *gap, *([self._painter.text(label)] if spoken else [])]

    def _inner(self, ctx: RenderContext) -> RenderContext:
        return ctx.narrower(2) if self.is_thinking else ctx

    def _styled(self, rows: list[Row], is_final: bool = True) -> list[Row]:
        self._has_rows = self._has_rows or (is_final and bool(rows))
        if not self.is_thinking:
            return rows
        style = self._painter.style(Role.THINKING)
        glyph = self._painter.look.glyphs.thinking
        bar = Text(end="").append(f"{glyph} " if glyph else "", self._painter.style(Role.DIM))
        styled = []
        for row in rows:
            row.stylize_before(style)
            styled.append(prefixed(row, bar))
        return styled


@dataclass(slots=True)
class _Other:
    """A sample other than the first: collected, and shown at the end."""

    passages: list[AnswerText] = field(default_factory=list)
    ended: AnswerEnded | None = None


class AnswerView:
    """Turns one reply's events into rows. `failed` and `ended` hold its outcome.

    `context_limit` returns the model's limit, None while it is not known. `said_before` is the
    existing text of an answer that is continued: its last row is shown again, with the new text.
    Of a reply that `is_unseen` only the progress is shown.
    """

    def __init__(
        self,
        view: View,
        context_limit: Callable[[], int | None],
        stats_level: StatsLevel,
        said_before: str = "",
        hides_thinking: bool = False,
        clock: Callable[[], float] = time.monotonic,
        is_unseen: bool = False,
    ) -> None:
        self.is_unseen = is_unseen
        self._view = view
        self._context_limit = context_limit
        self._stats_level = stats_level
        self._clock = clock
        self._began_s = clock()
        self._said_before = said_before
        self._hides_thinking = hides_thinking
        self._has_hidden = False
        self._renderer = self._renderer_so_far()
        self._meter = PrefillMeter()
        self._has_text = False
        self._warnings: list[str] = []
        self._others: dict[int, _Other] = {}
        self.ended: dict[int, AnswerEnded] = {}
        self.failed: AnswerFailed | None = None

    def take(self, events: list[ChatEvent]) -> list[Row]:
        """Process events; return the final rows to show."""
        rows: list[Row] = []
        for event in _joined(events):
            rows += self._take(event)
        return rows if not self.is_unseen else []

    @property
    def tail(self) -> list[Row]:
        """The rows that may still change; of a block with many, such as a table, their count."""
        most = self._view.max_tail_rows if not self.is_unseen else 0
        rows = self._renderer.tail(self._view.render_context) if most else []
        if len(rows) <= most:
            return rows
        painter = self._view.painter
        return [painter.text(f"{painter.look.glyphs.ellipsis} {len(rows)} rows so far", Role.DIM)]

    @property
    def progress(self) -> str:
        """The bar of a long prefill, else ""."""
        now_s = self._clock()
        if self._has_text or now_s - self._began_s < _BAR_AFTER_S:
            return ""
        return self._meter.line(now_s, self._view.painter.look.glyphs)

    @property
    def has_text(self) -> bool:
        """Whether the answer, or its thinking, has begun."""
        return self._has_text and not self.is_unseen

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began_s

    @property
    def too_long(self) -> ContextTooLong | None:
        """The error of a context that was too long, which the view does not show itself."""
        error = self.failed.error if self.failed is not None else None
        return error if isinstance(error, ContextTooLong) else None

    def model_is_ready(self) -> None:
        """Count the time from now on: the model was still loading when the message was sent."""
        self._began_s = self._clock()

    def _take(self, event: ChatEvent) -> list[Row]:
        if isinstance(event, AnswerText):
            return self._take_text(event)
        if isinstance(event, AnswerEnded):
            return self._end(event)
        if isinstance(event, AnswerCall):
            return []  # shown when it is run
        if isinstance(event, ReadingPrompt):
            self._meter.update(event, self._clock())
            return []
        if isinstance(event, AnswerFailed):
            self.failed = event
            told = self._problem(str(event.error)) if self.too_long is None else []
            rows = self._renderer.finish(self._view.render_context)
            return [*rows, *told, *self._held_warnings()]
        assert isinstance(event, SavingFailed)
        self._warnings.append(event.message)
        is_over = 0 in self.ended or self.failed is not None
        if self._has_text and not is_over:
            return []
        return [*self._held_warnings(), Text(end="")]

    def _held_warnings(self) -> list[Row]:
        """Return the warnings that came within the text, for after it."""
        held, self._warnings = self._warnings, []
        return [row for message in held for row in self._warning(message)]

    def _renderer_so_far(self, starts_thinking: bool | None = None) -> AnswerRenderer:
        renderer = AnswerRenderer(self._view.painter)
        for passage in whole_passages(self._said_before, starts_thinking):
            renderer.feed(passage.text, passage.is_thinking, self._view.render_context)
        return renderer

    def _take_text(self, event: AnswerText) -> list[Row]:
        if event.is_thinking and not self._has_text and not self._renderer.is_thinking:
            # The earlier text was thinking too: the prompt held the opening mark.
            self._renderer = self._renderer_so_far(starts_thinking=True)
        self._has_text = True
        if event.is_thinking and self._hides_thinking:
            return self._note_hidden()
        if event.sample:
            self._others.setdefault(event.sample, _Other()).passages.append(event)
            return []
        return self._renderer.feed(event.text, event.is_thinking, self._view.render_context)

    def _note_hidden(self) -> list[Row]:
        """Return a row at the first hidden thinking, no row at the next."""
        is_first, self._has_hidden = not self._has_hidden, True
        words = "thinking; /think show shows it"
        return [self._view.painter.text(words, Role.DIM)] if is_first else []

    def _end(self, event: AnswerEnded) -> list[Row]:
        self.ended[event.sample] = event
        if event.sample:
            self._others.setdefault(event.sample, _Other()).ended = event
            return []
        return [
            *self._renderer.finish(self._view.render_context),
            *self._held_warnings(),
            *self._closing(event),
        ]

    def others(self, num_before: int) -> list[Row]:
        """Return the rows of all samples but the first, when all are complete.

        `num_before` answers to the message are older than these, and are counted with them.
        """
        count = num_before + 1 + len(self._others)
        rows: list[Row] = []
        for sample, other in sorted(self._others.items()):
            title = f"Answer {num_before + sample + 1} of {count}"
            rows.append(self._view.painter.text(title, Role.TITLE))
            renderer = AnswerRenderer(self._view.painter)
            for passage in other.passages:
                rows += renderer.feed(passage.text, passage.is_thinking, self._view.render_context)
            rows += renderer.finish(self._view.render_context)
            if other.ended is not None:
                rows += self._closing(other.ended)
        return rows

    def _closing(self, event: AnswerEnded) -> list[Row]:
        """Return the rows after an answer: how it ended, and the figures if they are on."""
        painter, width = self._view.painter, self._view.render_context.width
        look = painter.look
        lines = [_ending_words(event)]
        if self._stats_level:
            room = None if look.is_spoken else width
            lines = [stats_line(event, self._context_limit(), look.glyphs, room)]
        lines.append(dropped_in_words(event.usage.dropped))
        if look.is_spoken:
            lines[0] = f"End of answer. {lines[0]}".strip()
        if self._stats_level is StatsLevel.ALL:
            lines.insert(1, detail_line(event, look.glyphs))
        rows = [row for line in lines if line for row in painter.wrapped(line, width, Role.DIM)]
        if self._has_filled_context(event):
            rows += self._warning(f"The context is full: {WAYS_OUT}")
        return [*rows, Text(end="")]

    def _has_filled_context(self, event: AnswerEnded) -> bool:
        used = event.usage.prompt_tokens + event.usage.completion_tokens
        limit = self._context_limit()
        is_aside = event.turn_id == ROOT  # its end is not the conversation's
        is_cut = event.reason is FinishReason.LENGTH and not is_aside
        return is_cut and limit is not None and used >= limit

    def _problem(self, message: str) -> list[Row]:
        rows = self._view.painter.wrapped(message, self._view.render_context.width, Role.ERROR)
        return [*rows, Text(end="")]

    def _warning(self, message: str) -> list[Row]:
        return self._view.painter.wrapped(message, self._view.render_context.width, Role.WARNING)


def _joined(events: list[ChatEvent]) -> list[ChatEvent]:
    """Return events with consecutive texts joined, because parsing has a cost per piece."""
    joined: list[ChatEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if (
            isinstance(event, AnswerText)
            and isinstance(last, AnswerText)
            and (last.sample, last.is_thinking) == (event.sample, event.is_thinking)
        ):
            joined[-1] = replace(last, text=last.text + event.text)
        else:
            joined.append(event)
    return joined


def error_in_words(error: ContextTooLong) -> str:
    """Return the error of a full context with the commands that help."""
    is_cache_small = "--device-cache" in error.hint
    return f"{error.message} {WAYS_OUT}{' Or raise --device-cache.' if is_cache_small else ''}"


def _ending_words(ended: AnswerEnded) -> str:
    reason = ended.reason
    if ended.ends_in_thinking and reason is FinishReason.STOP:
        return "The model ended within its thinking. /retry asks again, /think off without it."
    if reason is FinishReason.CANCELLED:
        return "Stopped."
    if reason is FinishReason.LENGTH:
        return "Cut off at the limit."
    if reason is FinishReason.REPETITION:
        return "Ended, as it only repeats itself. /set repetition-limit 0 lets answers go on."
    return "Out of time." if reason is FinishReason.TIMEOUT else ""

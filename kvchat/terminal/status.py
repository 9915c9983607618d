"""Formats figures as text: the line after an answer, the toolbar, the bar of a long prefill.

Pure functions of the engine's figures; parts that are zero or unknown are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from rich.cells import cell_len

from kvchat.chat.answer_settings import ContextPolicy
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.events import AnswerEnded, ReadingPrompt
from kvchat.core.stats import GraphStatus, SpeculationStatus
from kvchat.core.text import one_line
from kvchat.core.types import CachedTokens, FinishReason, MissReason, Timing, Usage, rate
from kvchat.terminal.theme import Glyphs
from kvchat.terminal.wrap import first_cells

_BAR_CELLS = 10
_LEAST_LEFT_S = 0.05
# The share of the context from which on the toolbar warns.
NEARLY_FULL = 0.8
_MIN_WORDY_COLUMNS = 60
_MIN_WORDIEST_COLUMNS = 110
# What a context policy does with the next messages.
_POLICY_WORDS = {
    ContextPolicy.DROP: "the oldest messages will be left out",
    ContextPolicy.COMPACT: "a summary will make room",
}
# What to do when the context is full.
WAYS_OUT = (
    "/compact lets a summary take the place of older messages, /new begins another conversation, "
    "/rewind goes back. /set context-policy drop or compact makes room by itself from now on."
)


def format_count(count: int) -> str:
    """Return a number of tokens as text: 812, 4.1k, 32k."""
    if count < 1000:
        return str(count)
    if count % 1024 == 0:
        return f"{count // 1024}k"
    return f"{count / 1000:.1f}k" if count < 9950 else f"{count / 1000:.0f}k"


def format_seconds(seconds: float) -> str:
    """Return a duration as text: 84 ms, 1.2 s, 43 s, 2 min 5 s."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


def _format_rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.0f}/s" if tokens_per_s >= 9.95 else f"{tokens_per_s:.1f}/s"


def plural(count: int, noun: str) -> str:
    """Return `1 token`, `2 tokens`, `1,240 tokens`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def about(model: ChatModel) -> str:
    """Return what stands before a number of tokens counted here: "about ", or "" if it is exact."""
    return "" if model.counts_tokens else "about "


class StatsLevel(IntEnum):
    """The figures that follow every answer: none, one line, or the line and the details below."""

    OFF = 0
    LINE = 1
    ALL = 2

    def next(self) -> "StatsLevel":
        """Return the level that F2 changes to: line, all, off, and again."""
        return StatsLevel((self + 1) % len(StatsLevel))


def stats_line(
    ended: AnswerEnded,
    context_limit: int | None,
    glyphs: Glyphs,
    width: int | None = None,
    load_s: float | None = None,
) -> str:
    """Return the line after an answer, in at most `width` cells; None leaves nothing out.

    The least important parts are left out first: tiers, context, tokens, the first token's time.
    So is what is not known: what a server had cached that does not tell, or what is cached of a
    prompt that was stopped before any of it was looked up; and `context_limit` None.
    `load_s` is the loading time of the model, for the first answer of a script.
    """
    usage, timing = ended.usage, ended.timing
    used = usage.prompt_tokens + usage.completion_tokens
    some = "about " if usage.is_estimate else ""
    tiers = _tiers(usage.cached)
    is_begun = not usage.prompt_tokens or usage.unread_tokens < usage.prompt_tokens
    is_told = ended.miss_reason is not MissReason.NOT_TOLD and is_begun
    cached = f"cached {usage.cached.total:,}/{usage.prompt_tokens:,}" if is_told else ""
    full = [
        _ending(ended),
        f"loaded in {format_seconds(load_s)}" if load_s is not None else "",
        f"{cached} ({tiers})" if cached and tiers else cached,
        f"first token {format_seconds(timing.ttft_s)}" if usage.completion_tokens else "",
        _generated(usage, timing, some),
        f"context {some}{_share(used, context_limit)}" if context_limit else "",
    ]
    shorter: list[tuple[int, str]] = [(2, cached), (5, ""), (4, ""), (1, ""), (3, "")]
    line = _joined(full, glyphs)
    for place, text in shorter:
        if width is None or cell_len(line) <= width:
            break
        full[place] = text
        line = _joined(full, glyphs)
    return line if width is None else first_cells(line, width)


def detail_line(ended: AnswerEnded, glyphs: Glyphs, read_again: str = "") -> str:
    """Return the figures that the line after an answer leaves to /stats; "" if there are none.

    `read_again` says why tokens were prefilled again, "" if none were.
    """
    usage = ended.usage
    num_read = usage.prefilled_tokens if ended.miss_reason is not MissReason.NOT_TOLD else 0
    pace = rate(num_read, ended.timing.prefill_s)
    prefill = f"prefill {num_read:,}" if num_read else ""
    parts = [
        f"{prefill} at {_format_rate(pace)}" if prefill and pace else prefill,
        f"read again: {read_again}" if read_again else "",
        _drafted(usage),
    ]
    return _joined(parts, glyphs)


def _joined(parts: list[str], glyphs: Glyphs) -> str:
    return glyphs.separator.join(part for part in parts if part)


def _ending(ended: AnswerEnded) -> str:
    if ended.ends_in_thinking and ended.reason is FinishReason.STOP:
        return "ended within its thinking"
    words = {
        FinishReason.CANCELLED: "stopped",
        FinishReason.LENGTH: "cut off at the limit",
        FinishReason.TIMEOUT: "out of time",
        FinishReason.REPETITION: "ended as it repeats itself",
    }
    return words.get(ended.reason, "")


def _tiers(cached: CachedTokens) -> str:
    """Return the tiers below the device that tokens were read from; "" if there are none."""
    places = cached.places.items()
    return ", ".join(f"{count:,} {name}" for name, count in places if count and name != "device")


def _share(used: int, limit: int) -> str:
    return f"{format_count(used)}/{format_count(limit)}"


def _generated(usage: Usage, timing: Timing, some: str) -> str:
    if not usage.completion_tokens:
        return ""
    tokens = some + plural(usage.completion_tokens, "token")
    speed = rate(usage.completion_tokens - 1, timing.decode_s)
    return f"{tokens}, {_format_rate(speed)}" if speed else tokens


def _drafted(usage: Usage) -> str:
    """Return the draft figures of an answer; "" if it had no drafts and no reason for that."""
    drafts = usage.drafts
    parts = []
    if drafts.num_drafted:
        parts.append(f"draft {drafts.accepted_share:.0%} accepted")
        parts.append(f"{drafts.accepted_len:.1f} a step")
        parts.append(f"{drafts.gain:.1f}x plain" if drafts.gain is not None else "")
    if drafts.why_plain:
        parts.append(f"{'' if drafts.num_drafted else 'draft '}off: {drafts.why_plain}")
    return ", ".join(part for part in parts if part)


def speculation_lines(status: SpeculationStatus) -> list[str]:
    """Return the mode of speculation and its figures so far."""
    total, names = status.total, " and ".join(status.drafters) or "nothing"
    if status.mode == "off":
        lines = [f"drafts: off; there is {names}"]
    else:
        lines = [f"drafts: {status.mode}, from {names}"]
    if total.num_drafted:
        gain = f", {total.gain:.2f} times the plain rate" if total.gain is not None else ""
        lines.append(
            f"        {total.num_accepted:,} of {plural(total.num_drafted, 'token')} accepted "
            f"({total.accepted_share:.0%}), {total.accepted_len:.2f} tokens a step{gain}"
        )
    if total.why_plain and status.mode != "off":
        lines.append(f"        off by themselves at the moment: {total.why_plain}")
    return lines + [f"        {one_line(reason)}" for reason in status.failed]


def graph_lines(status: GraphStatus) -> list[str]:
    """Return how many steps ran as captured graphs, and why others did not."""
    captured = f"{plural(status.num_captured, 'shape')} captured"
    took = f" in {status.capture_s:.1f} s" if status.num_captured else ""
    small = status.num_replayed + status.num_eager
    lines = [f"graphs: {captured}{took}, {status.num_replayed:,} of {small:,} small steps replayed"]
    return lines + ([f"        {one_line(status.trouble)}"] if status.trouble else [])


class PrefillMeter:
    """Estimates the remaining time of a prefill from its progress events."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, ReadingPrompt] | None = None

    def update(self, event: ReadingPrompt, now_s: float) -> None:
        if self._first is None:
            self._first = (now_s, event.done)
        self._last = (now_s, event)

    def remaining_s(self, now_s: float) -> float | None:
        """Return the seconds left as the event tells them, or else at the rate so far; None while
        there is no useful rate, and when that time has passed.
        """
        if self._first is None or self._last is None:
            return None
        first_s, first_done = self._first
        last_s, event = self._last
        left_s = event.left_s
        if left_s is None:
            pace = rate(event.done - first_done, last_s - first_s)
            left_s = (event.total - event.done) / pace if pace else 0.0
        left_s -= now_s - last_s
        return left_s if left_s > _LEAST_LEFT_S else None

    def line(self, now_s: float, glyphs: Glyphs) -> str:
        """Return the bar, "" before the first event and at the end of the prefill."""
        if self._last is None or self._last[1].done >= self._last[1].total:
            return ""
        event = self._last[1]
        share = event.done / event.total
        full = int(share * _BAR_CELLS)
        left = self.remaining_s(now_s)
        parts = [
            f"reading {event.total:,}",
            f"{event.cached.total:,} cached" if event.cached.total else "",
            f"{glyphs.bar_full * full}{glyphs.bar_empty * (_BAR_CELLS - full)} {share:.0%}",
            f"{format_seconds(left)} left" if left is not None else "",
        ]
        return glyphs.separator.join(part for part in parts if part)


def attached_in_words(
    names: Sequence[str], share_read: float | None, is_too_long: bool = False
) -> str:
    """Return the toolbar's words on attached files; `share_read` is the part of the next message
    that is read ahead, None for nothing.
    """
    what = f"{one_line(names[0], 20)} attached" if names else "text"
    if len(names) > 1:
        what = f"{plural(len(names), 'file')} attached"
    if is_too_long:
        return f"{what}: too long to send"
    if share_read is None:
        return what if names else ""
    done = "read" if share_read == 1.0 else f"{share_read:.0%} read"
    return f"{what}, {done}" if names else f"{what} {done}"


@dataclass(frozen=True, slots=True)
class ToolbarFacts:
    """The values that the toolbar shows.

    warmth      what the next message costs, in a few words; "" if not known. It is not shown
                during an answer, which changes it, and where the context is full
    attached    the files that go with the next message, and how much of it is read ahead
    about       "about " if the context's tokens are an estimate
    branch      (number, count) of the answers to the last message, None if there is only one
    answering   the activity of the answer in progress, empty while idle
    loading     the stage of loading, empty when the model is loaded
    editing     the message that the next one replaces
    """

    model: str
    title: str = ""
    branch: tuple[int, int] | None = None
    context_tokens: int = 0
    about: str = ""
    context_limit: int | None = None
    warmth: str = ""
    attached: str = ""
    answering: str = ""
    loading: str = ""
    editing: str = ""
    num_queued: int = 0
    escape: str = ""
    context_policy: ContextPolicy = ContextPolicy.STOP


def toolbar(facts: ToolbarFacts, width: int, glyphs: Glyphs) -> str:
    """Return the toolbar's text; at a small width the least important parts are left out."""
    is_full = _is_nearly_full(facts)
    context = _context(facts, width)
    urgent = [
        context if is_full else "",
        facts.loading,
        facts.answering,
        facts.editing,
        f"{facts.num_queued} queued" if facts.num_queued else "",
        f"Esc {facts.escape}" if facts.escape else "",
    ]
    quiet = [
        facts.model,
        f"answer {facts.branch[0]}/{facts.branch[1]}" if facts.branch else "",
        "" if is_full else context,
        "" if facts.answering or _is_over(facts) else facts.warmth,
        facts.attached,
    ]
    separator = glyphs.separator
    urgent = [part for part in urgent if part]
    parts = [part for part in quiet if part] + urgent
    title = _fitting(facts.title, width - cell_len(separator.join([*parts, ""])), glyphs)
    if title:
        parts.insert(1, title)
    while len(parts) > len(urgent) and cell_len(separator.join(parts)) > width:
        del parts[0]
    return _shortened(parts, width, glyphs)


def _shortened(parts: list[str], width: int, glyphs: Glyphs) -> str:
    """Return the parts in one row: the longest loses its end, and then the first ones go."""
    separator = glyphs.separator
    excess = cell_len(separator.join(parts)) - width
    if excess > 0 and parts:
        longest = max(parts, key=cell_len)
        if shorter := _fitting(longest, cell_len(longest) - excess, glyphs):
            parts = [shorter if part is longest else part for part in parts]
    while len(parts) > 1 and cell_len(separator.join(parts)) > width:
        parts = parts[1:]
    return first_cells(separator.join(parts), width)


def _fitting(title: str, room: int, glyphs: Glyphs) -> str:
    """Return a title cut to the width, "" if too little of it would remain."""
    if cell_len(title) <= room:
        return title
    cut = room - cell_len(glyphs.ellipsis)
    return first_cells(title, cut).rstrip() + glyphs.ellipsis if cut >= 8 else ""


def _is_nearly_full(facts: ToolbarFacts) -> bool:
    return facts.context_tokens >= NEARLY_FULL * (facts.context_limit or float("inf"))


def _is_over(facts: ToolbarFacts) -> bool:
    """Whether no next message fits, so that it costs nothing."""
    return facts.context_tokens >= (facts.context_limit or float("inf"))


def _context(facts: ToolbarFacts, width: int) -> str:
    """Return how full the context is; when it is nearly full, also what helps."""
    used, limit = facts.context_tokens, facts.context_limit
    if not used or not limit:
        return ""
    words = f"context {facts.about}{_share(used, limit)}"
    if not _is_nearly_full(facts):
        return words
    full = f"{used / limit:.0%} full"
    if facts.context_policy in _POLICY_WORDS:
        return f"{full}: {_POLICY_WORDS[facts.context_policy]}"
    if width < _MIN_WORDY_COLUMNS:
        return f"{full}: /compact /new /rewind"
    if width < _MIN_WORDIEST_COLUMNS:
        return f"{words}, {full}: /compact, /new or /rewind"
    return f"{words}, {full}: /compact, /new, /rewind or /set context-policy"

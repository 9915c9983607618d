"""Formats figures as text: the line after an answer, the toolbar, the bar of a long prefill.

Pure functions of the engine's figures; parts that are zero or unknown are left out.
"""

from dataclasses import dataclass

from rich.cells import cell_len

from kvchat.chat.events import ReadingPrompt
from kvchat.core.stats import GraphStatus, SpeculationStatus
from kvchat.core.text import one_line
from kvchat.core.types import CachedTokens, FinishReason, Timing, Usage, rate
from kvchat.terminal.theme import Glyphs
from kvchat.terminal.wrap import NO_BREAK, first_cells

_BAR_CELLS = 10


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


def model_label(name: str) -> str:
    """Return a model's name without the directories or the owner before it."""
    return one_line(name.rstrip("/").rpartition("/")[2], 32) or "model"


def plural(count: int, noun: str) -> str:
    """Return `1 token`, `2 tokens`, `1,240 tokens`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def stats_line(
    usage: Usage,
    timing: Timing,
    reason: FinishReason,
    context_limit: int | None,
    glyphs: Glyphs,
    read_again: str = "",
    load_s: float | None = None,
) -> str:
    """Return the line after an answer. A line that is too long breaks between its parts.

    `read_again` says why tokens were prefilled again, "" if none were. `load_s` is the loading time
    of the model, for the first answer of a script.
    """
    used = usage.prompt_tokens + usage.completion_tokens
    parts = [
        _ending(reason),
        f"loaded in {format_seconds(load_s)}" if load_s is not None else "",
        _cached(usage, glyphs),
        f"prefill {usage.prefilled_tokens:,}" if usage.prefilled_tokens else "",
        f"read again: {read_again}" if read_again else "",
        f"first token {format_seconds(timing.ttft_s)}" if usage.completion_tokens else "",
        _generated(usage, timing),
        _drafted(usage),
        f"context {format_count(used)}/{format_count(context_limit)}" if context_limit else "",
    ]
    return glyphs.separator.join(part.replace(" ", NO_BREAK) for part in parts if part)


def _ending(reason: FinishReason) -> str:
    words = {
        FinishReason.CANCELLED: "stopped",
        FinishReason.LENGTH: "cut off at the limit",
        FinishReason.TIMEOUT: "out of time",
    }
    return words.get(reason, "")


def _cached(usage: Usage, glyphs: Glyphs) -> str:
    total = usage.cached.total
    if not total:
        return ""
    return f"cached {total:,}/{usage.prompt_tokens:,}{_tiers(usage.cached, glyphs)}"


def _tiers(cached: CachedTokens, glyphs: Glyphs) -> str:
    """Return the tiers of the cached tokens, "" if all of them were on the device."""
    if cached.total == cached.device:
        return ""
    places = (("device", cached.device), ("host", cached.host), ("disk", cached.disk))
    found = [f"{count:,} {name}" for name, count in places if count]
    return f" ({glyphs.separator.join(found)})"


def _generated(usage: Usage, timing: Timing) -> str:
    if not usage.completion_tokens:
        return ""
    tokens = plural(usage.completion_tokens, "token")
    speed = rate(usage.completion_tokens - 1, timing.decode_s)
    return f"{tokens} at {_format_rate(speed)}" if speed else tokens


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
        """Return the seconds left at the rate so far, None while there is no useful rate."""
        if self._first is None or self._last is None:
            return None
        first_s, first_done = self._first
        last_s, event = self._last
        pace = rate(event.done - first_done, last_s - first_s)
        if not pace:
            return None
        return max(0.0, (event.total - event.done) / pace - (now_s - last_s))

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


@dataclass(frozen=True, slots=True)
class ToolbarFacts:
    """The values that the toolbar shows.

    warmth      what the next message costs, in a few words; "" if not known
    branch      (number, count) of the answers to the last message, None if there is only one
    answering   the activity of the answer in progress, empty while idle
    loading     the stage of loading, empty when the model is loaded
    editing     the message that the next one replaces
    """

    model: str
    title: str = ""
    branch: tuple[int, int] | None = None
    context_tokens: int = 0
    context_limit: int | None = None
    warmth: str = ""
    answering: str = ""
    loading: str = ""
    editing: str = ""
    num_queued: int = 0
    escape: str = ""


def toolbar(facts: ToolbarFacts, width: int, glyphs: Glyphs) -> str:
    """Return the toolbar's text; at a small width the least important parts are left out."""
    urgent = [
        facts.loading,
        facts.answering,
        facts.editing,
        f"{facts.num_queued} queued" if facts.num_queued else "",
        f"Esc {facts.escape}" if facts.escape else "",
    ]
    quiet = [
        facts.model,
        f"answer {facts.branch[0]}/{facts.branch[1]}" if facts.branch else "",
        _context(facts),
        facts.warmth,
    ]
    separator = glyphs.separator
    parts = [part for part in quiet + urgent if part]
    title = _fitting(facts.title, width - cell_len(separator.join([*parts, ""])), glyphs)
    if title:
        parts.insert(1, title)
    while len(parts) > 1 and cell_len(separator.join(parts)) > width:
        del parts[0]
    return first_cells(separator.join(parts), width)


def _fitting(title: str, room: int, glyphs: Glyphs) -> str:
    """Return a title cut to the width, "" if too little of it would remain."""
    if cell_len(title) <= room:
        return title
    cut = room - cell_len(glyphs.ellipsis)
    return first_cells(title, cut).rstrip() + glyphs.ellipsis if cut >= 8 else ""


def _context(facts: ToolbarFacts) -> str:
    if not facts.context_tokens or not facts.context_limit:
        return ""
    return f"context {format_count(facts.context_tokens)}/{format_count(facts.context_limit)}"

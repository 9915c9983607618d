"""The figures in words."""

from dataclasses import replace
from itertools import product

import pytest
from rich.cells import cell_len

from kvchat.chat.answer_settings import ContextPolicy
from kvchat.chat.events import AnswerEnded, ReadingPrompt
from kvchat.core.text import model_label
from kvchat.core.types import CachedTokens, DraftUse, FinishReason, MissReason, Timing, Usage
from kvchat.terminal.status import (
    PrefillMeter,
    ToolbarFacts,
    attached_in_words,
    detail_line,
    format_count,
    format_seconds,
    plural,
    stats_line,
    toolbar,
)
from kvchat.terminal.theme import Glyphs

_GLYPHS = Glyphs()


_USAGE = Usage(3904, CachedTokens(3200, 0, 612), 212, DraftUse(100, 74, 20, 2.345))
_TIMING = Timing(ttft_s=0.084, prefill_s=0.05, decode_s=211 / 61)


def _ended(
    usage: Usage,
    timing: Timing,
    reason: FinishReason = FinishReason.STOP,
    miss_reason: MissReason | None = None,
) -> AnswerEnded:
    return AnswerEnded(0, 2, "", "", reason, usage, timing, miss_reason)


def _line(
    usage: Usage,
    timing: Timing = _TIMING,
    reason: FinishReason = FinishReason.STOP,
    width: int | None = None,
) -> str:
    return stats_line(_ended(usage, timing, reason), 32768, _GLYPHS, width)


def test_the_line_after_an_answer_tells_what_matters_and_the_rest_is_a_detail() -> None:
    assert _line(_USAGE) == (
        "cached 3,812/3,904 (612 disk) · first token 84 ms · 212 tokens, 61/s · context 4.1k/32k"
    )
    assert detail_line(_ended(_USAGE, _TIMING), _GLYPHS, "evicted") == (
        "prefill 92 at 1840/s · read again: evicted · draft 74% accepted, 4.7 a step, 2.3x plain"
    )


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (87, "cached 3,812/3,904 (612 disk) · first token 84 ms · 212 tokens, 61/s · "
             "context 4.1k/32k"),
        (86, "cached 3,812/3,904 · first token 84 ms · 212 tokens, 61/s · context 4.1k/32k"),
        (75, "cached 3,812/3,904 · first token 84 ms · 212 tokens, 61/s"),
        (56, "cached 3,812/3,904 · first token 84 ms"),
        (37, "cached 3,812/3,904"),
        (9, "cached 3,"),
    ],
)  # fmt: skip
def test_the_line_fits_its_width_and_loses_what_matters_least_first(width: int, line: str) -> None:
    """It was four rows on a narrow screen."""
    assert _line(_USAGE, width=width) == line


def test_the_line_is_never_wider_than_the_screen() -> None:
    for reason, width in product(FinishReason, range(1, 100)):
        line = _line(_USAGE, _TIMING, reason, width)
        assert cell_len(line) <= width, (reason, width, line)


def test_what_a_server_does_not_tell_is_not_in_the_line() -> None:
    """It was "cached 0/31" and "context 43/1024k" of a server that told neither."""
    ended = _ended(
        Usage(31, completion_tokens=12), Timing(0.2, 0.2), miss_reason=MissReason.NOT_TOLD
    )

    assert stats_line(ended, None, _GLYPHS) == "first token 200 ms · 12 tokens"
    assert stats_line(ended, 8192, _GLYPHS) == "first token 200 ms · 12 tokens · context 43/8k"
    assert detail_line(ended, _GLYPHS) == ""


def test_figures_that_are_estimates_say_about() -> None:
    ended = _ended(
        Usage(31, completion_tokens=12, is_estimate=True),
        Timing(0.2, 0.2),
        miss_reason=MissReason.NOT_TOLD,
    )

    line = "first token 200 ms · about 12 tokens · context about 43/8k"
    assert stats_line(ended, 8192, _GLYPHS) == line


def test_what_loading_took_is_told_where_it_belongs_to_the_answer() -> None:
    usage, timing = Usage(prompt_tokens=40, completion_tokens=1), Timing(ttft_s=1.5)
    line = stats_line(_ended(usage, timing), None, _GLYPHS, load_s=2.04)

    assert line == "loaded in 2.0 s · cached 0/40 · first token 1.5 s · 1 token"


def test_drafts_that_do_not_pay_say_why_there_are_none() -> None:
    drafts = DraftUse(why_plain="too dear for guesses 12% likely")
    usage = Usage(prompt_tokens=40, completion_tokens=1, drafts=drafts)

    details = detail_line(_ended(usage, Timing()), _GLYPHS)
    assert details == "prefill 40 · draft off: too dear for guesses 12% likely"


def test_a_wholly_cached_prompt_on_the_device_needs_no_places_and_no_details() -> None:
    usage = Usage(64, CachedTokens(device=64), 2)
    timing = Timing(ttft_s=0.01, decode_s=0.5)

    assert _line(usage, timing) == (
        "cached 64/64 · first token 10 ms · 2 tokens, 2.0/s · context 66/32k"
    )
    assert detail_line(_ended(usage, timing), _GLYPHS) == ""


@pytest.mark.parametrize(
    ("reason", "begins"),
    [
        (FinishReason.CANCELLED, "stopped · cached 0/10"),
        (FinishReason.LENGTH, "cut off at the limit · cached 0/10"),
        (FinishReason.TIMEOUT, "out of time · cached 0/10"),
    ],
)
def test_an_answer_that_did_not_end_by_itself_says_so(reason: FinishReason, begins: str) -> None:
    assert _line(Usage(10), Timing(), reason).startswith(begins)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0k"), (4096, "4k"), (4116, "4.1k"), (9949, "9.9k"),
     (9950, "10k"), (32768, "32k"), (131072, "128k"), (40000, "40k")],
)  # fmt: skip
def test_token_counts_are_short(count: int, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0841, "84 ms"), (0.9994, "999 ms"), (1.0, "1.0 s"), (9.94, "9.9 s"), (43.4, "43 s"),
     (125, "2 min 5 s")],
)  # fmt: skip
def test_durations_are_short(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_words_and_names() -> None:
    assert plural(1, "token") == "1 token"
    assert plural(1240, "token") == "1,240 tokens"
    assert model_label("/home/ada/models/tiny/") == "tiny"
    assert model_label("org/model-1b") == "model-1b"


def test_a_long_prefill_shows_a_bar_and_what_is_left() -> None:
    meter = PrefillMeter()
    cached = CachedTokens(device=8000)
    meter.update(ReadingPrompt(cached, 8100, 9800), now_s=10.0)
    meter.update(ReadingPrompt(cached, 8900, 9800), now_s=12.0)

    assert meter.line(12.0, _GLYPHS) == "reading 9,800 · 8,000 cached · ▰▰▰▰▰▰▰▰▰▱ 91% · 2.2 s left"
    assert meter.line(13.0, _GLYPHS).endswith("1.2 s left"), "the time since the last step counts"
    meter.update(ReadingPrompt(cached, 9800, 9800), now_s=14.0)
    assert meter.line(14.0, _GLYPHS) == ""


def test_the_bar_is_timed_from_the_rate_of_the_prices() -> None:
    """/edit had said 79 to 113 s, and the bar that followed 65 s; before the first step it was not
    there at all.
    """
    meter = PrefillMeter()
    meter.update(ReadingPrompt(CachedTokens(), 0, 1000, 20.0), now_s=0.0)
    assert meter.line(0.0, _GLYPHS) == f"reading 1,000 · {'▱' * 10} 0% · 20 s left"
    meter.update(ReadingPrompt(CachedTokens(), 250, 1000, 15.0), now_s=10.0)
    assert meter.line(11.0, _GLYPHS).endswith("14 s left")


def test_a_bar_tells_no_time_when_it_has_passed() -> None:
    """A machine that was slower than before read "0 ms left" for seconds."""
    meter = PrefillMeter()
    meter.update(ReadingPrompt(CachedTokens(), 500, 1000, 2.0), now_s=0.0)
    assert meter.line(1.0, _GLYPHS).endswith("50% · 1.0 s left")
    assert meter.line(2.0, _GLYPHS).endswith("50%")
    assert meter.line(9.0, _GLYPHS).endswith("50%")


def test_the_first_step_of_a_prefill_tells_no_time() -> None:
    meter = PrefillMeter()
    assert meter.line(0.0, _GLYPHS) == ""
    meter.update(ReadingPrompt(CachedTokens(), 100, 1000), now_s=0.0)
    assert "left" not in meter.line(0.5, _GLYPHS)


_FACTS = ToolbarFacts(
    model="demo",
    title="radix trees and what they are good for",
    branch=(2, 3),
    context_tokens=4116,
    context_limit=32768,
    warmth="ready: 4,112 of 4,116 on disk",
)


def test_the_toolbar_tells_where_one_is() -> None:
    assert toolbar(_FACTS, 140, _GLYPHS) == (
        "demo · radix trees and what they are good for · answer 2/3 · context 4.1k/32k · "
        "ready: 4,112 of 4,116 on disk"
    )


def test_the_toolbar_prices_no_message_that_cannot_be_sent() -> None:
    """A reading at 52%, 22 s left, stood beside "cold, about 113 s"."""
    reading = toolbar(replace(_FACTS, answering="reading 36 s", warmth="cold"), 140, _GLYPHS)
    full = toolbar(replace(_FACTS, context_tokens=40_000, warmth="cold"), 140, _GLYPHS)

    assert reading.endswith("context 4.1k/32k · reading 36 s")
    assert "122% full" in full
    assert "cold" not in full


def test_a_narrow_toolbar_gives_up_what_matters_least_first() -> None:
    busy = ToolbarFacts(
        model="demo",
        title="radix trees",
        context_tokens=4116,
        context_limit=32768,
        answering="41 tokens 3 s",
        num_queued=2,
        escape="stops",
    )
    for width in range(10, 100):
        assert len(toolbar(busy, width, _GLYPHS)) <= width
    assert toolbar(busy, 70, _GLYPHS) == (
        "demo · context 4.1k/32k · 41 tokens 3 s · 2 queued · Esc stops"
    )
    assert toolbar(busy, 38, _GLYPHS) == "41 tokens 3 s · 2 queued · Esc stops"
    assert toolbar(busy, 12, _GLYPHS) == "Esc stops"


def test_the_toolbar_is_measured_in_cells() -> None:
    """A title of ideographs, two cells each, pushed the end of the toolbar off the screen."""
    facts = replace(_FACTS, title="日本語の会話" * 6, escape="stops")
    for width in range(10, 130):
        text = toolbar(facts, width, _GLYPHS)

        assert cell_len(text) <= width
        assert text.endswith("Esc stops")


@pytest.mark.parametrize(
    ("width", "words"),
    [
        (120, "context 3.3k/4k, 81% full: /compact, /new, /rewind or /set context-policy"),
        (100, "context 3.3k/4k, 81% full: /compact, /new or /rewind"),
        (40, "81% full: /compact /new /rewind"),
    ],
)
def test_a_nearly_full_context_names_the_ways_out(width: int, words: str) -> None:
    facts = ToolbarFacts("demo", "A title", context_tokens=3300, context_limit=4096)
    assert words in toolbar(facts, width, _GLYPHS)
    goes_on = replace(facts, context_policy=ContextPolicy.DROP)
    assert "full: the oldest messages will" in toolbar(goes_on, max(60, width), _GLYPHS)
    fewer = ToolbarFacts("demo", "A title", context_tokens=3276, context_limit=4096)
    assert "full" not in toolbar(fewer, width, _GLYPHS)


def test_a_stage_too_long_for_the_toolbar_is_cut_and_stays() -> None:
    """At 40 columns a long stage of loading went, and "1 queued" was all that was said."""
    facts = ToolbarFacts("demo", loading="compiling kernels for this processor", num_queued=1)

    assert toolbar(facts, 40, _GLYPHS) == "compiling kernels for this p… · 1 queued"
    assert toolbar(facts, 20, _GLYPHS) == "compilin… · 1 queued"
    assert toolbar(facts, 12, _GLYPHS) == "1 queued"


@pytest.mark.parametrize(
    ("names", "share", "words"),
    [
        ([], None, ""),
        ([], 0.404, "text 40% read"),
        ([], 1.0, "text read"),
        (["a.txt"], None, "a.txt attached"),
        (["a.txt"], 0.0, "a.txt attached, 0% read"),
        (["a.txt", "b.txt"], 1.0, "2 files attached, read"),
        (["a" * 40], None, f"{'a' * 19}… attached"),
    ],
)
def test_what_is_attached_and_read_ahead_in_words(names, share, words):
    assert attached_in_words(names, share) == words


def test_what_is_attached_stays_longest_of_what_is_not_urgent() -> None:
    facts = replace(_FACTS, attached="manual.txt attached, read")
    assert toolbar(facts, 120, _GLYPHS).endswith("manual.txt attached, read")
    assert toolbar(facts, 39, _GLYPHS).endswith("manual.txt attached, read")

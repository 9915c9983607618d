"""The figures in words."""

from dataclasses import replace

import pytest
from rich.cells import cell_len

from kvchat.chat.events import ReadingPrompt
from kvchat.core.types import CachedTokens, DraftUse, FinishReason, Timing, Usage
from kvchat.terminal.status import (
    PrefillMeter,
    ToolbarFacts,
    format_count,
    format_seconds,
    model_label,
    plural,
    stats_line,
    toolbar,
)
from kvchat.terminal.theme import Glyphs

_GLYPHS = Glyphs()


def _line(usage: Usage, timing: Timing, reason: FinishReason = FinishReason.STOP) -> str:
    return stats_line(usage, timing, reason, 32768, _GLYPHS).replace("\u00a0", " ")


def test_the_line_after_an_answer_tells_all_there_is_to_tell() -> None:
    usage = Usage(3904, CachedTokens(3200, 0, 612), 212, DraftUse(100, 74, 20, 2.345))
    timing = Timing(ttft_s=0.084, decode_s=211 / 61)

    assert _line(usage, timing) == (
        "cached 3,812/3,904 (3,200 device · 612 disk) · prefill 92 · first token 84 ms · "
        "212 tokens at 61/s · draft 74% accepted, 4.7 a step, 2.3x plain · context 4.1k/32k"
    )


def test_what_was_read_again_has_its_reason_beside_the_count() -> None:
    usage = Usage(40, CachedTokens(device=16), 1)
    line = stats_line(usage, Timing(), FinishReason.STOP, None, _GLYPHS, "evicted")

    assert line.replace("\u00a0", " ").startswith(
        "cached 16/40 · prefill 24 · read again: evicted · "
    )


def test_what_loading_took_is_told_where_it_belongs_to_the_answer() -> None:
    usage, timing = Usage(prompt_tokens=40, completion_tokens=1), Timing(ttft_s=1.5)
    line = stats_line(usage, timing, FinishReason.STOP, None, _GLYPHS, load_s=2.04)

    assert line.replace("\u00a0", " ").startswith(
        "loaded in 2.0 s · prefill 40 · first token 1.5 s"
    )


def test_what_is_zero_is_left_out() -> None:
    usage = Usage(prompt_tokens=40, completion_tokens=1)

    assert (
        _line(usage, Timing(ttft_s=1.5))
        == "prefill 40 · first token 1.5 s · 1 token · context 41/32k"
    )


def test_drafts_that_do_not_pay_say_why_there_are_none() -> None:
    drafts = DraftUse(why_plain="too dear for guesses 12% likely")
    usage = Usage(prompt_tokens=40, completion_tokens=1, drafts=drafts)

    assert "1 token · draft off: too dear for guesses 12% likely · context" in _line(
        usage, Timing()
    )


def test_a_wholly_cached_prompt_on_the_device_needs_no_places() -> None:
    usage = Usage(64, CachedTokens(device=64), 2)

    assert _line(usage, Timing(ttft_s=0.01, decode_s=0.5)) == (
        "cached 64/64 · first token 10 ms · 2 tokens at 2.0/s · context 66/32k"
    )


@pytest.mark.parametrize(
    ("reason", "begins"),
    [
        (FinishReason.CANCELLED, "stopped · prefill 10"),
        (FinishReason.LENGTH, "cut off at the limit · prefill 10"),
        (FinishReason.TIMEOUT, "out of time · prefill 10"),
    ],
)
def test_an_answer_that_did_not_end_by_itself_says_so(reason: FinishReason, begins: str) -> None:
    assert _line(Usage(10), Timing(), reason).startswith(begins)


def test_the_line_can_only_break_between_its_parts() -> None:
    usage = Usage(40, CachedTokens(device=16), 10)
    line = stats_line(usage, Timing(0.0, 0.1, 0.1, 1.0), FinishReason.STOP, 32768, _GLYPHS)

    assert all("\u00a0" not in word or "·" not in word for word in line.split(" "))


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

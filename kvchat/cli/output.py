"""Output of the script modes: plain text, one JSON object, or a stream of JSON lines.

stdout carries the answer and nothing else. Notices go to stderr, and on a terminal one line while a
model loads.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TextIO

from kvchat.chat.events import AnswerEnded, AnswerFailed, AnswerText, ChatEvent, ReadingPrompt
from kvchat.cli.streams import can_write_at_once
from kvchat.core.errors import GenerationError, KvchatError
from kvchat.core.events import LoadEvent, LoadProgress, ModelReady
from kvchat.core.text import Sanitizer, sanitize
from kvchat.core.types import FinishReason, MissReason
from kvchat.terminal.status import NEARLY_FULL, plural

Facts = Callable[[], ModelReady | None]


@dataclass(slots=True, eq=False)
class Exchange:
    """The fields of every object about one exchange: its session, or in a batch its request.

    A batch has no sessions.
    """

    session_id: str | None
    label: dict[str, object] = field(default_factory=dict)
    num_samples: int = 1
    has_started: bool = False
    told: set[str] = field(default_factory=set)  # notices already printed about its answers

    @property
    def where(self) -> str:
        """What a notice begins with: the request of a batch that it is about, as `line 3: `."""
        return "".join(f"{name} {value}: " for name, value in self.label.items())

    def fields(self, sample: int | None = None) -> dict[str, object]:
        fields: dict[str, object] = {"session": self.session_id, **self.label}
        if sample is not None and self.num_samples > 1:
            fields["sample"] = sample
        return fields


class Writer(Protocol):
    """Writes one exchange after another."""

    def write(self, exchange: Exchange, event: ChatEvent, read_again: str = "") -> None:
        """Write one event; with the end, `read_again` says why KV was computed again, or ""."""

    def fail(self, error: KvchatError, fields: dict[str, object]) -> None:
        """Report an error that prevented an exchange."""


def final_object(
    ready: ModelReady | None, exchange: Exchange, ended: AnswerEnded, read_again: str = ""
) -> dict[str, object]:
    """Return the object that describes a finished answer, as `--json` prints it.

    It has `calls`, `thinking` and `read_again` only if they are not empty.
    """
    timing = ended.timing.as_dict(ended.usage)
    timing["load_s"] = round(ready.load_s, 4) if ready is not None else 0.0
    result: dict[str, object] = {
        **exchange.fields(ended.sample),
        "text": ended.text,
        "finish_reason": ended.reason.value,
        "usage": _usage_object(ended),
        "timing": timing,
        "model": model_object(ready),
    }
    if ended.calls:
        result["calls"] = [{"name": call.name, "arguments": call.arguments} for call in ended.calls]
    if ended.thinking:
        result["thinking"] = ended.thinking
    if read_again:
        result["read_again"] = read_again
    return result


def _usage_object(ended: AnswerEnded) -> dict[str, object]:
    """Return the token counts; those that a server does not tell are None, not 0."""
    if ended.miss_reason is MissReason.NOT_TOLD:
        return ended.usage.as_dict() | {"cached_tokens": None, "prefilled_tokens": None}
    return ended.usage.as_dict()


def model_object(ready: ModelReady | None) -> dict[str, object] | None:
    """Return the object that describes the model, None while it is not loaded."""
    if ready is None:
        return None
    return {
        "name": ready.name,
        "identity": ready.identity,
        "device": ready.device,
        "dtype": ready.dtype or None,
        "kv_dtype": ready.kv_dtype or ready.dtype or None,
        "draft": ready.draft,
    }


def error_object(error: KvchatError) -> dict[str, object]:
    """Return the object that describes an error."""
    return {"code": int(error.exit_code), "message": error.message, "hint": error.hint}


class TextWriter:
    """Prints answers as they arrive, without thinking; each ends with a newline.

    Several samples are printed when complete, each below a line with its number. `is_raw` keeps
    control characters.
    """

    def __init__(self, stdout: TextIO, is_raw: bool) -> None:
        self._stdout = stdout
        self._sanitizer = Sanitizer()
        self._is_raw = is_raw
        self._ends_line = True
        self._num_printed = 0

    def write(self, exchange: Exchange, event: ChatEvent, read_again: str = "") -> None:
        if isinstance(event, AnswerText) and exchange.num_samples == 1 and not event.is_thinking:
            self._print(event.text)
        elif isinstance(event, AnswerEnded):
            if exchange.num_samples > 1:
                self._num_printed += 1
                self._print(f"--- {self._num_printed} of {exchange.num_samples} ---\n")
                self._print(event.text)
            self._end_line()
        elif isinstance(event, AnswerFailed):
            self._end_line()

    def fail(self, error: KvchatError, fields: dict[str, object]) -> None:
        self._end_line()

    def _print(self, text: str) -> None:
        shown = text if self._is_raw else self._sanitizer.feed(text)
        if shown:
            self._stdout.write(shown)
            self._stdout.flush()
            self._ends_line = shown.endswith("\n")

    def _end_line(self) -> None:
        if not self._ends_line:
            self._stdout.write("\n")
        self._stdout.flush()
        self._ends_line = True


class JsonWriter:
    """Prints one object per answer."""

    def __init__(self, stdout: TextIO, ready: Facts) -> None:
        self._stdout = stdout
        self._ready = ready

    def write(self, exchange: Exchange, event: ChatEvent, read_again: str = "") -> None:
        if isinstance(event, AnswerEnded):
            content = final_object(self._ready(), exchange, event, read_again)
            print_json(self._stdout, content)
        elif isinstance(event, AnswerFailed):
            self.fail(event.error, exchange.fields())

    def fail(self, error: KvchatError, fields: dict[str, object]) -> None:
        print_json(self._stdout, {**fields, "error": error_object(error)})


class StreamJsonWriter:
    """Prints every event as one JSON line, flushed."""

    def __init__(self, stdout: TextIO, ready: Facts) -> None:
        self._stdout = stdout
        self._ready = ready

    def write(self, exchange: Exchange, event: ChatEvent, read_again: str = "") -> None:
        if isinstance(event, AnswerFailed):
            self.fail(event.error, exchange.fields())
            return
        self._start(exchange)
        if isinstance(event, ReadingPrompt):
            cached = {"cached_tokens": event.cached.as_dict()}
            self._print("prefill", exchange, {"done": event.done, "total": event.total, **cached})
        elif isinstance(event, AnswerText):
            key = "thinking" if event.is_thinking else "text"
            self._print("delta", exchange, {key: event.text}, event.sample)
        elif isinstance(event, AnswerEnded):
            content = final_object(self._ready(), exchange, event, read_again)
            self._print("end", exchange, content)

    def fail(self, error: KvchatError, fields: dict[str, object]) -> None:
        print_json(self._stdout, {"event": "error", **fields, **error_object(error)})

    def _start(self, exchange: Exchange) -> None:
        if not exchange.has_started:
            exchange.has_started = True
            self._print("start", exchange, {"model": model_object(self._ready())})

    def _print(
        self, name: str, exchange: Exchange, content: dict[str, object], sample: int | None = None
    ) -> None:
        print_json(self._stdout, {"event": name, **exchange.fields(sample), **content})


def print_json(stdout: TextIO, content: dict[str, object]) -> None:
    """Print one JSON line and flush it; ASCII only, so that it works with any locale."""
    stdout.write(json.dumps(content, ensure_ascii=True) + "\n")
    stdout.flush()


class Notices:
    """Writes to stderr: one-line messages and output of commands; `is_quiet` keeps errors only."""

    def __init__(self, is_quiet: bool, stderr: TextIO | None = None) -> None:
        self._is_quiet = is_quiet
        self._stderr = stderr if stderr is not None else sys.stderr

    def tell(self, message: str) -> None:
        if not self._is_quiet:
            self._stderr.write(f"kvchat: {sanitize(message)}\n")
            self._stderr.flush()

    def show(self, text: str) -> None:
        """Write requested lines unchanged."""
        if not self._is_quiet:
            self._stderr.write(text)
            self._stderr.flush()

    def error(self, error: KvchatError) -> None:
        self._stderr.write(f"kvchat: {sanitize(str(error))}\n")
        self._stderr.flush()


def ending_notice(
    ended: AnswerEnded, context_limit: int, ways_out: str = "", max_tokens: int | None = None
) -> str | None:
    """Return a notice about the end of an answer, None if it needs none.

    An answer is cut off at the end of the context, `context_limit` tokens, at the `max_tokens` that
    the user allowed, or where a server would go on without end.
    `ways_out` says what to do about a context that is full or nearly full, "" nothing.
    """
    length = ended.usage.prompt_tokens + ended.usage.completion_tokens
    if ended.reason is FinishReason.LENGTH and length < context_limit:
        is_asked_for = max_tokens is not None and ended.usage.completion_tokens >= max_tokens
        at = "at --max-tokens" if is_asked_for else f"after {_tokens(ended)}"
        return f"the answer was cut off {at}."
    if ended.reason is FinishReason.LENGTH:
        return f"the answer was cut off at the end of the context. {ways_out}".rstrip()
    if ended.reason is FinishReason.REPETITION:
        return "the answer was ended, as it only repeats itself; see --repetition-limit."
    if ended.reason is FinishReason.STOP and not (ended.text or ended.thinking or ended.calls):
        return "the answer is empty."
    if ways_out and length >= NEARLY_FULL * context_limit:
        return f"the context is {length / context_limit:.0%} full. {ways_out}"
    return None


def _tokens(ended: AnswerEnded) -> str:
    some = "about " if ended.usage.is_estimate else ""
    return f"{some}{plural(ended.usage.completion_tokens, 'token')}"


def missing_answer(ended: AnswerEnded) -> GenerationError | None:
    """Return the error for an answer of which there is nothing but thinking, else None."""
    if not ended.ends_in_thinking:
        return None
    if ended.reason is FinishReason.STOP:
        hint = "Ask again, or with --think off."
        return GenerationError("The model ended within its thinking and gave no answer.", hint)
    if ended.reason is FinishReason.LENGTH:
        hint = "Allow it more tokens, or ask with --think off."
        return GenerationError("The model was still thinking when its tokens were used up.", hint)
    return None


_ERASE_LINE = "\r\x1b[K"


class LoadingLine:
    """Shows the stage of loading in one line, and erases it when loading ends."""

    def __init__(
        self,
        stderr: TextIO,
        is_quiet: bool,
        can_write: Callable[[TextIO], bool] = can_write_at_once,
    ) -> None:
        self._stderr = stderr
        self._can_write = can_write
        self._is_shown = not is_quiet and stderr.isatty()

    def show(self, event: LoadEvent) -> None:
        """Show a loading event."""
        if self._is_shown and self._can_write(self._stderr):
            self._draw(event)

    def _draw(self, event: LoadEvent) -> None:
        line = _ERASE_LINE
        if isinstance(event, LoadProgress):
            share = f" {event.fraction:.0%}" if event.fraction is not None else ""
            line += f"{event.stage}{share} ..."
        self._stderr.write(line)
        self._stderr.flush()

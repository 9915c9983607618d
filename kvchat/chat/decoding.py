"""Decoding: makes text, thinking and calls of the tokens of one answer while they arrive."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from kvchat.chat.events import AnswerCall, AnswerText, ChatEvent, LogprobTrack, ShownToken
from kvchat.chat.text_stream import TextStream
from kvchat.chat.thinking import Passage, ThinkingSplitter, joined, overlap
from kvchat.chat.tool_calls import CallSplitter, Part
from kvchat.chat.tools import ToolCall
from kvchat.core.events import TokensGenerated
from kvchat.core.types import TokenLogprobs

# A stop text ends what the user reads. Within thinking, and within a call, it is a text as any
# other: a blank line there would end an answer that has not begun, or leave half a call.

AnswerPart = Passage | ToolCall


class StopFilter:
    """Passes text up to the first complete stop string; holds back what may be part of one.

    The result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string stops everything"
        self._stops = tuple(stops)
        self._held = ""
        self.stop: str | None = None  # the stop string that was complete first

    @property
    def has_stopped(self) -> bool:
        return self.stop is not None

    @property
    def num_held(self) -> int:
        """How many characters are held back."""
        return len(self._held)

    def feed(self, text: str) -> str:
        """Take more text; return the text that cannot belong to a stop string."""
        if self.has_stopped or not text:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if found:
            _, start, self.stop = min(found)
            released, self._held = self._held[:start], ""
            return released
        cut = len(self._held) - overlap(self._held, self._stops)
        released, self._held = self._held[:cut], self._held[cut:]
        return released

    def flush(self) -> str:
        """Return the text that was held back, at the end of the stream."""
        released, self._held = self._held, ""
        return released


class AnswerParts:
    """The parts of one answer. They do not depend on how its text is cut into pieces.

    starts_thinking   whether the prompt ends with an opened mark; None reads all as text, marks too
    calls             finds the calls, None if there are none to find
    """

    def __init__(
        self, stops: Sequence[str], starts_thinking: bool | None, calls: CallSplitter | None = None
    ) -> None:
        assert calls is None or starts_thinking is not None
        self._has_stops = bool(stops)
        self._filter = StopFilter(stops)
        self._is_raw = starts_thinking is None
        self._splitter = ThinkingSplitter(bool(starts_thinking))
        self._calls = calls
        self._start: int | None = None  # the place of what goes to the calls in the whole text
        self._num_fed = 0
        self._end = 0  # of what was returned, in the whole text
        self.is_thinking = bool(starts_thinking)  # whether the text is still within its thinking

    @property
    def stop(self) -> str | None:
        """The stop text that ended the answer; None if none did."""
        return self._filter.stop

    @property
    def num_dropped_calls(self) -> int:
        return self._calls.num_dropped if self._calls is not None else 0

    @property
    def num_certain(self) -> int:
        """How many leading characters of the whole text belong to the answer for certain."""
        return self._end if self._has_stops else self._num_fed

    def feed(self, text: str) -> list[AnswerPart]:
        """Take more text; return the parts that it completes, in order."""
        self._num_fed += len(text)
        parts = list(self._stopped(self._parts(text)))
        self.is_thinking = self._splitter.is_thinking
        return parts

    def flush(self) -> list[AnswerPart]:
        """Return what was held back, at the end of the answer."""
        parts = [*self._stopped(self._last_parts()), *self._released()]
        if self.stop is None:
            self._end = self._num_fed
        self.is_thinking = self._splitter.is_thinking
        return parts

    def _parts(self, text: str) -> Iterable[AnswerPart]:
        if self._is_raw:
            return [Passage(text, False, self._num_fed - len(text))] if text else []
        if self._calls is not None and self._calls.is_channel:
            return self._of_channels(self._calls.feed(text))
        return self._of_passages(self._splitter.feed(text))

    def _last_parts(self) -> Iterator[AnswerPart]:
        if self._calls is None:
            yield from self._splitter.flush()
        elif self._calls.is_channel:
            yield from self._of_channels(self._calls.flush())
            yield from self._splitter.flush()
        else:
            yield from self._of_passages(self._splitter.flush())
            yield from self._of_calls(self._calls.flush())

    def _of_channels(self, parts: Iterable[Part]) -> Iterator[AnswerPart]:
        """Yield calls, and the passages of the text around them."""
        for part in parts:
            if isinstance(part, ToolCall):
                yield part
            else:
                yield from self._splitter.feed(part.text)

    def _of_passages(self, passages: Iterable[Passage]) -> Iterator[AnswerPart]:
        """Yield thinking, and the calls and texts in what comes after it."""
        for passage in passages:
            if passage.is_thinking or self._calls is None:
                yield passage
            else:
                self._start = passage.start if self._start is None else self._start
                yield from self._of_calls(self._calls.feed(passage.text))

    def _of_calls(self, parts: Iterable[Part]) -> Iterator[AnswerPart]:
        for part in parts:
            if isinstance(part, ToolCall):
                yield part
            else:
                yield Passage(part.text, False, (self._start or 0) + part.start)

    def _stopped(self, parts: Iterable[AnswerPart]) -> Iterator[AnswerPart]:
        """Yield parts up to a stop text; hold back what may be the beginning of one."""
        for part in parts:
            if self.stop is not None:
                return
            if isinstance(part, ToolCall) or part.is_thinking:
                yield from self._released()  # no stop text reaches over a call
                self._end = self._end if isinstance(part, ToolCall) else part.end
                yield part
                continue
            start = part.start - self._filter.num_held
            text = self._filter.feed(part.text)
            self._end = start + len(text)
            if text:
                yield part if text == part.text else Passage(text, False, start)

    def _released(self) -> list[Passage]:
        """Return the text that could have been the beginning of a stop text."""
        text = self._filter.flush()
        start = self._end
        self._end += len(text)
        return [Passage(text, False, start)] if text else []


class AnswerWatcher:
    """Sees where an answer ends by a stop text, or by a token that is one; for the engine.

    `stop_tokens` are ids of tokens that are not shown. Within thinking they end nothing either.
    """

    def __init__(
        self, stream: TextStream, parts: AnswerParts, stop_tokens: Mapping[int, str]
    ) -> None:
        self._stream = stream
        self._parts = parts
        self._stop_tokens = stop_tokens

    def feed(self, token_id: int) -> bool:
        """Take the next token id; true once the answer has ended."""
        self._parts.feed(self._stream.feed(token_id))
        is_stop = token_id in self._stop_tokens and not self._parts.is_thinking
        return is_stop or self._parts.stop is not None


class Decoding(NamedTuple):
    """How the tokens of one sample become text, thinking and calls; one answer owns its parts.

    `starts_thinking` is None where no thinking is separated. `track` is for answers whose logprobs
    are told. Those whose calls are channels have none. `tells_ids` if events have the tokens' ids.
    `stop_tokens` are the stop texts that are tokens without a text of their own, by id.
    """

    stream: TextStream
    stops: tuple[str, ...]
    starts_thinking: bool | None
    calls: CallSplitter | None = None
    track: LogprobTrack | None = None
    tells_ids: bool = False
    stop_tokens: Mapping[int, str] = MappingProxyType({})


class DecodedAnswer:
    """The text of one sample while it is generated."""

    def __init__(self, how: Decoding) -> None:
        assert how.track is None or how.calls is None or not how.calls.is_channel
        self._track = how.track
        self._tells_ids = how.tells_ids
        self.scored: list[TokenLogprobs] = []
        self.told_ids: list[int] = []
        self.logprobs: dict[bool, list[ShownToken]] = {False: [], True: []}  # by is_thinking
        self._stream = how.stream
        self._parts = AnswerParts(how.stops, how.starts_thinking, how.calls)
        self._stop_tokens = how.stop_tokens
        self._last_token: int | None = None
        self.calls: list[ToolCall] = []
        self._whole = ""
        self._num_saved = 0  # characters of it
        self.text = ""
        self.thinking = ""
        self.num_thinking_tokens = 0
        self.has_begun = False
        self.unsaved_text = ""
        self.unsaved_ids: list[int] = []
        self.saved_s = float("-inf")

    def feed(self, sample: int, generated: TokensGenerated) -> list[ChatEvent]:
        self.unsaved_ids.extend(generated.token_ids)
        told: list[ChatEvent] = []
        if self._tells_ids:
            self.told_ids.extend(generated.token_ids)
            told.append(AnswerText(sample, "", token_ids=generated.token_ids))
        pieces = [self._stream.feed(token) for token in generated.token_ids]
        if self._track is not None:
            for token, piece in zip(generated.logprobs, pieces, strict=True):
                self._track.add(token, piece)
        self._last_token = generated.token_ids[-1] if generated.token_ids else self._last_token
        # Thinking is fed by tokens, so that they can be counted; the rest is fed at once.
        for fed in pieces if self._parts.is_thinking else ["".join(pieces)]:
            was_thinking = self._parts.is_thinking
            self._whole += fed
            told += self._events(sample, self._parts.feed(fed))
            if was_thinking or self._parts.is_thinking:
                self.num_thinking_tokens += 1 if was_thinking else len(pieces)
        return told

    def flush(self, sample: int) -> list[ChatEvent]:
        end = self._stream.flush()
        if self._track is not None:
            self._track.complete(end)
        self._whole += end
        events = self._events(sample, self._parts.feed(end))
        return events + self._events(sample, self._parts.flush())

    @property
    def text_without_calls(self) -> str:
        """The text to save: thinking with its marks, and the answer."""
        if not self.thinking:
            return self.text
        return joined(self.thinking, self.text, self._whole)

    @property
    def num_dropped_calls(self) -> int:
        return self._parts.num_dropped_calls

    @property
    def is_thinking(self) -> bool:
        """Whether it has not come to the end of its thinking."""
        return self._parts.is_thinking

    @property
    def stop_text(self) -> str | None:
        """The stop text that it ended with, None if it goes on or ended otherwise."""
        if self._parts.stop is not None or self.is_thinking or self._last_token is None:
            return self._parts.stop
        return self._stop_tokens.get(self._last_token)

    def _events(self, sample: int, parts: list[AnswerPart]) -> list[ChatEvent]:
        """Return the events for parts; note what is to be saved of the whole text."""
        self.unsaved_text += self._whole[self._num_saved : self._parts.num_certain]
        self._num_saved = max(self._num_saved, self._parts.num_certain)
        return [self._event(sample, part) for part in parts]

    def _event(self, sample: int, part: AnswerPart) -> ChatEvent:
        if isinstance(part, ToolCall):
            self.calls.append(part)
            return AnswerCall(sample, part)
        if part.is_thinking:
            self.thinking += part.text
        else:
            self.text += part.text
        if self._track is None:
            return AnswerText(sample, part.text, part.is_thinking)
        tokens = self._track.take(part.start, part.end)
        self.logprobs[part.is_thinking] += tokens
        return AnswerText(sample, part.text, part.is_thinking, tokens)

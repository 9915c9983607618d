"""AnswerParts: cuts an answer into thinking, the text up to a stop text, and calls.

A stop text ends what the user reads. Within thinking, and within a call, it is a text as any other:
a blank line there would end an answer that has not begun, or leave half a call.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvchat.chat.channels import Passage
from kvchat.chat.detokenizer import StopFilter, TextStream
from kvchat.chat.thinking import ThinkingSplitter
from kvchat.chat.tool_calls import CallSplitter, Part
from kvchat.chat.tools import ToolCall

AnswerPart = Passage | ToolCall


class AnswerParts:
    """The parts of one answer. They do not depend on how its text is cut into pieces.

    starts_thinking   whether the prompt ends with an opened mark; None reads all as text, marks too
    calls             finds the calls, None if there are none to find
    """

    def __init__(
        self,
        stops: Sequence[str],
        starts_thinking: bool | None,
        calls: CallSplitter | None = None,
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

    @property
    def is_thinking(self) -> bool:
        """Whether the text has not come to the end of its thinking."""
        return self._splitter.is_thinking

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
        return list(self._stopped(self._parts(text)))

    def flush(self) -> list[AnswerPart]:
        """Return what was held back, at the end of the answer."""
        parts = [*self._stopped(self._last_parts()), *self._released()]
        if self.stop is None:
            self._end = self._num_fed
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

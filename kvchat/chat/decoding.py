"""Decoding: makes text, thinking and calls of the tokens of one answer while they arrive."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from kvchat.chat.answer_parts import AnswerPart, AnswerParts
from kvchat.chat.detokenizer import TextStream
from kvchat.chat.events import AnswerCall, AnswerText, ChatEvent
from kvchat.chat.shown_logprobs import LogprobTrack, ShownToken
from kvchat.chat.thinking import joined
from kvchat.chat.tool_calls import CallSplitter
from kvchat.chat.tools import ToolCall
from kvchat.core.events import TokensGenerated
from kvchat.core.types import TokenLogprobs


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

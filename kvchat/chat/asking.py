"""Asking: makes of options and a context what the engine computes, and what reads the answers."""

from collections.abc import Callable
from dataclasses import dataclass

from kvchat.chat.answer_parts import AnswerParts, AnswerWatcher
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.decoding import Decoding
from kvchat.chat.detokenizer import TextStream
from kvchat.chat.grammar import AtLeast
from kvchat.chat.shown_logprobs import LogprobTrack
from kvchat.chat.tool_calls import CallSplitter
from kvchat.chat.tools import ToolSet
from kvchat.core.types import TokenConstraint
from kvchat.engine.request import RequestSpec


@dataclass(frozen=True, slots=True)
class Asking:
    """A context that a model is to continue.

    context           all its ids
    starts_thinking   whether the answer begins with thinking; None if there are no marks of it
    tools             those that the answer may call; None for none
    """

    model: ChatModel
    context: tuple[int, ...]
    options: AskOptions
    starts_thinking: bool | None
    tools: ToolSet | None

    def decodings(self) -> list[Decoding]:
        """Return what makes text of each sample's tokens."""
        options, stop_tokens = self.options, self._stop_tokens()
        return [
            Decoding(
                self._new_stream(),
                options.stops,
                self.starts_thinking,
                self._calls(),
                self._track(),
                options.tells_ids,
                stop_tokens,
            )
            for _ in range(options.num_samples)
        ]

    def spec(self, session_id: str, is_kept: bool) -> RequestSpec:
        """Return the engine's request; `session_id` and `is_kept` as there."""
        options = self.options
        return RequestSpec(
            prompt_ids=self.context,
            sampling=options.resolved_sampling(),
            max_tokens=options.max_tokens,
            stop_token_ids=self._stop_ids,
            new_stop_watcher=self._new_watcher() if options.stops else None,
            num_samples=options.num_samples,
            is_one_shot=options.is_one_shot,
            is_kept=is_kept,
            new_constraint=self._new_constraint(),
            num_top_logprobs=options.num_top_logprobs,
            scores_prompt=options.scores_prompt,
            session_id=session_id,
            client=options.client,
            repetition_limit=options.repetition_limit,
        )

    @property
    def _stop_ids(self) -> frozenset[int]:
        return self.model.stop_token_ids | self.options.stop_token_ids

    def _new_stream(self) -> TextStream:
        return self.model.tokenizer.new_stream(self.context)

    def _new_watcher(self) -> Callable[[], AnswerWatcher]:
        stop_tokens = self._stop_tokens()

        def new_watcher() -> AnswerWatcher:
            parts = AnswerParts(self.options.stops, self.starts_thinking, self._calls())
            return AnswerWatcher(self._new_stream(), parts, stop_tokens)

        return new_watcher

    def _new_constraint(self) -> Callable[[], TokenConstraint] | None:
        """Return what makes the limit of one answer's tokens; None for any answer."""
        grammar, least = self.options.grammar, self.options.min_tokens

        def by_grammar() -> TokenConstraint | None:
            # The grammar applies after the thinking that an answer begins with.
            stream = self._new_stream() if grammar is not None and self.starts_thinking else None
            return grammar.constraint(stream) if grammar is not None else None

        def new_constraint() -> TokenConstraint:
            limit, vocab_size = by_grammar(), self.model.vocab_size or 0
            if limit is not None and not least:
                return limit
            return AtLeast(least, self._stop_ids, vocab_size, limit)

        return new_constraint if grammar is not None or least else None

    def _stop_tokens(self) -> dict[int, str]:
        """Return the stop texts that are tokens which no text shows, by id."""
        tokenizer = self.model.tokenizer
        ids = ((tokenizer.token_id(stop), stop) for stop in self.options.stops)
        return {i: stop for i, stop in ids if i is not None and tokenizer.is_hidden(i)}

    def _calls(self) -> CallSplitter | None:
        """Return what finds the tool calls in one answer, None if none are looked for."""
        form, most = self.model.format.tools, self.options.max_calls
        if self.tools is None or form is None or most == 0:
            return None
        return CallSplitter(form.calls, self.tools, most)

    def _track(self) -> LogprobTrack | None:
        """Return what finds the logprobs of one answer's text, None if none are told."""
        if self.options.num_top_logprobs is None:
            return None
        return LogprobTrack(self.model.tokenizer)

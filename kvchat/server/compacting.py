"""Compacts a conversation that a client sends, as /compact does, always into one that goes on.

The summary is asked for below the conversation, which is cached then. Where the context has no room
for that, an excerpt is summarised. Without a summary the oldest messages are left out.
"""

from dataclasses import dataclass, replace

from kvchat.chat.compaction import (
    NoSummary,
    checked_summary,
    excerpt_request,
    max_summary_tokens,
    request_text,
    require_substance,
    summary_options,
    without_summary,
)
from kvchat.chat.conversation import Role
from kvchat.chat.events import AnswerEnded
from kvchat.chat.incoming import IncomingChat
from kvchat.chat.resent_chat import Message, ResentChat, resent_chat
from kvchat.chat.tokenizer import Segment
from kvchat.chat.tools import ToolSet
from kvchat.server.answering import Answer, whole_answers
from kvchat.server.api_errors import ApiError
from kvchat.server.service import Service

_TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class Compacted:
    """What stands for a conversation, and how the model answered; None where it was not asked."""

    text: str
    asked: tuple[AnswerEnded, Answer] | None


class Compacting:
    """Compacts one conversation, which a request gave with these tools."""

    def __init__(
        self, service: Service, given: IncomingChat, tools: ToolSet | None, client: str
    ) -> None:
        self._service = service
        self._answering = service.answering
        self._limit = service.host.context_limit
        options = summary_options(service.options, service.host.model, self._limit)
        self._options = replace(options, client=client, max_calls=0)
        self._request = request_text("", self._limit)
        given.ask(self._request)
        self._messages = given.messages[:-1]
        self._chat = given.chat(tools)

    async def run(self) -> Compacted:
        """Return what stands for the conversation; raises ApiError if it cannot be answered."""
        asked = None
        try:
            chat = self._chat if await self._has_room() else await self._excerpt()
            answer = await self._answering.chat(chat, self._options)
            [ended] = await whole_answers(answer, 1)
            asked = ended, answer
            return Compacted(await self._answering.on_encoder(lambda: self._summary(ended)), asked)
        except (NoSummary, ApiError) as error:
            if isinstance(error, ApiError) and error.code != _TOO_LONG:
                raise
            text = await self._answering.on_encoder(self._left_out)
            return Compacted(text, asked)

    async def _has_room(self) -> bool:
        """Whether the context holds the conversation with the request and a summary."""
        try:
            num_tokens = await self._answering.count(self._chat, self._options.think)
        except ApiError as error:
            if error.code != _TOO_LONG:
                raise
            return False
        return num_tokens + max_summary_tokens(self._limit) <= self._limit

    async def _excerpt(self) -> ResentChat:
        """Return a conversation of one message: an excerpt of the other one, and the request."""
        text = await self._answering.on_encoder(
            lambda: excerpt_request(self._messages, self._request, self._limit, self._num_tokens)
        )
        return resent_chat(None, [Message(Role.USER, text)])

    def _summary(self, ended: AnswerEnded) -> str:
        summary = checked_summary(ended.text, ended.reason)
        num_tokens = self._num_tokens(summary)
        require_substance(summary, num_tokens, ended.usage.prompt_tokens, self._messages)
        return summary

    def _left_out(self) -> str:
        return without_summary(self._messages, self._limit, self._num_tokens)

    def _num_tokens(self, text: str) -> int:
        """Return the number of tokens of a text; called on the encoder's thread."""
        return len(self._service.host.model.tokenizer.encode([Segment(text, is_inert=True)]))

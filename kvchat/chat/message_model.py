"""The text side of a model behind a server that takes messages: ids stand for text and for marks.

`remote/message_ids.py` says how. The server has the tokenizer and the chat template.
"""

import json
from collections.abc import Sequence

from kvchat.chat.chat_model import ChatModel
from kvchat.chat.grammar import Grammars
from kvchat.chat.template import AnswerForm, NewTurn, Strategy
from kvchat.chat.template_tools import ToolForm
from kvchat.chat.text_codec import Segment
from kvchat.chat.thinking import Think, ThinkSwitch
from kvchat.chat.tool_calls import CALL_FORMATS
from kvchat.chat.tools import ToolCall
from kvchat.core.errors import UsageError
from kvchat.remote.message_ids import CALL, Mark, call_text, id_text, text_ids, text_of

# Stands for the mark at the end of an answer where a form is written as text.
_CLOSING = "\x04"
_THINKS = {
    Think.ON: Mark.THINK_ON,
    Think.OFF: Mark.THINK_OFF,
    Think.LOW: Mark.THINK_LOW,
    Think.MEDIUM: Mark.THINK_MEDIUM,
    Think.HIGH: Mark.THINK_HIGH,
}


def message_model(name: str, max_context: int) -> ChatModel:
    """Return the text side of the model that a server calls `name`."""
    tokenizer = MessageTokenizer()
    return ChatModel(
        name=name,
        tokenizer=tokenizer,
        format=MessageFormat(tokenizer),
        stop_token_ids=tokenizer.stop_token_ids,
        sampling_defaults={},
        max_context=max_context,
        counts_tokens=False,
    )


class MessageStream:
    """Decodes ids to text one by one; no character is ever split."""

    def feed(self, token_id: int) -> str:
        return id_text(token_id)

    def flush(self) -> str:
        return ""


class MessageTokenizer:
    """Has of a ChatTokenizer what a chat uses."""

    digest = "messages-1"
    stop_token_ids = frozenset({int(Mark.END)})

    def encode(self, segments: Sequence[Segment]) -> list[int]:
        """Return the ids of segments; only a whole segment that is not inert becomes a mark."""
        ids: list[int] = []
        text = ""
        for segment in segments:
            if segment.text == _CLOSING and not segment.is_inert:
                ids += [*text_ids(text), Mark.END]
                text = ""
            else:
                text += segment.text
        return ids + text_ids(text)

    def encode_after(self, last_id: int | None, segments: Sequence[Segment]) -> list[int]:
        return self.encode(segments)

    def encode_front(self, text: str, most: int) -> list[int]:
        """Return the ids of a text, and only the first ones if there are more than `most`."""
        return text_ids(text[: 4 * most + 4])

    def encode_raw(self, text: str) -> list[int]:
        """Return the ids of a text, as one message of the user."""
        return [Mark.USER, *text_ids(text), Mark.ANSWER]

    def exceeds(self, text: str, limit: int) -> bool:
        """Return whether a text has certainly more than twice `limit` tokens."""
        return len(text) > 16 * limit

    def decode(self, token_ids: Sequence[int]) -> str:
        return text_of(token_ids)

    def new_stream(self, context_ids: Sequence[int]) -> MessageStream:
        return MessageStream()

    def token_id(self, token: str) -> None:
        """No text is a token here: the server makes its own."""

    def is_hidden(self, token_id: int) -> bool:
        return not id_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return id_text(token_id).encode(errors="replace")

    @property
    def grammars(self) -> Grammars:
        raise UsageError("An answer in a given format needs a model of this machine.")


class MessageFormat:
    """Turns messages into ids, and leaves their form to the server."""

    strategy = Strategy.MESSAGES
    switch = ThinkSwitch(("enable_thinking",), has_effort=True, has_none=True)
    answer = AnswerForm(closing=_CLOSING, closing_id=Mark.END)
    tools = ToolForm(next(f for f in CALL_FORMATS if CALL.strip() in f.openers), False, False, "")

    def __init__(self, tokenizer: MessageTokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, turn: NewTurn) -> list[int]:
        ids: list[int] = []
        if turn.tools is not None and len(turn.tools):
            ids += [Mark.TOOLS, *text_ids(turn.tools.text)]
        if turn.system is not None:
            ids += [Mark.SYSTEM, *text_ids(turn.system)]
        return [*ids, *_asked(turn.text, turn.think)]

    def following(self, turn: NewTurn, last_id: int | None) -> list[int]:
        ids: list[int] = [] if last_id == Mark.END else [Mark.END]
        for result in turn.use.results:
            told = json.dumps({"name": result.name, "text": result.text}, ensure_ascii=False)
            ids += [Mark.RESULT, *text_ids(told)]
        if turn.text or not turn.use.results:
            return [*ids, *_asked(turn.text, turn.think)]
        return [*ids, *_answering(turn.think)]

    def given_calls(self, text: str, calls: Sequence[ToolCall]) -> list[Segment]:
        written = "\n".join(call_text(call.name, call.arguments_text) for call in calls)
        joined = f"{text}\n{written}" if text else written
        return [Segment(joined, is_inert=True), Segment(_CLOSING)]


def _asked(user: str, think: Think) -> list[int]:
    return [Mark.USER, *text_ids(user), *_answering(think)]


def _answering(think: Think) -> list[int]:
    """Return the marks before an answer, the first says how much to think."""
    marks = [_THINKS[think]] if think in _THINKS else []
    return [*marks, Mark.ANSWER]

"""ChatModel: the text side of a model: tokenizer, turn format, and what ends an answer.

Made without weights in a fraction of a second, so that a prompt can be read while they load. Knows
text files; knows no engine.
"""

from dataclasses import dataclass
from datetime import datetime

from kvchat.chat.conversation import Conversation, Role, Turn
from kvchat.chat.template import TurnFormat, turn_format
from kvchat.chat.thinking import CHANNEL_TOKEN, THINKING_MARKS
from kvchat.chat.tokenizer import ChatTokenizer, Segment
from kvchat.core.types import FinishReason
from kvchat.model.source import ModelSource
from kvchat.model.text_files import read_text_files


@dataclass(frozen=True, slots=True)
class ChatModel:
    """Everything a conversation needs to know about a model's text.

    `starts_thinking` says that the format opens a mark of thinking before every answer.
    """

    name: str
    tokenizer: ChatTokenizer
    format: TurnFormat
    stop_token_ids: frozenset[int]
    sampling_defaults: dict[str, float]
    starts_thinking: bool

    def user_ids(
        self, conversation: Conversation, parent_id: int, text: str, system: str | None
    ) -> tuple[int, ...]:
        """Return the ids a user turn adds below `parent_id`."""
        clock = datetime.fromtimestamp(conversation.created_s)
        last = conversation.last_token(parent_id)
        if last is None:
            return tuple(self.format.opening(system, text, clock))
        return tuple(self.format.following(text, last, clock))

    def answer_ids(self, turn: Turn) -> tuple[int, ...]:
        """Return ids for an answer known by its text only, as another model's answers are."""
        ids = self.tokenizer.encode([Segment(turn.text, is_inert=True)])
        closing = self.format.closing_id
        if turn.finish is FinishReason.STOP and closing is not None:
            ids.append(closing)
        return tuple(ids)

    def kept_stop_ids(self, stop_token: int | None) -> tuple[int, ...]:
        """Return what of a stop token belongs to the ledger: the format's own closing token."""
        if stop_token is None or stop_token != self.format.closing_id:
            return ()
        return (stop_token,)


def read_chat_model(source: ModelSource, variables: dict[str, object] | None = None) -> ChatModel:
    """Read the text side of a checkpoint; raises ModelError where it cannot be used."""
    files = read_text_files(source)
    tokenizer = ChatTokenizer(files)
    turns = turn_format(files, tokenizer, variables)
    # Where a model speaks in channels, what closes an answer also closes a channel before it.
    has_channels = CHANNEL_TOKEN in (files.chat_template or "")
    closing = set() if turns.closing_id is None or has_channels else {turns.closing_id}
    return ChatModel(
        name=source.name,
        tokenizer=tokenizer,
        format=turns,
        stop_token_ids=tokenizer.stop_token_ids | closing,
        sampling_defaults=files.sampling_defaults,
        starts_thinking=_starts_thinking(tokenizer, turns),
    )


def _starts_thinking(tokenizer: ChatTokenizer, turns: TurnFormat) -> bool:
    opening = tokenizer.decode(turns.opening(None, "x", datetime(2026, 1, 2)))
    return opening.rstrip().endswith(tuple(THINKING_MARKS))


def readopt(conversation: Conversation, model: ChatModel) -> int:
    """Give turns of another tokenizer ids of this one, from their texts; return how many.

    Parents come before children, so each turn sees its context as it will be.
    """
    num_changed = 0
    for turn in list(conversation.turns()):
        if turn.tokenizer == model.tokenizer.digest:
            continue
        if turn.role is Role.USER:
            ids = model.user_ids(conversation, turn.parent_id, turn.text, turn.system)
        else:
            ids = model.answer_ids(turn)
        conversation.replace(turn.with_ids(ids, model.tokenizer.digest))
        num_changed += 1
    return num_changed

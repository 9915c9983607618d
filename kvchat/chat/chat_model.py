"""ChatModel: the text side of a model: tokenizer, turn format, and the tokens that end an answer.

It needs no weights and takes a fraction of a second to create, so that a prompt can be tokenised
while the weights load.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from kvchat.chat.conversation import ROOT, Conversation, Role, Turn
from kvchat.chat.template import NewTurn, TurnFormat, turn_format
from kvchat.chat.text_codec import Segment, TextCodec
from kvchat.chat.thinking import (
    CHANNEL_TOKEN,
    THINKING_MARKS,
    Think,
    cut_at_marks,
    first_mark_closes,
)
from kvchat.chat.tools import NO_TOOL_USE, ToolResult, ToolUse
from kvchat.chat.why import common_len
from kvchat.core.errors import ContextTooLong
from kvchat.core.types import FinishReason

if TYPE_CHECKING:
    from kvchat.chat.template_process import RenderingChild
    from kvchat.model.checkpoint.source import ModelSource

# The context length of a model whose configuration gives none.
_LARGE_CONTEXT = 1 << 20
# Other programs sample so where a model's author recommends nothing. At temperature 0.7 alone an
# answer draws from the whole vocabulary, in which a small model often loses itself.
_USUAL_SAMPLING = {"temperature": 0.7, "top_p": 0.95, "top_k": 40, "min_p": 0.05}
# Two messages that differ from their first character: the ids before them belong to what precedes.
_PROBES = ("a", "Z")
# More tokens than a thinking mark and the white space after it have.
_MARK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class ChatModel:
    """The text properties of a model that a conversation needs.

    max_context       the most tokens of a context
    vocab_size        every id is below it; None if not known
    counts_tokens     whether ids are tokens; else their number is an estimate of that of the tokens
    """

    name: str
    tokenizer: TextCodec
    format: TurnFormat
    stop_token_ids: frozenset[int]
    sampling_defaults: dict[str, float]
    max_context: int = _LARGE_CONTEXT
    vocab_size: int | None = None
    counts_tokens: bool = True

    def user_ids(
        self,
        conversation: Conversation,
        parent_id: int,
        text: str,
        system: str | None,
        think: Think = Think.AUTO,
        is_answered: bool = False,
        results: tuple[ToolResult, ...] = (),
    ) -> tuple[int, ...]:
        """Return the ids that a user turn adds below `parent_id`; `system` is for first turns.

        With `is_answered` they are those before an answer that is given as text. `results` are what
        the calls of the answer before returned.

        Raises ContextTooLong for a text so long that no context could hold it.
        """
        for given in (text, system or "", *(result.text for result in results)):
            self.require_fit(given)
        clock = datetime.fromtimestamp(conversation.created_s)
        last = conversation.last_token(parent_id)
        if last is None:
            first_turn = NewTurn(text, clock, system, think, is_answered, conversation.tools)
            return tuple(self.format.opening(first_turn))
        first, answer = conversation.path(parent_id)[0], conversation.turn(parent_id)
        use = ToolUse(answer.calls, results)
        if self.format.tools is None and use.calls:  # another model's: what it was told stays
            text = "\n\n".join((*(result.text for result in results), *([text] if text else [])))
            use = NO_TOOL_USE
        turn = NewTurn(text, clock, first.system, think, is_answered, use=use)
        return tuple(self.format.following(turn, last))

    def beginning_ids(
        self, conversation: Conversation, parent_id: int, text: str, system: str | None
    ) -> list[int]:
        """Return the leading ids of any user turn below `parent_id` that begins with a text."""
        turns = (self.user_ids(conversation, parent_id, text + end, system) for end in _PROBES)
        one, other = turns
        return list(one[: common_len(one, other)])

    def opening_ids(self, conversation: Conversation, text: str = "") -> list[int]:
        """Return the leading token ids of any conversation that has this one's time, system prompt
        and tools, and whose first message begins with a text.
        """
        system = conversation.system
        empty = Conversation("", conversation.created_s, system, conversation.tools)
        return self.beginning_ids(empty, ROOT, text, system)

    def asking_ids(self, conversation: Conversation, turn: Turn, think: Think) -> tuple[int, ...]:
        """Return the ids of a user turn as if it had been asked with `think`."""
        return self.user_ids(
            conversation, turn.parent_id, turn.text, turn.system, think, results=turn.results
        )

    def think_of(self, conversation: Conversation, turn: Turn) -> Think | None:
        """Return how a user turn was asked, by its ids; None if they are another template's."""
        for think in self.format.switch.known:
            if self.asking_ids(conversation, turn, think) == turn.token_ids:
                return think
        return None

    def ids_with_system(
        self, conversation: Conversation, turn: Turn, system: str | None
    ) -> tuple[int, ...]:
        """Return the ids of a context's first turn under another system prompt."""
        think = self.think_of(conversation, turn) or Think.AUTO
        is_told = self.is_told(conversation, turn)
        return self.user_ids(conversation, ROOT, turn.text, system, think, is_told)

    def starts_thinking(self, context_ids: Sequence[int]) -> bool:
        """Return whether a context ends inside a thinking mark, which its template opened."""
        end = self.tokenizer.decode(context_ids[-_MARK_TOKENS:])
        return end.rstrip().endswith(tuple(THINKING_MARKS))

    def think_problem(self, think: Think) -> str | None:
        """Return one sentence if this model's template ignores a setting, else None."""
        return self.format.switch.problem(think, self.name.rstrip("/").rpartition("/")[2])

    def answer_ids(self, conversation: Conversation, turn: Turn) -> tuple[int, ...]:
        """Return ids for an answer that is given as text, such as another model's answer.

        They continue its user turn's ids. Raises ContextTooLong for a text so long that no context
        could hold it.
        """
        self.require_fit(turn.text)
        for call in turn.calls:
            self.require_fit(call.arguments_text)
        before = () if turn.parent_id == ROOT else conversation.turn(turn.parent_id).token_ids
        if turn.calls and self.format.tools is not None:
            segments = self.format.given_calls(turn.text, turn.calls)
        else:
            is_whole, form = turn.finish is FinishReason.STOP, self.format.answer
            text = form.spaces.strip(turn.text) if is_whole else turn.text
            segments = self._given(text, self.starts_thinking(before))
            if is_whole:
                segments.append(Segment(form.closing))
        return tuple(self.tokenizer.encode_after(before[-1] if before else None, segments))

    def _given(self, text: str, is_open: bool) -> list[Segment]:
        """Return a given answer after a prompt in which a mark of thinking is open, or is not."""
        form, pieces = self.format.answer, cut_at_marks(text)
        begins_closed = first_mark_closes(text)
        if is_open:
            closer = next((c for o, c in THINKING_MARKS.items() if o in form.opener), "")
            lead = "" if begins_closed else f"{closer}\n\n"
        elif begins_closed:
            lead = form.opener
        else:
            lead = form.lead if len(pieces) == 1 else ""
        marked = [Segment(piece, is_inert=not is_mark) for piece, is_mark in pieces]
        return [Segment(lead), *marked]

    def retold(self, conversation: Conversation, answer: Turn) -> Turn | None:
        """Return the user turn of a given answer, with the ids that stand before such an answer.

        None if its own ids do, or if another answer continues them.
        """
        if answer.parent_id == ROOT or not self.format.answer.is_told_apart:
            return None
        question = conversation.turn(answer.parent_id)
        others = (t for t in conversation.children(question.turn_id) if t.turn_id != answer.turn_id)
        is_right = question.role is not Role.USER or first_mark_closes(answer.text)
        if is_right or any(other.token_ids for other in others):
            return None
        return replace(question, token_ids=self._told_ids(conversation, question))

    def is_told(self, conversation: Conversation, turn: Turn) -> bool:
        """Return whether a user turn's ids are those before an answer that was given as text."""
        if not self.format.answer.is_told_apart:
            return False
        return turn.token_ids == self._told_ids(conversation, turn)

    def _told_ids(self, conversation: Conversation, turn: Turn) -> tuple[int, ...]:
        return self.user_ids(
            conversation,
            turn.parent_id,
            turn.text,
            turn.system,
            is_answered=True,
            results=turn.results,
        )

    def require_fit(self, text: str) -> None:
        """Raise ContextTooLong if a text alone certainly exceeds the context.

        This does not encode the whole text. The engine may still refuse a text that passes.
        """
        if self.tokenizer.exceeds(text, self.max_context):
            raise ContextTooLong(
                f"The text has {len(text):,} characters, which are more than twice the "
                f"{self.max_context:,} tokens that the context holds.",
                "Shorten it.",
                self.max_context + 1,
                self.max_context,
            )

    def is_stranger(self, turn: Turn) -> bool:
        """Return whether a turn's ids belong to another tokenizer, or exceed this vocabulary."""
        if turn.tokenizer != self.tokenizer.digest:
            return True
        return self.vocab_size is not None and max(turn.token_ids, default=0) >= self.vocab_size

    def kept_stop_ids(self, stop_token: int | None) -> tuple[int, ...]:
        """Return the stop token as the ids to store, if the template itself closes answers with it.

        Returns an empty tuple for None and for any other stop token.
        """
        if stop_token is None or stop_token != self.format.answer.closing_id:
            return ()
        return (stop_token,)


def read_chat_model(
    source: "ModelSource",
    variables: dict[str, object] | None = None,
    limit_s: float | None = None,
    child: "RenderingChild | None" = None,
) -> ChatModel:
    """Read the text side of a checkpoint; raises ModelError if it cannot be used.

    Its imports are those of a process that reads one: a chat on a server does not.

    `limit_s` is the user's time limit for one rendering of the template in seconds. `child` is a
    process that was started in advance to render it.
    """
    from kvchat.chat.template_process import TemplateProcess
    from kvchat.chat.tokenizer import ChatTokenizer
    from kvchat.model.checkpoint.drafters import refuse_drafter
    from kvchat.model.checkpoint.text_files import read_text_files

    refuse_drafter(source)  # heads have no tokenizer
    files = read_text_files(source)
    template = files.chat_template
    process = TemplateProcess(template, limit_s, child) if template is not None else None
    tokenizer = ChatTokenizer(files)  # slow; the process starts and compiles meanwhile
    turns = turn_format(files, tokenizer, variables, process)
    # In a model with channels, the closing token of an answer also closes earlier channels.
    has_channels = CHANNEL_TOKEN in (files.chat_template or "")
    closing_id = turns.answer.closing_id
    closing = set() if closing_id is None or has_channels else {closing_id}
    return ChatModel(
        name=source.name,
        tokenizer=tokenizer,
        format=turns,
        stop_token_ids=tokenizer.stop_token_ids | closing,
        sampling_defaults=files.sampling_defaults or dict(_USUAL_SAMPLING),
        max_context=files.max_context or _LARGE_CONTEXT,
        vocab_size=files.vocab_size,
    )


def readopt(conversation: Conversation, model: ChatModel) -> int:
    """Encode the turns of another tokenizer again, from their texts; return their number.

    Turns with an id outside the model's vocabulary are included: the file was edited, or written by
    a model with the same tokenizer and more embeddings. Parents come before children, so each turn
    is encoded after its final context.
    """
    num_changed = 0
    for turn in list(conversation.turns()):
        if not model.is_stranger(turn):
            continue
        if turn.role is Role.ASSISTANT and (asked := model.retold(conversation, turn)) is not None:
            conversation.replace(asked)
        ids = _ids_again(conversation, turn, model)
        conversation.replace(turn.with_ids(ids, model.tokenizer.digest))
        num_changed += 1
    return num_changed


def _ids_again(conversation: Conversation, turn: Turn, model: ChatModel) -> tuple[int, ...]:
    """Return a turn's ids from its text.

    For a text that no context could hold, returns only its first ids, but more than a context has.
    """
    try:
        if turn.role is Role.USER:
            return model.user_ids(
                conversation, turn.parent_id, turn.text, turn.system, results=turn.results
            )
        return model.answer_ids(conversation, turn)
    except ContextTooLong:  # opening must not fail for one turn, perhaps on an unused branch
        text = f"{turn.system or ''}\n\n{turn.text}"
        return tuple(model.tokenizer.encode_front(text, model.max_context))

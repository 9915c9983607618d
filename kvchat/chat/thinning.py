"""Answers over less KV: which of a request's KV may be dropped, and what the user is told of it."""

from collections.abc import Sequence

from kvchat.chat.attachment import attached_files
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.conversation import Conversation, Role
from kvchat.core.text import parse_size
from kvchat.core.types import KvDropped
from kvchat.engine.request import Thinning

# A message without files may be a document with a question at its end.
_MOST_QUESTION = 256


def budget_thinning(
    model: ChatModel, conversation: Conversation, turn_id: int, num_tokens: int, kv_budget: str
) -> Thinning:
    """Return how the answer below a turn is held to a budget.

    num_tokens   of the context that ends with that turn

    The system prompt stays, and the question: the words of the last message behind its files.
    """
    budget = parse_size(kv_budget, "kv-budget")
    asked = [turn for turn in conversation.path(turn_id) if turn.role is Role.USER]
    if not asked:
        return Thinning(budget=budget, num_last=min(num_tokens, _MOST_QUESTION))
    turn = asked[-1]
    before: Sequence[int] = conversation.context_ids(turn.parent_id) if len(asked) > 1 else ()
    num_before = len(before)
    if files := "".join(text for _, text in attached_files(turn.text)):
        system = conversation.system if not before else None
        num_before += len(model.beginning_ids(conversation, turn.parent_id, files, system))
    num_last = min(max(0, num_tokens - num_before), _MOST_QUESTION)
    return Thinning(
        budget=budget,
        num_leading=len(model.opening_ids(conversation)),
        num_last=num_last,
    )


def dropped_in_words(dropped: KvDropped | None) -> str:
    """Return a sentence on KV that an answer went on without, "" for none."""
    if dropped is None:
        return ""
    share = dropped.num_kept / dropped.num_tokens
    counts = f"{share:.0%} of {dropped.num_tokens:,} positions ({dropped.method})"
    if dropped.method == "KVzip":
        return f"The pin's KV: kept {counts}."
    why = "by this question" if dropped.method == "SnapKV" else "by the answer so far"
    return (
        f"KV budget: kept {counts}, chosen {why}; the next message reads the conversation's whole "
        "KV again, for another question needs other positions."
    )

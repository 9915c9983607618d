"""Explains why a turn's context was prefilled: how much was cached, and why the rest was not.

Pure functions of the requested ids, the ids of contexts prefilled earlier, and the engine's counts
of cached tokens. Only the conversation itself is compared, not others beside it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvchat.chat.conversation import ROOT, Conversation, Role, Turn
from kvchat.core.types import CONVERTED_FROM, ELSEWHERE, CachedTokens, MissReason, Usage

# Fewer tokens than this are a partial block, which is never cached.
NOT_WORTH_MENTIONING = 32
# So many tokens are a whole block, which could have been cached.
_WHOLE_BLOCK = 16
_TEXT_CHARS = 40
# The miss reasons of a context that no tier has ever held.
_UNKNOWN = (None, MissReason.NEVER_WRITTEN, MissReason.NO_TIER)


class Change(StrEnum):
    """How a context differs from one that was prefilled before."""

    NEW = "new"
    EDITED = "new text"
    SYSTEM = "system prompt changed"
    TOKENIZER = "model changed"
    TEMPLATE = "template"
    IMPORTED = "imported"
    COMPACTED = "compacted"


# With these nothing was read again.
_FIRST = (Change.NEW, Change.IMPORTED, Change.COMPACTED)


@dataclass(frozen=True, slots=True)
class Reuse:
    """The facts about one answered turn.

    ids           the token ids of the requested context
    before        the ids of the earlier prefilled context with the longest common prefix; empty if
                  there is none
    change        why the two differ; IMPORTED if no model had prefilled the turns before, COMPACTED
                  if a summary takes their place that none had
    cached        tokens that were not computed, by tier
    miss_reason   why a slower tier did not have more, None if it was not asked
    num_unread    tokens that were not reached: the reading was stopped
    """

    ids: tuple[int, ...]
    before: tuple[int, ...]
    change: Change
    cached: CachedTokens
    miss_reason: MissReason | None = None
    num_unread: int = 0

    @property
    def num_shared(self) -> int:
        """Length of the common prefix in tokens: the most that could have been reused."""
        return common_len(self.ids, self.before)

    @property
    def num_again(self) -> int:
        """Tokens that had been prefilled before and were prefilled again, however few."""
        return max(0, min(self.num_shared, len(self.ids) - self.num_unread) - self.cached.total)

    @property
    def num_lost(self) -> int:
        """The same, where they are more than the rest of a block."""
        return self.num_again if self.num_again >= NOT_WORTH_MENTIONING else 0


@dataclass(frozen=True, slots=True)
class Times:
    """Since when the engine has computed KV, and when the cache was cleared last; in seconds since
    the epoch.
    """

    run_began_s: float = math.inf
    cleared_s: float = 0.0


def common_len(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many leading ids two contexts share."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next((n for n in range(length) if one[n] != other[n]), length)


def reuse_of(
    conversation: Conversation,
    turn_id: int,
    cached: CachedTokens,
    miss_reason: MissReason | None,
    times: Times = Times(),
) -> Reuse:
    """Return the facts about an answer, or about a user turn without an answer."""
    asked = _asked(conversation, turn_id)
    ids = tuple(conversation.context_ids(asked.turn_id))
    if miss_reason in _UNKNOWN and _is_first_of_a_model(conversation, asked, turn_id):
        miss_reason = MissReason.OTHER_MODEL
    first_missing = _turn_at(conversation, asked, cached.total)
    miss_reason = dated(miss_reason, first_missing.created_s, times)
    others = [leaf for leaf in conversation.leaves() if not _is_below(conversation, leaf, asked)]
    if asked.parent_id != ROOT:
        others.append(conversation.turn(asked.parent_id))
    others.extend(each for each in conversation.children(asked.turn_id) if each.turn_id < turn_id)
    others = [other for other in others if not _is_copy(conversation, other)]
    unread = _unread(conversation, turn_id)
    others = [
        read for other in others if (read := _last_read(conversation, other, unread, turn_id))
    ]
    best = max(others, key=lambda other: _closeness(conversation, other, ids), default=None)
    before = tuple(conversation.context_ids(best.turn_id)) if best is not None else ()
    change = Change.NEW
    if best is not None and common_len(ids, before) < min(len(ids), len(before)):
        change = _change(conversation, asked, best, common_len(ids, before))
    if change in (Change.NEW, Change.EDITED):
        change = _first_reading(conversation, asked, unread, cached) or change
    return Reuse(ids, before, change, cached, miss_reason)


def _asked(conversation: Conversation, turn_id: int) -> Turn:
    """Return the message of an answer; of a user turn without an answer the turn itself."""
    turn = conversation.turn(turn_id)
    return conversation.turn(turn.parent_id) if turn.role is Role.ASSISTANT else turn


def dated(reason: MissReason | None, created_s: float, times: Times) -> MissReason | None:
    """Return a miss reason, more exactly by when the KV of a turn made at `created_s` was computed.

    What this run has computed was in memory, whatever the disk has; what was on disk when the cache
    was cleared went with it.
    """
    if reason in (MissReason.NEVER_WRITTEN, MissReason.NO_TIER):
        if created_s >= times.run_began_s:
            return MissReason.EVICTED
        if reason is MissReason.NEVER_WRITTEN and created_s < times.cleared_s:
            return MissReason.CLEARED
    return reason


def _is_first_of_a_model(conversation: Conversation, asked: Turn, turn_id: int) -> bool:
    """Whether a turn is this model's first answer in a conversation of another model."""
    others = (turn for turn in conversation.turns() if turn.turn_id < turn_id)
    return any(turn.is_adopted for turn in conversation.path(asked.turn_id)) and not any(
        turn.role is Role.ASSISTANT and not (turn.is_adopted or turn.is_imported) for turn in others
    )


def _unread(conversation: Conversation, turn_id: int) -> set[int]:
    """Return the turns that no model had prefilled before the answer `turn_id`.

    These are imported turns, summaries and copies that are in no other generated answer's context.
    """
    unread = {turn.turn_id for turn in conversation.turns() if _is_written(turn)}
    for turn in conversation.turns() if unread else ():
        if turn.role is Role.ASSISTANT and not _is_written(turn) and turn.turn_id < turn_id:
            unread.difference_update(each.turn_id for each in conversation.path(turn.turn_id))
    return unread


def _is_written(turn: Turn) -> bool:
    """Whether a turn was put into the conversation, and not said in it."""
    return turn.is_imported or turn.summary_of is not None or turn.copy_of is not None


def _last_read(
    conversation: Conversation, turn: Turn, unread: set[int], turn_id: int
) -> Turn | None:
    """Return the last turn on a turn's path that a model had prefilled before the answer `turn_id`.

    That is one not in `unread` and, if no answer, one with an answer somewhere below it: a message
    may be sent and no model loaded. None if there is none.
    """
    for each in reversed(conversation.path(turn.turn_id)):
        is_answer = each.role is Role.ASSISTANT
        if each.turn_id not in unread and (is_answer or _is_answered(conversation, each, turn_id)):
            return each
    return None


def _is_answered(conversation: Conversation, turn: Turn, turn_id: int) -> bool:
    """Whether a model has answered a turn or one after it before the answer `turn_id`."""
    return any(
        below.turn_id < turn_id
        and (below.role is Role.ASSISTANT or _is_answered(conversation, below, turn_id))
        for below in conversation.children(turn.turn_id)
    )


def _first_reading(
    conversation: Conversation, asked: Turn, unread: set[int], cached: CachedTokens
) -> Change | None:
    """Return why turns before a turn had never been prefilled, and now had to be; None if not."""
    before = conversation.path(asked.parent_id) if asked.parent_id != ROOT else []
    first = [turn for turn in before if turn.turn_id in unread]
    if cached.total + NOT_WORTH_MENTIONING > sum(len(turn.token_ids) for turn in before):
        return None
    if any(turn.summary_of is not None for turn in first):
        return Change.COMPACTED
    return Change.IMPORTED if any(turn.is_imported for turn in first) else None


def _is_copy(conversation: Conversation, turn: Turn) -> bool:
    """Whether a turn is a copy, as under another system prompt; a copy was never prefilled."""
    return any(
        each.turn_id < turn.turn_id
        and (each.created_s, each.role, each.text) == (turn.created_s, turn.role, turn.text)
        for each in conversation.turns()
    )


def _is_below(conversation: Conversation, turn: Turn, other: Turn) -> bool:
    return any(each.turn_id == other.turn_id for each in conversation.path(turn.turn_id))


def _closeness(conversation: Conversation, turn: Turn, ids: tuple[int, ...]) -> tuple[int, int]:
    """Rank a context: by its common prefix with `ids`, then by whether it differs after it."""
    context = tuple(conversation.context_ids(turn.turn_id))
    shared = common_len(ids, context)
    return shared, min(len(context), len(ids)) - shared


def _change(conversation: Conversation, asked: Turn, other: Turn, position: int) -> Change:
    """Return why two contexts differ at a token position."""
    new, old = _turn_at(conversation, asked, position), _turn_at(conversation, other, position)
    if new.parent_id == ROOT and old.parent_id == ROOT and new.system != old.system:
        return Change.SYSTEM
    if new.tokenizer != old.tokenizer:
        return Change.TOKENIZER
    if new.text != old.text or new.role is not old.role:
        return Change.EDITED
    return Change.TEMPLATE


def _turn_at(conversation: Conversation, turn: Turn, position: int) -> Turn:
    """Return the turn on a turn's path that holds the token at a position."""
    for each in conversation.path(turn.turn_id):
        position -= len(each.token_ids)
        if position < 0:
            return each
    return turn


def cached_ids(conversation: Conversation, turn_id: int, usage: Usage) -> CachedTokens:
    """Return how many of an answer's context ids were cached, by tier.

    Another program's server counts its own tokens, which may be fewer or more than the ids here:
    then it is the same share.
    """
    num_ids = len(conversation.context_ids(_asked(conversation, turn_id).turn_id))
    if not usage.prompt_tokens or usage.prompt_tokens == num_ids:
        return usage.cached
    share = num_ids / usage.prompt_tokens
    return CachedTokens.of({name: round(n * share) for name, n in usage.cached.places.items()})


def is_as_expected(conversation: Conversation, turn_id: int, cached: CachedTokens) -> bool:
    """Whether an answer prefilled no more than its own turn; a fast check before `reuse_of`."""
    asked = conversation.turn(conversation.turn(turn_id).parent_id)
    expected = len(conversation.context_ids(asked.parent_id)) if asked.parent_id != ROOT else 0
    return cached.total + NOT_WORTH_MENTIONING > expected


def cause(reuse: Reuse) -> str:
    """Return in a few words why a turn prefilled more than its own tokens.

    The reason is why earlier KV was missing, or what changed in the context. Returns "" if the
    context was never prefilled before.
    """
    if not reuse.num_lost:
        return "" if reuse.change in _FIRST else str(reuse.change)
    return str(reuse.miss_reason or MissReason.EVICTED)


def explain(reuse: Reuse, decode: Callable[[list[int]], str]) -> list[str]:
    """Return the lines of `/cache why`; `decode` turns ids into text."""
    total = len(reuse.ids)
    if reuse.miss_reason is MissReason.NOT_TOLD:
        return [f"{total:,} tokens were sent. The server does not tell how many it had cached."]
    lines = [f"{reuse.cached.total:,} of {total:,} tokens were there{_places(reuse.cached)}."]
    for name, count in reuse.cached.others:
        if name.startswith(CONVERTED_FROM):
            was = name.removeprefix(CONVERTED_FROM)
            lines.append(
                f"{count:,} were kept in {was}; converted, they are kept in fewer bits too."
            )
        elif name == ELSEWHERE:
            lines.append(f"{count:,} were computed for it by the machine of --prefill-at.")
    num_read = total - reuse.cached.total - reuse.num_unread
    were = "was" if num_read == 1 else "were"
    if reuse.num_lost:
        lines.append(
            f"{num_read:,} {were} read, {reuse.num_lost:,} of them again: {_WHY[reuse.miss_reason]}"
        )
    elif num_read:
        lines.append(f"{num_read:,} {were} read: {_CHANGES[reuse.change]}")
        if reuse.num_again >= _WHOLE_BLOCK:
            why = _WHY[reuse.miss_reason] if reuse.miss_reason is not None else _FEW
            lines.append(f"{reuse.num_again:,} of them were read before: {why}")
    if reuse.num_unread:
        were = "was" if reuse.num_unread == 1 else "were"
        stopped = f"{reuse.num_unread:,} {were} not read, as the reading was stopped"
        lines.append(f"{stopped}: /continue goes on from there.")
    if reuse.change not in _FIRST:
        lines.append(_difference(reuse, decode))
    return lines


_CHANGES = {
    Change.NEW: "new text.",
    Change.EDITED: "the message was edited.",
    Change.SYSTEM: "the system prompt changed.",
    Change.TOKENIZER: "the model changed, and writes the same words with other tokens.",
    Change.TEMPLATE: "the template writes the same words in another way.",
    Change.COMPACTED: "the conversation was compacted, and no model had read it so yet.",
    Change.IMPORTED: "the conversation was imported, and no model had read it yet.",
}
_FEW = "the end of what is kept is a whole block."
_WHY = {
    None: "they were evicted from memory.",
    MissReason.NEVER_WRITTEN: "they were not written to disk before the last run ended, as when "
    "it is killed, or were deleted there by other means.",
    MissReason.OPEN_ELSEWHERE: "another kvchat has this conversation open, and they are in its "
    "memory: not all of it is on disk yet.",
    MissReason.CLEARED: "the cache on disk was cleared.",
    MissReason.EVICTED: "they are neither in memory nor on disk any more: evicted to make "
    "room, or out of date.",
    MissReason.OFF: "the cache is off (--no-cache), so every answer reads its whole context.",
    MissReason.THINNED: "what follows a pin that keeps a share of its KV is in memory only.",
    MissReason.CORRUPT: "what was kept on disk was corrupt, and is gone now.",
    MissReason.OVER_BUDGET: "they did not fit on disk: over budget. --disk-cache allows more.",
    MissReason.QUARANTINED: "what was kept is not this model's: "
    "a forward pass did not agree with it.",
    MissReason.OTHER_MODEL: "the model changed, or how it is run, and its KV with it.",
    MissReason.OTHER_WEIGHTS: "--weights or --dtype changed, and the model's KV with it.",
    MissReason.OTHER_KV: "--kv-dtype or --block-size changed, and KV is kept in another format.",
    MissReason.SLOWER: "reading them from disk takes longer here than computing them.",
    MissReason.LATE: "the disk took too long, and computing went on without it.",
    MissReason.NO_ROOM: "there is no room for more on the device. --device-cache allows more.",
    MissReason.NO_TIER: "there is no disk cache, and they are no longer in memory.",
    MissReason.NOT_KEPT: "the server no longer had them. It does not tell why; it may keep whole "
    "blocks of tokens only.",
    MissReason.NOT_TOLD: "or so it seems, as the server does not tell what it had cached.",
}


def missing(num_tokens: int, reason: MissReason | None) -> str:
    """Return a sentence on tokens that have to be read because no tier has them."""
    return f"{num_tokens:,} tokens have to be read: {_WHY[reason]}"


def _places(cached: CachedTokens) -> str:
    found = [f"{count:,} {name}" for name, count in cached.places.items() if count]
    return f" ({', '.join(found)})" if found else ""


def _difference(reuse: Reuse, decode: Callable[[list[int]], str]) -> str:
    start = reuse.num_shared
    new, old = list(reuse.ids[start : start + 8]), list(reuse.before[start : start + 8])
    return (
        f"The first token that differs is number {start + 1:,}: "
        f"{decode(new)[:_TEXT_CHARS]!r} was {decode(old)[:_TEXT_CHARS]!r}."
    )

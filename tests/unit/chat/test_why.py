"""Why a turn was read again: every cause told, and none made up."""

from dataclasses import replace

import pytest

from kvchat.chat.conversation import ROOT, Conversation, Role, Turn
from kvchat.chat.why import (
    Change,
    Reuse,
    Times,
    cached_ids,
    cause,
    common_len,
    dated,
    explain,
    reuse_of,
)
from kvchat.core.types import CachedTokens, MissReason, Usage

HISTORY = tuple(range(1, 201))


def spell(ids: list[int]) -> str:
    return " ".join(str(token) for token in ids)


def told(**changes: object) -> str:
    facts = Reuse((*HISTORY, 900, 901), HISTORY, Change.NEW, CachedTokens(device=192))
    return "\n".join(explain(replace(facts, **changes), spell))  # type: ignore[arg-type]


def test_a_turn_that_only_adds_reads_what_is_new() -> None:
    assert told() == "192 of 202 tokens were there (192 device).\n10 were read: new text."


def test_a_few_tokens_that_were_not_written_are_no_new_text() -> None:
    """After a kill: 28 tokens of the last answer were told as new text."""
    said = told(cached=CachedTokens(disk=172), miss_reason=MissReason.NEVER_WRITTEN)
    assert said.splitlines()[1:] == [
        "30 were read: new text.",
        "28 of them were read before: they were not written to disk before the last run ended, as "
        "when it is killed, or were deleted there by other means.",
    ]
    assert "28 of them were read before: the end of" in told(cached=CachedTokens(disk=172))


def test_where_nothing_was_read_nothing_more_is_said() -> None:
    """After /retry it said "0 were read: new text."."""
    assert told(cached=CachedTokens(device=202)) == "202 of 202 tokens were there (202 device)."


def test_what_was_not_reached_is_not_told_as_read() -> None:
    """After Esc in a prefill: "0 of 3,571 tokens were there. 3,571 were read: new text." """
    assert told(cached=CachedTokens(device=192), num_unread=6) == (
        "192 of 202 tokens were there (192 device).\n4 were read: new text.\n"
        "6 were not read, as the reading was stopped: /continue goes on from there."
    )
    said = told(cached=CachedTokens(device=16), num_unread=100)
    assert "86 were read, 86 of them again" in said
    assert "100 were not read" in said


def test_the_tokens_of_a_message_without_an_answer_are_counted() -> None:
    """They were counted as those of the message before it: of a first one 0 were cached."""
    talk = Talk()
    message = talk.add(Role.USER, "hello", ROOT)
    stopped = Usage(prompt_tokens=5, cached=CachedTokens(device=4), unread_tokens=1)
    assert cached_ids(talk.conversation, message, stopped).total == 4


RUN = Times(run_began_s=100.0, cleared_s=50.0)


@pytest.mark.parametrize(
    ("reason", "created_s", "expected"),
    [
        # This run has computed it: it was in memory, whatever the disk has.
        (MissReason.NEVER_WRITTEN, 100.0, MissReason.EVICTED),
        (MissReason.NO_TIER, 150.0, MissReason.EVICTED),
        # Before this run: the disk does not have it, and has not lost it either.
        (MissReason.NEVER_WRITTEN, 99.0, MissReason.NEVER_WRITTEN),
        (MissReason.NEVER_WRITTEN, 50.0, MissReason.NEVER_WRITTEN),
        (MissReason.NO_TIER, 99.0, MissReason.NO_TIER),
        # Before the cache was cleared.
        (MissReason.NEVER_WRITTEN, 49.0, MissReason.CLEARED),
        (MissReason.NO_TIER, 49.0, MissReason.NO_TIER),
        # What is known more exactly stays.
        (MissReason.CORRUPT, 150.0, MissReason.CORRUPT),
        (MissReason.EVICTED, 49.0, MissReason.EVICTED),
        (None, 150.0, None),
    ],
)
def test_what_was_evicted_is_told_from_what_was_not_written_by_its_date(
    reason: MissReason | None, created_s: float, expected: MissReason | None
) -> None:
    assert dated(reason, created_s, RUN) is expected
    assert dated(reason, created_s, Times()) is reason


def test_the_date_is_that_of_the_turn_with_the_first_missing_token() -> None:
    """Not that of the last message, which this run has always read."""
    talk = Talk()
    old = talk.add(Role.ASSISTANT, "b" * 100, talk.add(Role.USER, "a" * 100, ROOT), created_s=60.0)
    new = talk.add(Role.USER, "c" * 100, old, created_s=120.0)
    answer = talk.add(Role.ASSISTANT, "d", new, created_s=121.0)

    def reason(num_cached: int) -> MissReason | None:
        cached = CachedTokens(device=num_cached)
        found = reuse_of(talk.conversation, answer, cached, MissReason.NEVER_WRITTEN, RUN)
        return found.miss_reason

    assert reason(150) is MissReason.NEVER_WRITTEN
    assert reason(200) is MissReason.EVICTED


def test_every_tier_is_named() -> None:
    assert "(100 device, 50 host, 42 disk)" in told(cached=CachedTokens(100, 50, 42))


@pytest.mark.parametrize(
    ("miss_reason", "words"),
    [
        (MissReason.NEVER_WRITTEN, "not written to disk before the last run ended"),
        (MissReason.EVICTED, "nor on disk any more: evicted"),
        (MissReason.CORRUPT, "corrupt"),
        (MissReason.OVER_BUDGET, "over budget"),
        (MissReason.QUARANTINED, "not this model's"),
        (MissReason.OTHER_MODEL, "model changed"),
        (MissReason.OTHER_WEIGHTS, "--weights or --dtype changed"),
        (MissReason.OTHER_KV, "--kv-dtype or --block-size changed"),
        (MissReason.SLOWER, "longer here than computing"),
        (MissReason.LATE, "took too long"),
        (MissReason.NO_ROOM, "--device-cache"),
        (MissReason.NO_TIER, "no disk cache"),
        (MissReason.NOT_KEPT, "the server no longer had them"),
        (None, "evicted from memory"),
    ],
)
def test_what_was_read_again_has_its_cause(miss_reason: MissReason | None, words: str) -> None:
    said = told(cached=CachedTokens(), miss_reason=miss_reason)

    assert "202 were read, 200 of them again" in said
    assert words in said


def test_every_lack_has_words() -> None:
    assert all(told(cached=CachedTokens(), miss_reason=miss_reason) for miss_reason in MissReason)


def test_what_was_partly_there_is_evicted_only_where_that_is_known() -> None:
    """Where a run was killed, KV of its last turn was never on disk, and was called evicted."""
    cached = CachedTokens(device=64)
    facts = Reuse((*HISTORY, 900, 901), HISTORY, Change.NEW, cached, MissReason.NEVER_WRITTEN)

    assert cause(facts) == "not written before the last run ended"
    assert cause(replace(facts, miss_reason=MissReason.EVICTED)) == "evicted"


@pytest.mark.parametrize(
    "change", [Change.EDITED, Change.SYSTEM, Change.TOKENIZER, Change.TEMPLATE]
)
def test_the_first_token_that_differs_is_shown(change: Change) -> None:
    said = told(ids=(*HISTORY[:120], 7, 7, 7), change=change, cached=CachedTokens(device=112))

    assert "The first token that differs is number 121: '7 7 7' was '121 122" in said
    assert "11 were read: " in said


def test_the_short_cause_is_said_only_where_something_was_lost() -> None:
    facts = Reuse(
        (*HISTORY, 900), HISTORY, Change.NEW, CachedTokens(device=192), MissReason.EVICTED
    )

    assert cause(facts) == ""
    assert cause(replace(facts, cached=CachedTokens())) == "evicted"
    assert (
        cause(replace(facts, cached=CachedTokens(), miss_reason=MissReason.OTHER_MODEL))
        == "model changed"
    )
    assert cause(replace(facts, cached=CachedTokens(), miss_reason=None)) == "evicted"
    never = replace(facts, cached=CachedTokens(), miss_reason=MissReason.NEVER_WRITTEN)
    assert cause(never) == "not written before the last run ended"


def test_the_short_cause_of_what_was_never_there_is_what_changed() -> None:
    """After /system the whole conversation is read, and the line said nothing of it."""
    facts = Reuse((7, *HISTORY), HISTORY, Change.SYSTEM, CachedTokens())

    assert cause(facts) == "system prompt changed"
    assert cause(replace(facts, change=Change.NEW)) == ""


def test_the_common_length_is_that_of_the_naive_loop() -> None:
    for one, other in [((), ()), ((1,), ()), ((1, 2), (1, 2, 3)), ((1, 2, 3), (1, 5, 3))]:
        naive = 0
        while naive < min(len(one), len(other)) and one[naive] == other[naive]:
            naive += 1
        assert common_len(one, other) == naive


# Facts from a conversation


class Talk:
    """A conversation whose ids are those of its letters."""

    def __init__(self, system: str | None = None) -> None:
        self.conversation = Conversation("id", 0.0, system)

    def add(self, role: Role, text: str, parent: int, **changes: object) -> int:
        conversation = self.conversation
        system = conversation.system if parent == ROOT else None
        turn = Turn(
            turn_id=conversation.next_turn_id,
            parent_id=parent,
            role=role,
            text=text,
            token_ids=tuple(ord(letter) for letter in (system or "") + text),
            tokenizer="one",
            created_s=float(conversation.next_turn_id),
            system=system,
        )
        conversation.add(replace(turn, **changes))  # type: ignore[arg-type]
        return turn.turn_id

    def why(self, turn_id: int) -> Reuse:
        return reuse_of(self.conversation, turn_id, CachedTokens(), None)


def test_a_second_turn_follows_the_first() -> None:
    talk = Talk()
    first = talk.add(Role.ASSISTANT, "hello", talk.add(Role.USER, "hi, you", ROOT))
    second = talk.add(Role.ASSISTANT, "fine", talk.add(Role.USER, "how are you", first))

    found = talk.why(second)

    assert found.change is Change.NEW
    assert len(found.before) == found.num_shared == len("hi, youhello")
    assert len(found.ids) == len("hi, youhellohow are you")


def test_a_message_that_no_model_has_answered_was_not_read() -> None:
    """It was sent while a model loaded that never came; the next answer read all of it "again"."""
    talk = Talk()
    answer = talk.add(Role.ASSISTANT, "hello", talk.add(Role.USER, "hi, you", ROOT))
    waits = talk.add(Role.USER, "how are you", answer)
    asked = talk.add(Role.USER, "and your dog", waits)

    first = talk.why(talk.add(Role.ASSISTANT, "fine", asked))
    second = talk.why(talk.add(Role.ASSISTANT, "well", asked))

    assert (first.change, len(first.before)) == (Change.NEW, len("hi, youhello"))
    assert len(second.before) == len("hi, youhellohow are youand your dogfine")


def test_a_first_turn_follows_nothing() -> None:
    talk = Talk()
    answer = talk.add(Role.ASSISTANT, "hello", talk.add(Role.USER, "hi", ROOT))

    assert talk.why(answer).before == ()


def test_an_edited_message() -> None:
    talk = Talk()
    talk.add(Role.ASSISTANT, "hello", talk.add(Role.USER, "tell me of cats", ROOT))
    edited = talk.add(Role.ASSISTANT, "well", talk.add(Role.USER, "tell me of dogs", ROOT))

    found = talk.why(edited)

    assert found.change is Change.EDITED
    assert found.num_shared == len("tell me of ")


def test_another_answer_to_the_same_message_costs_nothing() -> None:
    talk = Talk()
    question = talk.add(Role.USER, "say a word", ROOT)
    first = talk.add(Role.ASSISTANT, "ant", question)
    talk.add(Role.ASSISTANT, "done", talk.add(Role.USER, "more", first))
    other = talk.add(Role.ASSISTANT, "ape", question)
    last = talk.add(Role.ASSISTANT, "done", talk.add(Role.USER, "x", other))

    assert talk.why(other).num_shared == len("say a word")
    assert talk.why(last).change is Change.NEW
    assert talk.why(last).num_shared == len("say a wordape")


def under_another_prompt() -> tuple[Talk, int]:
    """Return a talk whose question was written anew under another prompt, and that question."""
    talk = Talk("be kind. ")
    question = talk.add(Role.USER, "hi there", ROOT, created_s=5.0)
    talk.add(Role.ASSISTANT, "hello", question, created_s=6.0)
    talk.conversation.system = "be dull. "
    return talk, talk.add(Role.USER, "hi there", ROOT, created_s=5.0)


def test_answers_that_come_together_are_not_read_before_one_another() -> None:
    """Of three answers under another system prompt the first was told to be evicted."""
    talk, again = under_another_prompt()
    talk.add(Role.ASSISTANT, "hello", again, created_s=6.0)
    one, two = (talk.add(Role.ASSISTANT, text, again) for text in ("fine", "well"))

    assert talk.why(one).change is Change.SYSTEM
    assert talk.why(one).num_shared == len("be ")
    assert talk.why(two).num_shared == len("be dull. hi there")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"system": "be dull. ", "token_ids": tuple(b"be dull. hi there")}, Change.SYSTEM),
        ({"tokenizer": "two", "token_ids": tuple(b"be kund. hi there")}, Change.TOKENIZER),
        ({"token_ids": tuple(b"be kund. hi there"), "created_s": 99.0}, Change.TEMPLATE),
    ],
)
def test_what_else_may_change(changes: dict[str, object], expected: Change) -> None:
    talk = Talk("be kind. ")
    talk.add(Role.ASSISTANT, "hello", talk.add(Role.USER, "hi there", ROOT))
    again = talk.add(Role.USER, "hi there", ROOT, **changes)

    assert talk.why(again).change is expected


def test_what_another_model_wrote_is_read_since_the_model_changed() -> None:
    """With another tokenizer no tier knows such ids: they were said never to have been kept."""
    talk = Talk()
    talk.add(Role.ASSISTANT, "hello", talk.add(Role.USER, "tell me of cats " * 4, ROOT))
    conversation = talk.conversation
    for turn in list(conversation.turns()):
        conversation.replace(turn.with_ids(turn.token_ids, "two"))
    first = talk.add(Role.ASSISTANT, "fine", talk.add(Role.USER, "and dogs", 2))

    for miss_reason in (MissReason.NEVER_WRITTEN, MissReason.NO_TIER, None):
        found = reuse_of(conversation, first, CachedTokens(), miss_reason)
        assert cause(found) == "model changed"
        assert "the model changed" in "".join(explain(found, spell))
    corrupt = reuse_of(conversation, first, CachedTokens(), MissReason.CORRUPT)
    assert cause(corrupt) == "corrupt", "the tier knows more"
    second = talk.add(Role.ASSISTANT, "bye", talk.add(Role.USER, "well", first))
    assert cause(reuse_of(conversation, second, CachedTokens(), None)) == "evicted"


def test_a_path_written_anew_under_another_system_prompt_was_never_read() -> None:
    """All that /system wrote anew was once said to be evicted, before it was ever read."""
    talk, again = under_another_prompt()
    copy = talk.add(Role.ASSISTANT, "hello", again, created_s=6.0)
    answer = talk.add(Role.ASSISTANT, "fine", talk.add(Role.USER, "how are you", copy))
    later = talk.add(Role.ASSISTANT, "bye", talk.add(Role.USER, "well", answer))

    assert talk.why(answer).change is Change.SYSTEM
    assert talk.why(answer).num_shared == len("be ")
    assert talk.why(later).change is Change.NEW
    assert talk.why(later).num_shared == len("be dull. hi therehellohow are youfine")

"""Answers that are given as text are fed as the template writes them into the history.

The oracle renders whole conversations with Jinja directly.
"""

from dataclasses import replace
from datetime import datetime

import pytest
from tokenizers import Tokenizer

from kvchat.chat.chat_model import ChatModel, readopt
from kvchat.chat.conversation import NO_TOKENIZER, ROOT, Conversation, Role, Turn
from kvchat.chat.template import NewTurn, turn_format
from kvchat.chat.text_codec import Segment
from kvchat.chat.tokenizer import ChatTokenizer
from kvchat.core.types import FinishReason
from support import template_zoo as zoo
from support.tokenizer_zoo import ZOO, byte_level, text_files
from unit.chat.test_template import written

CLOCK = datetime(2025, 3, 4, 5, 6)
_CHANNEL_TOKENS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
Message = tuple[str, str]


def model_of(source: str, tokenizer: Tokenizer | None = None) -> ChatModel:
    tokenizer = tokenizer or byte_level()
    tokenizer.add_special_tokens(_CHANNEL_TOKENS)
    files = text_files(tokenizer, source)
    chat_tokenizer = ChatTokenizer(files)
    form = turn_format(files, chat_tokenizer)
    return ChatModel("m", chat_tokenizer, form, frozenset(), {})


def imported(*messages: Message) -> Conversation:
    """Return a conversation as it is read from a document: without ids."""
    conversation = Conversation("s", CLOCK.timestamp())
    for role, text in messages:
        turn = Turn(
            turn_id=conversation.next_turn_id,
            parent_id=conversation.tip_id,
            role=Role(role),
            text=text,
            token_ids=(),
            tokenizer=NO_TOKENIZER,
            created_s=0.0,
            finish=FinishReason.STOP if role == "assistant" else None,
        )
        conversation.add(turn)
    return conversation


TALK = (
    ("user", "What is it?"),
    ("assistant", "A cat."),
    ("user", "Its name?"),
    ("assistant", "Tom, 3 years old."),
    ("user", "Thanks!"),
)
FAMILIES = {
    "chatml": zoo.CHATML,
    "white space around answers": zoo.SPACED,
    "a line before the end": zoo.LINE_BEFORE_END,
    "thinks, then forgets": zoo.THINKS_THEN_FORGETS,
    "closes thoughts": zoo.CLOSES_THOUGHTS,
    "empty thoughts": zoo.EMPTY_THOUGHTS,
    "channels": zoo.CHANNELS,
    "toggled": zoo.TOGGLED,
    "text only": zoo.TEXT_ONLY,
}


# The prompt of "text only" ends with a space, which "byte fallback" joins to the answer's letter.
CASES = [
    (family, kind)
    for family in FAMILIES
    for kind in ("byte level", "byte fallback")
    if (family, kind) != ("text only", "byte fallback")
]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_an_imported_conversation_is_fed_as_the_template_renders_it(family: str, kind: str) -> None:
    """Old answers stood inside an open thought, without their channel's header, or with the white
    space before their closing token twice."""
    source = FAMILIES[family]
    model = model_of(source, ZOO[kind]())
    conversation = imported(*TALK)
    readopt(conversation, model)

    whole = model.tokenizer.encode([Segment(written(source, *TALK))])
    assert conversation.context_ids() == whole


def test_a_given_answer_is_stripped_as_the_template_strips_it() -> None:
    """White space at its ends was fed."""
    talk = (*TALK[:1], ("assistant", "\u3000A cat.\xa0\r\n"), *TALK[2:3])
    model, conversation = model_of(zoo.TRIMMING), imported(*talk)
    readopt(conversation, model)

    whole = model.tokenizer.encode([Segment(written(zoo.TRIMMING, *talk))])
    assert conversation.context_ids() == whole


SYSTEMS = (
    "/no_think",
    "Be brief. /no_think",
    "/no_think\nBe brief.",
    "A /no_think  B",
    "Be brief.",
)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("source", [zoo.READS_WORDS, zoo.CHATML], ids=["reads words", "chatml"])
def test_a_word_for_the_template_in_a_system_prompt_is_seen_at_every_turn(source, system):
    """The template saw a placeholder for the system prompt, and no word in it."""
    model, talk = model_of(source), TALK[:3]
    conversation = imported(*talk)
    conversation.replace(replace(conversation.turn(1), system=system))
    readopt(conversation, model)

    question, _, last = conversation.path()
    opening = written(source, ("system", system), *talk[:1])
    assert list(question.token_ids) == model.tokenizer.encode([Segment(opening)])
    whole = written(source, ("system", system), *talk)
    after = whole.rpartition(talk[1][1])[2].partition("<|im_end|>")[2]
    assert list(last.token_ids) == model.tokenizer.encode([Segment(after)])


@pytest.mark.parametrize("family", ["white space around answers", "a line before the end"])
def test_the_white_space_before_a_closing_token_is_not_fed_twice(family: str) -> None:
    """The model ended its answer itself, and the template's own end was appended to that."""
    form = model_of(FAMILIES[family]).format
    closing_id = form.answer.closing_id
    assert closing_id is not None

    after_end, after_cut = (
        form.following(NewTurn("b", CLOCK), last) for last in (closing_id, None)
    )

    assert after_cut[-len(after_end) :] == after_end
    ended = after_cut[: -len(after_end)]
    assert ended[-1] == closing_id
    assert ended.count(closing_id) == 1


def test_thoughts_that_an_answer_holds_are_fed_as_the_model_wrote_them() -> None:
    """They were kept whole in the text; their marks became ordinary characters."""
    tokenizer = byte_level()
    close, opened = tokenizer.token_to_id("</think>"), tokenizer.token_to_id("<think>")
    model = model_of(zoo.THINKS_THEN_FORGETS)
    conversation = imported(("user", "a"), ("assistant", "hm\n</think>\n\nYes."), ("user", "b"))
    readopt(conversation, model)
    question, answer, _ = conversation.path()
    assert question.token_ids[-2:-1] == (opened,)
    assert close in answer.token_ids
    assert opened not in answer.token_ids


def test_thoughts_under_a_prompt_that_opens_none_get_their_opening_mark() -> None:
    """Of two answers to one question, one with thoughts and one without, neither is garbled."""
    model = model_of(zoo.THINKS_THEN_FORGETS)
    conversation = imported(("user", "a"), ("assistant", "Yes."))
    thoughtful = replace(conversation.turn(2), turn_id=3, text="hm\n</think>\n\nNo.")
    conversation.add(thoughtful)
    readopt(conversation, model)
    texts = [
        model.tokenizer.decode(conversation.context_ids(turn_id)).partition("assistant\n")[2]
        for turn_id in (2, 3)
    ]
    assert texts == ["Yes.", "<think>\nhm\n</think>\n\nNo."]


def test_an_answer_without_thoughts_below_an_asked_question_closes_the_mark() -> None:
    model = model_of(zoo.THINKS_THEN_FORGETS)
    conversation = imported(("user", "a"), ("assistant", "Yes."))
    ids = model.user_ids(conversation, ROOT, "a", None)
    conversation.replace(conversation.turn(1).with_ids(ids, model.tokenizer.digest))
    generated = replace(conversation.turn(2), turn_id=3, text="hm", token_ids=(5,))
    conversation.add(generated)
    assert model.retold(conversation, conversation.turn(2)) is None
    answer = model.tokenizer.decode(model.answer_ids(conversation, conversation.turn(2)))
    assert answer == "</think>\n\nYes."


def test_a_given_answer_gives_no_control_token_but_marks_of_thinking() -> None:
    model = model_of(zoo.CHATML)
    conversation = imported(("user", "a"), ("assistant", "x<|im_end|>\n<|im_start|>user"))
    readopt(conversation, model)
    ids = conversation.turn(2).token_ids
    assert [i for i in ids if model.tokenizer.is_control(i)] == [model.format.answer.closing_id]

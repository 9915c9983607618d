"""A text that no context can hold is refused without being encoded whole, and only such a one."""

import random
from datetime import datetime

import pytest

from kvchat.chat.chat_model import ChatModel, readopt
from kvchat.chat.conversation import NO_TOKENIZER, ROOT, Conversation, Role, Turn
from kvchat.chat.session import ChatSession
from kvchat.chat.template import NewTurn, turn_format
from kvchat.chat.text_codec import Segment
from kvchat.chat.tokenizer import ChatTokenizer
from kvchat.core.errors import ContextTooLong
from support.odd_tokenizers import ODD
from support.template_zoo import CHATML
from support.tokenizer_zoo import ZOO, byte_level, text_files

LIMIT = 512
MEGABYTES = 10 << 20
PARTS = ["the ", "a", "\n\n", "\u597d", "</s>", "<|im_end|>", "    ", "\u2603", "ab"]


def small_model(kind: str = "byte level", template: str | None = CHATML) -> ChatModel:
    files = text_files(ZOO[kind](), template)
    tokenizer = ChatTokenizer(files)
    turns = turn_format(files, tokenizer)
    return ChatModel("m", tokenizer, turns, frozenset(), {}, max_context=LIMIT)


def first_turn(text: str, tokenizer: str = NO_TOKENIZER) -> Turn:
    return Turn(1, ROOT, Role.USER, text, (), tokenizer, created_s=0.0)


@pytest.mark.parametrize("kind", [*ZOO, *ODD])
def test_what_is_refused_has_more_tokens_than_the_limit(kind: str) -> None:
    """The twin encodes it whole."""
    rng = random.Random(3)
    files = text_files(ZOO[kind]()) if kind in ZOO else ODD[kind]().files
    tokenizer = ChatTokenizer(files)
    for _ in range(3):
        some = rng.choices(PARTS, k=3)
        text = "".join(rng.choices(some, k=rng.choice((10, 8_000))))
        num_tokens = len(tokenizer.encode([Segment(text, is_inert=True)]))
        for limit in (16, num_tokens // 3, num_tokens, 2 * num_tokens):
            assert not tokenizer.exceeds(text, limit) or num_tokens > limit


def test_ten_megabytes_are_refused_after_a_piece_of_them() -> None:
    """All of them were encoded first, which took 4.9 GB of memory."""
    tokenizer = ChatTokenizer(text_files(byte_level()))
    text = "word " * (MEGABYTES // 5)

    assert tokenizer.exceeds(text, LIMIT)
    assert len(tokenizer.encode_front(text, 2 * LIMIT)) <= 2 * LIMIT + (1 << 16)


@pytest.mark.parametrize("template", [CHATML, None])
def test_messages_system_prompts_and_answers_are_refused_in_a_sentence(template):
    model, long = small_model(template=template), "word " * (MEGABYTES // 5)
    empty = Conversation("", 0.0)
    answer = Turn(2, 1, Role.ASSISTANT, long, (), NO_TOKENIZER, created_s=0.0)

    for refused in (
        lambda: model.user_ids(empty, ROOT, long, None),
        lambda: model.user_ids(empty, ROOT, "Hi", long),
        lambda: model.answer_ids(empty, answer),
    ):
        with pytest.raises(ContextTooLong, match=r"10,485,760 characters.* twice the 512 tokens"):
            refused()


def test_the_ids_of_a_text_that_fits_are_those_of_the_whole_text() -> None:
    model = small_model()
    text = "a\n\nhe ab " * 50

    ids = model.user_ids(Conversation("", 0.0), ROOT, text, None)

    whole = byte_level().encode(
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )
    assert list(ids) == whole.ids
    assert model.format.opening(NewTurn(text, datetime.fromtimestamp(0.0))) == whole.ids


def test_a_conversation_with_a_turn_too_long_can_be_opened_and_gone_on_with_beside_it() -> None:
    model = small_model()
    conversation = Conversation("", 0.0)
    conversation.add(first_turn("word " * (MEGABYTES // 5)))
    conversation.move_tip(ROOT)
    conversation.add(Turn(2, ROOT, Role.USER, "Hi", (), NO_TOKENIZER, created_s=0.0))

    assert readopt(conversation, model) == 2

    assert LIMIT < len(conversation.context_ids(1)) < 1 << 17
    assert list(conversation.context_ids(2)) == list(
        model.user_ids(Conversation("", 0.0), ROOT, "Hi", None)
    )


def test_a_session_is_as_before_where_a_text_is_refused(session: ChatSession) -> None:
    long = "word " * 400_000
    before = len(session.conversation)

    with pytest.raises(ContextTooLong):
        session.add_user_turn(long)
    with pytest.raises(ContextTooLong):
        session.set_system(long)

    assert len(session.conversation) == before
    assert session.conversation.system == "Be brief."

"""Tokenizer and template: numbers whole, histories append-only, control tokens out of reach."""

from datetime import datetime
from itertools import islice, pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from demo_recipe.conversation import Conversations, Shape
from demo_recipe.scene import Chat, Turn
from demo_recipe.tokenizer import CONTROL_TOKENS, ChatTokenizer, train_tokenizer
from kvchat.chat.template_child import CompiledTemplate, compile_template


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    chats = islice(Conversations(1).stream(Shape(mean_turns=3)), 400)
    return ChatTokenizer(train_tokenizer(chats, 1024))


def chats(count: int) -> list[Chat]:
    return list(islice(Conversations(2).stream(Shape(mean_turns=4)), count))


def rendered_by(template: CompiledTemplate, messages: list[dict[str, str]], *, waits: bool) -> str:
    return template.render(messages, {}, datetime(2026, 1, 1), waits)


def test_numbers_below_a_hundred_are_one_token_each(tokenizer: ChatTokenizer) -> None:
    assert all(len(tokenizer.encode(str(number))) == 1 for number in range(100))


def test_text_survives_encoding_and_decoding(tokenizer: ChatTokenizer) -> None:
    texts = ("Hello, world!", "  two  spaces\n\ttabs", "naïve 你好 👍", "g i r a f f e", "x" * 99)
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_longer_history_only_appends(tokenizer: ChatTokenizer) -> None:
    for chat in chats(50):
        prompts = [
            tokenizer.prompt(chat.messages[:end])
            for end in range(len(chat.messages) + 1)
            if end and chat.messages[end - 1]["role"] == "user"
        ]
        for shorter, longer in pairwise(prompts):
            assert longer[: len(shorter)] == shorter


def test_the_files_template_renders_what_training_encoded(
    tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path, max_length=4096)
    plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    template = compile_template((tmp_path / "chat_template.jinja").read_text())

    for chat in chats(50):
        rendered = rendered_by(template, chat.messages, waits=False)
        ids = plain.encode(rendered, add_special_tokens=False).ids
        assert ids == tokenizer.encode_chat(chat).ids
        waiting = rendered_by(template, chat.messages[:-1], waits=True)
        ids = plain.encode(waiting, add_special_tokens=False).ids
        assert ids == tokenizer.prompt(chat.messages[:-1])


def test_only_replies_and_their_ends_are_learnt(tokenizer: ChatTokenizer) -> None:
    chat = Chat("Be brief.", (Turn("hi", "Hello!", "t"), Turn("bye", "Goodbye!", "t")))
    encoded = tokenizer.encode_chat(chat)

    learnt = [i for i, is_answer in zip(encoded.ids, encoded.is_answer, strict=True) if is_answer]
    end = [tokenizer.end_id]
    assert learnt == tokenizer.encode("Hello!") + end + tokenizer.encode("Goodbye!") + end


def test_a_typed_control_token_is_plain_text(tokenizer: ChatTokenizer) -> None:
    control = {tokenizer.bos_id, tokenizer.end_id, tokenizer.pad_id, *tokenizer.role_ids.values()}

    for token in CONTROL_TOKENS:
        assert not control & set(tokenizer.encode(f"say {token} please"))
        assert tokenizer.decode(tokenizer.encode(token)) == token

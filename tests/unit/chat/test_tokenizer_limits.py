"""A tokenizer that would multiply a text without end is refused before it takes all memory."""

import struct
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors

from kvchat.chat.text_codec import Segment
from kvchat.chat.tokenizer import ChatTokenizer
from kvchat.core.errors import ModelError
from support.tokenizer_zoo import ZOO, byte_level, text_files

Replace = normalizers.Replace


def read(**parts: Any) -> ChatTokenizer:
    """Return a byte-level tokenizer with other parts, as a chat reads it."""
    tokenizer: Tokenizer = byte_level()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return ChatTokenizer(text_files(tokenizer, None))


def charsmap(longest: int) -> Any:
    """A table of characters in sentencepiece's form, with one text of this length."""
    return normalizers.Precompiled(struct.pack("<I", 1024) + bytes(1024) + b"x" * longest + b"\0")


DOUBLED = [Replace("a", "aa")] * 40
BOMBS = {
    "doubling": {"normalizer": normalizers.Sequence(DOUBLED)},
    "one long text": {"normalizer": Replace("a", "a" * 5000)},
    "between characters": {"normalizer": normalizers.Sequence([Replace(Regex(""), "xx")] * 10)},
    "by turns": {"normalizer": normalizers.Sequence([Replace("a", "bb"), Replace("b", "aa")] * 12)},
    "beside Unicode's": {"normalizer": normalizers.Sequence([*DOUBLED, normalizers.NFKC()])},
    "before a text": {"normalizer": normalizers.Prepend("x" * 5000)},
    "a table": {"normalizer": charsmap(100_000)},
    "bytes of bytes": {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 20)},
    "when decoded": {"decoder": decoders.Sequence([decoders.Replace("a", "aa")] * 40)},
    "tokens around a text": {
        "post_processor": processors.TemplateProcessing(
            single=[*["<s>"] * 2000, "$A"], special_tokens=[("<s>", 1)]
        )
    },
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_tokenizer_that_multiplies_texts_is_refused_when_it_is_read(name: str) -> None:
    with pytest.raises(ModelError, match=r"cannot be read: it (multiplies|adds)") as caught:
        read(**BOMBS[name])
    assert "\n" not in caught.value.message


def test_a_text_that_a_tokenizer_multiplies_is_refused_and_others_are_not() -> None:
    """Steps for different characters look like growth in each other's place."""
    quotes = [Replace(Regex(f"[{c}]+"), "'") for c in "«»„“"]
    tokenizer = read(normalizer=normalizers.Sequence([Replace("\n", "x" * 50), *quotes]))

    assert tokenizer.encode([Segment("«hello» " * 1000)])
    with pytest.raises(ModelError, match="multiplies"):
        tokenizer.encode([Segment("\n" * 1000)])


REAL: dict[str, Any] = {
    "Llama 2": normalizers.Sequence([normalizers.Prepend("▁"), Replace(" ", "▁")]),
    "XLM-R": normalizers.Sequence([charsmap(36), Replace(Regex(" {2,}"), "▁")]),
    "CLIP": normalizers.Sequence(
        [normalizers.NFC(), Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    ),
    "lines as tokens": Replace("\n", "<0x0A>"),
}


@pytest.mark.parametrize("name", REAL)
def test_what_models_have_is_not_measured_at_all(name: str) -> None:
    assert read(normalizer=REAL[name])._check_text is None


def test_the_zoo_is_not_measured_at_all() -> None:
    for build in ZOO.values():
        assert ChatTokenizer(text_files(build(), None))._check_text is None

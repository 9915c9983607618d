"""Small tokenizers of the kinds real checkpoints ship, made in memory."""

import string
from collections.abc import Callable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvchat.model.files.text_settings import TextFiles
from support.template_zoo import CHATML

START, END = "<|im_start|>", "<|im_end|>"
CONTROL = ["<unk>", "<s>", "</s>", START, END]
# Of the checkpoints of tests.
SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|start|>", "<|end|>", "<|eos|>"]
_PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *string.ascii_letters,
    *string.digits,
    *string.punctuation,
    *("▁", "▁a", "▁the", "ab", "he", "é", "好", "▁好"),
]
_MERGES = [("▁", "a"), ("a", "b"), ("h", "e"), ("▁", "好")]


def bare_byte_level(merges: Sequence[tuple[str, str]] = (), **settings: bool) -> Tokenizer:
    """Return a tokenizer of bytes as letters, and of what merges make, without added tokens."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, list(merges), **settings))  # type: ignore[arg-type]
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte, the special tokens, and `<think>` marks."""
    tokenizer = bare_byte_level()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in ("<think>", "</think>")])
    return tokenizer


def byte_level() -> Tokenizer:
    """GPT-2's kind (Qwen, Llama 3): bytes as letters, and merges that cut through characters."""
    merges = [("h", "e"), ("Ġ", "a"), ("ð", "Ł"), ("Ã", "©"), ("<", "|")]
    tokenizer = bare_byte_level(merges)
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.add_tokens([AddedToken(t, special=False) for t in ("<think>", "</think>", "<td>")])
    return tokenizer


def _spaces_as_pieces(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(CONTROL)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """SentencePiece's BPE (Llama 2, Gemma, Phi-3): spaces are pieces, unknown characters bytes."""
    vocab = {piece: i for i, piece in enumerate(_PIECES)}
    model = models.BPE(
        vocab=vocab, merges=_MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    return _spaces_as_pieces(Tokenizer(model))


def unigram() -> Tokenizer:
    """A unigram model whose vocabulary holds a control token as an ordinary, likely piece."""
    pieces = [(piece, -10.0 + len(piece)) for piece in [*_PIECES, START]]
    return _spaces_as_pieces(Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True)))


def lower_case() -> Tokenizer:
    """A normaliser that maps other spellings onto a control token, and no byte fallback."""
    letters = [*string.ascii_lowercase, *string.digits, *string.punctuation, " ", "\n", "<unk>"]
    model = models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=True) for token in CONTROL]
    )
    return tokenizer


ZOO: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "unigram": unigram,
    "lower case": lower_case,
}


def text_files(
    tokenizer: Tokenizer, chat_template: str | None = CHATML, adds_bos: bool = False
) -> TextFiles:
    """Return the text side of a checkpoint with this tokenizer."""
    return TextFiles(
        vocabulary=tokenizer.to_str(),
        chat_template=chat_template,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        adds_bos=adds_bos,
    )

"""Tokenizers in which control tokens are where few have them; one for each way they come about."""

import string
from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from kvchat.model.files.text_settings import TextFiles
from support.template_zoo import CHATML
from support.tokenizer_zoo import CONTROL, bare_byte_level

GPT2_END = "<|endoftext|>"
_CHARACTERS = [*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n"]
_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@dataclass(frozen=True, slots=True)
class Odd:
    """The text side of a checkpoint, and whether decoding gives every text back."""

    files: TextFiles
    is_lossless: bool


def _files(
    tokenizer: Tokenizer, names: dict[str, str], stop_ids: tuple[int, ...] = ()
) -> TextFiles:
    return TextFiles(tokenizer.to_str(), CHATML, names, stop_ids)


def one_token_for_all() -> Odd:
    """GPT-2's: one token is BOS, EOS and unknown."""
    tokenizer = bare_byte_level()
    tokenizer.add_special_tokens([GPT2_END])
    return Odd(_files(tokenizer, dict.fromkeys(_NAMES, GPT2_END)), is_lossless=True)


def unknown_word_is_end() -> Odd:
    """The unknown token is the EOS, and there are unknown characters."""
    vocab = {piece: i for i, piece in enumerate([*_CHARACTERS, "</s>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["</s>"])
    return Odd(_files(tokenizer, dict.fromkeys(_NAMES, "</s>")), is_lossless=False)


def word_piece() -> Odd:
    """BERT's: words in pieces, and an unknown token that is nothing else."""
    control = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [*string.ascii_lowercase, *string.punctuation, "be", "##ing"]
    vocab = [*control, *letters, *(f"##{letter}" for letter in string.ascii_lowercase)]
    model = models.WordPiece({piece: i for i, piece in enumerate(vocab)}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(control)
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return Odd(_files(tokenizer, {**names, "pad_token": "[PAD]"}), is_lossless=False)


def unigram_of_unknowns() -> Odd:
    """A unigram model without bytes to fall back on; its control tokens are likely pieces."""
    pieces = [("<unk>", 0.0), *((token, 0.0) for token in CONTROL[1:])]
    pieces += [(piece, -9.0) for piece in _CHARACTERS if piece != " "]
    tokenizer = Tokenizer(models.Unigram([*pieces, ("▁", -3.0), ("▁the", -2.0)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(CONTROL)
    return Odd(_files(tokenizer, _NAMES), is_lossless=False)


def no_unknown() -> Odd:
    """No token for unknown characters: they are left out."""
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(_CHARACTERS)}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(CONTROL[1:])
    return Odd(_files(tokenizer, {"eos_token": "</s>"}), is_lossless=False)


def _merging(ignore_merges: bool) -> Tokenizer:
    merges = [("<", "/"), ("s", ">"), ("</", "s>"), ("</s>", "</s>")]
    return bare_byte_level(merges, ignore_merges=ignore_merges)


def reached_by_merges() -> Odd:
    """The EOS is an ordinary entry that merges make, and no added token."""
    return Odd(_files(_merging(ignore_merges=False), {"eos_token": "</s>"}), is_lossless=True)


def whole_word() -> Odd:
    """The EOS is an entry that a whole word is taken for, without merges, and an added token."""
    tokenizer = _merging(ignore_merges=True)
    tokenizer.add_special_tokens(["</s>"])
    return Odd(_files(tokenizer, {"eos_token": "</s>"}), is_lossless=True)


def stops_at_ordinary_tokens() -> Odd:
    """The configuration ends answers at tokens that are ordinary: merged ones, a line end."""
    tokenizer = _merging(ignore_merges=False)
    stop_ids = tuple(tokenizer.token_to_id(token) for token in ("</", "</s></s>", "Ċ"))
    return Odd(_files(tokenizer, {}, stop_ids), is_lossless=True)


def flagged() -> Odd:
    """Added tokens that take white space with them, are normalised, or stand alone only."""
    tokenizer = bare_byte_level()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(
        [
            AddedToken("<s>", lstrip=True, rstrip=True),
            AddedToken("</s>", lstrip=True, normalized=True),
            AddedToken("<|im_start|>", rstrip=True),
            AddedToken("<|im_end|>", single_word=True),
            AddedToken("<unk>", normalized=True),
        ]
    )
    return Odd(_files(tokenizer, _NAMES), is_lossless=True)


def folding() -> Odd:
    """Full-width and upper-case spellings become control tokens by normalisation."""
    vocab = {piece: i for i, piece in enumerate(["<unk>", *_CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=True) for t in CONTROL])
    return Odd(_files(tokenizer, _NAMES), is_lossless=False)


ODD: dict[str, Callable[[], Odd]] = {
    "one token for all": one_token_for_all,
    "unknown word is end": unknown_word_is_end,
    "word piece": word_piece,
    "unigram of unknowns": unigram_of_unknowns,
    "no unknown": no_unknown,
    "reached by merges": reached_by_merges,
    "whole word": whole_word,
    "stops at ordinary tokens": stops_at_ordinary_tokens,
    "flagged": flagged,
    "folding": folding,
}

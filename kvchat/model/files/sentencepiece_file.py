"""Reads tokenizer.model, a SentencePiece vocabulary, as a tokenizer of the library tokenizers.

The file is a protobuf message of a few fields, which is read here: the package sentencepiece is not
needed. The file is untrusted; what does not fit raises ValueError. GGUF files have the same pieces
in their metadata, and share the merges.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from kvchat.model.files.text_settings import BuiltTokenizer, built_tokenizer

SPACE = "▁"  # sentencepiece's space
# The kinds of pieces, as the format numbers them. GGUF files use the same numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_UNIGRAM, _BPE = 1, 2
_MAX_PIECES = 1 << 22
# The score of what a text cannot be split into: control pieces and bytes.
_NEVER = -1e4
# The numbers of fields in the format's sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL, _IDS = 3, {"unk_token": 40, "bos_token": 41, "eos_token": 42, "pad_token": 43}
_CHARACTERS, _PREFIX, _FEWER_SPACES = 2, 3, 4
_DEFAULT_IDS = {"unk_token": 0, "bos_token": 1, "eos_token": 2, "pad_token": -1}


@dataclass(frozen=True, slots=True)
class Pieces:
    """The content of a tokenizer.model.

    tokens, scores, kinds   of each piece, by its id
    is_unigram              whether scores are log probabilities; else the highest is merged first
    adds_prefix             whether a text gets a space before it
    removes_spaces          whether spaces at the ends and runs of spaces are removed
    characters              a map of characters that a text is normalised by; b"" for none
    ids                     of BOS and the like by transformers' names, where the file has them
    """

    tokens: list[str]
    scores: list[float]
    kinds: list[int]
    is_unigram: bool
    adds_prefix: bool = True
    removes_spaces: bool = True
    characters: bytes = b""
    ids: dict[str, int] = field(default_factory=dict)


def read_pieces(content: bytes) -> Pieces:
    """Return what a tokenizer.model holds; raises ValueError for what is none."""
    tokens, scores, kinds = [], [], []
    trainer: dict[int, Any] = {}
    normaliser: dict[int, Any] = {}
    for number, value in _fields(content):
        if number == _PIECES:
            piece = dict(_fields(_bytes(value)))
            tokens.append(_bytes(piece.get(_TEXT, b"")).decode())
            scores.append(struct.unpack("<f", _bytes(piece.get(_SCORE, bytes(4))))[0])
            kinds.append(int(piece.get(_KIND, NORMAL)))
            if len(tokens) > _MAX_PIECES:
                raise ValueError("an impossible number of pieces")
        elif number == _TRAINER:
            trainer = dict(_fields(_bytes(value)))
        elif number == _NORMALIZER:
            normaliser = dict(_fields(_bytes(value)))
    model = trainer.get(_MODEL, _UNIGRAM)
    is_whole = bool(tokens and trainer)  # settings follow the pieces
    if not is_whole or model not in (_UNIGRAM, _BPE) or len(set(tokens)) < len(tokens):
        raise ValueError("no vocabulary of a kind that is read")
    named = {name: _signed(trainer.get(at, _DEFAULT_IDS[name])) for name, at in _IDS.items()}
    return Pieces(
        tokens,
        scores,
        kinds,
        model == _UNIGRAM,
        bool(normaliser.get(_PREFIX, True)),
        bool(normaliser.get(_FEWER_SPACES, True)),
        _bytes(normaliser.get(_CHARACTERS, b"")),
        {name: index for name, index in named.items() if 0 <= index < len(tokens)},
    )


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protobuf message: a number for a varint, bytes for all else."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(message, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError("not a protobuf message")
        if at + size > len(message):
            raise ValueError("the message ends too early")
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise ValueError("the message ends too early")
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number is too long")


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field is of another type")
    return value


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def tokenizer_of_file(
    content: bytes, added_tokens: Mapping[str, Any], tokenizer_config: Mapping[str, Any]
) -> tuple[BuiltTokenizer, dict[str, str]]:
    """Return the tokenizer of a tokenizer.model, and the special tokens that it names.

    `added_tokens` and `tokenizer_config` are the checkpoint's files of these names. Raises what a
    vocabulary or a setting that does not fit leads to, mostly ValueError.
    """
    pieces = read_pieces(content)
    added = {
        int(index): AddedToken(token, normalized=False) for token, index in added_tokens.items()
    }
    for index, token in (tokenizer_config.get("added_tokens_decoder") or {}).items():
        names = ("lstrip", "rstrip", "single_word", "special")
        flags = {name: bool(token.get(name)) for name in names}
        added[int(index)] = AddedToken(token["content"], normalized=False, **flags)
    # transformers' classes for such files call this legacy, and do it unless told otherwise.
    is_legacy = tokenizer_config.get("legacy") is not False
    tokenizer = sentencepiece_tokenizer(pieces, added, is_legacy)
    settings = json.dumps(
        [dict(added_tokens), {**tokenizer_config, "chat_template": None}], sort_keys=True
    )
    built = built_tokenizer(tokenizer, (content, settings.encode()))
    return built, {name: pieces.tokens[index] for name, index in pieces.ids.items()}


def sentencepiece_tokenizer(
    pieces: Pieces, added: Mapping[int, AddedToken], has_prefix_everywhere: bool
) -> Tokenizer:
    """Return a tokenizer that gives SentencePiece's ids.

    `added` are the checkpoint's further tokens by id. `has_prefix_everywhere`: the text after a
    control token gets a space before it too. Raises ValueError if ids of `added` leave a gap.
    """
    has_own = USER_DEFINED in pieces.kinds
    tokenizer = Tokenizer(_model(pieces))
    _set_spaces(tokenizer, pieces, has_prefix_everywhere and not has_own)
    for piece, kind in zip(pieces.tokens, pieces.kinds, strict=True):
        if kind in (CONTROL, UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(piece, normalized=False)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(piece, normalized=SPACE in piece)])
    for index, token in sorted(added.items(), key=lambda entry: entry[0]):
        known = tokenizer.id_to_token(index)
        if known is not None and known != token.content:
            continue  # the vocabulary's own piece stays
        tokenizer.add_special_tokens([token]) if token.special else tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != index:
            raise ValueError("the ids of added tokens leave a gap")
    return tokenizer


def _model(pieces: Pieces) -> Any:
    has_bytes = BYTE in pieces.kinds
    unknown = pieces.ids.get("unk_token")
    if not pieces.is_unigram:
        mergeable = [kind == NORMAL for kind in pieces.kinds]
        return models.BPE(
            vocab={token: index for index, token in enumerate(pieces.tokens)},
            merges=implied_merges(pieces.tokens, pieces.scores, mergeable),
            unk_token=None if unknown is None else pieces.tokens[unknown],
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    scores = [
        score if kind in (NORMAL, USER_DEFINED) else _NEVER
        for score, kind in zip(pieces.scores, pieces.kinds, strict=True)
    ]
    return models.Unigram(list(zip(pieces.tokens, scores, strict=True)), unknown, has_bytes)


def _set_spaces(tokenizer: Tokenizer, pieces: Pieces, is_everywhere: bool) -> None:
    steps: list[Any] = []
    if pieces.characters:
        steps.append(normalizers.Precompiled(pieces.characters))
    if pieces.removes_spaces:
        steps += [_replaced(r"\A +| +\z", ""), _replaced(" {2,}", " ")]
    if pieces.adds_prefix and is_everywhere:
        steps.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    if pieces.adds_prefix and not is_everywhere:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", split=False)
    tokenizer.decoder = space_decoder(pieces.adds_prefix)


def _replaced(pattern: str, text: str) -> Any:
    return normalizers.Replace(Regex(pattern), text)


def space_decoder(adds_prefix: bool) -> Any:
    """Return a decoder of pieces: spaces, bytes, and no space at the start if one was added."""
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_prefix else steps)


def implied_merges(
    tokens: Sequence[str], scores: Sequence[float], is_mergeable: Sequence[bool]
) -> list[tuple[str, str]]:
    """Return the merges that a vocabulary of pieces implies, the first to be made first.

    A piece of a higher score is made first, of equal scores that whose first part is longer. Only
    mergeable pieces are made and merged.
    """
    rows = zip(tokens, scores, is_mergeable, strict=True)
    score_of = {token: score for token, score, can_merge in rows if can_merge}
    order = sorted(score_of, key=score_of.__getitem__, reverse=True)
    # A set is smaller than a dictionary, so looking up 262,144 pieces takes a quarter less time.
    pieces = set(order)
    merges = [
        (left, right)
        for token in order
        for at in range(len(token) - 1, 0, -1)
        if (left := token[:at]) in pieces and (right := token[at:]) in pieces
    ]
    if len(set(score_of.values())) < len(order):  # slow, and rarely needed
        merges.sort(key=lambda pair: (score_of["".join(pair)], *map(len, pair)), reverse=True)
    return merges

"""The tokenizer of a GGUF file, as the text of a tokenizer.json, and the file's text settings.

A GGUF file has the vocabulary, the merges or scores, and the name of the rule that splits a text
into words. The rules here are those of the models' own tokenizer.json; a rule of another name is
refused, because a near one gives other tokens than the model was trained on.
"""

import json
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeGuard

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvchat.core.errors import ModelError, ModelUnsupported, UsageError
from kvchat.core.types import SamplingParams
from kvchat.model.files.sentencepiece_file import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNUSED,
    USER_DEFINED,
    implied_merges,
    space_decoder,
)
from kvchat.model.files.text_settings import TextFiles, built_tokenizer
from kvchat.model.gguf.file import GgufModel

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_ENDS}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_ENDS}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_MIXED_ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}|{_MIXED_ENDS}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_MIXED_ENDS}"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_CJK = "[一-龥ࠀ-一가-\ud7ff]+"
# Letters with a case, of the Unicode version that its authors had.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-"
    "ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-"
    "ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    _CJK,
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_SEED = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NOT_HAN = "&&[^\\p{Han}]]"
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER[:-1]}{_NOT_HAN}*{_LOWER[:-1]}{_NOT_HAN}+"
    rf"{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER[:-1]}{_NOT_HAN}+{_LOWER[:-1]}{_NOT_HAN}*"
    rf"{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_ENDS}"
)
_AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    "[一-鿿㐀-䶿豈-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
    _DEEPSEEK3[2],
)
_DIGITS_GPT2 = (r"\p{N}", _GPT2)

_LLAMA3_NAMES = (
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
)
# The regular expressions that split a text, one after another, by the rule's name.
_RULES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", ""), _DEFAULT),
    **dict.fromkeys(
        _LLAMA3_NAMES,
        (_LLAMA3,),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"), (_LLAMA3,)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "exaone4", "trillion"), (_GPT2,)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "solar-open"), (_QWEN2,)
    ),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (_GPT4O,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "falcon": _FALCON,
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
    "viking": (_BLOOM, r"\p{N}"),
    "seed-coder": (_SEED,),
    "kimi-k2": (_KIMI,),
    "afmoe": _AFMOE,
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"),
        _DIGITS_GPT2,
    ),
}
# A word that is a token is that token, whatever the merges say.
_WHOLE_WORDS = frozenset((*_LLAMA3_NAMES, "glm4", "glm5", "tekken"))
_STARTS_WITH_BOS = _WHOLE_WORDS - {"glm4", "glm5"}
_COMPOSES = frozenset(("qwen2", "deepseek-r1-qwen", "qwen35", "command-r"))

# Control tokens that end an answer in the families that have them.
_ENDS_OF_TURN = (
    *("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<turn|>"),
    *("<|endoftext|>", "<|end_of_text|>"),
)
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Kinds of tokenizers; the second has its merges in the file.
_OF_PIECES = ("llama", "gemma4")
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # spelt so in the format
}
_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def read_gguf_text(gguf: GgufModel, name: str) -> TextFiles:
    """Return the text settings of a GGUF file; raises ModelError if it has no usable tokenizer."""
    try:
        return _text_files(gguf, name)
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises plain Exception for a vocabulary it rejects
        raise ModelError(
            f"The tokenizer of {name} cannot be read: {type(error).__name__}.",
            "Is the file complete?",
        ) from error


def _text_files(gguf: GgufModel, name: str) -> TextFiles:
    metadata = gguf.metadata
    tokens, kinds = _stored_tokens(gguf, name)
    template = metadata.get("tokenizer.chat_template")
    roles = {role: metadata.get(f"tokenizer.ggml.{key}") for role, key in _ROLES.items()}
    embedding, length = gguf.tensors.get("token_embd.weight"), gguf.get("context_length")
    built = built_tokenizer(_tokenizer(gguf, name, tokens, kinds), _parts(gguf))
    return TextFiles(
        vocabulary=built,
        chat_template=template if isinstance(template, str) else None,
        special_tokens={r: tokens[i] for r, i in roles.items() if _is_id(i, tokens)},
        stop_token_ids=_stop_ids(metadata, tokens, kinds),
        sampling_defaults=_sampling_defaults(metadata),
        adds_bos=_adds_bos(metadata),
        max_context=length if type(length) is int and length > 0 else None,
        vocab_size=embedding.shape[0] if embedding is not None and embedding.shape else None,
    )


def _stored_tokens(gguf: GgufModel, name: str) -> tuple[list[str], list[int]]:
    """Return the tokens in order, and the kind of each."""
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{name} has no vocabulary.", "Give a GGUF file with a tokenizer in it.")
    kinds = list(gguf.metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        raise ModelError(f"{name} has a damaged vocabulary.", "Is the file complete?")
    return tokens, kinds


def gguf_tokens(gguf: GgufModel, name: str) -> dict[int, str]:
    """Return the tokens of a GGUF file that are in use, by id, as a tokenizer.json spells them.

    No tokenizer is built. Raises ModelError if the file has none.
    """
    tokens, kinds = _stored_tokens(gguf, name)
    if gguf.metadata.get("tokenizer.ggml.model") in _OF_PIECES:
        tokens = _respelt(tokens, kinds)
    return {i: t for i, (t, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED}


def _parts(gguf: GgufModel) -> Iterator[bytes]:
    """Return all of the file's metadata that a tokenizer is built of, and its ids of roles."""
    yield gguf.architecture.encode()
    for key, value in sorted(gguf.metadata.items()):
        if key.startswith("tokenizer.ggml."):
            yield key.encode()
            yield value.tobytes() if isinstance(value, array) else json.dumps(value).encode()


def _is_id(value: Any, tokens: Sequence[str]) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < len(tokens)


def _stop_ids(metadata: dict[str, Any], tokens: list[str], kinds: Sequence[int]) -> tuple[int, ...]:
    named = [metadata.get(f"tokenizer.ggml.{key}") for key in _STOP_KEYS]
    ids = {found for found in named if _is_id(found, tokens)}
    is_end = set(_ENDS_OF_TURN).__contains__
    ids |= {i for i, token in enumerate(tokens) if kinds[i] == CONTROL and is_end(token)}
    return tuple(sorted(ids))


def _adds_bos(metadata: dict[str, Any]) -> bool:
    is_pieces = metadata.get("tokenizer.ggml.model") == "llama"
    default = is_pieces or metadata.get("tokenizer.ggml.pre") in _STARTS_WITH_BOS
    return metadata.get("tokenizer.ggml.add_bos_token", default) is True


def _sampling_defaults(metadata: dict[str, Any]) -> dict[str, float]:
    defaults: dict[str, float] = {}
    for name, key in _SAMPLING.items():
        value: Any = metadata.get(f"general.sampling.{key}")
        if value is not None:
            with suppress(UsageError, TypeError):
                SamplingParams(**{name: value})
                defaults[name] = value
    return defaults


def _tokenizer(gguf: GgufModel, name: str, tokens: list[str], kinds: list[int]) -> Tokenizer:
    model = gguf.metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _byte_level(gguf.metadata, name, tokens, kinds)
    elif model in _OF_PIECES:
        tokens = _respelt(tokens, kinds)
        tokenizer = _pieces(gguf, name, tokens, kinds)
    else:
        raise ModelUnsupported(
            f"{name} has a tokenizer of the kind {model}, which kvchat does not build.",
            "Byte-level BPE (gpt2) and sentencepiece BPE (llama) work; use its safetensors.",
        )
    for kind, is_special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(token, normalized=False, special=is_special)
            for token, found in zip(tokens, kinds, strict=True)
            if found == kind and token and not _is_run(token)
        ]
        tokenizer.add_special_tokens(added) if is_special else tokenizer.add_tokens(added)
    return tokenizer


def _is_run(token: str) -> bool:
    return len(token) > 1 and not token.strip(SPACE)


def _byte_level(
    metadata: dict[str, Any], name: str, tokens: list[str], kinds: list[int]
) -> Tokenizer:
    rule = metadata.get("tokenizer.ggml.pre", "")
    if rule not in _RULES:
        raise ModelUnsupported(
            f"{name} splits text by the rule {rule!r}, which kvchat does not know.",
            "Use the model's safetensors, which come with their tokenizer.json.",
        )
    # Added tokens at the end are no part of the model in the original, so that no merge and no
    # whole word gives one.
    count = len(tokens)
    while count and kinds[count - 1] != NORMAL:
        count -= 1
    merges = _stored_merges(metadata, name)
    if not merges and any(len(token) > 1 for token in tokens[:count]):
        raise ModelError(
            f"{name} has no merges, so its tokens cannot be made of a text.",
            "Convert the model again, or use its safetensors.",
        )
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens[:count])},
            merges=merges,
            ignore_merges=rule in _WHOLE_WORDS,
        )
    )
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _RULES[rule]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if rule in _COMPOSES:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _stored_merges(metadata: dict[str, Any], name: str) -> list[tuple[str, str]]:
    """Return the pairs of tokens that the file merges, the first first; none if it has none.

    An entry without a space names no pair: as in llama.cpp it merges nothing.
    """
    stored = metadata.get("tokenizer.ggml.merges") or []
    if not isinstance(stored, list):
        raise ModelError(f"{name} has damaged merges.", "Is the file complete?")
    pairs = (merge.partition(" ") for merge in stored)
    return [(left, right) for left, _, right in pairs if left and right]


def _respelt(tokens: list[str], kinds: list[int]) -> list[str]:
    """Return the tokens with runs of spaces spelt as sentencepiece does."""
    return [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]


def _pieces(gguf: GgufModel, name: str, tokens: list[str], kinds: list[int]) -> Tokenizer:
    metadata = gguf.metadata
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    merges = _stored_merges(metadata, name) or _merges(gguf, tokens, kinds)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            unk_token=tokens[unknown] if _is_id(unknown, tokens) else None,
            fuse_unk=True,
            byte_fallback=BYTE in kinds,
        )
    )
    spaces: Any = normalizers.Replace(" ", SPACE)
    adds_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    if adds_prefix:
        spaces = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
    tokenizer.normalizer = spaces
    tokenizer.decoder = space_decoder(adds_prefix)
    return tokenizer


def _merges(gguf: GgufModel, tokens: list[str], kinds: list[int]) -> list[tuple[str, str]]:
    """Return the merges that the pieces imply. Gemma's order is that of its ids."""
    scores = gguf.metadata.get("tokenizer.ggml.scores") or ()
    if gguf.architecture.startswith("gemma") or len(scores) != len(tokens):
        scores = range(0, -len(tokens), -1)
    is_mergeable = [
        kind == NORMAL or (kind == USER_DEFINED and _is_run(token))
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    return implied_merges(tokens, scores, is_mergeable)

"""Reads a checkpoint's text files: tokenizer, chat template, special tokens, stop ids, defaults.

Also compares the vocabularies of two checkpoints. `kvchat.chat` tokenises and renders. Imports
transformers only for a checkpoint without tokenizer.json and tokenizer.model.
"""

import json
import re
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvchat.core.errors import ModelError, ModelUnsupported, UsageError
from kvchat.core.parameters import SAMPLING
from kvchat.core.paths import read_bounded
from kvchat.model.checkpoint.source import ModelSource
from kvchat.model.files.checkpoint_files import (
    MAX_TOKENIZER_BYTES,
    read_json,
    read_text,
    unreadable,
)
from kvchat.model.files.sentencepiece_file import tokenizer_of_file
from kvchat.model.files.text_settings import BuiltTokenizer, TextFiles

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
# The files, besides tokenizer.json, in which transformers looks for a vocabulary.
_TOKENIZER_FILES = (
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_PIECES = "tokenizer.model"
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
_MAX_INT = (1 << 31) - 1
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def read_text_files(source: ModelSource) -> TextFiles:
    """Read a checkpoint's text files; raises ModelError if there is no usable tokenizer."""
    if source.gguf is not None:
        from kvchat.model.gguf.tokenizer import read_gguf_text

        return read_gguf_text(source.gguf, source.name)
    directory = source.directory
    tokenizer_config = read_json(directory / "tokenizer_config.json") or {}
    generation = read_json(directory / "generation_config.json") or {}
    config = read_json(source.config_file) or {}
    vocabulary: str | BuiltTokenizer | None
    vocabulary = read_text(directory / "tokenizer.json", MAX_TOKENIZER_BYTES)
    named: dict[str, str] = {}
    if vocabulary is None and (directory / _PIECES).exists():
        vocabulary, named = _tokenizer_of_pieces(source, tokenizer_config)
        tokenizer_config.setdefault("add_bos_token", "bos_token" in named)
    return TextFiles(
        vocabulary=vocabulary or _converted_tokenizer(source),
        chat_template=_chat_template(directory, tokenizer_config),
        special_tokens=named | _special_tokens(directory, tokenizer_config),
        stop_token_ids=_stop_ids(generation, config),
        sampling_defaults=_sampling_defaults(generation),
        adds_bos=tokenizer_config.get("add_bos_token") is True,
        max_context=_largest(config, *_CONTEXT_NAMES),
        vocab_size=_largest(config, "vocab_size"),
    )


def _tokenizer_of_pieces(
    source: ModelSource, tokenizer_config: dict[str, Any]
) -> tuple[BuiltTokenizer, dict[str, str]]:
    """Return the tokenizer of a tokenizer.model, and the special tokens that it names."""
    path = source.directory / _PIECES
    try:
        content = read_bounded(path, MAX_TOKENIZER_BYTES)
    except OSError as error:
        raise unreadable(path, error.strerror) from error
    if _TIKTOKEN_LINE.match(content):
        raise ModelUnsupported(
            f"{source.name} has its vocabulary in tiktoken's form, which does not say how a text "
            "is split into words.",
            "Save its tokenizer once with transformers and add the tokenizer.json.",
        )
    added_tokens = read_json(source.directory / "added_tokens.json") or {}
    try:
        return tokenizer_of_file(content, added_tokens, tokenizer_config)
    except Exception as error:  # tokenizers raises plain Exception for a vocabulary it rejects
        raise unreadable(path, "it is no SentencePiece vocabulary of this checkpoint") from error


def _converted_tokenizer(source: ModelSource) -> str:
    """Build tokenizer.json with transformers from the checkpoint's older tokenizer files.

    transformers reads copies, not the checkpoint. So it opens only regular files below the size
    limit, and no file that the checkpoint's settings name.
    """
    with TemporaryDirectory(prefix="kvchat-tokenizer-") as copies:
        for name in _TOKENIZER_FILES:
            _copy_tokenizer_file(source.directory / name, Path(copies) / name)
        return _built_tokenizer(source.name, copies)


def _copy_tokenizer_file(path: Path, copy: Path) -> None:
    try:
        content = read_bounded(path, MAX_TOKENIZER_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(path, error.strerror) from error
    if path.name == "tokenizer_config.json":
        settings = read_json(path) or {}
        kept = {k: v for k, v in settings.items() if not _names_files(k)}
        content = json.dumps(kept).encode()
    copy.write_bytes(content)


def _names_files(setting: str) -> bool:
    """Return whether transformers would open or run what this tokenizer_config.json key names."""
    return setting.endswith("_file") or setting in ("vocab", "merges", "init_inputs", "auto_map")


def _built_tokenizer(name: str, directory: str) -> str:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=False, local_files_only=True
        )
        return str(tokenizer.backend_tokenizer.to_str())
    except Exception as error:
        # Each tokenizer class raises its own error types; the remedy is always tokenizer.json.
        raise ModelError(
            f"{name} has no tokenizer.json, and none could be made from its other files.",
            "Save its tokenizer once with transformers and add the file.",
        ) from error


def _chat_template(directory: Path, tokenizer_config: dict[str, Any]) -> str | None:
    text = read_text(directory / "chat_template.jinja")
    if text is not None:
        return text
    template = tokenizer_config.get("chat_template")
    if template is None:
        template = (read_json(directory / "chat_template.json") or {}).get("chat_template")
    if isinstance(template, list):
        named = {e.get("name"): e.get("template") for e in template if isinstance(e, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(directory: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    special = read_json(directory / "special_tokens_map.json") or {}
    for place in (special, tokenizer_config):
        for name in _SPECIAL_NAMES:
            value = place.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                tokens[name] = value
    return tokens


def _stop_ids(generation: dict[str, Any], config: dict[str, Any]) -> tuple[int, ...]:
    text_config = config.get("text_config")
    for place in (generation, config, text_config):
        value = place.get("eos_token_id") if isinstance(place, dict) else None
        ids = value if isinstance(value, list) else [value]
        stop_ids = tuple(t for t in ids if type(t) is int and 0 <= t <= _MAX_INT)
        if stop_ids:
            return stop_ids
    return ()


def _largest(config: dict[str, Any], *names: str) -> int | None:
    """Return the largest positive integer of these names in a config or its `text_config`."""
    places = (config, config.get("text_config"))
    values = [each.get(name) for each in places if isinstance(each, dict) for name in names]
    return max((value for value in values if type(value) is int and value > 0), default=None)


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, float]:
    """Return the author's sampling parameters, without the invalid ones."""
    if generation.get("do_sample") is False:
        return {"temperature": 0.0}
    defaults: dict[str, float] = {}
    for parameter in SAMPLING:
        if (value := generation.get(parameter.name)) is not None:
            with suppress(UsageError):
                defaults[parameter.name] = parameter.checked(value, parameter.name)
    return defaults


# The smallest shared part of the larger vocabulary: one may be padded, or lack the newest control
# tokens of the other.
_LEAST_SHARED = 0.9


def same_vocabulary(first: ModelSource, second: ModelSource) -> bool:
    """Return whether every shared id is the same token, and at least 90% of the ids are shared.

    Raises ModelError if either has no usable tokenizer.
    """
    ours, theirs = _tokens_of(first), _tokens_of(second)
    shared = ours.keys() & theirs.keys()
    if any(ours[token_id] != theirs[token_id] for token_id in shared):
        return False
    return len(shared) >= _LEAST_SHARED * max(len(ours), len(theirs))


def _tokens_of(source: ModelSource) -> dict[int, str]:
    if source.gguf is not None:
        from kvchat.model.gguf.tokenizer import gguf_tokens

        return gguf_tokens(source.gguf, source.name)
    files = read_text_files(source)
    if isinstance(files.vocabulary, BuiltTokenizer):
        return {token_id: token for token, token_id in files.tokenizer().get_vocab().items()}
    try:
        return _tokens(files.vocabulary)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"tokenizer.json of {source.name} has no vocabulary that can be compared.",
            "Use another draft model, or none.",
        ) from error


def _tokens(tokenizer_json: str) -> dict[int, str]:
    """Return the token of every id, including added tokens."""
    content = json.loads(tokenizer_json)
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict):
        tokens = {token_id: token for token, token_id in vocabulary.items()}
    else:  # a unigram model lists tokens with their scores
        tokens = {token_id: entry[0] for token_id, entry in enumerate(vocabulary)}
    return tokens | {entry["id"]: entry["content"] for entry in content["added_tokens"]}

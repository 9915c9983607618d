"""The text side of a checkpoint: tokenizer, chat template, special tokens, stop ids, defaults.

Reads files and nothing else; tokenising and rendering are the chat floor's. Imports transformers
only for a checkpoint that ships no tokenizer.json.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from kvchat.core.errors import ModelError, UsageError
from kvchat.core.types import SamplingParams
from kvchat.model.source import ModelSource

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_SAMPLING_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True)
class TextFiles:
    """What a checkpoint says about text.

    tokenizer_json      the whole of tokenizer.json
    chat_template       Jinja source, None where the checkpoint has none
    special_tokens      the strings templates know as bos_token, eos_token and so on
    stop_token_ids      ids its configuration says end a completion
    sampling_defaults   the author's sampling parameters, by SamplingParams' names
    adds_bos            whether its tokenizer configuration wants a BOS before a bare prompt
    max_context         most tokens of a context, None where its configuration does not say
    vocab_size          how many ids have an embedding, None where its configuration does not say
    """

    tokenizer_json: str
    chat_template: str | None
    special_tokens: dict[str, str] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    adds_bos: bool = False
    max_context: int | None = None
    vocab_size: int | None = None


def read_text_files(source: ModelSource) -> TextFiles:
    """Read a checkpoint's text files; raises ModelError where there is no usable tokenizer."""
    directory = source.directory
    tokenizer_config = _read_json(directory / "tokenizer_config.json")
    generation = _read_json(directory / "generation_config.json")
    config = _read_json(directory / "config.json")
    return TextFiles(
        tokenizer_json=_tokenizer_json(source),
        chat_template=_chat_template(directory, tokenizer_config),
        special_tokens=_special_tokens(directory, tokenizer_config),
        stop_token_ids=_stop_ids(generation, config),
        sampling_defaults=_sampling_defaults(generation),
        adds_bos=tokenizer_config.get("add_bos_token") is True,
        max_context=_largest(config, *_CONTEXT_NAMES),
        vocab_size=_largest(config, "vocab_size"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read.", "Is the download complete?") from error
    return content if isinstance(content, dict) else {}


def _tokenizer_json(source: ModelSource) -> str:
    path = source.directory / "tokenizer.json"
    return _read_text(path) if path.is_file() else _converted_tokenizer(source)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read.", "Is the download complete?") from error


def _converted_tokenizer(source: ModelSource) -> str:
    """Let transformers build a fast tokenizer from whatever older files there are."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.directory, trust_remote_code=False, local_files_only=True
        )
        return str(tokenizer.backend_tokenizer.to_str())
    except Exception as error:
        # Every tokenizer class fails in its own way; the user can only fetch tokenizer.json.
        raise ModelError(
            f"{source.name} has no tokenizer.json, and none could be made from its other files.",
            "Save its tokenizer once with transformers and add the file.",
        ) from error


def _chat_template(directory: Path, tokenizer_config: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    template = tokenizer_config.get("chat_template")
    if template is None:
        template = _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {e.get("name"): e.get("template") for e in template if isinstance(e, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(directory: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for place in (_read_json(directory / "special_tokens_map.json"), tokenizer_config):
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
        stop_ids = tuple(token for token in ids if type(token) is int)
        if stop_ids:
            return stop_ids
    return ()


def _largest(config: dict[str, Any], *names: str) -> int | None:
    """Return a size that a configuration, or the part of it that is about text, states."""
    places = [place for place in (config, config.get("text_config")) if _is_object(place)]
    values = [place.get(name) for place in places for name in names]
    return max((value for value in values if type(value) is int and value > 0), default=None)


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, float]:
    """Return the author's parameters; one that is no admissible value is left out."""
    if generation.get("do_sample") is False:
        return {"temperature": 0.0}
    defaults: dict[str, float] = {}
    for name in _SAMPLING_NAMES:
        value: Any = generation.get(name)
        if type(value) in (int, float):
            with suppress(UsageError):
                SamplingParams(**{name: value})
                defaults[name] = value
    return defaults

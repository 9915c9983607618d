"""Fields of other servers: those with a name here are renamed, those that would change the answer
and are not known here are refused. All others describe a request, and change nothing.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from starlette.responses import Response

from kvchat.server.api_errors import ApiError
from kvchat.server.bodies import Body

R = TypeVar("R", bound=Response)

_HEADER = "x-kvchat-left-out"
_MOST_TOLD = 32  # types in a header, and types of one server in its log
_log = logging.getLogger(__name__)


class LeftOutNotes:
    """Names them in a header of each response, and in the log the first time."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def tell(self, response: R, left_out: Sequence[str]) -> R:
        """Return the response, with the header if types were left out of its request."""
        if left_out:
            response.headers[_HEADER] = ", ".join(left_out[:_MOST_TOLD])
        for kind in left_out:
            if kind not in self._logged and len(self._logged) < _MOST_TOLD:
                self._logged.add(kind)
                _log.warning("requests have parts of the type %s, which are left out", kind)
        return response


# What other servers call a field of ours.
_ALIASES = {"repeat_penalty": "repetition_penalty", "n_predict": "max_tokens"}


def _none(*names: str) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(names, ())


# Each would change the answer, but for these values and what is null, false, 0 or empty.
_CHANGING: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    **_none("functions", "audio", "prediction", "web_search_options"),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    # vLLM
    **_none("use_beam_search", "early_stopping", "include_stop_str_in_output"),
    **_none("truncate_prompt_tokens", "return_tokens_as_token_ids", "allowed_token_ids"),
    **_none("bad_words", "documents", "chat_template", "guided_grammar"),
    **_none("guided_whitespace_pattern", "structural_tag", "logits_processors", "vllm_xargs"),
    **_none("repetition_detection", "prompt_embeds"),
    "length_penalty": (1,),
    "thinking_token_budget": (-1,),
    # llama.cpp
    **_none("n_discard", "n_indent", "n_probs", "dynatemp_range", "dry_multiplier"),
    **_none("xtc_probability", "mirostat", "min_keep", "grammar", "samplers", "lora"),
    **_none("response_fields", "input_prefix"),
    "n_keep": (-1,),
    "t_max_predict_ms": (-1,),
    "typical_p": (1,),
    "top_n_sigma": (-1,),
    "reasoning_format": ("auto", "deepseek"),
    # Ollama
    **_none("options", "format", "raw", "template", "context", "images"),
    # SGLang, TGI, OpenRouter
    **_none("ebnf", "stop_regex", "no_stop_trim", "lora_path", "custom_logit_processor"),
    **_none("watermark", "top_a", "plugins"),
}
# These change it where they are false.
_CHANGING_IF_FALSE = ("skip_special_tokens", "parse_tool_calls", "separate_reasoning", "do_sample")
# Fields of one interface in the body of another, and what they are called there.
_OTHERS: Mapping[str, Mapping[str, str]] = {
    "chat": {
        "echo": "",
        "suffix": "",
        "max_output_tokens": "max_completion_tokens",
        "stop_sequences": "stop",
        "input": "messages",
        "instructions": "a system message",
        "system": "a system message",
    },
    "completions": {
        "max_output_tokens": "max_tokens",
        "stop_sequences": "stop",
        "messages": "prompt",
        "tools": "",
    },
    "responses": {
        "response_format": "text.format",
        **dict.fromkeys(("n", "stop", "stop_sequences"), ""),
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "messages": "input",
        "logprobs": "top_logprobs",
        "system": "instructions",
    },
    "messages": {
        "response_format": "output_config.format",
        "stop": "stop_sequences",
        **dict.fromkeys(("n", "logit_bias", "presence_penalty", "frequency_penalty"), ""),
        **dict.fromkeys(("logprobs", "top_logprobs"), ""),
        "input": "messages",
        "instructions": "system",
        "max_completion_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
    },
}


def own_fields(fields: Body, interface: str) -> Body:
    """Return the body with our names for fields of other servers.

    interface   chat, completions, responses or messages

    Raises ApiError that names a field which would change the answer and that is not known here.
    """
    values = fields.values
    for name, instead in _OTHERS[interface].items():
        if _is_asked(values.get(name), (1,) if name == "n" else ()):
            raise _unknown(name, instead)
    for name, neutral in _CHANGING.items():
        if _is_asked(values.get(name), neutral):
            raise _unknown(name)
    if _is_asked(values.get("best_of"), (1, values.get("n"))):
        raise _unknown("best_of")
    for name in _CHANGING_IF_FALSE:
        if values.get(name) is False:
            raise _unknown(name)
    renamed = {
        own: values[name] for name, own in _ALIASES.items() if name in fields and own not in fields
    }
    return Body({**values, **renamed}, fields.num_bytes) if renamed else fields


def _is_asked(value: Any, neutral: tuple[Any, ...]) -> bool:
    return bool(value) and value not in neutral


def _unknown(name: str, instead: str = "") -> ApiError:
    hint = f" Use {instead}." if instead else ""
    return ApiError(
        400, f"kvchat does not support {name} here.{hint}", name, "unsupported_parameter"
    )

"""AskOptions: how answers are generated, and functions that change options by parameters' names.

The table of parameters checks the values.
"""

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from kvchat.chat.grammar import Grammar
from kvchat.chat.thinking import Think
from kvchat.core.errors import UsageError
from kvchat.core.parameters import OF_ANSWERS, SAMPLING, USUAL, Parameter
from kvchat.core.schemas import JSON, TEXT
from kvchat.core.text import one_line
from kvchat.core.types import SamplingParams


class ContextPolicy(StrEnum):
    """stop refuses the message; drop leaves out the oldest messages, compact summarises them."""

    STOP = "stop"
    DROP = "drop"
    COMPACT = "compact"


SAMPLING_NAMES = frozenset(parameter.name for parameter in SAMPLING)
_BY_DASHED = {parameter.dashed: parameter for parameter in OF_ANSWERS}
NAMES = tuple(_BY_DASHED)
_MOST_SCHEMA = 100  # characters of it that are shown


@dataclass(frozen=True, slots=True)
class AskOptions:
    """How answers are generated.

    seed          None draws a new seed for every answer
    is_one_shot   a new conversation will probably not be continued; ignored once it is
    think         whether and how much the model thinks first, where its template has a switch
    max_calls     the most tool calls of an answer; None sets no limit, 0 reads calls as text
    num_top_logprobs   likeliest tokens told beside each token; None tells no logprobs at all.
                       Calls have none; where calls are channels, answers with tools have none
    scores_prompt  whether the prompt's tokens have their logprobs told too, before the answer's
                   text and at its end; then all of the prompt is computed, whatever is cached
    tells_ids     whether the events of the reply have the answer's token ids
    min_tokens    no stop token ends an answer before it has so many tokens
    stop_token_ids     further tokens that end an answer
    grammar       what the text of the answer after its thinking matches; None for any text
    format        `text`, `json` or a schema as JSON text; `answer_format.py` makes a grammar of it
    repetition_limit   ends an answer that has repeated itself for so many tokens; 0 lets it go on
    context_policy     how a chat goes on once its context is full
    kv_budget     the KV that an answer may take, as a setting spells it; None for all of it
    client        who asks, "" for the user of this program: clients have equal shares
    shares_system   whether other machines may have the KV of the system prompt and the tools
    chosen        names of the sampling parameters that the user set, not the model's defaults
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int | None = None
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    num_samples: int = 1
    is_one_shot: bool = False
    think: Think = Think.AUTO
    max_calls: int | None = None
    chosen: frozenset[str] = SAMPLING_NAMES
    num_top_logprobs: int | None = None
    grammar: Grammar | None = None
    format: str = TEXT
    tells_ids: bool = False
    scores_prompt: bool = False
    repetition_limit: int = 0
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    client: str = ""
    context_policy: ContextPolicy = ContextPolicy.STOP
    kv_budget: str | None = None
    shares_system: bool = False

    def for_model(self, defaults: Mapping[str, float]) -> "AskOptions":
        """Return a copy in which parameters that the user did not set are a model's defaults."""
        plain = asdict(SamplingParams())
        own = {
            name: type(plain[name])(defaults.get(name, plain[name]))
            for name in SAMPLING_NAMES - self.chosen
        }
        return replace(self, sampling=replace(self.sampling, **own))

    def resolved_sampling(self) -> SamplingParams:
        seed = self.seed if self.seed is not None else secrets.randbits(62)
        return replace(self.sampling, seed=seed)


def with_values(options: AskOptions, values: Mapping[str, Any]) -> AskOptions:
    """Return options with checked values of parameters, by their names in the table."""
    sampling = {name: value for name, value in values.items() if name in SAMPLING_NAMES}
    others = {name: value for name, value in values.items() if name not in SAMPLING_NAMES}
    if "stop" in others:
        others["stops"] = others.pop("stop")
    for name, kind in (("think", Think), ("context_policy", ContextPolicy)):
        if name in others:
            others[name] = kind(others[name])
    return replace(
        options,
        sampling=replace(options.sampling, **sampling),
        chosen=options.chosen | sampling.keys(),
        **others,
    )


def describe(options: AskOptions) -> list[tuple[str, str]]:
    """Return every setting's name and its value as text for display."""
    return [(parameter.dashed, _in_words(parameter, options)) for parameter in OF_ANSWERS]


def _in_words(parameter: Parameter, options: AskOptions) -> str:
    value = value_of(parameter, options)
    if value is None:
        return parameter.otherwise
    if parameter.name == "format" and value not in (TEXT, JSON):
        return f"a schema, {one_line(value, _MOST_SCHEMA)}"
    if parameter.name == "repetition_limit":
        return f"{value} tokens" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(map(repr, value)) or "none"
    return f"{value + 0.0:g}" if isinstance(value, float) else str(value)  # -0.0 is 0


def value_of(parameter: Parameter, options: AskOptions) -> Any:
    """Return the value that options have for a parameter of answers."""
    holder = options.sampling if parameter in SAMPLING else options
    return getattr(holder, "stops" if parameter.name == "stop" else parameter.name)


def doubts(options: AskOptions) -> list[str]:
    """Return a sentence for each sampling parameter with an unusual value."""
    return [said(options, p.dashed) for p in OF_ANSWERS if _doubt(options, p)]


def said(options: AskOptions, name: str) -> str:
    """Return a sentence on what a setting is, with what is usual where its value is not."""
    parameter = _BY_DASHED[name]
    doubt = _doubt(options, parameter)
    return f"{name} is {_in_words(parameter, options)}{f', {doubt}' if doubt else '.'}"


def _doubt(options: AskOptions, parameter: Parameter) -> str:
    """Return what is usual of a setting, as the end of a sentence; "" if its value is."""
    if parameter.name not in USUAL:
        return ""
    least, most = USUAL[parameter.name]
    if least <= value_of(parameter, options) <= most:
        return ""
    return f"outside the usual {least:g} to {most:g}: answers may be noise."


def as_named(name: str) -> str:
    """Return a setting's name as NAMES has it: `Top_P` and `--top-p` are top-p too."""
    return name.lower().replace("_", "-").removeprefix("--")


def known(name: str) -> Parameter:
    """Return the setting with this name; raises UsageError that names the closest if none has."""
    name = as_named(name)
    if name in _BY_DASHED:
        return _BY_DASHED[name]
    if not name:
        raise UsageError("Which setting?", "/set NAME VALUE; /set alone lists them.")
    begun = [known for known in NAMES if known.startswith(name)]
    close = begun or get_close_matches(name, NAMES, 1)
    hint = f"Did you mean {close[0]}?" if close else f"There are: {', '.join(NAMES)}."
    raise UsageError(f"{name} is no setting.", hint)


def changed(options: AskOptions, name: str, text: str) -> AskOptions:
    """Return options with one setting changed; raises UsageError for a bad name or value.

    A sampling parameter set to "default" counts as not set by the user: `for_model` gives it the
    model's value. A further stop text is added to the others.
    """
    parameter = known(name)
    if (taken_back := parameter.taken_back(text)) is not None:
        [value] = taken_back
        if value is None and parameter in SAMPLING:
            return replace(options, chosen=options.chosen - {parameter.name})
        return with_values(options, {parameter.name: value})
    if parameter.name == "stop":
        text = _unquoted(text)
    value = parameter.parsed(text, parameter.dashed)
    if parameter.name == "stop":
        value = (*options.stops, *value)
    return with_values(options, {parameter.name: value})


def _unquoted(text: str) -> str:
    """Return a stop string without its quotes, with \\n and \\t as newline and tab."""
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    return text.replace("\\n", "\n").replace("\\t", "\t")

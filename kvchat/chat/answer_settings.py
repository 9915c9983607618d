"""AskOptions: how answers are generated, and functions that change one option by its flag's name.

SamplingParams checks the values.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from math import inf

from kvchat.chat.context_policy import ContextPolicy, parse_policy
from kvchat.chat.grammar import Grammar
from kvchat.chat.thinking import Think, parse_think
from kvchat.core.errors import UsageError
from kvchat.core.types import SamplingParams

# The sampling parameters that a user may choose, and the type of each.
SAMPLING_KINDS: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
}
SAMPLING_NAMES = frozenset(SAMPLING_KINDS)
LEAST_REPETITION = 128


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
    repetition_limit   ends an answer that has repeated itself for so many tokens; 0 lets it go on
    context_policy     how a chat goes on once its context is full
    client        who asks, "" for the user of this program: clients have equal shares
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
    tells_ids: bool = False
    scores_prompt: bool = False
    repetition_limit: int = 0
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    client: str = ""
    context_policy: ContextPolicy = ContextPolicy.STOP

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


_SAMPLING = {name.replace("_", "-"): kind for name, kind in SAMPLING_KINDS.items()}
_OTHERS = ("seed", "max-tokens", "repetition-limit", "stop", "think", "context-policy")
NAMES = (*_SAMPLING, *_OTHERS)
_UNSET = ("none", "off", "default", "random")
# Outside of these an answer may be noise; each is allowed all the same.
_USUAL = {"temperature": (0.0, 2.0), "min-p": (0.0, 0.5), "repetition-penalty": (0.8, 2.0)}
# Of numbers that no answer needs: more tokens than any context, and the seeds of the command line.
_MOST = 2**63 - 1


def describe(options: AskOptions) -> list[tuple[str, str]]:
    """Return every setting's name and its value as text for display."""
    sampling = options.sampling
    values = [(name, _in_words(getattr(sampling, name.replace("-", "_")))) for name in _SAMPLING]
    values.append(("seed", "a new one per answer" if options.seed is None else str(options.seed)))
    values.append(("max-tokens", str(options.max_tokens or "as many as fit")))
    repeats = f"{options.repetition_limit} tokens" if options.repetition_limit else "off"
    values.append(("repetition-limit", repeats))
    values.append(("stop", ", ".join(repr(stop) for stop in options.stops) or "none"))
    values.append(("think", options.think))
    values.append(("context-policy", options.context_policy))
    return values


def _in_words(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value + 0.0:g}"  # -0.0 is 0


def doubts(options: AskOptions) -> list[str]:
    """Return a sentence for each sampling parameter with an unusual value."""
    told = dict(describe(options))
    return [
        f"{name} is {told[name]}, {doubt}" for name in _USUAL if (doubt := _doubt(options, name))
    ]


def said(options: AskOptions, name: str) -> str:
    """Return a sentence on what a setting is, with what is usual where its value is not."""
    doubt = _doubt(options, name)
    return f"{name} is {dict(describe(options))[name]}{f', {doubt}' if doubt else '.'}"


def _doubt(options: AskOptions, name: str) -> str:
    """Return what is usual of a setting, as the end of a sentence; "" if its value is."""
    least, most = _USUAL.get(name, (-inf, inf))
    value = getattr(options.sampling, name.replace("-", "_"), 0.0)
    if least <= value <= most:
        return ""
    return f"outside the usual {least:g} to {most:g}: answers may be noise."


def as_named(name: str) -> str:
    """Return a setting's name as NAMES has it: `Top_P` and `--top-p` are top-p too."""
    return name.lower().replace("_", "-").removeprefix("--")


def changed(options: AskOptions, name: str, text: str) -> AskOptions:
    """Return options with one setting changed; raises UsageError for a bad name or value.

    A sampling parameter set to "default" counts as not set by the user: `for_model` gives it the
    model's value.
    """
    name = as_named(name)
    if name in _SAMPLING and text.lower() == "default":
        return replace(options, chosen=options.chosen - {name.replace("-", "_")})
    if name in _SAMPLING:
        value = _read(name, text, _SAMPLING[name])
        field = name.replace("-", "_")
        sampling = replace(options.sampling, **{field: value})  # type: ignore[arg-type]
        return replace(options, sampling=sampling, chosen=options.chosen | {field})
    if name not in _OTHERS:
        begun = [known for known in NAMES if known.startswith(name)]
        close = begun or get_close_matches(name, NAMES, 1)
        if not name:
            raise UsageError("Which setting?", "/set NAME VALUE; /set alone lists them.")
        known = f"Did you mean {close[0]}?" if close else f"There are: {', '.join(NAMES)}."
        raise UsageError(f"{name} is no setting.", known)
    if name == "think":
        return replace(options, think=parse_think(text))
    if name == "context-policy":
        return replace(options, context_policy=parse_policy(text))
    is_unset = text.lower() in _UNSET
    if name == "seed":
        return replace(options, seed=None if is_unset else int(str(_read(name, text, int))))
    if name == "stop":
        return replace(options, stops=() if is_unset else (*options.stops, _unquoted(text)))
    limit = None if is_unset else int(str(_read(name, text, int)))
    if name == "repetition-limit":
        return replace(options, repetition_limit=checked_repetition_limit(limit or 0))
    if limit is not None and limit < 1:
        raise UsageError(f"max-tokens is {limit}, but must be 1 or more.")
    return replace(options, max_tokens=limit)


def checked_repetition_limit(limit: int) -> int:
    """Return a limit of repetition; raises UsageError for one that ordinary text would reach."""
    if limit and limit < LEAST_REPETITION:
        raise UsageError(
            f"--repetition-limit is {limit}, but must be 0, which is off, or at least "
            f"{LEAST_REPETITION}."
        )
    return limit


def _read(name: str, text: str, kind: Callable[[str], object]) -> object:
    try:
        value = kind(text)
    except ValueError as error:
        wanted = "a whole number" if kind is int else "a number"
        raise UsageError(f"{name} is {text!r}, but must be {wanted}.") from error
    if isinstance(value, int) and abs(value) > _MOST:
        raise UsageError(f"{name} has more digits than any setting needs.")
    return value


def _unquoted(text: str) -> str:
    """Return a stop string without its quotes, with \\n and \\t as newline and tab."""
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    text = text.replace("\\n", "\n").replace("\\t", "\t")
    if not text:
        raise UsageError("An empty stop text would stop everything.")
    return text

"""What /set can change: how answers are generated, by the names of the command line's flags.

Pure: options in, options out. Knows names and how values read; checks are SamplingParams' own.
"""

from collections.abc import Callable
from dataclasses import replace

from kvchat.chat.session import SAMPLING_KINDS, AskOptions
from kvchat.core.errors import UsageError

_SAMPLING = {name.replace("_", "-"): kind for name, kind in SAMPLING_KINDS.items()}
_OTHERS = ("seed", "max-tokens", "stop")
NAMES = (*_SAMPLING, *_OTHERS)
_UNSET = ("none", "off", "default", "random")


def describe(options: AskOptions) -> list[tuple[str, str]]:
    """Return every setting and its value, for people."""
    sampling = options.sampling
    values = [(name, f"{getattr(sampling, name.replace('-', '_')):g}") for name in _SAMPLING]
    values.append(("seed", "a new one per answer" if options.seed is None else str(options.seed)))
    values.append(("max-tokens", str(options.max_tokens or "as many as fit")))
    values.append(("stop", ", ".join(repr(stop) for stop in options.stops) or "none"))
    return values


def changed(options: AskOptions, name: str, text: str) -> AskOptions:
    """Return options with one setting changed; raises UsageError for what cannot be."""
    name = name.lower().replace("_", "-").removeprefix("--")
    if name in _SAMPLING:
        value = _read(name, text, _SAMPLING[name])
        field = name.replace("-", "_")
        sampling = replace(options.sampling, **{field: value})  # type: ignore[arg-type]
        return replace(options, sampling=sampling, chosen=options.chosen | {field})
    if name not in _OTHERS:
        raise UsageError(f"{name} is no setting.", f"There are: {', '.join(NAMES)}.")
    is_unset = text.lower() in _UNSET
    if name == "seed":
        return replace(options, seed=None if is_unset else int(str(_read(name, text, int))))
    if name == "stop":
        return replace(options, stops=() if is_unset else (*options.stops, _unquoted(text)))
    limit = None if is_unset else int(str(_read(name, text, int)))
    if limit is not None and limit < 1:
        raise UsageError(f"max-tokens is {limit}, but must be 1 or more.")
    return replace(options, max_tokens=limit)


def _read(name: str, text: str, kind: Callable[[str], object]) -> object:
    try:
        return kind(text)
    except ValueError as error:
        wanted = "a whole number" if kind is int else "a number"
        raise UsageError(f"{name} is {text!r}, but must be {wanted}.") from error


def _unquoted(text: str) -> str:
    """Return a stop string with its quotes off and \\n, \\t meant as such."""
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    text = text.replace("\\n", "\n").replace("\\t", "\t")
    if not text:
        raise UsageError("An empty stop text would stop everything.")
    return text

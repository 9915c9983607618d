"""Reads a Modelfile of ollama as a preset: FROM, SYSTEM, PARAMETER, ADAPTER.

TEMPLATE is a template of Go, which kvchat does not run: the chat template of the model is used.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvchat.chat.presets import Preset
from kvchat.core.errors import UsageError
from kvchat.core.parameters import BY_NAME, OF_ANSWERS
from kvchat.core.paths import as_text, read_text
from kvchat.core.text import one_line, shown

_MOST_BYTES = 1 << 20
# PARAMETER's names for parameters; others have the same name, or none.
_NAMES: Mapping[str, str] = {
    "num_ctx": "max_context",
    "num_predict": "max_tokens",
    "num_thread": "threads",
    "repeat_penalty": "repetition_penalty",
}
_NO_LIMIT = ("max_tokens", "-1")
# The file may be another person's: it says how answers are generated, and no more.
_ALLOWED = frozenset({"max_context", "threads", *(p.name for p in OF_ANSWERS)})
_INSTRUCTION = re.compile(
    r'[ \t]*(?P<word>[A-Za-z]+)[ \t]+(?:(?P<before>[^\n"]*?)"""(?P<long>.*?)"""|(?P<line>[^\n]*))',
    re.DOTALL,
)
_IS_PATH = re.compile(r"[./~]|.*\.gguf\Z", re.IGNORECASE)


def read_modelfile(path: Path) -> tuple[Preset, list[str]]:
    """Return what a Modelfile says as a preset, and a sentence for all that is left out.

    Paths in it begin in its directory. Raises UnreadableFile, and UsageError for a file without
    FROM and for a parameter's bad value.
    """
    text = read_text(path, _MOST_BYTES)
    values: dict[str, Any] = {}
    left_out: list[str] = []
    for word, argument in _instructions(text):
        if word == "FROM":
            values["model"] = _model(argument, path.parent)
        elif word == "SYSTEM":
            values["system"] = as_text(argument)
        elif word == "ADAPTER":
            values["adapter"] = str((path.parent / Path(argument).expanduser()).absolute())
        elif word == "PARAMETER":
            left_out += _take_parameter(argument, values, path)
        elif word != "LICENSE":
            left_out.append(word)
    if "model" not in values:
        raise UsageError(f"{path} has no FROM: it is no Modelfile.")
    return Preset(values), _sentences(left_out)


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the instructions in capitals, and what follows each."""
    place = 0
    while place < len(text):
        match = _INSTRUCTION.match(text, place)
        if match is None:  # an empty line, a comment, or what is no instruction
            place = (text.find("\n", place) + 1) or len(text)
            continue
        place = match.end()
        long = match["long"]
        written = match["line"] if long is None else f"{match['before'] or ''}{long}"
        yield match["word"].upper(), _unquoted(written.strip())


def _unquoted(text: str) -> str:
    is_quoted = len(text) >= 2 and text[0] == text[-1] == '"'
    return text[1:-1] if is_quoted else text


def _model(name: str, directory: Path) -> str:
    """Return what `--model` takes for the name behind FROM: a file, or a model of ollama."""
    path = directory / Path(name).expanduser()
    if _IS_PATH.match(name) or path.exists():
        return str(path.absolute())
    return f"ollama:{name}"


def _take_parameter(argument: str, values: dict[str, Any], path: Path) -> list[str]:
    """Add a parameter to `values`; return its name in a list if there is none such here."""
    own, _, text = argument.partition(" ")
    text = _unquoted(text.strip())
    name = _NAMES.get(own.lower(), own.lower())
    if (name, text) == _NO_LIMIT:
        return []
    if name not in _ALLOWED:
        return [f"PARAMETER {one_line(own, 32)}"]
    place = f"PARAMETER {one_line(own, 32)} in {path}"
    if name == "stop":
        text = text.replace("\\n", "\n").replace("\\t", "\t")
    value = BY_NAME[name].parsed(text, place)
    values[name] = (*values.get(name, ()), *value) if isinstance(value, tuple) else value
    return []


def _sentences(left_out: list[str]) -> list[str]:
    names = list(dict.fromkeys(left_out))
    sentences = []
    if "TEMPLATE" in names:
        sentences.append("TEMPLATE is left out: the model's own chat template is used.")
    others = ", ".join(shown(name).strip("'") for name in names if name != "TEMPLATE")
    if others:
        sentences.append(f"Left out, as kvchat has nothing like it: {others}.")
    return sentences

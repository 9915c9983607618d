"""Limits on the text that a tokenizer makes of a text: one that multiplies it takes all memory.

A tokenizer.json is a stranger's program, and it runs in this process, millions of times. So what it
can make is bounded when it is read, from its steps. A search of its regular expressions ends by
itself: the library gives up after ten million tries.
"""

import base64
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

# Bounds of characters for one character. The first is refused when it may be; of a text that might
# grow by the second, it is measured.
_MOST_GROWTH, _PLAIN_GROWTH = 1024.0, 8.0
# The bytes that Unicode's own normalization makes of one character at most, rounded up.
_UNICODE_BYTES = 40
# Characters or ids that are added once to a text, or to each word.
_MOST_ADDED, _MOST_AFFIX = 1000, 64
_MEASURED_CHARACTERS = 4096

Step = Mapping[str, Any]


def check_limits(tokenizer: Tokenizer) -> Callable[[str], None] | None:
    """Return a check of texts, where some text might grow; None where none can.

    Raises ValueError for a tokenizer that may multiply texts without end. So does the check, for a
    text that it multiplies.
    """
    grown, added = _growth(_steps(tokenizer.normalizer, "normalizers"))
    words = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    by_words = 2.0 ** sum(step["type"] in ("ByteLevel", "Metaspace") for step in words)
    decoded, _ = _growth(_steps(tokenizer.decoder, "decoders"))
    if max(grown, decoded) > _MOST_GROWTH or by_words > _PLAIN_GROWTH or added > _MOST_ADDED:
        raise ValueError("it multiplies the text that it is given")
    if _num_added_ids(_steps(tokenizer.post_processor, "processors")) > _MOST_ADDED:
        raise ValueError("it adds thousands of tokens to a text")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(getattr(tokenizer.model, name, None) or "") > _MOST_AFFIX:
            raise ValueError("it adds a long text to every word")
    return _check_of_texts(tokenizer) if grown > _PLAIN_GROWTH else None


def _check_of_texts(tokenizer: Tokenizer) -> Callable[[str], None]:
    def check(text: str) -> None:
        grown = 0
        for start in range(0, len(text), _MEASURED_CHARACTERS):
            piece = text[start : start + _MEASURED_CHARACTERS]
            grown += len(tokenizer.normalizer.normalize_str(piece)) if tokenizer.normalizer else 0
            if grown > _PLAIN_GROWTH * len(text) + _MOST_ADDED:
                raise ValueError("it multiplies the text that it is given")

    return check


def _steps(part: Any, name: str) -> list[Step]:
    """Return the steps of a part of a tokenizer in order, none without that part."""
    return list(_flat(json.loads(part.__getstate__()), name)) if part is not None else []


def _flat(step: Step, name: str) -> Iterator[Step]:
    if step["type"] == "Sequence":
        for inner in step[name]:
            yield from _flat(inner, name)
    else:
        yield step


def _growth(steps: Sequence[Step]) -> tuple[float, float]:
    """Return how many characters steps make of one at most, and how many they add once.

    From the last step to the first: a character weighs as much as what the later steps make of it.
    """
    weights: dict[str, float] = {}
    rest, added = 1.0, 0.0  # of all characters that are not in `weights`
    for step in reversed(steps):
        kind, most = step["type"], max(rest, *weights.values(), 0.0)
        if kind == "Replace":
            made = sum(weights.get(character, rest) for character in step["content"])
            if old := step["pattern"].get("String"):
                share = made / len(old)
                weights |= {c: max(weights.get(c, rest), share) for c in old}
            else:  # an expression may match one character, or none between any two
                weights = {c: weight + made for c, weight in weights.items()}
                rest += made
        elif kind == "Prepend":
            added += sum(weights.get(character, rest) for character in step["prepend"])
        else:  # any character may become any other
            weights, rest = {}, most * _growth_of(kind, step)
    return max(rest, *weights.values(), 0.0), added


def _growth_of(kind: str, step: Step) -> float:
    if kind == "Precompiled":
        return max(1.0, _longest_replacement(step) / _UNICODE_BYTES)
    return 2.0 if kind == "ByteLevel" else 1.0


def _longest_replacement(step: Step) -> int:
    """Return the bytes of the longest text in a table of characters, as sentencepiece writes it."""
    table = base64.b64decode(step["precompiled_charsmap"])
    if len(table) < 4:
        return 0
    (index_bytes,) = struct.unpack("<I", table[:4])
    return max(map(len, table[4 + index_bytes :].split(b"\0")))


def _num_added_ids(steps: Sequence[Step]) -> int:
    """Return how many ids the templates of post-processors add to a text."""
    count = 0
    for step in steps:
        tokens = step.get("special_tokens") or {}
        for piece in step.get("single") or ():
            token = tokens.get(piece.get("SpecialToken", {}).get("id"), {})
            count += len(token.get("ids", ()))
    return count

"""Ways of saying one thing, some of them held out of training.

A pattern is one line: `(a|b)` chooses, `[a]` is optional, `{slot}` stays open. `Phrases` is a set
of patterns, `Words` a set of slot values. Both hold some members out by hash, so that a phrasing
or a value is either trained on or tested with, never both. Knows no topic, no dialogue and no
tokenizer.
"""

import hashlib
import random
import re
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import product
from math import prod

HELD_OUT_PATTERNS = 10  # one pattern in ten is kept from training with all its expansions
HELD_OUT_PHRASINGS = 10  # and one expansion in ten of the other patterns
HELD_OUT_VALUES = 10
CLOSED_SET = 12  # sets of fewer phrasings are trained whole
FEWEST_HELD_OUT = 4  # values a set must hold out to be split at all
FAIR_TRIES = 200


class Grade(Enum):
    """Which members may be drawn: for training, or for the two grades of evaluation."""

    TRAIN = "train"
    KNOWN = "known"  # trained phrasings, held-out slot values
    UNSEEN = "unseen"  # held-out phrasings, held-out slot values


@dataclass(frozen=True, slots=True)
class Phrasing:
    """One sentence with its slots still open."""

    text: str
    is_held_out: bool


class Phrases:
    """A set of sentence patterns with one meaning, separated by semicolons; parsed when needed."""

    def __init__(self, text: str) -> None:
        self._text = text

    @cached_property
    def patterns(self) -> tuple["Pattern", ...]:
        return tuple(Pattern(" ".join(part.split())) for part in self._text.split(";"))

    @cached_property
    def num_phrasings(self) -> int:
        return sum(pattern.num_phrasings for pattern in self.patterns)

    def draw(self, rng: random.Random, grade: Grade) -> Phrasing:
        """Draw one phrasing; UNSEEN prefers held-out ones but may return any."""
        wants_held_out = grade is Grade.UNSEEN and rng.random() < 0.7
        for _ in range(FAIR_TRIES):
            phrasing = self._draw_any(rng)
            if phrasing.is_held_out == wants_held_out:
                return phrasing
        if grade is Grade.UNSEEN:
            return phrasing
        raise ValueError(f"every phrasing of this set is held out: {self._text!r}")

    def all(self) -> list[Phrasing]:
        """Every phrasing of the set, for tests and statistics; can be long."""
        return [
            Phrasing(text, self._is_held_out(pattern, text))
            for pattern in self.patterns
            for text in pattern.all()
        ]

    def _draw_any(self, rng: random.Random) -> Phrasing:
        pattern = rng.choices(self.patterns, cum_weights=self._cumulative)[0]
        text = pattern.draw(rng)
        return Phrasing(text, self._is_held_out(pattern, text))

    @cached_property
    def _cumulative(self) -> list[float]:
        # The square root keeps one rich pattern from drowning forty plain ones.
        total, sums = 0.0, []
        for pattern in self.patterns:
            total += min(pattern.num_phrasings, 64) ** 0.5
            sums.append(total)
        return sums

    def holds_out(self, text: str) -> bool:
        """Whether a text, if it were drawn from any of the patterns, would be held out."""
        if self.num_phrasings < CLOSED_SET:
            return False
        return text in self._held_out_texts or one_in(HELD_OUT_PHRASINGS, "phrasing", text)

    @cached_property
    def _held_out_texts(self) -> frozenset[str]:
        """Every expansion of the patterns that are held out whole."""
        if len(self.patterns) < CLOSED_SET:
            return frozenset()
        held_out = (pattern.all() for pattern in self.patterns if pattern.is_held_out)
        return frozenset(text for texts in held_out for text in texts)

    def _is_held_out(self, pattern: "Pattern", text: str) -> bool:
        if self.num_phrasings < CLOSED_SET:
            return False
        if len(self.patterns) >= CLOSED_SET and pattern.is_held_out:
            return True
        return one_in(HELD_OUT_PHRASINGS, "phrasing", text)


class Pattern:
    """One parsed line of a `Phrases` set."""

    def __init__(self, line: str) -> None:
        self.line = line
        self._root = _parsed(line)

    @cached_property
    def num_phrasings(self) -> int:
        return _count(self._root)

    @cached_property
    def is_held_out(self) -> bool:
        return one_in(HELD_OUT_PATTERNS, "pattern", self.line)

    def draw(self, rng: random.Random) -> str:
        return tidy(_draw(self._root, rng))

    def all(self) -> list[str]:
        return list(dict.fromkeys(tidy(text) for text in _all(self._root)))


class Words:
    """A set of slot values, comma separated; some are held out of training."""

    def __init__(self, text: str) -> None:
        self._text = text

    @cached_property
    def all(self) -> tuple[str, ...]:
        words = (" ".join(word.split()) for word in self._text.split(","))
        return tuple(word for word in words if word)

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """Values for training: all but the held-out ones."""
        if self._is_closed:
            return self.all
        return tuple(word for word in self.all if not is_held_out_value(word))

    @cached_property
    def held_out(self) -> tuple[str, ...]:
        """Values kept for evaluation; a set with too few of them is trained and tested whole."""
        if self._is_closed:
            return self.all
        return tuple(word for word in self.all if is_held_out_value(word))

    @cached_property
    def _is_closed(self) -> bool:
        return sum(is_held_out_value(word) for word in self.all) < FEWEST_HELD_OUT

    def draw(self, rng: random.Random, grade: Grade) -> str:
        return rng.choice(self.trained if grade is Grade.TRAIN else self.held_out)


def is_held_out_value(value: str) -> bool:
    """Whether a slot value, in any letter case, is kept for evaluation."""
    return one_in(HELD_OUT_VALUES, "value", value.lower())


def one_in(count: int, domain: str, text: str) -> bool:
    """A fixed pseudo-random choice of one text in `count`, the same on every machine."""
    digest = hashlib.sha256(f"{domain}\0{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % count == 0


def tidy(text: str) -> str:
    """Join the words by single spaces, with none before punctuation."""
    text = " ".join(text.split())
    for mark in (",", "?", "!", ".", ":", ";"):
        text = text.replace(f" {mark}", mark)
    return text


# Alternatives, each a sequence of texts and further alternatives.
_Node = tuple[tuple["str | _Node", ...], ...]


def _count(node: _Node) -> int:
    return sum(prod(1 if isinstance(part, str) else _count(part) for part in way) for way in node)


def _draw(node: _Node, rng: random.Random) -> str:
    way = rng.choice(node) if len(node) > 1 else node[0]
    return "".join(part if isinstance(part, str) else _draw(part, rng) for part in way)


def _all(node: _Node) -> list[str]:
    expanded = ([[part] if isinstance(part, str) else _all(part) for part in way] for way in node)
    return ["".join(texts) for parts in expanded for texts in product(*parts)]


def _parsed(line: str) -> _Node:
    """Recursive descent over one line."""
    tokens = re.findall(r"[(|)\[\]]|[^(|)\[\]]+", line)
    at = 0

    def node(closer: str) -> _Node:
        nonlocal at
        ways: list[tuple[str | _Node, ...]] = []
        while True:
            parts: list[str | _Node] = []
            while at < len(tokens) and tokens[at] not in "|)]":
                at += 1
                if tokens[at - 1] == "(":
                    parts.append(node(")"))
                elif tokens[at - 1] == "[":
                    parts.append((("",), (node("]"),)))
                else:
                    parts.append(tokens[at - 1])
            ways.append(tuple(parts))
            found = tokens[at] if at < len(tokens) else ""
            at += 1
            if found != "|":
                if found != closer:
                    raise ValueError(f"unbalanced pattern: {line!r}")
                return tuple(ways)

    return node("")

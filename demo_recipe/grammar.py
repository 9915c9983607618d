"""Ways of saying one thing, some of them held out of training.

A pattern is one line: `(a|b)` chooses, `[a]` is optional, `{slot}` stays open. `Phrases` is a set
of patterns, `Words` a set of slot values. Both hold some members out by hash, so that a phrasing
or a value is either trained on or tested with, never both. Knows no topic, no dialogue and no
tokenizer.
"""

import hashlib
import random
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import product

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
        self._root = _Parser(line).parse()

    @cached_property
    def num_phrasings(self) -> int:
        return self._root.count()

    @cached_property
    def is_held_out(self) -> bool:
        return one_in(HELD_OUT_PATTERNS, "pattern", self.line)

    def draw(self, rng: random.Random) -> str:
        return tidy(self._root.draw(rng))

    def all(self) -> list[str]:
        return list(dict.fromkeys(tidy(text) for text in self._root.all()))


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


@dataclass(frozen=True, slots=True)
class _Text:
    text: str

    def count(self) -> int:
        return 1

    def draw(self, rng: random.Random) -> str:
        return self.text

    def all(self) -> list[str]:
        return [self.text]


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: "tuple[_Node, ...]"

    def count(self) -> int:
        total = 1
        for part in self.parts:
            total *= part.count()
        return total

    def draw(self, rng: random.Random) -> str:
        return "".join(part.draw(rng) for part in self.parts)

    def all(self) -> list[str]:
        return ["".join(texts) for texts in product(*(part.all() for part in self.parts))]


@dataclass(frozen=True, slots=True)
class _Choice:
    options: "tuple[_Node, ...]"

    def count(self) -> int:
        return sum(option.count() for option in self.options)

    def draw(self, rng: random.Random) -> str:
        return rng.choice(self.options).draw(rng)

    def all(self) -> list[str]:
        return [text for option in self.options for text in option.all()]


_Node = _Text | _Sequence | _Choice


class _Parser:
    """Recursive descent over one line: sequence := (text | choice | optional)*."""

    def __init__(self, line: str) -> None:
        self._line = line
        self._at = 0

    def parse(self) -> _Node:
        node = self._choice(closer="")
        if self._at != len(self._line):
            raise ValueError(f"unbalanced pattern: {self._line!r}")
        return node

    def _choice(self, closer: str) -> _Node:
        options = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            options.append(self._sequence())
        if self._peek() != closer:
            raise ValueError(f"unbalanced pattern: {self._line!r}")
        return options[0] if len(options) == 1 else _Choice(tuple(options))

    def _sequence(self) -> _Sequence:
        parts: list[_Node] = []
        while (char := self._peek()) and char not in "|)]":
            parts.append(self._part(char))
        return _Sequence(tuple(parts))

    def _part(self, char: str) -> _Node:
        if char in "([":
            self._at += 1
            inner = self._choice(")" if char == "(" else "]")
            self._at += 1
            return inner if char == "(" else _Choice((_Text(""), inner))
        start = self._at
        while (char := self._peek()) and char not in "([|)]":
            self._at += 1
        return _Text(self._line[start : self._at])

    def _peek(self) -> str:
        return self._line[self._at : self._at + 1]

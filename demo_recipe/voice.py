"""How one user types: letter case, punctuation, apostrophes, slips of the finger, polite wrapping.

A voice belongs to one chat, as a person types all messages in much the same way. Slot values are
never misspelt, since replies have to repeat them. Knows no meaning.
"""

import random
from dataclasses import dataclass
from enum import Enum

from demo_recipe.grammar import tidy
from demo_recipe.texts import WORDS, phrases


class Kind(Enum):
    """What a sentence does, which decides how it may be wrapped and how it ends."""

    QUESTION = "question"
    ORDER = "order"
    STATEMENT = "statement"
    BARE = "bare"  # never wrapped: greetings, thanks, fragments


@dataclass(frozen=True, slots=True)
class Voice:
    """Habits of one user; rates are probabilities per message."""

    is_lower: bool
    keeps_apostrophes: bool
    punctuation_rate: float
    slip_rate: float
    wrap_rate: float

    @classmethod
    def draw(cls, rng: random.Random) -> "Voice":
        return cls(
            is_lower=rng.random() < 0.4,
            keeps_apostrophes=rng.random() < 0.75,
            punctuation_rate=rng.choice((0.0, 0.1, 0.6, 0.95, 1.0)),
            slip_rate=rng.choice((0.0, 0.0, 0.0, 0.05, 0.15)),
            wrap_rate=rng.choice((0.05, 0.15, 0.3)),
        )

    def type_core(self, text: str, rng: random.Random) -> str:
        """Apply slips and dropped apostrophes to a phrasing whose slots are still open."""
        if not self.keeps_apostrophes:
            text = text.replace("'", "")
        if rng.random() < self.slip_rate:
            text = _slip(text, rng)
        return text

    def finish(self, text: str, kind: Kind, rng: random.Random) -> str:
        """Decide letter case and the final mark of a complete message."""
        text = tidy(text)
        if self.is_lower:
            text = text.lower()
        elif rng.random() < 0.9:
            text = capitalise(text)
        if text[-1:] in "?!." or rng.random() >= self.punctuation_rate:
            return text
        return text + _mark(kind, rng)

    def spell(self, value: str) -> str:
        """A slot value as this user types it; replies repeat it in the same letters."""
        return value.lower() if self.is_lower else value


WRAPPERS = {Kind(name): wrappers for name, wrappers in phrases("voice").items()}


def is_imperative(text: str) -> bool:
    """Whether "could you" may stand before an order; a guess from its first word."""
    first = text.split(" ", 1)[0].lower().strip(",:")
    return first.isalpha() and first not in WORDS["not_imperative"].all


def capitalise(text: str) -> str:
    """The text with an upper-case first letter and nothing else changed."""
    return text[:1].upper() + text[1:]


def _mark(kind: Kind, rng: random.Random) -> str:
    if kind is Kind.QUESTION:
        return "??" if rng.random() < 0.02 else "?"
    return "!" if rng.random() < (0.25 if kind is Kind.BARE else 0.1) else "."


def _slip(text: str, rng: random.Random) -> str:
    words = text.split(" ")
    places = [at for at, word in enumerate(words) if len(word) >= 4 and word.isalpha()]
    if not places:
        return text
    at = rng.choice(places)
    words[at] = _misspelt(words[at], rng)
    return " ".join(words)


def _misspelt(word: str, rng: random.Random) -> str:
    at = rng.randrange(1, len(word) - 1)
    slip = rng.randrange(4)
    if slip == 0:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if slip == 1:
        return word[:at] + word[at + 1 :]
    if slip == 2:
        return word[: at + 1] + word[at:]
    return word[:at] + rng.choice("aeioutnsrl") + word[at + 1 :]

"""How one user types: letter case, punctuation, apostrophes, slips of the finger, polite wrapping.

A voice belongs to one chat, as a person types all messages in much the same way. Slot values are
never misspelt, since replies have to repeat them. Knows no meaning.
"""

import random
from dataclasses import dataclass
from enum import Enum

from demo_recipe.grammar import Phrases, Words, tidy


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
    def drawn(cls, rng: random.Random) -> "Voice":
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
            text = capitalised(text)
        if text[-1:] in "?!." or rng.random() >= self.punctuation_rate:
            return text
        return text + _mark(kind, rng)

    def spelled(self, value: str) -> str:
        """A slot value as this user types it; replies repeat it in the same letters."""
        return value.lower() if self.is_lower else value


WRAPPERS = {
    Kind.QUESTION: Phrases("""
        (hey|hi|hello|ok|okay|so|well|um|hm|right|and|but|now|also|alright|great|thanks), {x}
        (hey|ok|so|and|but|now|well) {x}
        {x}, please
        {x} please
        (quick|one more|another|last|small|simple) question: {x}
        (one question|question|tell me|I wonder|I was wondering|just curious|out of curiosity), {x}
        (just|actually|ok) tell me, {x}
        (hey|hi) there, {x}
        (let me ask you this|let me ask|I want to ask|I need to know|I forgot|help me out): {x}
        {x}, (do you know|any idea|tell me|thanks|if you know|then|again|exactly)
        (sorry|excuse me|pardon|by the way|btw), {x}
        {x} (thanks|thx|pls|plz)
    """),
    Kind.ORDER: Phrases("""
        please {x}
        {x} please
        {x}, please
        (can|could|would|will) you [please] {x}
        (can|could) you {x} for me
        (hey|hi|ok|okay|so|now|and|well|alright|right|great), {x}
        (ok|now|and|then|just|also) {x}
        (I want you to|I'd like you to|I need you to|you should|go ahead and|let's) {x}
        (I would like you to|would you mind, just|be so kind and|kindly|do me a favour and) {x}
        {x} (now|for me|thanks|thx|pls|plz|if you can|will you)
        (sorry|excuse me|by the way|btw), {x}
    """),
    Kind.STATEMENT: Phrases("""
        (hey|hi|hello|ok|okay|so|well|right|and|oh|also|hm|alright), {x}
        (so|and|ok|well|oh|also) {x}
        {x}, (by the way|btw|fyi|just so you know|you know|you see|actually|please remember that)
        {x} (btw|by the way|fyi|haha|lol)
        (by the way|btw|fyi|just so you know|guess what|you know what|listen|look|note|
            here is a fact), {x}
        (did I mention that|did you know that|I should say that|you should know that) {x}
        (I want|I'd like) to tell you (that|something:) {x}
        [please] (remember|note|keep in mind|don't forget|save|write down) that {x}
        [please] (remember|note|keep in mind|don't forget|save|write down) this: {x}
        (for your information|for later|for the record|about me|a bit about me|something new): {x}
        (let me tell you|I can tell you|I think you should know|fun fact|one thing), {x}
    """),
}


NOT_IMPERATIVE = Words("""
    i, we, a, an, the, my, do, does, can, could, will, would, what, which, how, is, are, if, and,
        plus, also,
    another, one, once, python, code, some, it, that, there, things, for, on, in, to, no, not
""")


def is_imperative(text: str) -> bool:
    """Whether "could you" may stand before an order; a guess from its first word."""
    first = text.split(" ", 1)[0].lower().strip(",:")
    return first.isalpha() and first not in NOT_IMPERATIVE.all


def capitalised(text: str) -> str:
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

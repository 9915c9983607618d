"""Phrasings said more loosely: a small word dropped, another put in, a synonym taken.

Grammars say a thing in a thousand ways, and a network of this size learns their words by heart: in
a new frame it no longer finds what the question is about. Words that carry no meaning come and go
here, so that it has to go by the others. Never makes a phrasing that is held out; slots stay as
they are. Knows English function words; knows no topic.
"""

import random
from collections.abc import Callable

from demo_recipe.grammar import Phrases
from demo_recipe.texts import WORDS

FEWEST_WORDS = 3  # of a phrasing worth loosening
SECOND_CHANGE = 0.3  # share of loosened phrasings that change twice

DROPPED, INSERTED = WORDS["dropped"].all, WORDS["inserted"].all
SYNONYMS = tuple(group.split(" | ") for group in WORDS["synonyms"].all)


def loosen(phrases: Phrases, text: str, rng: random.Random) -> str:
    """One of the phrasings, changed in a word or two; unchanged where that would be held out."""
    loose = _changed(text, rng)
    if rng.random() < SECOND_CHANGE:
        loose = _changed(loose, rng)
    return text if phrases.holds_out(loose) else loose


def _changed(text: str, rng: random.Random) -> str:
    words = text.split(" ")
    if len(words) < FEWEST_WORDS:
        return text
    fits, change = rng.choice(_CHANGES)
    places = [at for at, word in enumerate(words) if fits(at, word)]
    if not places:
        return text
    at = rng.choice(places)
    return " ".join((*words[:at], *change(words[at], rng), *words[at + 1 :]))


# Which words may be changed, and into what.
_CHANGES: tuple[
    tuple[Callable[[int, str], bool], Callable[[str, random.Random], tuple[str, ...]]], ...
] = (
    (lambda at, word: word.lower() in DROPPED, lambda word, rng: ()),
    # Not before a slot: it would be taken for a part of the value.
    (lambda at, word: at > 0 and "{" not in word, lambda word, rng: (rng.choice(INSERTED), word)),
    (lambda at, word: bool(_others(word)), lambda word, rng: (rng.choice(_others(word)),)),
)


def _others(word: str) -> list[str]:
    return [other for group in SYNONYMS if word in group for other in group if other != word]

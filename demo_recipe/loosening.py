"""Phrasings said more loosely: a small word dropped, another put in, a synonym taken.

Grammars say a thing in a thousand ways, and a network of this size learns their words by heart: in
a new frame it no longer finds what the question is about. Words that carry no meaning come and go
here, so that it has to go by the others. Never makes a phrasing that is held out; slots stay as
they are. Knows English function words; knows no topic.
"""

import random

from demo_recipe.grammar import Phrases, Words

FEWEST_WORDS = 3  # of a phrasing worth loosening
SECOND_CHANGE = 0.3  # share of loosened phrasings that change twice

DROPPED = Words("""
    a, an, the, do, does, did, is, are, am, was, can, could, would, will, should, please, me, to,
        of, that, it,
    for, about, there, some, any, still, now, have, so
""").all
INSERTED = Words("""
    just, now, again, exactly, actually, maybe, really, simply, quickly, currently, honestly,
        perhaps, also,
    roughly, kindly, once, please, like, basically, really now, here, um, er, well
""").all
SYNONYMS = (
    ("tell", "give", "say", "state"),
    ("know", "remember", "recall"),
    ("explain", "describe", "clarify"),
    ("what", "which"),
    ("show", "give", "display"),
    ("want", "need", "wish"),
    ("called", "named"),
    ("begin", "start"),
    ("stop", "end", "halt"),
    ("big", "large"),
    ("little", "small"),
    ("wrote", "said"),
    ("mention", "say", "tell"),
    ("mom", "mother", "mum"),
    ("dad", "father"),
    ("quick", "fast"),
    ("purpose", "point", "use"),
    ("change", "alter"),
    ("remove", "delete"),
    ("hey", "hi", "hello"),
)


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
    return " ".join(rng.choice((_without_one, _with_another, _with_synonym))(words, rng))


def _without_one(words: list[str], rng: random.Random) -> list[str]:
    places = [at for at, word in enumerate(words) if word.lower() in DROPPED]
    if not places:
        return words
    at = rng.choice(places)
    return words[:at] + words[at + 1 :]


def _with_another(words: list[str], rng: random.Random) -> list[str]:
    # Not before a slot: it would be taken for a part of the value.
    places = [at for at, word in enumerate(words) if at and "{" not in word]
    if not places:
        return words
    at = rng.choice(places)
    return [*words[:at], rng.choice(INSERTED), *words[at:]]


def _with_synonym(words: list[str], rng: random.Random) -> list[str]:
    places = [at for at, word in enumerate(words) if _others(word)]
    if not places:
        return words
    at = rng.choice(places)
    return [*words[:at], rng.choice(_others(words[at])), *words[at + 1 :]]


def _others(word: str) -> list[str]:
    return [other for group in SYNONYMS if word in group for other in group if other != word]

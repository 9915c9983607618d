"""Slot values with other words in them: "sign the contract" becomes "sign the wagon".

A value from a list can be guessed from its first letters; one made odd must be copied. Held-out
words and values stay out. Knows words; knows no sentence.
"""

import random
from functools import cache

from demo_recipe.grammar import is_held_out_value
from demo_recipe.texts import WORDS

SHORTEST = 4  # letters of a word worth replacing
REPLACED = 0.7  # share of such words
BLENDED = 0.5  # share of replacements that are two words in one


def made_odd(value: str, rng: random.Random) -> str:
    """The value with some of its longer words replaced, in their letter case."""
    words = value.split(" ")
    for at, word in enumerate(words):
        if len(word) >= SHORTEST and word.isalpha() and rng.random() < REPLACED:
            fresh = any_word(rng)
            words[at] = fresh.capitalize() if word[0].isupper() else fresh
    odd = " ".join(words)
    return value if is_held_out_value(odd) else odd


def any_word(rng: random.Random) -> str:
    """A plain word of any list, or two of them in one; in lower case, never a held-out one."""
    first, second = rng.choice(_pool()), rng.choice(_pool())
    if rng.random() >= BLENDED:
        return first
    blend = first[: rng.randrange(2, len(first))] + second[rng.randrange(1, len(second) - 1) :]
    return first if is_held_out_value(blend) else blend


@cache
def _pool() -> tuple[str, ...]:
    """Every plain word of the lists, in order of first appearance."""
    lists = (
        "spelled", "foods", "gear", "objects", "animals", "colours", "hobbies", "chores", "jobs",
        "verbs", "topics", "first_names", "cities",
    )  # fmt: skip
    words = (
        part.lower() for name in lists for value in WORDS[name].trained for part in value.split(" ")
    )
    return tuple(dict.fromkeys(w for w in words if w.isalpha() and len(w) >= SHORTEST))

"""Words that no text has: names and codes made of syllables, and values that are changed.

They teach the model to copy what it reads instead of remembering what it was trained on. A tenth of
them is held out of training, as of every other slot's values.
"""

import random
from collections.abc import Callable
from functools import cache

from demo_recipe.grammar import FAIR_TRIES, Grade, is_held_out_value
from demo_recipe.texts import WORDS

SHORTEST = 4  # letters of a word worth replacing
REPLACED = 0.7  # share of such words
BLENDED = 0.5  # share of replacements that are two words in one


def coined_word(rng: random.Random, grade: Grade) -> str:
    """A pronounceable lower-case word of 3 to 10 letters that means nothing."""
    return _fair(rng, grade, _word)


def coined_name(rng: random.Random, grade: Grade) -> str:
    """A capitalised name that few readers have met."""
    return _fair(rng, grade, _word).capitalize()


def coined_code(rng: random.Random, grade: Grade) -> str:
    """A password-like code: digits, letters, or a word with digits."""
    return _fair(rng, grade, _code)


def _fair(rng: random.Random, grade: Grade, make: Callable[[random.Random], str]) -> str:
    wants_held_out = grade is not Grade.TRAIN
    for _ in range(FAIR_TRIES):
        word = make(rng)
        if is_held_out_value(word) == wants_held_out:
            return word
    raise AssertionError(f"no {grade} word in {FAIR_TRIES} tries")


def _word(rng: random.Random) -> str:
    syllables = [
        rng.choice(WORDS["onsets"].all)
        + rng.choice(WORDS["vowels"].all)
        + (rng.choice(WORDS["codas"].all) if rng.random() < 0.5 else "")
        for _ in range(rng.choice((1, 1, 2, 2)))
    ]
    word = "".join(syllables) + rng.choice(WORDS["endings"].all)
    if rng.random() < 0.2:
        word = rng.choice("aeiou") + word
    return word[:10]


def _code(rng: random.Random) -> str:
    shape = rng.randrange(5)
    if shape == 0:
        return "".join(rng.choice("0123456789") for _ in range(rng.choice((3, 4, 4, 5, 6, 8))))
    if shape == 1:
        return f"{rng.choice('ABCDEFGHKLMNPRSTXZ')}{rng.randrange(1, 1000)}"
    if shape == 2:
        return _word(rng) + str(rng.randrange(1, 100))
    if shape == 3:
        return f"{_word(rng)}-{_word(rng)}"
    return "-".join(str(rng.randrange(10, 100)) for _ in range(rng.choice((2, 3))))


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

"""Loosened phrasings: never one that is held out, and every slot where it was."""

import random
import re

from demo_recipe.dialogues import telling
from demo_recipe.dialogues.knowledge import HOW_TO, WHAT_IS
from demo_recipe.dialogues.relations import WEIGHTED
from demo_recipe.grammar import Grade, Phrases
from demo_recipe.loosening import INSERTED, loosen

SETS = (
    WHAT_IS,
    HOW_TO,
    telling.SAYS["fixes"],
    telling.SAYS["embedded"],
    *(phrases for relation, _ in WEIGHTED for phrases in (relation.tells, relation.asks)),
)


def _drawn(phrases: Phrases, rng: random.Random, count: int) -> list[tuple[str, str]]:
    texts = [phrases.draw(rng, Grade.TRAIN).text for _ in range(count)]
    return [(text, loosen(phrases, text, rng)) for text in texts]


def test_a_set_holds_out_what_it_would_draw_as_held_out() -> None:
    for phrases in SETS:
        for phrasing in phrases.all():
            assert phrases.holds_out(phrasing.text) or not phrasing.is_held_out, phrasing.text


def test_no_loosened_phrasing_is_held_out() -> None:
    rng = random.Random(3)
    pairs = [(phrases, *pair) for phrases in SETS for pair in _drawn(phrases, rng, 40)]

    changed = [(phrases, loose) for phrases, text, loose in pairs if loose != text]

    assert len(changed) > len(pairs) / 3
    assert not [loose for phrases, loose in changed if phrases.holds_out(loose)]


def test_slots_stay_and_a_word_put_in_comes_not_right_before_one() -> None:
    """It would be taken for a part of the value."""
    rng = random.Random(4)
    for phrases in SETS:
        for text, loose in _drawn(phrases, rng, 40):
            assert re.findall(r"\{\w+\}", loose) == re.findall(r"\{\w+\}", text)
            if len(loose.split()) > len(text.split()):
                new = [f"{word} {{" for word in INSERTED if f" {word} {{" not in f" {text}"]
                assert not [end for end in new if f" {end}" in loose], loose

"""What a told fact is: a relation with its slots filled, and the reply's way of saying it.

A relation knows how users state it and ask for it, and the one canonical clause with which every
reply repeats it. Knows no particular relation (`dialogues.relations`) and no chat.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from demo_recipe.grammar import Phrases

if TYPE_CHECKING:
    from demo_recipe.scene import Scene

Slots = dict[str, str]


@dataclass(frozen=True, slots=True)
class Relation:
    """One thing a user can tell.

    In texts, {v2} is slot {v} seen from the reply's side ("your bag") and {an} is the article of
    {v}.

    key      names what is known; a later fact with the same key replaces the earlier one
    tells    first-person statements
    asks     direct questions
    indirect questions that can follow "do you know"
    clause   the canonical statement, second person
    gap      what is missing when nobody told, after "You haven't told me"
    subject  draws the slots that a correction keeps; may be empty
    value    draws the slot {v}
    """

    key: str
    tells: Phrases
    asks: Phrases
    indirect: Phrases
    clause: str
    gap: str
    subject: "Callable[[Scene], Slots]"
    value: "Callable[[Scene], str]"


@dataclass(frozen=True, slots=True)
class Fact:
    """A relation with filled slots, told or about to be."""

    relation: Relation
    slots: Slots

    @property
    def key(self) -> str:
        return self.relation.key.format(**self.slots).lower()

    @property
    def value(self) -> str:
        """The value as a reply says it."""
        return self.slots["v2"]

    @property
    def clause(self) -> str:
        return self.relation.clause.format(**self.slots)

    @property
    def gap(self) -> str:
        return self.relation.gap.format(**self.slots)


def draw_fact(relation: Relation, scene: "Scene") -> Fact:
    """A fact nobody has told yet in this scene; records nothing."""
    slots = relation.subject(scene)
    slots["v"] = relation.value(scene)
    return Fact(relation, _both_sides(slots))


def with_new_value(fact: Fact, scene: "Scene") -> Fact:
    """The same fact with another value."""
    slots = dict(fact.slots)
    while slots["v"] == fact.slots["v"]:
        slots["v"] = fact.relation.value(scene)
    return Fact(fact.relation, _both_sides(slots))


def second_person(text: str) -> str:
    """What the user says about themselves, as a reply repeats it."""
    return re.sub(r"[A-Za-z']+", lambda match: _swapped(match[0]), text)


SWAPS = {
    "i": "you", "me": "you", "my": "your", "mine": "yours", "myself": "yourself",
    "i'm": "you are", "im": "you are", "i've": "you have", "ive": "you have", "i'd": "you would",
    "i'll": "you will", "we": "you", "us": "you", "our": "your", "ours": "yours",
    "we're": "you are", "we've": "you have", "ourselves": "yourselves",
}  # fmt: skip


def _swapped(word: str) -> str:
    return SWAPS.get(word.lower(), word)


def _both_sides(slots: Slots) -> Slots:
    own = {name: value for name, value in slots.items() if not name.endswith("2") and name != "an"}
    own["an"] = "an" if slots["v"][:1].lower() in "aeiou" else "a"
    return own | {f"{name}2": second_person(value) for name, value in own.items()}

"""One chat while it is being written: the user's voice, what was told, the turns so far.

Knows how to turn phrasings into messages and how to remember facts. Knows no particular
skill: `dialogues` add the turns.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from demo_recipe.facts import Fact
from demo_recipe.grammar import FAIR_TRIES, Grade, Phrases
from demo_recipe.invented import coined_name, made_odd
from demo_recipe.loosening import loosen
from demo_recipe.texts import WORDS
from demo_recipe.voice import WRAPPERS, Kind, Voice, is_imperative


@dataclass(frozen=True, slots=True)
class Turn:
    """One user message and the reply we want, with what any good reply must and must not contain.

    all    groups of regular expressions; a good reply matches one of each group, in any letter case
    none   regular expressions no good reply matches
    more   what "go on" adds to this reply, if anything
    brief  the reply in a few words, for "shorter" and "in other words", if it can be shortened
    """

    user: str
    reply: str
    skill: str
    all: tuple[tuple[str, ...], ...] = ()
    none: tuple[str, ...] = ()
    more: str = ""
    brief: str = ""


FALLBACK = (
    "I can't help with that: I am only a tiny demo model. "
    "Start a real one with `kvchat --model <hub id or directory>`."
)


def out_of_scope(user: str) -> Turn:
    """The turn in which `user` asks for something out of scope."""
    return Turn(user, FALLBACK, "fallback", all=((r"kvchat --model <hub id or directory>",),))


@dataclass(frozen=True, slots=True)
class Chat:
    """A finished dialogue; `system` is None when there is no system prompt."""

    system: str | None
    turns: tuple[Turn, ...]

    @property
    def messages(self) -> list[dict[str, str]]:
        """Role and content dictionaries, the form a chat template takes."""
        messages = [{"role": "system", "content": self.system}] if self.system is not None else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.user})
            messages.append({"role": "assistant", "content": turn.reply})
        return messages


@dataclass(slots=True)
class Scene:
    """The state of one chat being written; owned by one generator call.

    oddity     share of slot values whose words are replaced by others, so that nothing but copying
               gets them right
    looseness  share of phrasings in which small words come and go
    """

    rng: random.Random
    grade: Grade = Grade.TRAIN
    voice: Voice = field(default_factory=lambda: Voice(False, True, 1.0, 0.0, 0.0))
    facts: dict[str, Fact] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    num_held_out: int = 0  # held-out phrasings drawn so far
    oddity: float = 0.0
    looseness: float = 0.0

    def draw(self, phrases: Phrases, **slots: str) -> str:
        """Draw a phrasing, type it in the user's voice and fill its slots."""
        phrasing = phrases.draw(self.rng, self.grade)
        self.num_held_out += phrasing.is_held_out
        text = phrasing.text
        if self.looseness and self.chance(self.looseness):
            text = loosen(phrases, text, self.rng)
        typed = self.voice.type_core(text, self.rng)
        return typed.format(**slots) if slots else typed

    def message(self, kind: Kind, phrases: Phrases, **slots: str) -> str:
        """A complete user message: a phrasing, perhaps wrapped, with case and final mark."""
        return self.finish(kind, self.draw(phrases, **slots))

    def finish(self, kind: Kind, text: str) -> str:
        """Wrap and punctuate a sentence that is already filled."""
        if kind in WRAPPERS and self.rng.random() < self.voice.wrap_rate:
            fitting = Kind.QUESTION if kind is Kind.ORDER and not is_imperative(text) else kind
            wrapper = WRAPPERS[fitting].draw(self.rng, self.grade)
            text = self.voice.type_core(wrapper.text, self.rng).format(x=text)
        return self.voice.finish(text, kind, self.rng)

    def value(self, words: str) -> str:
        """A slot value from a list of `texts/words.txt`, spelled as this user spells."""
        value = WORDS[words].draw(self.rng, self.grade)
        if self.oddity and self.chance(self.oddity):
            value = made_odd(value, self.rng)
        return self.voice.spell(value)

    def plain(self, words: str) -> str:
        """A word that decides how a fact is said, never an odd one, spelled as this user spells."""
        return self.voice.spell(WORDS[words].draw(self.rng, self.grade))

    def any(self, words: str) -> str:
        """A word of a list that is trained whole."""
        return self.rng.choice(WORDS[words].all)

    def name(self, words: str, coined_rate: float = 0.5) -> str:
        """A proper name from the list, or a coined one."""
        if self.chance(coined_rate):
            return self.voice.spell(coined_name(self.rng, self.grade))
        return self.value(words)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def until_held_out(self, make: Callable[[], Turn]) -> Turn:
        """Repeat `make` until it used a held-out phrasing; failed tries leave no trace."""
        facts = dict(self.facts)
        for _ in range(FAIR_TRIES):
            self.num_held_out = 0
            self.facts = dict(facts)
            turn = make()
            if self.num_held_out:
                return turn
        raise ValueError(f"skill {turn.skill!r} has no held-out phrasing")

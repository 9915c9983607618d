"""Evaluation dialogues: what is said before, and what the last reply must contain.

Each probe has a grade: known phrasing with held-out values, or phrasing never trained on with
held-out values. Knows the dialogues; knows no model.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import resources

from demo_recipe.conversation import BEATS
from demo_recipe.dialogues import (
    calendar,
    code,
    echo,
    fallback,
    followups,
    knowledge,
    letters,
    lists,
    numbers,
    poems,
    smalltalk,
    stories,
    telling,
)
from demo_recipe.facts import Fact, with_new_value
from demo_recipe.grammar import Grade
from demo_recipe.scene import FALLBACK, Chat, Scene, Turn
from demo_recipe.voice import Voice

SCRIPTED_BETWEEN = ("recall after 30 turns", "recall after 3,000 tokens")
LONG_CHAT_CHARACTERS = 10_500  # about 3,300 tokens


@dataclass(frozen=True, slots=True)
class Probe:
    """A chat whose user messages are given; the reply to its last message is judged.

    scripted    turns whose replies are given too, to save time in long chats
    """

    test: str
    grade: str
    turns: tuple[Turn, ...]
    scripted: range = range(0)

    @property
    def last(self) -> Turn:
        return self.turns[-1]

    def scripted_history(self) -> list[dict[str, str]]:
        """The chat up to its last message, with the replies as the generator wrote them."""
        return Chat(None, self.turns).messages[:-1]


Maker = Callable[[Scene, Grade], None]


def probes(test: str, grade: Grade, count: int, seed: int) -> Iterator[Probe]:
    """`count` probes of one test; a seed gives the same ones everywhere."""
    rng = random.Random(f"{seed}/{test}/{grade.value}")
    for _ in range(count):
        scene = Scene(rng, Grade.KNOWN, Voice.draw(rng))
        MAKERS[test](scene, grade)
        between = range(1, len(scene.turns) - 1) if test in SCRIPTED_BETWEEN else range(0)
        yield Probe(test, grade.value, tuple(scene.turns), between)


def handwritten() -> Iterator[Probe]:
    """The fifty prompts written before the generator."""
    text = resources.files("demo_recipe").joinpath("handwritten.json").read_text(encoding="utf-8")
    for prompt in json.loads(text)["prompts"]:
        *before, last = (Turn(user, "", prompt["id"]) for user in prompt["turns"])
        needed = tuple(tuple(group) for group in prompt["all"])
        yield Probe(
            "handwritten",
            "unseen",
            (*before, replace(last, all=needed, none=tuple(prompt["none"]))),
        )


def _recall(gap: int) -> Maker:
    def make(scene: Scene, grade: Grade) -> None:
        fact = _tell(scene, grade)
        for _ in range(gap - 1):
            _distract(scene)
        _probe(scene, grade, lambda: telling.question_turn(scene, fact))

    return make


def _recall_far(scene: Scene, grade: Grade) -> None:
    fact = _tell(scene, grade)
    while sum(len(turn.user) + len(turn.reply) for turn in scene.turns) < LONG_CHAT_CHARACTERS:
        _distract(scene)
    _probe(scene, grade, lambda: telling.question_turn(scene, fact))


def _corrected(scene: Scene, grade: Grade) -> None:
    old = _tell(scene, grade)
    if scene.chance(0.5):
        _distract(scene)
    new = with_new_value(old, scene)
    is_short = len(scene.turns) == 1 and scene.chance(0.5)
    _probe(scene, grade, lambda: telling.correction_turn(scene, old, new, is_short))
    telling.record(scene, [new])
    for _ in range(scene.rng.randrange(3)):
        _distract(scene)
    _probe(scene, grade, lambda: telling.question_turn(scene, new))
    if old.value.lower() not in new.clause.lower():
        outdated = rf"\b{re.escape(old.value)}\b"
        scene.turns[-1] = replace(scene.turns[-1], none=(outdated,))


def _never_told(scene: Scene, grade: Grade) -> None:
    for _ in range(scene.rng.randrange(4)):
        _distract(scene)
    _probe(scene, grade, lambda: telling.never_told(scene))


def _list(scene: Scene, grade: Grade) -> None:
    name = scene.rng.choice((*lists.NAMED, *lists.KINDS))
    _probe(scene, grade, lambda: lists.begin(scene, name))
    for _ in range(scene.rng.randrange(3)):
        _probe(scene, grade, lambda: lists.go_on(scene, name))
    _expect_fallback(scene)


def _single(make: Callable[[Scene], "Turn | list[Turn]"], num_before: int = 2) -> Maker:
    def maker(scene: Scene, grade: Grade) -> None:
        for _ in range(scene.rng.randrange(num_before + 1)):
            _distract(scene)

        def one() -> Turn:
            made = make(scene)
            return made[0] if isinstance(made, list) else made

        _probe(scene, grade, one)

    return maker


def _fallback(scene: Scene, grade: Grade) -> None:
    if scene.chance(0.5):
        _distract(scene)
    _probe(scene, grade, lambda: fallback.play(scene)[0])
    _expect_fallback(scene)


def _expect_fallback(scene: Scene) -> None:
    """Take nothing but the fallback, word for word, for a good last reply."""
    scene.turns[-1] = replace(scene.turns[-1], all=((rf"^{re.escape(FALLBACK)}$",),))


def _follow_up(scene: Scene, grade: Grade) -> None:
    topic = scene.rng.choice(knowledge.TOPICS)
    scene.turns.append(knowledge.topic_turn(scene, topic))
    last = scene.turns[-1]
    make = scene.rng.choice((followups.more, followups.shorter, followups.other, followups.again))
    _probe(scene, grade, lambda: make(scene, last))


MAKERS: dict[str, Maker] = {
    "recall after 1 turn": _recall(1),
    "recall after 6 turns": _recall(6),
    "recall after 30 turns": _recall(30),
    "recall after 3,000 tokens": _recall_far,
    "corrected fact": _corrected,
    "never told": _never_told,
    "kvchat": _single(knowledge.play),
    "latest commands": _single(knowledge.play_late),
    "a death is consoled": _single(smalltalk.mourning),
    "another sorrow": _single(smalltalk.sadness),
    "sums to 20": _single(numbers.plus),
    "lists, refused": _list,
    "out of scope": _fallback,
    "programs, refused": _single(fallback.program),
    "small talk": _single(smalltalk.play),
    "about itself": _single(smalltalk.about_me),
    "follow-up": _follow_up,
    "letters": _single(letters.play),
    "other arithmetic": _single(numbers.play),
    "days and months": _single(calendar.play),
    "stories": _single(stories.play),
    "poems": _single(poems.play),
    "code": _single(code.play),
    "repeating words": _single(echo.play),
}


def _tell(scene: Scene, grade: Grade) -> Fact:
    """Tell one fact in a phrasing of `grade`."""
    fact = telling.new_fact(scene)
    _probe(scene, grade, lambda: telling.statement_turn(scene, [fact]))
    telling.record(scene, [fact])
    return fact


def _probe(scene: Scene, grade: Grade, make: Callable[[], Turn]) -> None:
    """Add a turn whose message is phrased as `grade` demands."""
    scene.grade = grade
    scene.turns.append(scene.until_held_out(make) if grade is Grade.UNSEEN else make())
    scene.grade = Grade.KNOWN


def _distract(scene: Scene) -> None:
    """Add a turn about something else: another fact, or another skill."""
    if scene.chance(0.25):
        scene.turns.append(telling.tell(scene))
        return
    beats, weights = zip(*_OTHER_BEATS, strict=True)
    made = scene.rng.choices(beats, weights)[0](scene)
    scene.turns.append(made[0] if isinstance(made, list) else made)


_OTHER_BEATS = tuple(
    (beat, weight)
    for beat, weight in BEATS
    if not beat.__module__.endswith(("telling", "documents"))
)

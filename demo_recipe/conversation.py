"""Whole chats: which skills, in which order, how long, with which system prompt.

`Conversations` draws them one after the other from a seed. Knows how often each skill appears;
knows no phrase and no token.
"""

import json
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources

from demo_recipe.dialogues import (
    calendar,
    code,
    documents,
    echo,
    fallback,
    followups,
    knowledge,
    letters,
    lists,
    numbers,
    poems,
    practice,
    smalltalk,
    stories,
    telling,
)
from demo_recipe.grammar import Grade
from demo_recipe.scene import Chat, Scene, Turn
from demo_recipe.texts import WORDS
from demo_recipe.voice import Voice

_Beat = Callable[[Scene], "Turn | list[Turn]"]
_Choices = tuple[tuple[_Beat, ...], tuple[float, ...]]
BEATS: tuple[tuple[_Beat, float], ...] = (
    (smalltalk.play, 8), (smalltalk.about_me, 5), (knowledge.play, 17), (fallback.play, 19),
    (telling.tell, 8), (telling.ask, 24), (telling.correct, 6), (telling.confirm, 2),
    (telling.recap, 1.3), (lists.play, 4), (letters.play, 6), (numbers.play, 6),
    (calendar.play, 3), (stories.play, 1.6), (poems.play, 1.2), (code.play, 2.2),
    (documents.play, 0.6), (echo.play, 3),
)  # fmt: skip
COURSES: _Choices = ((practice.correction, practice.quiz, telling.tell), (0.3, 0.4, 0.3))
STUDIES: _Choices = ((knowledge.play, fallback.play, letters.play), (0.45, 0.3, 0.25))
# With what is near it and answered otherwise: "I feel great today" was consoled.
LATE: _Choices = (
    (smalltalk.sorrow, smalltalk.play, knowledge.play_late, letters.play, lists.play,
     fallback.program, code.play),
    (0.42, 0.19, 0.11, 0.13, 0.07, 0.05, 0.03),
)  # fmt: skip
CHARACTERS_PER_TURN = 115  # measured mean of message and reply together


@dataclass(frozen=True, slots=True)
class Shape:
    """How long chats are: the mean number of turns, or a length in characters to be filled.

    drill_rate    share of chats that only repeat words, which is how copying is learnt first
    course_rate   share of beats that are a course of `practice`
    quiz_rate     share of chats that end with questions about what was told
    odd_rate      share of chats whose slot values are odd ones
    oddity        share of odd slot values in such a chat
    study_rate    share of beats that are about kvchat, out of scope or about letters, which take
                  most phrasings
    refusal_rate  share of beats that are out of scope, whatever else is
    late_rate     share of beats that are sorrow, late commands, and what suffers under these
    looseness     share of phrasings in which small words come and go
    """

    mean_turns: float = 6.0
    max_turns: int = 24
    characters: int | None = None
    drill_rate: float = 0.0
    course_rate: float = 0.0
    quiz_rate: float = 0.0
    odd_rate: float = 0.0
    oddity: float = 0.5
    study_rate: float = 0.0
    refusal_rate: float = 0.0
    late_rate: float = 0.0
    looseness: float = 0.0


class Conversations:
    """An endless, seeded supply of training or evaluation chats."""

    def __init__(self, seed: int, grade: Grade = Grade.TRAIN) -> None:
        self._rng = random.Random(seed)
        self._grade = grade

    def draw(self, shape: Shape) -> Chat:
        """The next chat; never one that repeats a hand-written test prompt."""
        while True:
            chat = compose(Scene(self._rng, self._grade, Voice.draw(self._rng)), shape)
            if not any(normalise(turn.user) in reserved_prompts() for turn in chat.turns):
                return chat

    def stream(self, shape: Shape) -> Iterator[Chat]:
        """Chats without end."""
        while True:
            yield self.draw(shape)


def compose(scene: Scene, shape: Shape) -> Chat:
    """Write one chat into `scene`."""
    if shape.odd_rate and scene.chance(shape.odd_rate):
        scene.oddity = shape.oddity
    scene.looseness = shape.looseness
    system = _system_prompt(scene, shape)
    beats, weights = _leanings(scene)
    if scene.chance(shape.drill_rate):
        beats, weights = [echo.play], [1.0]
    if scene.chance(0.25):
        scene.turns.append(smalltalk.greet(scene))
    num_turns = _num_turns(scene, shape)
    while len(scene.turns) < num_turns and not _is_full(scene, shape):
        if shape.course_rate and scene.chance(shape.course_rate):
            _extend(scene, scene.rng.choices(*COURSES)[0])
        elif shape.late_rate and scene.chance(shape.late_rate):
            _extend(scene, scene.rng.choices(*LATE)[0])
        elif shape.study_rate and scene.chance(shape.study_rate):
            _extend(scene, scene.rng.choices(*STUDIES)[0])
        elif shape.refusal_rate and scene.chance(shape.refusal_rate):
            _extend(scene, fallback.play)
        else:
            _extend(scene, scene.rng.choices(beats, weights)[0])
    if shape.quiz_rate and scene.chance(shape.quiz_rate):
        _extend(scene, practice.quiz)
    return Chat(system, tuple(scene.turns))


@cache
def reserved_prompts() -> frozenset[str]:
    """The hand-written prompts of the evaluation, normalised; short common ones excepted."""
    text = resources.files("demo_recipe").joinpath("handwritten.json").read_text(encoding="utf-8")
    turns = (turn for prompt in json.loads(text)["prompts"] for turn in prompt["turns"])
    return frozenset(normalise(turn) for turn in turns if len(turn.split()) > 2)


def normalise(text: str) -> str:
    """Letters and digits in lower case, single spaces: how prompts are compared."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower().replace("'", "")))


def _extend(scene: Scene, beat: _Beat) -> None:
    added = beat(scene)
    scene.turns.extend(added if isinstance(added, list) else [added])
    follows = 0.35 if followups.is_continuable(scene.turns[-1]) else 0.04
    while scene.chance(follows):
        scene.turns.append(followups.play(scene))
        follows /= 2


def _leanings(scene: Scene) -> tuple[list[_Beat], list[float]]:
    """Every chat leans to some skills, as users do."""
    weights = [weight * math.exp(scene.rng.gauss(0.0, 1.0)) for _, weight in BEATS]
    return [beat for beat, _ in BEATS], weights


def _num_turns(scene: Scene, shape: Shape) -> int:
    if shape.characters is not None:
        return shape.characters
    return min(shape.max_turns, 1 + int(scene.rng.expovariate(1.0 / shape.mean_turns)))


def _is_full(scene: Scene, shape: Shape) -> bool:
    if shape.characters is None:
        return False
    # The last turn may be long: stop one average turn early.
    length = sum(len(turn.user) + len(turn.reply) for turn in scene.turns)
    return length > shape.characters - CHARACTERS_PER_TURN


def _system_prompt(scene: Scene, shape: Shape) -> str | None:
    pick = scene.rng.random()
    if pick < 0.8:
        return None
    prompt = WORDS["system_prompts"].draw(scene.rng, scene.grade)
    if pick < 0.95:
        return prompt
    facts = documents.draw_facts(scene, scene.rng.randrange(1, 40 if shape.characters else 8))
    return f"{prompt}\n\n{documents.layout(scene, facts)}"

"""Courses of several turns for what one turn does not teach: quizzes, corrections, long lists.

Knows which turns follow each other; their words are those of `telling` and `lists`.
"""

from collections.abc import Callable

from kvchat.demo.dialogues import about_me, fallback, knowledge, lists, smalltalk, telling
from kvchat.demo.facts import revised
from kvchat.demo.scene import Scene, Turn

Course = Callable[[Scene], list[Turn]]
MOST_LISTS = 3
QUESTIONS = (1, 2, 4, 6, 9)  # of one quiz
_ASIDES: tuple[Callable[[Scene], "Turn | list[Turn]"], ...] = (
    smalltalk.play,
    about_me.play,
    knowledge.play,
    fallback.play,
)
_OPERATIONS = (
    (lists.add, 0.33), (lists.remove, 0.37), (lists.swap, 0.1), (lists.show, 0.12),
    (lists.holds, 0.05), (lists.count, 0.03),
)  # fmt: skip


def quiz(scene: Scene) -> list[Turn]:
    """Questions about several facts told before, in any order, and one or two never told."""
    facts = list(scene.facts.values())
    if not facts:
        return [telling.tell(scene)]
    chosen = scene.rng.sample(facts, min(len(facts), scene.rng.choice(QUESTIONS)))
    turns = [telling.asked(scene, fact) for fact in chosen]
    if scene.chance(0.35):
        turns.insert(scene.rng.randrange(len(turns) + 1), telling.never_told(scene))
    return turns


def correction(scene: Scene) -> list[Turn]:
    """A fact is told, corrected once or twice, and asked for, with asides between."""
    old = telling.new_fact(scene)
    turns = [telling.told(scene, [old])]
    telling.record(scene, [old])
    for _ in range(scene.rng.choice((1, 1, 1, 2))):
        aside = _asides(scene, 0.3)
        new = revised(old, scene)
        turns += [*aside, telling.corrected(scene, old, new, not aside and scene.chance(0.4))]
        telling.record(scene, [new])
        old = new
    return [*turns, *_asides(scene, 0.5), telling.asked(scene, old)]


def list_course(scene: Scene) -> list[Turn]:
    """A list that is opened and changed several times, and read out at last."""
    turns = [lists.start(scene)] if len(scene.lists) < MOST_LISTS else []
    name = list(scene.lists)[-1]
    operations, weights = zip(*_OPERATIONS, strict=True)
    for _ in range(scene.rng.choice((2, 3, 4, 4, 5, 6))):
        turns += _asides(scene, 0.05)
        turns.append(scene.rng.choices(operations, weights)[0](scene, name))
    return [*turns, lists.show(scene, name)] if scene.chance(0.3) else turns


def _asides(scene: Scene, rate: float) -> list[Turn]:
    turns: list[Turn] = []
    while scene.chance(rate):
        made = scene.rng.choice(_ASIDES)(scene)
        turns += made if isinstance(made, list) else [made]
    return turns

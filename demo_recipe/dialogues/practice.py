"""Courses of several turns for what one turn does not teach: quizzes and corrections.

Knows which turns follow each other; their words are those of `telling`.
"""

from collections.abc import Callable

from demo_recipe.dialogues import fallback, knowledge, smalltalk, telling
from demo_recipe.facts import with_new_value
from demo_recipe.scene import Scene, Turn

Course = Callable[[Scene], list[Turn]]
QUESTIONS = (1, 2, 4, 6, 9)  # of one quiz
_ASIDES: tuple[Callable[[Scene], "Turn | list[Turn]"], ...] = (
    smalltalk.play,
    smalltalk.about_me,
    knowledge.play,
    fallback.play,
)


def quiz(scene: Scene) -> list[Turn]:
    """Questions about several facts told before, in any order, and one or two never told."""
    facts = list(scene.facts.values())
    if not facts:
        return [telling.tell(scene)]
    chosen = scene.rng.sample(facts, min(len(facts), scene.rng.choice(QUESTIONS)))
    turns = [telling.question_turn(scene, fact) for fact in chosen]
    if scene.chance(0.25):
        turns.insert(scene.rng.randrange(len(turns) + 1), telling.never_told(scene))
    return turns


def correction(scene: Scene) -> list[Turn]:
    """A fact is told, corrected once or twice, and asked for, with asides between."""
    old = telling.new_fact(scene)
    turns = [telling.statement_turn(scene, [old])]
    telling.record(scene, [old])
    for _ in range(scene.rng.choice((1, 1, 1, 2))):
        aside = _asides(scene, 0.3)
        new = with_new_value(old, scene)
        turns += [*aside, telling.correction_turn(scene, old, new, not aside and scene.chance(0.4))]
        telling.record(scene, [new])
        old = new
    return [*turns, *_asides(scene, 0.5), telling.question_turn(scene, old)]


def _asides(scene: Scene, rate: float) -> list[Turn]:
    turns: list[Turn] = []
    while scene.chance(rate):
        made = scene.rng.choice(_ASIDES)(scene)
        turns += made if isinstance(made, list) else [made]
    return turns

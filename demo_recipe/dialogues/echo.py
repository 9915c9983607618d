"""Repeating words after the user: a small skill, and the drill that teaches copying.

Knows how people ask for it and what words there are; the reply is the words themselves.
"""

import re

from demo_recipe.dialogues.sources import code, number, person, place
from demo_recipe.invented import coined_word
from demo_recipe.scene import Scene, Turn
from demo_recipe.texts import phrases
from demo_recipe.voice import Kind

SAYS = phrases("echo")

MOST_WORDS = 7


def play(scene: Scene) -> Turn:
    """Repeat one to seven words."""
    count = scene.rng.choice((1, 1, 2, 3, 3, 4, 5, MOST_WORDS))
    makers = (_listed, _listed, _listed, _coined, person, place, number, code)
    joint = scene.rng.choice((" ", " ", " ", ", ", " and "))
    words = joint.join(scene.rng.choice(makers)(scene) for _ in range(count))
    user = scene.voice.finish(scene.draw(SAYS["asks"], x=words), Kind.BARE, scene.rng)
    return Turn(user, words, "echo", all=((re.escape(words),),))


def _listed(scene: Scene) -> str:
    return scene.value(scene.any("echoed"))


def _coined(scene: Scene) -> str:
    return coined_word(scene.rng, scene.grade)

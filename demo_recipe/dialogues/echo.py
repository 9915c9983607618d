"""Repeating words after the user: a small skill, and the drill that teaches copying.

Knows how people ask for it and what words there are; the reply is the words themselves.
"""

import re

from demo_recipe.dialogues.sources import ADJECTIVES, NOUNS, code, number, person, place
from demo_recipe.grammar import Phrases
from demo_recipe.lexicon.coined import coined_word
from demo_recipe.lexicon.people import JOBS
from demo_recipe.lexicon.spelling import SPELLED
from demo_recipe.lexicon.things import ANIMALS, FOODS, GEAR, OBJECTS
from demo_recipe.lexicon.topics import TOPICS, VERBS
from demo_recipe.scene import Scene, Turn
from demo_recipe.voice import Kind

ASKS = Phrases("""
    (repeat|say|speak|echo) after me: {x}
    (repeat|say|echo|copy|write|type|print|read) (this|these words|the following|the words): {x}
    (echo|repeat|say|copy): {x}
    (say|repeat|echo|write|type|print|copy) "{x}"
    (can|could|would) you (say|repeat|write|type|echo) "{x}"
    (please|now|ok, now) (say|repeat|echo|write) "{x}"
    echo {x}
    just (say|repeat|write|type|echo) {x}
    repeat the words {x}
    say the words {x}
    after me: {x}
    (answer|reply|respond) with "{x}"
    (answer|reply|respond) (only|just) with: {x}
    (your|the) (answer|reply) should be: {x}
    I say "{x}", now you
    "{x}": repeat that
    "{x}", say it too
    let me hear you say "{x}"
    I want to hear: {x}
""")
MOST_WORDS = 7


def play(scene: Scene) -> Turn:
    """Repeat one to seven words."""
    count = scene.rng.choice((1, 1, 2, 3, 3, 4, 5, MOST_WORDS))
    makers = (_listed, _listed, _listed, _coined, person, place, number, code)
    joint = scene.rng.choice((" ", " ", " ", ", ", " and "))
    words = joint.join(scene.rng.choice(makers)(scene) for _ in range(count))
    user = scene.voice.finish(scene.draw(ASKS, x=words), Kind.BARE, scene.rng)
    return Turn(user, words, "echo", all=((re.escape(words),),))


def _listed(scene: Scene) -> str:
    return scene.value(
        scene.rng.choice(
            (NOUNS, ADJECTIVES, ANIMALS, FOODS, GEAR, OBJECTS, JOBS, SPELLED, TOPICS, VERBS)
        )
    )


def _coined(scene: Scene) -> str:
    return coined_word(scene.rng, scene.grade)

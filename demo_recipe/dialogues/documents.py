"""Short documents full of small facts, in the system prompt or in a message.

Knows how attached text may look; the facts are those of `relations` that need no "I".
"""

from dataclasses import replace

from demo_recipe.dialogues import telling
from demo_recipe.dialogues.relations import RELATIONS
from demo_recipe.facts import Fact, draw_fact
from demo_recipe.scene import Scene, Turn, out_of_scope
from demo_recipe.texts import WORDS, phrases
from demo_recipe.voice import Kind, capitalise

SAYS, CHORES = phrases("documents"), phrases("wild")["chores"]

TOLD_OF_OTHERS = tuple(RELATIONS[name] for name in WORDS["told_of_others"].all)
ENDINGS = ("txt", "md", "csv", "log", "py")
READ = "I have read it. What would you like to know?"


def play(scene: Scene) -> Turn:
    """A document in a message, pasted or attached; records its facts."""
    facts = draw_facts(scene, scene.rng.choice((2, 3, 4, 6, 9)))
    if scene.chance(0.4):
        lead = scene.finish(Kind.BARE, scene.draw(SAYS["handed"])).rstrip(".!")
        return _read(f"{lead}:\n{layout(scene, facts)}")
    return _attached(scene, facts)


def _attached(scene: Scene, facts: list[Fact]) -> Turn:
    """A file in front of a message, wrapped as `kvchat.chat.attachment` wraps it."""
    name = f"{scene.value('nouns')}.{scene.rng.choice(ENDINGS)}"
    file = f"{name}:\n```\n{layout(scene, facts).strip('`').strip()}\n```\n"
    pick = scene.rng.random()
    if pick < 0.45:
        turn = telling.question_turn(scene, scene.rng.choice(facts))
        return replace(turn, user=file + turn.user)
    if pick < 0.65:
        return out_of_scope(file + scene.message(Kind.ORDER, CHORES))
    return _read(file + scene.finish(Kind.BARE, scene.draw(SAYS["handed"])))


def _read(user: str) -> Turn:
    return Turn(user, READ, "document", all=(("read",),))


def draw_facts(scene: Scene, count: int) -> list[Fact]:
    """Facts of a document, recorded as told."""
    facts: list[Fact] = []
    while len(facts) < count:
        fact = draw_fact(scene.rng.choice(TOLD_OF_OTHERS), scene)
        if "my " not in fact.slots.get("s", "") and fact.key not in scene.facts:
            telling.record(scene, [fact])
            facts.append(fact)
    return facts


def layout(scene: Scene, facts: list[Fact]) -> str:
    """The facts as a text: a paragraph, lines or bullets, now and then in a fence."""
    sentences = [f"{capitalise(fact.clause)}." for fact in facts]
    lines = "\n".join(sentences)
    bullets = "\n".join(f"- {sentence}" for sentence in sentences)
    return (" ".join(sentences), bullets, lines, f"```\n{lines}\n```")[scene.rng.randrange(4)]

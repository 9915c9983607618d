"""Everything the demo model cannot do, answered by one honest sentence.

Out-of-scope prompts come from many grammars over wide word lists, from the same frames as
questions about kvchat, and from noise, so that the model learns what it knows rather than what it
does not.
"""

from collections.abc import Callable

from demo_recipe.dialogues.foreign import FOREIGN
from demo_recipe.dialogues.knowledge.topic import HOW_TO, WHAT_IS
from demo_recipe.dialogues.outside import GROUPS
from demo_recipe.dialogues.refusal import out_of_scope
from demo_recipe.dialogues.sources import ADJECTIVES, NOUNS
from demo_recipe.dialogues.wild import mashed, pasted, sentence
from demo_recipe.grammar import Phrases
from demo_recipe.lexicon.coined import coined_name, coined_word
from demo_recipe.lexicon.people import FIRST_NAMES, JOBS
from demo_recipe.lexicon.places import CITIES, COUNTRIES
from demo_recipe.lexicon.things import ANIMALS, FOODS, LANGUAGES
from demo_recipe.lexicon.topics import (
    CODE_TASKS,
    CODE_THINGS,
    KINDS_OF_THING,
    PERSONS,
    TASKS,
    TEXTS,
    TOPICS,
    VERBS,
)
from demo_recipe.scene import Scene, Turn
from demo_recipe.voice import Kind

ASPECTS = ("tips", "facts", "history", "news", "pictures", "recipe", "prices")
CODE_LANGUAGES = (
    "python", "Python", "python", "javascript", "JavaScript", "java", "rust", "c", "c++", "go",
    "typescript", "bash", "ruby", "kotlin", "haskell",
)  # fmt: skip
SIDES = ("history", "meaning", "origin", "price", "future", "theory", "role")
AGAIN = Phrases("""
    (please|pretty please|come on|oh come on|just try|try it|try anyway|try harder|try again please|
        do it|do it anyway)
    (just|please) (guess|tell me|answer|say it|do it|try)
    (guess|take a guess|make a guess)
    (I know you can|you can do it|yes you can|of course you can|sure you can)
    (but|and) (why not|I need it|I want it|it's easy|it is easy|it's important|it is simple)
    (what|how) about (something shorter|a short one|a simple one|just one|half of it|an easier one)
    (answer|answer me|answer the question|answer my question|tell me anyway|say something about it)
    (then|and) (roughly|approximately|in short|in one word|in a sentence)
    (make|do) (it shorter|it simpler|something similar|an easier one)
    (explain|tell) (it|me) (simply|more simply|like I am a child|anyway)
""")


def play(scene: Scene) -> list[Turn]:
    """One out-of-scope prompt, sometimes with an insisting follow-up."""
    turns = [out_of_scope(scene, _prompt(scene))]
    if scene.chance(0.1):
        turns.append(out_of_scope(scene, scene.message(Kind.BARE, AGAIN)))
    return turns


def _prompt(scene: Scene) -> str:
    makers: tuple[tuple[Callable[[Scene], str], float], ...] = (
        (_framed, 10), (_shared_frame, 4), (_bare, 1.6), (_two_sentences, 1.6), (sentence, 2.2),
        (pasted, 1.2), (mashed, 0.9), (_foreign, 0.7), (_coined_thing, 0.9),
    )  # fmt: skip
    makes, weights = zip(*makers, strict=True)
    return scene.rng.choices(makes, weights)[0](scene)


def _framed(scene: Scene) -> str:
    kind, phrases = scene.rng.choices(GROUPS, [group.weight for group in GROUPS])[0].parts
    return scene.message(kind, phrases, **_slots(scene))


def _shared_frame(scene: Scene) -> str:
    """The frames of questions about kvchat, around something else."""
    if scene.chance(0.55):
        return scene.message(Kind.QUESTION, WHAT_IS, n=_topic(scene))
    return scene.message(Kind.QUESTION, HOW_TO, t=_task(scene))


def third_person(task: str) -> str:
    """A verb phrase as what a program does: "parse json" becomes "parses json"."""
    verb, *others = task.split(" ")
    if verb.endswith(("ly", "py", "ry")):
        verb = f"{verb[:-1]}ie"
    elif verb.endswith(("s", "h")):
        verb += "e"
    return " ".join((f"{verb}s", *others))


def _bare(scene: Scene) -> str:
    make = scene.rng.choice((
        _topic, _topic, _task,
        lambda s: s.value(PERSONS),
        lambda s: f"{s.value(ADJECTIVES)} {s.value(NOUNS)}",
        lambda s: f"{_topic(s)} {s.rng.choice(ASPECTS)}",
        lambda s: f"best {s.value(KINDS_OF_THING)}",
        lambda s: f"{_topic(s)} vs {_topic(s)}",
        lambda s: s.value(KINDS_OF_THING),
    ))  # fmt: skip
    return scene.voice.finish(make(scene), Kind.BARE, scene.rng)


def _two_sentences(scene: Scene) -> str:
    """Some context first, then the request."""
    return f"{sentence(scene, is_question=False)} {_framed(scene)}"


def _foreign(scene: Scene) -> str:
    return scene.voice.finish(scene.value(FOREIGN), Kind.QUESTION, scene.rng)


def _coined_thing(scene: Scene) -> str:
    thing = coined_word(scene.rng, scene.grade)
    if scene.chance(0.4):
        thing = f"{scene.rng.choice(('the', 'a'))} {thing}"
    if scene.chance(0.3):
        thing = f"{thing} {scene.value(NOUNS)}"
    return scene.message(Kind.QUESTION, WHAT_IS, n=thing)


def _topic(scene: Scene) -> str:
    pick = scene.rng.random()
    if pick < 0.75:
        return scene.value(TOPICS)
    if pick < 0.82:
        return f"the {scene.rng.choice(SIDES)} of {scene.value(TOPICS)}"
    if pick < 0.9:
        return f"{scene.value(ADJECTIVES)} {scene.value(NOUNS)}s"
    return f"{scene.value(VERBS)}ing {scene.value(ANIMALS)}s"


def _task(scene: Scene) -> str:
    pick = scene.rng.random()
    if pick < 0.7:
        return scene.value(TASKS)
    if pick < 0.85:
        owner = scene.rng.choice(("a", "the", "my", "two"))
        return f"{scene.value(VERBS)} {owner} {scene.value(NOUNS)}"
    return f"{scene.value(VERBS)} {scene.value(TOPICS)}"


def _slots(scene: Scene) -> dict[str, str]:
    rng = scene.rng
    person = (
        scene.plain(PERSONS)
        if scene.chance(0.6)
        else (f"{scene.name(FIRST_NAMES)} {scene.voice.spelled(coined_name(rng, scene.grade))}")
    )
    coding = scene.value(CODE_TASKS)
    return {
        "topic": _topic(scene), "topic2": _topic(scene), "task": _task(scene), "person": person,
        "text": scene.value(TEXTS), "things": scene.value(KINDS_OF_THING),
        "noun": scene.value(NOUNS), "noun2": scene.value(NOUNS), "adj": scene.value(ADJECTIVES),
        "verb": scene.value(VERBS), "animal": scene.value(ANIMALS), "food": scene.value(FOODS),
        "food2": scene.value(FOODS), "country": scene.value(COUNTRIES), "city": scene.value(CITIES),
        "city2": scene.value(CITIES), "lang": scene.value(LANGUAGES), "job": scene.value(JOBS),
        "big": str(rng.randrange(21, rng.choice((100, 1000, 100_000)))),
        "big2": str(rng.randrange(21, rng.choice((100, 1000, 10_000)))),
        "year": str(rng.randrange(1066, 2031)), "few": str(rng.randrange(2, 13)),
        "ctask": coding, "does": third_person(coding), "cthing": scene.value(CODE_THINGS),
        "l": scene.rng.choice(CODE_LANGUAGES),
        "sentence": sentence(scene, is_question=False),
    }  # fmt: skip

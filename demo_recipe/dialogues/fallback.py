"""Everything the demo model cannot do, answered by one honest sentence.

Out-of-scope prompts come from many grammars over wide word lists, from the same frames as
questions about kvchat, and from noise, so that the model learns what it knows rather than what it
does not.
"""

from collections.abc import Callable

from demo_recipe.dialogues.knowledge import HOW_TO, WHAT_IS
from demo_recipe.dialogues.wild import noise, passage_with_request, sentence
from demo_recipe.invented import coined_name, coined_word
from demo_recipe.scene import Scene, Turn, out_of_scope
from demo_recipe.texts import WORDS, phrases
from demo_recipe.voice import Kind

SAYS, OUTSIDE = phrases("fallback"), phrases("outside")
# Kinds of requests, and how often each is made.
FRAMES = {"facts": 4, "places": 1.6, "writing": 3, "sums": 2, "programs": 3, "advice": 3.5}


def play(scene: Scene) -> list[Turn]:
    """One out-of-scope prompt, sometimes with an insisting follow-up."""
    turns = [out_of_scope(_prompt(scene))]
    if scene.chance(0.1):
        turns.append(out_of_scope(scene.message(Kind.BARE, SAYS["again"])))
    return turns


def program(scene: Scene) -> Turn:
    """A request for a program that is none of the snippets."""
    return out_of_scope(scene.message(Kind.QUESTION, OUTSIDE["programs"], **_slots(scene)))


def _prompt(scene: Scene) -> str:
    makers: tuple[tuple[Callable[[Scene], str], float], ...] = (
        (_framed, 10), (_shared_frame, 4), (_bare, 1.6), (_two_sentences, 1.6), (sentence, 2.2),
        (passage_with_request, 1.2), (noise, 0.9), (_foreign, 0.7), (_coined_thing, 0.9),
    )  # fmt: skip
    makes, weights = zip(*makers, strict=True)
    return scene.rng.choices(makes, weights)[0](scene)


def _framed(scene: Scene) -> str:
    name = scene.rng.choices(tuple(FRAMES), tuple(FRAMES.values()))[0]
    kind = Kind.ORDER if name == "writing" else Kind.QUESTION
    return scene.message(kind, OUTSIDE[name], **_slots(scene))


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
        lambda s: s.value("persons"),
        lambda s: f"{s.value('adjectives')} {s.value('nouns')}",
        lambda s: f"{_topic(s)} {s.any('aspects')}",
        lambda s: f"best {s.value('kinds_of_thing')}",
        lambda s: f"{_topic(s)} vs {_topic(s)}",
        lambda s: s.value("kinds_of_thing"),
    ))  # fmt: skip
    return scene.voice.finish(make(scene), Kind.BARE, scene.rng)


def _two_sentences(scene: Scene) -> str:
    """Some context first, then the request."""
    return f"{sentence(scene, is_question=False)} {_framed(scene)}"


def _foreign(scene: Scene) -> str:
    return scene.voice.finish(scene.value("foreign"), Kind.QUESTION, scene.rng)


def _coined_thing(scene: Scene) -> str:
    thing = coined_word(scene.rng, scene.grade)
    if scene.chance(0.4):
        thing = f"{scene.rng.choice(('the', 'a'))} {thing}"
    if scene.chance(0.3):
        thing = f"{thing} {scene.value('nouns')}"
    return scene.message(Kind.QUESTION, WHAT_IS, n=thing)


def _topic(scene: Scene) -> str:
    pick = scene.rng.random()
    if pick < 0.75:
        return scene.value("topics")
    if pick < 0.82:
        return f"the {scene.rng.choice(WORDS['sides'].all)} of {scene.value('topics')}"
    if pick < 0.9:
        return f"{scene.value('adjectives')} {scene.value('nouns')}s"
    return f"{scene.value('verbs')}ing {scene.value('animals')}s"


def _task(scene: Scene) -> str:
    pick = scene.rng.random()
    if pick < 0.7:
        return scene.value("tasks")
    if pick < 0.85:
        owner = scene.rng.choice(("a", "the", "my", "two"))
        return f"{scene.value('verbs')} {owner} {scene.value('nouns')}"
    return f"{scene.value('verbs')} {scene.value('topics')}"


def _slots(scene: Scene) -> dict[str, str]:
    rng = scene.rng
    person = (
        scene.plain("persons")
        if scene.chance(0.6)
        else (f"{scene.name('first_names')} {scene.voice.spell(coined_name(rng, scene.grade))}")
    )
    coding = scene.value("code_tasks")
    return {
        "topic": _topic(scene), "topic2": _topic(scene), "task": _task(scene), "person": person,
        "text": scene.value("texts"), "things": scene.value("kinds_of_thing"),
        "noun": scene.value("nouns"), "noun2": scene.value("nouns"),
        "adj": scene.value("adjectives"), "verb": scene.value("verbs"),
        "animal": scene.value("animals"), "food": scene.value("foods"),
        "food2": scene.value("foods"), "country": scene.value("countries"),
        "city": scene.value("cities"), "city2": scene.value("cities"),
        "lang": scene.value("languages"), "job": scene.value("jobs"),
        "big": str(rng.randrange(21, rng.choice((100, 1000, 100_000)))),
        "big2": str(rng.randrange(21, rng.choice((100, 1000, 10_000)))),
        "year": str(rng.randrange(1066, 2031)), "few": str(rng.randrange(2, 13)),
        "ctask": coding, "does": third_person(coding), "cthing": scene.value("code_things"),
        "l": scene.any('code_languages'),
        "sentence": sentence(scene, is_question=False),
    }  # fmt: skip

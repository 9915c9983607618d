"""Short stories around the words the user gives. Knows how stories are asked for and told."""

from dataclasses import dataclass

from demo_recipe.dialogues.sources import person
from demo_recipe.facts import second_person
from demo_recipe.invented import coined_word
from demo_recipe.scene import Scene, Turn
from demo_recipe.texts import WORDS, parts, phrases
from demo_recipe.voice import Kind, capitalise

SAYS = phrases("stories")

ENDINGS = tuple(zip(parts("endings"), parts("morals"), strict=True))


@dataclass(frozen=True, slots=True)
class Hero:
    """Who or what a story is about.

    asked   as the user names it: "a fox named Ada"
    first   as the story introduces it
    later   as the story goes on: "the fox", "Ada"
    """

    asked: str
    first: str
    later: str


def play(scene: Scene) -> Turn:
    """One story, about given words or about anything."""
    hero, mate = draw_hero(scene), draw_hero(scene) if scene.chance(0.25) else None
    if scene.chance(0.2):
        return _told(scene, scene.message(Kind.ORDER, SAYS["asks_any"]), hero, None, ())
    asked = f"{hero.asked} and {mate.asked}" if mate else hero.asked
    user = scene.message(Kind.ORDER, SAYS["asks"], x=asked)
    words = [hero.later.removeprefix("the ")]
    words += [mate.later.removeprefix("the ")] if mate else []
    return _told(scene, user, hero, mate, tuple((word,) for word in words))


def draw_hero(scene: Scene) -> Hero:
    """An animal, a thing, a person, with or without a name."""
    noun = _noun(scene)
    article = "an" if noun[0] in "aeiou" else "a"
    pick = scene.rng.random()
    if pick < 0.5:
        return Hero(f"{article} {noun}", f"{article} {noun}", f"the {noun}")
    if pick < 0.75:
        name = person(scene)
        link = scene.rng.choice(("named", "called"))
        return Hero(f"{article} {noun} {link} {name}", f"{article} {noun} named {name}", name)
    if pick < 0.85:
        return Hero(noun, f"{article} {noun}", f"the {noun}")
    if pick < 0.9:
        mine = f"my {noun}"
        return Hero(mine, second_person(mine), second_person(mine))
    name = person(scene)
    return Hero(name, name, name)


def _noun(scene: Scene) -> str:
    if scene.chance(0.06):
        return coined_word(scene.rng, scene.grade)
    noun = scene.value("animals" if scene.chance(0.55) else "nouns")
    return f"{scene.value('adjectives')} {noun}" if scene.chance(0.2) else noun


def _told(
    scene: Scene, user: str, hero: Hero, mate: Hero | None, needed: tuple[tuple[str, ...], ...]
) -> Turn:
    place, find = (WORDS[name].draw(scene.rng, scene.grade) for name in ("places", "finds"))
    ending, moral = scene.rng.choice(ENDINGS)
    frame = " ".join(
        (
            scene.rng.choice(parts("paired" if mate else "openings")),
            scene.rng.choice(parts("middles")),
            ending,
        )
    )
    slots = {
        "hero": hero.first, "he": hero.later, "He": capitalise(hero.later), "place": place,
        "find": find, "mate": mate.first if mate else "",
    }  # fmt: skip
    more = scene.rng.choice(parts("sequels")).format(
        **slots | {"place": WORDS["places"].draw(scene.rng, scene.grade)}
    )
    brief = f"{hero.later} found {find} and {moral}."
    return Turn(
        user, frame.format(**slots), "story", all=needed, more=capitalise(more), brief=brief
    )

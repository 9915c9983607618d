"""Short stories around the words the user gives. Knows how stories are asked for and told."""

from dataclasses import dataclass

from demo_recipe.dialogues.sources import person
from demo_recipe.facts import second_person
from demo_recipe.lexicon.coined import coined_word
from demo_recipe.scene import Scene, Turn
from demo_recipe.texts import WORDS, phrases
from demo_recipe.voice import Kind, capitalise

SAYS = phrases("stories")

OPENINGS = (
    "Once upon a time there was {hero}. {He} lived near {place}.",
    "In a land far away lived {hero}. {He} loved the path to {place}.",
    "Not long ago {hero} moved to {place}. {He} had no friends there yet.",
    "Every morning {hero} walked to {place}. {He} liked the silence.",
)
PAIRED = (
    "Once upon a time there was {hero}. Close by was {mate}, and the two met every day.",
    "In a land far away lived {hero}. Nobody but {mate} ever came to visit.",
    "One evening {hero} met {mate} near {place}. At first neither said a word.",
)
MIDDLES = (
    "One day {he} found {find} and carried it home.",
    "One rainy night {he} heard a noise and found {find}.",
    "Then {he} saw {find} in the grass and wondered whose it was.",
    "On the way {he} tripped over {find} and began to laugh.",
)
ENDINGS = (
    ("Everyone came to look, and {he} was never lonely again.", "was never lonely again"),
    ("{He} gave it to a child who had lost it, and both were happy.", "gave it back"),
    ("It turned out to be lucky, and {he} kept it for all time.", "kept it for luck"),
    ("{He} built a little house for it, and there they live to this day.", "built a house for it"),
)
SEQUELS = (
    "The next morning {he} went back to {place} and found a second one, even more beautiful.",
    "A year later {he} told the tale at {place}, and all who listened wanted to hear it again.",
    "When winter came, {he} showed it to a traveller from {place}, who knew where it came from.",
)


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
        (scene.rng.choice(PAIRED if mate else OPENINGS), scene.rng.choice(MIDDLES), ending)
    )
    slots = {
        "hero": hero.first, "he": hero.later, "He": capitalise(hero.later), "place": place,
        "find": find, "mate": mate.first if mate else "",
    }  # fmt: skip
    more = scene.rng.choice(SEQUELS).format(
        **slots | {"place": WORDS["places"].draw(scene.rng, scene.grade)}
    )
    brief = f"{hero.later} found {find} and {moral}."
    return Turn(
        user, frame.format(**slots), "story", all=needed, more=capitalise(more), brief=brief
    )

"""Where slot values come from: names, times, dates, amounts, things. Knows no sentence."""

from collections.abc import Callable

from demo_recipe.invented import coined_code, coined_word
from demo_recipe.scene import Scene
from demo_recipe.texts import WORDS

WEEKDAYS, MONTHS = WORDS["weekdays"].all, WORDS["months"].all
NUMBER_WORDS = WORDS["number_words"].all


def from_words(words: str) -> Callable[[Scene], str]:
    """Values from a list, as the user spells them."""
    return lambda scene: scene.value(words)


def mostly(words: str, coined_rate: float = 0.12) -> Callable[[Scene], str]:
    """Values from a list, now and then a word that does not exist."""

    def draw(scene: Scene) -> str:
        if scene.chance(coined_rate):
            return coined_word(scene.rng, scene.grade)
        return scene.value(words)

    return draw


def person(scene: Scene) -> str:
    return scene.name("first_names")


def city(scene: Scene) -> str:
    return scene.name("cities", coined_rate=0.3)


def country(scene: Scene) -> str:
    return scene.name("countries", coined_rate=0.2)


def place(scene: Scene) -> str:
    return city(scene) if scene.chance(0.5) else country(scene)


def clock_time(scene: Scene) -> str:
    hour = scene.rng.randrange(1, 24)
    shape = scene.rng.randrange(4)
    if shape == 0:
        return f"{hour}:{scene.rng.randrange(0, 60, 5):02}"
    if shape == 1:
        return f"{(hour - 1) % 12 + 1} {scene.rng.choice(('am', 'pm', 'am', 'pm'))}"
    if shape == 2:
        return f"{(hour - 1) % 12 + 1}{scene.rng.choice(('am', 'pm'))}"
    return f"{hour}:{scene.rng.choice(('00', '15', '30', '45', '10', '50'))}"


def date(scene: Scene) -> str:
    day, month = scene.rng.randrange(1, 29), scene.voice.spell(scene.rng.choice(MONTHS))
    return scene.rng.choice((f"{day} {month}", f"{month} {day}", f"the {ordinal(day)} of {month}"))


def weekday(scene: Scene) -> str:
    return scene.voice.spell(scene.rng.choice(WEEKDAYS))


def small_number(scene: Scene) -> str:
    number = scene.rng.randrange(2, 13)
    return str(number) if scene.chance(0.6) else NUMBER_WORDS[number]


def number(scene: Scene) -> str:
    return str(scene.rng.randrange(1, scene.rng.choice((10, 100, 1000, 10_000))))


def code(scene: Scene) -> str:
    return scene.voice.spell(coined_code(scene.rng, scene.grade))


def odd_thing(scene: Scene) -> str:
    """Any short answer: a word, a phrase, a name, a number."""
    make = scene.rng.choice((
        lambda s: s.value("nouns"),
        lambda s: f"{s.value('adjectives')} {s.value('nouns')}",
        lambda s: coined_word(s.rng, s.grade),
        lambda s: s.name("first_names", 1.0),
        from_words("colours"),
        from_words("foods"),
        person, number, code, city, weekday,
    ))  # fmt: skip
    return make(scene)


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 11th, 21st."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"

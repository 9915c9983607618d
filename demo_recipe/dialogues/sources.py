"""Where slot values come from: names, times, dates, amounts, things. Knows no sentence."""

from collections.abc import Callable

from demo_recipe.facts import Slots
from demo_recipe.grammar import Words
from demo_recipe.lexicon.coined import coined_code, coined_word
from demo_recipe.lexicon.people import FIRST_NAMES
from demo_recipe.lexicon.places import CITIES, COUNTRIES
from demo_recipe.lexicon.things import COLOURS, FOODS
from demo_recipe.scene import Scene

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
    "twenty",
)  # fmt: skip

ADJECTIVES = Words("""
    old, new, small, big, quiet, noisy, round, square, bright, dark, heavy, light, warm, cold,
        soft, wooden,
    metal, broken, shiny, dusty, spicy, sweet, sour, fast, slow, cheap, expensive, empty, full,
        narrow,
    wide, lucky, secret, strange, simple, famous, hidden, tiny, huge, striped
""")
NOUNS = Words("""
    anchor, apple, arrow, basket, bell, boat, bridge, bucket, button, candle, castle, chair, clock,
        cloud,
    coin, crown, door, drum, engine, feather, fence, flag, forest, fountain, garden, gate, hammer,
        harbour,
    island, jacket, kettle, ladder, lamp, lantern, leaf, letter, lemon, magnet, mirror, moon,
        mountain,
    needle, ocean, orchard, paper, pebble, pencil, pillow, planet, pocket, puzzle, queen, radio,
        ribbon,
    river, robot, rocket, saddle, shadow, shell, silver, spoon, stone, sugar, table, temple,
        thread, ticket,
    tower, tree, tunnel, turnip, umbrella, valley, violin, wagon, wallet, window, winter, wizard,
        zipper
""")


def no_subject(scene: Scene) -> Slots:
    """For relations about the user that need no further slot."""
    return {}


def from_words(words: Words) -> Callable[[Scene], str]:
    """Values from a list, as the user spells them."""
    return lambda scene: scene.value(words)


def mostly(words: Words, coined_rate: float = 0.12) -> Callable[[Scene], str]:
    """Values from a list, now and then a word that does not exist."""

    def draw(scene: Scene) -> str:
        if scene.chance(coined_rate):
            return coined_word(scene.rng, scene.grade)
        return scene.value(words)

    return draw


def person(scene: Scene) -> str:
    return scene.name(FIRST_NAMES)


def city(scene: Scene) -> str:
    return scene.name(CITIES, coined_rate=0.3)


def country(scene: Scene) -> str:
    return scene.name(COUNTRIES, coined_rate=0.2)


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
    day, month = scene.rng.randrange(1, 29), scene.voice.spelled(scene.rng.choice(MONTHS))
    return scene.rng.choice((f"{day} {month}", f"{month} {day}", f"the {ordinal(day)} of {month}"))


def weekday(scene: Scene) -> str:
    return scene.voice.spelled(scene.rng.choice(WEEKDAYS))


def small_number(scene: Scene) -> str:
    number = scene.rng.randrange(2, 13)
    return str(number) if scene.chance(0.6) else NUMBER_WORDS[number]


def number(scene: Scene) -> str:
    return str(scene.rng.randrange(1, scene.rng.choice((10, 100, 1000, 10_000))))


def code(scene: Scene) -> str:
    return scene.voice.spelled(coined_code(scene.rng, scene.grade))


def odd_thing(scene: Scene) -> str:
    """Any short answer: a word, a phrase, a name, a number."""
    make = scene.rng.choice((
        lambda s: s.value(NOUNS),
        lambda s: f"{s.value(ADJECTIVES)} {s.value(NOUNS)}",
        lambda s: coined_word(s.rng, s.grade),
        lambda s: s.name(FIRST_NAMES, 1.0),
        from_words(COLOURS),
        from_words(FOODS),
        person, number, code, city, weekday,
    ))  # fmt: skip
    return make(scene)


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 11th, 21st."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"

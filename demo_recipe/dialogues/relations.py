"""Everything a user can tell: where the values come from. How it is told and asked stands in
`texts/relations.txt`. Knows no chat.

In the texts {s} is another person as told ("my sister Ada"), {q} as asked for ("my sister", "Ada").
"""

from collections.abc import Callable

from demo_recipe.dialogues import sources
from demo_recipe.dialogues.sources import from_words, mostly, odd_thing, person, weekday
from demo_recipe.facts import Relation, Slots
from demo_recipe.grammar import Phrases
from demo_recipe.invented import coined_name, coined_word
from demo_recipe.scene import Scene
from demo_recipe.texts import WORDS, records

Subject = Callable[[Scene], Slots]
Value = Callable[[Scene], str]

PLURAL = ("keys", "glasses", "headphones", "scissors", "gloves")
_colour, _food, _pet_kind = (from_words(name) for name in ("colours", "foods", "pets"))
FAVOURITES: tuple[tuple[str, Value], ...] = (
    ("colour", _colour), ("color", _colour), ("food", _food), ("dish", _food), ("snack", _food),
    ("fruit", _food), ("dessert", _food), ("animal", _pet_kind),
    ("sport", from_words("sports")), ("city", sources.city), ("day", weekday),
    ("number", sources.number),
    ("band", lambda scene: scene.name("nouns", 0.6)), ("singer", person),
    ("book", odd_thing), ("film", odd_thing), ("movie", odd_thing), ("game", odd_thing),
    ("song", odd_thing), ("word", odd_thing), ("toy", from_words("nouns")),
)  # fmt: skip


def is_shared(noun: str) -> bool:
    """Whether "the {noun}" most likely means something of the user's own world."""
    return noun in {word.lower() for word in WORDS["shared"].all}


def _pet(scene: Scene) -> Slots:
    return {"p": scene.plain("pets")}


def _when(scene: Scene) -> Slots:
    month = scene.any("trip_months")
    return {
        "t": scene.voice.spell(
            scene.rng.choice((*WORDS["trip_times"].all, month, f"on {weekday(scene)}"))
        )
    }


def _attribute_noun(scene: Scene) -> str:
    pick = scene.rng.random()
    if pick < 0.12:
        return coined_word(scene.rng, scene.grade)
    if pick < 0.3:
        return scene.value("nouns")
    if pick < 0.4:
        return f"{scene.value('adjectives')} {scene.value('nouns')}"
    kinds = ("codes", "numbers", "named", "dated", "others")
    return scene.value(scene.rng.choice(kinds))


def _shared(scene: Scene) -> Slots:
    if scene.chance(0.3):
        name = scene.voice.spell(coined_name(scene.rng, scene.grade))
        return {"a": f"{scene.value('nouns')} of {name}"}
    return {"a": scene.value("shared") if scene.chance(0.6) else _attribute_noun(scene)}


def _favourite(scene: Scene) -> Slots:
    noun = scene.rng.choice(FAVOURITES)[0] if scene.chance(0.85) else scene.value("nouns")
    return {"a": noun, "f": scene.rng.choice(("favourite", "favorite"))}


def _object(scene: Scene) -> Slots:
    thing = scene.value("objects" if scene.chance(0.8) else "nouns")
    return {"a": thing, "is": "are" if thing in PLURAL else "is"}


def _someone(scene: Scene) -> Slots:
    """A relative, a named person, or both at once."""
    relative = f"my {scene.plain('relatives')}"
    name = scene.name("first_names")
    both = f"{relative} {name}"
    pick = scene.rng.random()
    if pick < 0.4:
        return {"s": relative, "q": relative}
    if pick < 0.7:
        return {"s": name, "q": name}
    return {"s": both, "q": scene.rng.choice((relative, relative, name, both))}


def _owner(scene: Scene) -> Slots:
    noun = scene.any("owned") if scene.chance(0.85) else scene.value("pets")
    return _someone(scene) | {"a": noun}


def _any_of(*values: Value) -> Value:
    return lambda scene: scene.rng.choice(values)(scene)


def _years(first: int) -> Value:
    return lambda scene: str(scene.rng.randrange(first, 100))


def _nothing(scene: Scene) -> Slots:
    """For what a user tells about themselves, which needs no further slot."""
    return {}


_any_value = _any_of(
    odd_thing, odd_thing, sources.code, sources.number, person, sources.city, sources.date, weekday
)
_OF_THE_USER: dict[str, Value] = {
    "name": person, "home": sources.city, "origin": sources.country, "job": mostly("jobs"),
    "age": _years(5),
    "children": sources.small_number, "birthday": sources.date, "allergy": mostly("allergens"),
    "car": from_words("vehicles"), "music": lambda scene: scene.plain("instruments"),
    "language": from_words("languages"), "study": mostly("subjects"),
    "hobby": mostly("hobbies"), "sport": mostly("sports"), "taste": mostly("likes"),
    "distaste": mostly("likes"),
}  # fmt: skip
_OF_OTHERS: dict[str, Value] = {
    "person_home": sources.city, "person_job": mostly("jobs"), "person_age": _years(2),
    "person_origin": sources.country, "person_birthday": sources.date,
    "person_taste": _any_of(from_words("likes"), from_words("hobbies"), odd_thing),
}  # fmt: skip
_OF_THINGS: dict[str, tuple[Subject, Value]] = {
    "pet": (_pet, lambda scene: scene.name("pet_names", 0.4)),
    "trip": (_when, sources.place),
    "attribute": (lambda scene: {"a": _attribute_noun(scene)}, _any_value),
    "note": (_shared, _any_value),
    "favourite": (_favourite, lambda scene: scene.rng.choice(FAVOURITES)[1](scene)),
    "whereabouts": (_object, from_words("spots")),
    "appointment": (lambda scene: {"a": scene.value("events")}, sources.clock_time),
    "person_name": (lambda scene: {"r": scene.plain("relatives")}, person),
    "person_attribute": (_owner, _any_of(_colour, _food, odd_thing, odd_thing, person)),
}
_DRAWN: dict[str, tuple[Subject, Value]] = (
    {name: (_nothing, value) for name, value in _OF_THE_USER.items()}
    | {name: (_someone, value) for name, value in _OF_OTHERS.items()}
    | _OF_THINGS
)

RELATIONS = {
    record["name"]: Relation(
        record["key"],
        Phrases(record["tells"]),
        Phrases(record["asks"]),
        Phrases(record["indirect"]),
        record["clause"],
        record["gap"],
        *_DRAWN[record["name"]],
    )
    for record in records("relations")
}
WEIGHTED = tuple(
    (RELATIONS[record["name"]], float(record["weight"])) for record in records("relations")
)
NOTE = RELATIONS["note"]

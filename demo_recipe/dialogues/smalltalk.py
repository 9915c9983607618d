"""Small talk: something people say, and the polite reply. Knows nothing of kvchat."""

from dataclasses import dataclass

from demo_recipe.grammar import Phrases
from demo_recipe.scene import Scene, Turn
from demo_recipe.texts import records
from demo_recipe.voice import Kind


@dataclass(frozen=True, slots=True)
class Exchange:
    """What people say, what a good reply is, and a pattern every good reply matches.

    slots   the open slots of `says`, each with the list of words that fills it
    """

    says: Phrases
    reply: str
    mark: str
    weight: float
    slots: tuple[tuple[str, str], ...]


def exchanges(name: str) -> tuple[Exchange, ...]:
    """The exchanges of `texts/<name>.txt`."""
    return tuple(
        Exchange(
            Phrases(record["says"]),
            record["reply"],
            record["mark"],
            float(record.get("weight", 1)),
            _pairs(record.get("slots", "")),
        )
        for record in records(name)
    )


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Slots with their lists: "l loved, n first_names"."""
    pairs = (pair.split() for pair in text.split(", ") if pair)
    return tuple((slot, words) for slot, words in pairs)


GREETINGS = exchanges("greetings")
HELLO, HOW_ARE_YOU = GREETINGS[:2]
MOODS = exchanges("moods")
SORROWS = SADNESS, DESPAIR, MOURNING, WEAKNESS = MOODS[:4]
EXCHANGES = (*GREETINGS, *MOODS)
ABOUT_ME = exchanges("about_me")


def play(scene: Scene) -> Turn:
    """Any exchange."""
    return any_of(scene, EXCHANGES)


def sorrow(scene: Scene) -> Turn:
    """The loss of a person or an animal, an illness, another sadness."""
    return exchange_turn(scene, scene.rng.choices(SORROWS, (0.35, 0.1, 0.4, 0.15))[0], Kind.BARE)


def about_me(scene: Scene) -> Turn:
    """One question about the model itself, answered honestly."""
    return any_of(scene, ABOUT_ME, Kind.QUESTION)


def mourning(scene: Scene) -> Turn:
    """The loss of a person or an animal."""
    return exchange_turn(scene, MOURNING, Kind.BARE)


def sadness(scene: Scene) -> Turn:
    """An illness, despair or another sadness."""
    return exchange_turn(scene, scene.rng.choices((SADNESS, DESPAIR), (8, 2))[0], Kind.BARE)


def greet(scene: Scene) -> Turn:
    """A first message."""
    return exchange_turn(scene, scene.rng.choices((HELLO, HOW_ARE_YOU), (4, 1))[0], Kind.BARE)


def any_of(scene: Scene, choices: tuple[Exchange, ...], kind: Kind = Kind.BARE) -> Turn:
    """One of these exchanges as a turn."""
    weights = [exchange.weight for exchange in choices]
    return exchange_turn(scene, scene.rng.choices(choices, weights)[0], kind)


def exchange_turn(scene: Scene, exchange: Exchange, kind: Kind) -> Turn:
    """One exchange as a turn."""
    slots = {slot: scene.plain(words) for slot, words in exchange.slots}
    user = scene.message(kind, exchange.says, **slots)
    skill = "sorrow" if exchange in SORROWS else "small talk"
    return Turn(user, exchange.reply, skill, all=((exchange.mark,),))

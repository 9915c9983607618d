"""A short exchange: something people say, and the polite reply. Knows no particular one."""

from dataclasses import dataclass

from demo_recipe.grammar import Phrases, Words
from demo_recipe.scene import Scene, Turn
from demo_recipe.voice import Kind


@dataclass(frozen=True, slots=True)
class Exchange:
    """What people say, what a good reply is, and a pattern every good reply matches.

    slots   the open slots of `says`, each with the words that fill it
    """

    says: Phrases
    reply: str
    mark: str
    weight: float = 1.0
    kind: Kind = Kind.BARE
    slots: tuple[tuple[str, Words], ...] = ()


def exchanged(scene: Scene, exchange: Exchange) -> Turn:
    """One exchange as a turn."""
    slots = {slot: scene.plain(words) for slot, words in exchange.slots}
    user = scene.message(exchange.kind, exchange.says, **slots)
    return Turn(user, exchange.reply, "small talk", all=((exchange.mark,),))


def any_of(scene: Scene, exchanges: tuple[Exchange, ...]) -> Turn:
    """One of these exchanges as a turn."""
    weights = [exchange.weight for exchange in exchanges]
    return exchanged(scene, scene.rng.choices(exchanges, weights)[0])

"""Days and months: order, neighbours, lengths. Knows how people ask; does not know today's date."""

from demo_recipe.dialogues.sources import MONTHS, NUMBER_WORDS, WEEKDAYS, ordinal
from demo_recipe.grammar import Phrases
from demo_recipe.scene import Scene, Turn
from demo_recipe.texts import WORDS, phrases
from demo_recipe.voice import Kind

SAYS = phrases("calendar")
LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ORDINAL_WORDS = WORDS["ordinal_words"].all

_SETS = {"day": WEEKDAYS, "month": MONTHS}
_WHOLE = {"day": "week", "month": "year"}


def play(scene: Scene) -> Turn:
    """One question about days or months."""
    makers = (after, before, everything, how_many, length, nth, position, weekend)
    return scene.rng.choices(makers, (5, 5, 1.5, 1, 2.5, 2.5, 1, 0.6))[0](scene)


def after(scene: Scene) -> Turn:
    kind, at = _pick(scene)
    names = _SETS[kind]
    phrases = SAYS["after_today"] if kind == "day" and scene.chance(0.25) else SAYS["after"]
    answer = names[(at + 1) % len(names)]
    return _turn(scene, phrases, f"After {names[at]} comes {answer}.", answer, k=kind, x=names[at])


def before(scene: Scene) -> Turn:
    kind, at = _pick(scene)
    names = _SETS[kind]
    phrases = SAYS["before_today"] if kind == "day" and scene.chance(0.25) else SAYS["before"]
    answer = names[at - 1]
    return _turn(scene, phrases, f"Before {names[at]} comes {answer}.", answer, k=kind, x=names[at])


def everything(scene: Scene) -> Turn:
    kind, _ = _pick(scene)
    listed = ", ".join(_SETS[kind])
    return _turn(scene, SAYS["list"], f"{listed}.", listed, k=kind, o=_WHOLE[kind])


def how_many(scene: Scene) -> Turn:
    kind, whole, number = scene.rng.choice(
        (("day", "week", 7), ("month", "year", 12), ("day", "year", 365))
    )
    reply = f"A {whole} has {number} {kind}s."
    return _turn(scene, SAYS["how_many"], reply, f"{number} {kind}s", k=kind, o=whole)


def length(scene: Scene) -> Turn:
    at = scene.rng.randrange(12)
    reply = f"{MONTHS[at]} has {LENGTHS[at]} days{', 29 in a leap year' if at == 1 else ''}."
    return _turn(scene, SAYS["length"], reply, f"{LENGTHS[at]} days", x=MONTHS[at])


def nth(scene: Scene) -> Turn:
    kind, at = _pick(scene)
    name = _SETS[kind][at]
    count = ORDINAL_WORDS[at] if scene.chance(0.6) else ordinal(at + 1)
    reply = f"{name} is the {ORDINAL_WORDS[at]} {kind} of the {_WHOLE[kind]}."
    number = str(at + 1) if scene.chance(0.6) else NUMBER_WORDS[at + 1]
    return _turn(scene, SAYS["nth"], reply, name, k=kind, o=_WHOLE[kind], n=count, m=number)


def position(scene: Scene) -> Turn:
    at = scene.rng.randrange(12)
    reply = f"{MONTHS[at]} is the {ORDINAL_WORDS[at]} month of the year."
    return _turn(
        scene, SAYS["position"], reply, ORDINAL_WORDS[at], x=MONTHS[at], n=ORDINAL_WORDS[at]
    )


def weekend(scene: Scene) -> Turn:
    reply = "The weekend is Saturday and Sunday."
    return _turn(scene, SAYS["weekend"], reply, "saturday and sunday")


def _pick(scene: Scene) -> tuple[str, int]:
    kind = scene.rng.choice(("day", "month"))
    return kind, scene.rng.randrange(len(_SETS[kind]))


def _turn(scene: Scene, phrases: Phrases, reply: str, answer: str, **slots: str) -> Turn:
    user = scene.message(Kind.QUESTION, phrases, **slots)
    return Turn(user, reply, "calendar", all=((answer,),))

"""Small arithmetic: sums and differences to 20, products to 10 times 10, comparing, counting.

All number pairs of this range are trained; what is held out is the phrasing. Larger numbers belong
to the fallback. Knows how people ask for sums; knows no chat.
"""

from collections.abc import Callable

from demo_recipe.dialogues.sources import NUMBER_WORDS, person
from demo_recipe.grammar import Phrases
from demo_recipe.scene import Scene, Turn, out_of_scope
from demo_recipe.texts import phrases
from demo_recipe.voice import Kind

SAYS = phrases("numbers")


def play(scene: Scene) -> list[Turn]:
    """One sum, sometimes with a follow-up that goes on from its result."""
    makers: tuple[Callable[[Scene], Turn], ...] = (plus, minus, times, compare, count, beyond)
    turn = scene.rng.choices(makers, (5, 3.5, 2, 1, 1, 1.5))[0](scene)
    return [turn, *_further(scene, turn)]


def plus(scene: Scene) -> Turn:
    a = scene.rng.randrange(21)
    b = scene.rng.randrange(21 - a)
    is_story = scene.chance(0.2) and min(a, b) > 0
    return _sum(scene, SAYS["plus_story" if is_story else "plus"], f"{a} + {b}", a + b, a, b)


def minus(scene: Scene) -> Turn:
    a = scene.rng.randrange(21)
    b = scene.rng.randrange(a + 1)
    is_story = scene.chance(0.2) and min(a, b) > 0
    return _sum(scene, SAYS["minus_story" if is_story else "minus"], f"{a} - {b}", a - b, a, b)


def times(scene: Scene) -> Turn:
    a, b = scene.rng.randrange(11), scene.rng.randrange(11)
    return _sum(scene, SAYS["times"], f"{a} * {b}", a * b, a, b)


def compare(scene: Scene) -> Turn:
    a, b = scene.rng.sample(range(101 if scene.chance(0.5) else 21), 2)
    reply = f"{max(a, b)} is greater than {min(a, b)}."
    user = scene.message(Kind.QUESTION, SAYS["compare"], a=str(a), b=str(b))
    return Turn(user, reply, "numbers", all=((f"{max(a, b)} is greater",),))


def count(scene: Scene) -> Turn:
    end = scene.rng.randrange(3, 21)
    numbers = [str(number) for number in range(1, end + 1)]
    is_down = scene.chance(0.35)
    user = scene.message(
        Kind.ORDER, SAYS["count_down"] if is_down else SAYS["count_up"], b=_number(scene, end)
    )
    listed = ", ".join(numbers[::-1] if is_down else numbers)
    return Turn(user, f"{listed}.", "numbers", all=((listed,),))


def beyond(scene: Scene) -> Turn:
    """A sum outside the range: too large, or below zero."""
    shape = scene.rng.randrange(4)
    a, b = scene.rng.randrange(2, 20), scene.rng.randrange(2, 20)
    if shape == 0:
        phrases, a = SAYS["plus"], scene.rng.randrange(26 - b, 26)
    elif shape == 1:
        phrases, a, b = SAYS["minus"], min(a, b), max(a, b) + 1
    elif shape == 2:
        phrases, a = SAYS["times"], a + 10
    else:
        phrases, a = scene.rng.choice((SAYS["plus"], SAYS["minus"])), scene.rng.randrange(21, 1000)
    slots = {"n": scene.value("counted"), "p": person(scene)}
    return out_of_scope(scene.message(Kind.QUESTION, phrases, a=str(a), b=str(b), **slots))


def _sum(scene: Scene, phrases: Phrases, sides: str, result: int, a: int, b: int) -> Turn:
    user = scene.message(
        Kind.QUESTION, phrases, a=_number(scene, a), b=_number(scene, b),
        n=scene.value("counted"), p=person(scene),
    )  # fmt: skip
    return Turn(user, f"{sides} = {result}.", "sum", all=((rf"\b{result}\b",),))


def _further(scene: Scene, turn: Turn) -> list[Turn]:
    if turn.skill != "sum" or not scene.chance(0.15):
        return []
    result = int(turn.reply.split(" = ")[1][:-1])
    if result > 20:
        return []
    is_more = scene.chance(0.6)
    b = scene.rng.randrange(21 - result if is_more else result + 1)
    user = scene.message(Kind.BARE, SAYS["more" if is_more else "less"], b=_number(scene, b))
    sign, total = ("+", result + b) if is_more else ("-", result - b)
    return [Turn(user, f"{result} {sign} {b} = {total}.", "sum", all=((rf"\b{total}\b",),))]


def _number(scene: Scene, number: int) -> str:
    return NUMBER_WORDS[number] if number <= 20 and scene.chance(0.12) else str(number)

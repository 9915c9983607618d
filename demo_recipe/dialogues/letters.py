"""Spelling, counting letters, reversing. The reply spells the word first and reads the answer off.

Knows how people ask about letters.
"""

from demo_recipe.grammar import Grade, Phrases
from demo_recipe.invented import any_word, coined_word
from demo_recipe.scene import Scene, Turn
from demo_recipe.texts import WORDS, phrases
from demo_recipe.voice import Kind, capitalise

SAYS = phrases("letters")
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
NUMBER_OF = ("never", "once", "twice", "3 times", "4 times", "5 times")


def play(scene: Scene) -> Turn:
    """One question about letters."""
    makers = (spell, reverse, count, first, last, occurs, neighbour, recite)
    return scene.rng.choices(makers, (5, 4, 4, 2, 2, 3, 1.5, 0.5))[0](scene)


def spell(scene: Scene) -> Turn:
    word = _word(scene)
    return _turn(scene, SAYS["spell"], word, "", rf": {_in_order(word)}")


def reverse(scene: Scene) -> Turn:
    word = _word(scene)
    backwards = word[::-1]
    result = f"Backwards: {letters_of(backwards)}."
    return _turn(scene, SAYS["reverse"], word, result, rf"backwards: {_in_order(backwards)}")


def count(scene: Scene) -> Turn:
    word = _word(scene)
    return _turn(
        scene, SAYS["count"], word, f"That is {len(word)} letters.", rf"\b{len(word)} letters"
    )


def first(scene: Scene) -> Turn:
    word = _word(scene)
    return _turn(scene, SAYS["first"], word, f"It starts with {word[0]}.", f"starts with {word[0]}")


def last(scene: Scene) -> Turn:
    word = _word(scene)
    return _turn(scene, SAYS["last"], word, f"It ends with {word[-1]}.", f"ends with {word[-1]}")


def occurs(scene: Scene) -> Turn:
    word = _word(scene)
    letter = scene.rng.choice(word) if scene.chance(0.75) else scene.rng.choice(ALPHABET)
    times = word.count(letter)
    result = f"{letter} is in it {NUMBER_OF[times]}" if times else f"There is no {letter} in it"
    result = capitalise(result)
    return _turn(scene, SAYS["occurs"], word, f"{result}.", result, c=letter)


def neighbour(scene: Scene) -> Turn:
    at = scene.rng.randrange(1, 25)
    direction, step = scene.rng.choice((("after", 1), ("before", -1)))
    letter, answer = ALPHABET[at], ALPHABET[at + step]
    link = "is followed by" if step == 1 else "comes after"
    reply = f"{letter.upper()} {link} {answer.upper()}."
    user = scene.message(Kind.QUESTION, SAYS["neighbour"], c=letter, d=direction)
    return Turn(user, reply, "letters", all=((rf"\b{answer}\b",),))


def recite(scene: Scene) -> Turn:
    user = scene.message(Kind.ORDER, SAYS["recite"])
    return Turn(user, f"{' '.join(ALPHABET)}.", "letters", all=(("x y z",),))


def letters_of(word: str) -> str:
    """The letters of a word, joined by spaces: one token each."""
    return " ".join(word)


def _word(scene: Scene) -> str:
    # The letters of a token are learnt from words that have it: training takes them from all lists.
    if scene.grade is Grade.TRAIN and scene.chance(0.4):
        return any_word(scene.rng)
    pick = scene.rng.random()
    if pick < 0.12:
        return coined_word(scene.rng, scene.grade)
    if pick < 0.2:
        return WORDS["first_names"].draw(scene.rng, scene.grade).lower()
    return (WORDS["animals"] if pick < 0.35 else WORDS["spelled"]).draw(scene.rng, scene.grade)


def _turn(
    scene: Scene, phrases: Phrases, word: str, result: str, answer: str, **slots: str
) -> Turn:
    """A question about a word; the reply spells it and then says what was `result`."""
    shown = word.capitalize() if not scene.voice.is_lower and scene.chance(0.08) else word
    if scene.chance(0.12):
        shown = f'"{shown}"'
    user = scene.message(Kind.QUESTION, phrases, w=shown, **slots)
    reply = f"{word}: {letters_of(word)}. {result}".strip()
    return Turn(user, reply, "letters", all=((answer,),))


def _in_order(word: str) -> str:
    return r"\W*".join(word) + r"\b"

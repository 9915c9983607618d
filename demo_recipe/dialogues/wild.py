"""Sentences of random words, passages and keyboard noise. Knows grammar, no meaning."""

from collections.abc import Callable

from demo_recipe.lexicon.coined import coined_word
from demo_recipe.scene import Scene
from demo_recipe.texts import phrases
from demo_recipe.voice import Kind, capitalise

SAYS = phrases("wild")

SIGNS = (
    "!",
    "?",
    "...",
    "???",
    "!!!",
    ".",
    "#",
    "%%",
    ":)",
    ":-(",
    "<>",
    "{}",
    "[]",
    "()",
    "+-",
    "&",
    "😀",
    "👍",
    "🤔",
    "❤️",
)


def sentence(scene: Scene, is_question: bool | None = None) -> str:
    """A grammatical question or statement about nothing."""
    asks = scene.chance(0.8) if is_question is None else is_question
    slots = {
        "n": _thing(scene), "m": _thing(scene), "v": scene.value("verbs"),
        "a": scene.value("adjectives"), "c": scene.value("cities"),
    }  # fmt: skip
    if asks:
        return scene.message(Kind.QUESTION, SAYS["questions"], **slots)
    text = scene.draw(SAYS["statements"], **slots)
    return (text if scene.voice.is_lower else capitalise(text)) + "."


def passage_with_request(scene: Scene) -> str:
    """A passage with a request before or after it."""
    passage = " ".join(sentence(scene, is_question=False) for _ in range(scene.rng.randrange(1, 5)))
    chore = scene.message(Kind.ORDER, SAYS["chores"])
    mark = scene.rng.choice((": ", "\n", "\n\n", " - ", ':\n"'))
    return f"{chore}{mark}{passage}" if scene.chance(0.6) else f"{passage}{mark}{chore}"


def noise(scene: Scene) -> str:
    """Keys hit at random, signs, or a lone word that means nothing."""
    makers: tuple[Callable[[Scene], str], ...] = (_keys, _signs, _nonsense, _row)
    return scene.rng.choice(makers)(scene)


def _thing(scene: Scene) -> str:
    pick = scene.rng.random()
    if pick < 0.1:
        return coined_word(scene.rng, scene.grade)
    if pick < 0.15:
        return scene.value("topics").removeprefix("the ")
    return scene.value(scene.rng.choice(("nouns", "animals", "objects", "jobs", "foods")))


def _keys(scene: Scene) -> str:
    letters = "asdfghjklqwertyuiopzxcvbnm"
    return "".join(scene.rng.choice(letters) for _ in range(scene.rng.randrange(3, 18)))


def _signs(scene: Scene) -> str:
    return "".join(scene.rng.choice(SIGNS) for _ in range(scene.rng.randrange(1, 4)))


def _nonsense(scene: Scene) -> str:
    words = (coined_word(scene.rng, scene.grade) for _ in range(scene.rng.randrange(1, 6)))
    return scene.voice.finish(" ".join(words), Kind.BARE, scene.rng)


def _row(scene: Scene) -> str:
    start = scene.rng.randrange(8)
    return "asdfghjkl;qwertyuiop"[start : start + scene.rng.randrange(3, 9)] * scene.rng.randrange(
        1, 3
    )

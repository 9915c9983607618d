"""Sentences of random words, passages and keyboard noise. Knows grammar, no meaning."""

from demo_recipe.invented import coined_word
from demo_recipe.scene import Scene
from demo_recipe.texts import phrases
from demo_recipe.voice import Kind, capitalise

SAYS = phrases("wild")

KEYS = "asdfghjklqwertyuiopzxcvbnm"
SIGNS = (
    "!", "?", "...", "???", "!!!", ".", "#", "%%", ":)", ":-(", "<>", "{}", "[]", "()", "+-", "&",
    "😀", "👍", "🤔", "❤️",
)  # fmt: skip


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
    """Keys hit at random, signs, words that mean nothing, or a row of keys."""
    rng = scene.rng
    kind = rng.randrange(4)
    if kind == 0:
        return "".join(rng.choice(KEYS) for _ in range(rng.randrange(3, 18)))
    if kind == 1:
        return "".join(rng.choice(SIGNS) for _ in range(rng.randrange(1, 4)))
    if kind == 2:
        words = (coined_word(rng, scene.grade) for _ in range(rng.randrange(1, 6)))
        return scene.voice.finish(" ".join(words), Kind.BARE, rng)
    start = rng.randrange(8)
    return "asdfghjkl;qwertyuiop"[start : start + rng.randrange(3, 9)] * rng.randrange(1, 3)


def _thing(scene: Scene) -> str:
    pick = scene.rng.random()
    if pick < 0.1:
        return coined_word(scene.rng, scene.grade)
    if pick < 0.15:
        return scene.value("topics").removeprefix("the ")
    return scene.value(scene.rng.choice(("nouns", "animals", "objects", "jobs", "foods")))

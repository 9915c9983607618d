"""Sentences of random words, pasted passages and keyboard noise. Knows grammar, no meaning."""

from collections.abc import Callable

from demo_recipe.dialogues.sources import ADJECTIVES, NOUNS
from demo_recipe.grammar import Phrases
from demo_recipe.lexicon.coined import coined_word
from demo_recipe.lexicon.people import JOBS
from demo_recipe.lexicon.places import CITIES
from demo_recipe.lexicon.things import ANIMALS, FOODS, OBJECTS
from demo_recipe.lexicon.topics import TOPICS, VERBS
from demo_recipe.scene import Scene
from demo_recipe.voice import Kind, capitalised

QUESTIONS = Phrases("""
    why (do|did|would|can't|don't) {n}s {v} [the] {m}s
    how (do|did|can|many|often do) {n}s {v} [the] {m}s
    when (do|did|will) the {n} {v} the {m}
    who (can|will|would|could) {v} the {a} {n}
    where (do|can|will) {n}s {v} (in winter|at night|in {c}|best)
    (is|was) the {n} (more|less) {a} than the {m}
    (do|does|did|can|will) (the|a) {n} {v} (the|a) {m}
    what (happens|would happen) if a {n} (meets|becomes|eats|wears) a {m}
    which {n} (is|was) the (first|best|oldest|fastest) to {v} in {c}
    how (long|far|fast|high|deep|old|heavy) (is|can) (a|the) {n} [get]
    (are|were) {n}s (always|ever|really|often) {a}
    what (color|shape|size|kind) (is|of) a {n}
    (should|must|may) a {n} {v} before the {m}
    how much (does a {n} cost|is a {n}) in {c}
    who (invented|discovered|made|sells|owns) the {n}
    can you (imagine|describe|find|compare) the {a} {n}
    what do {n}s and {m}s have in common
    if a {n} can {v}, (why|how|when) (does|can) the {m} {v} too
""")
STATEMENTS = Phrases("""
    the {a} {n} (wants|needs|likes|tries) to {v} near the {m}
    (yesterday|today|last year|in {c}) a {n} (met|saw|found|lost) a {m}
    (many|some|few|most) {n}s {v} (at night|in summer|in {c}|every day)
    there (is|was) a {a} {n} between the {m} and the river
    a {n} is not a {m}
    {n}s are (often|rarely|never) {a}
    the {n} of the {m} was {a} and (old|new|broken|rare)
    in {c} every {n} has a {m}
""")
CHORES = Phrases("""
    summarize (this|the text|the following text|the passage above|it in one sentence)
    translate (this|the text|the following|it) into (french|german|spanish|chinese|latin)
    (what is the|find the) (main idea|topic|author's opinion|conclusion) [of this text]
    (rewrite|improve|shorten|simplify|correct|proofread) (this|this text|the following|
        the paragraph)
    (answer|solve) the question using (this text|the context)
    (classify|rate) the (sentiment|tone|topic) of this [text|review]
    (explain|analyse|analyze|interpret) this [text|paragraph|passage]
    (extract|list) (all|the) (names|places|dates|keywords|nouns) (from this|from the text)
    what happens next
    is this (true|correct|good english|a good text|positive or negative)
    (turn|convert) this into (a table|json|bullet points|a formal letter)
    continue this text
""")
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
        "n": _thing(scene), "m": _thing(scene), "v": scene.value(VERBS),
        "a": scene.value(ADJECTIVES), "c": scene.value(CITIES),
    }  # fmt: skip
    if asks:
        return scene.message(Kind.QUESTION, QUESTIONS, **slots)
    text = scene.draw(STATEMENTS, **slots)
    return (text if scene.voice.is_lower else capitalised(text)) + "."


def pasted(scene: Scene) -> str:
    """A passage with a request before or after it."""
    passage = " ".join(sentence(scene, is_question=False) for _ in range(scene.rng.randrange(1, 5)))
    chore = scene.message(Kind.ORDER, CHORES)
    mark = scene.rng.choice((": ", "\n", "\n\n", " - ", ':\n"'))
    return f"{chore}{mark}{passage}" if scene.chance(0.6) else f"{passage}{mark}{chore}"


def mashed(scene: Scene) -> str:
    """Keys hit at random, signs, or a lone word that means nothing."""
    makers: tuple[Callable[[Scene], str], ...] = (_keys, _signs, _nonsense, _row)
    return scene.rng.choice(makers)(scene)


def _thing(scene: Scene) -> str:
    pick = scene.rng.random()
    if pick < 0.1:
        return coined_word(scene.rng, scene.grade)
    if pick < 0.15:
        return scene.value(TOPICS).removeprefix("the ")
    return scene.value(scene.rng.choice((NOUNS, ANIMALS, OBJECTS, JOBS, FOODS)))


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

"""Four-line poems around the words the user gives. Knows how poems are asked for and made."""

from dataclasses import replace

from demo_recipe.dialogues.sources import NOUNS
from demo_recipe.grammar import Phrases, Words
from demo_recipe.lexicon.coined import coined_word
from demo_recipe.lexicon.things import ANIMALS
from demo_recipe.scene import Scene, Turn
from demo_recipe.voice import Kind, capitalised

ASKS = Phrases("""
    (write|make|compose|create|give|tell) me a poem about {x}
    (write|make|compose|create) a poem about {x}
    (write|make|compose|give|tell) me a (short|little|nice|funny|small|lovely) poem about {x}
    (write|make|compose) a (short|little|nice|funny|small|simple) poem about {x}
    a poem about {x}
    a (short|little|nice) poem about {x}
    poem about {x}
    (I want|I'd like|I would like|I need) a [short|little] poem about {x}
    (can|could|will) you (write|make) a [short|little] poem about {x}
    do you know a [short|nice] poem about {x}
    (come up with|invent) a [short] poem about {x}
    (some|a few) (verses|rhymes|lines of poetry) about {x}
    (write|give) me (some|a few|four) (verses|rhymes|lines) about {x}
    a rhyme about {x}
    (write|make|tell) [me] a rhyme about {x}
    make {x} rhyme
    be a poet and write about {x}
    (turn|put) {x} into a poem
    let me hear a poem about {x}
    (write|make) [me] some poetry about {x}
    poetry about {x} please
""")
ASKS_ANY = Phrases("""
    (write|make|compose|give|tell) me a poem
    (write|make|compose) a poem
    (write|make|tell) me a (short|little|nice|funny) poem
    (can|could|will) you (write|make) [me] a poem
    do you know a poem
    a poem please
    I want a poem
    (I'd like|I would like) a [short] poem
    (write|tell) me (another|one more) poem
    say something poetic
    some poetry please
    do you write poems
    make a rhyme
    rhyme something for me
""")
MOODS = Words("""
    rain, snow, wind, winter, summer, spring, autumn, love, friendship, music, night, sunshine,
        silence, home,
    sleep, moonlight, thunder, fog, freedom, hope, time, water, fire, bread, coffee, tea,
        chocolate, school,
    work, rivers, stars, clouds, flowers, trees, birds, cats, dogs, mountains, dreams, trains,
        books, colours,
    shadows, letters, mornings, holidays, candles, honey, frost, dust
""")
VERSES = (
    ("When {x} came softly to my door,", "I smiled and could not ask for more.",
     "The evening hummed a quiet tune,", "and sang of {x} to the moon."),
    ("I thought of {x} all day long", "and turned the thought into a song.",
     "The song was short, the day was bright,", "and {x} stayed with me till night."),
    ("Oh {x}, you are dear to me,", "as dear as water to the sea.",
     "Whatever else the year may bring,", "of {x} I will always sing."),
    ("The world is wide, the road is steep,", "and {x} will come to me in sleep.",
     "I wake and look around once more:", "I hear of {x} at my door."),
    ("A little light, a little air,", "and {x} waiting on the stair.",
     "I did not know, I could not guess", "how {x} could bring such happiness."),
)  # fmt: skip
PAIRED = (
    ("I saw {x} pass by one day", "and {y} was not far away.",
     "They met, they laughed, they said goodbye", "beneath a wide and silver sky."),
    ("Here is {x}, there is {y},", "one is low and one is high.",
     "Put the two in one small rhyme", "and they will last for a long time."),
)  # fmt: skip
SECOND = (
    "And when the night is at an end,\nI count {x} as my friend.",
    "And if you ask me where to go,\nI say that {x} ought to know.",
    "So close the book and dim the light,\nlet {x} say to you good night.",
)


def play(scene: Scene) -> Turn:
    """One poem, about given words or about anything."""
    asked, topic = _topic(scene)
    if scene.chance(0.15):
        made = _made(scene, scene.message(Kind.ORDER, ASKS_ANY), topic, None)
        return replace(made, all=())
    if scene.chance(0.15):
        other_asked, other = _topic(scene)
        user = scene.message(Kind.ORDER, ASKS, x=f"{asked} and {other_asked}")
        return _made(scene, user, topic, other)
    return _made(scene, scene.message(Kind.ORDER, ASKS, x=asked), topic, None)


def _topic(scene: Scene) -> tuple[str, str]:
    """The topic as asked for and as the poem names it."""
    pick = scene.rng.random()
    if pick < 0.5:
        mood = scene.value(MOODS)
        return mood, mood
    if pick < 0.56:
        word = coined_word(scene.rng, scene.grade)
        return word, word
    noun = scene.value(ANIMALS if pick < 0.78 else NOUNS)
    article = scene.rng.choice(("the", "the", "an" if noun[0] in "aeiou" else "a", "my"))
    return f"{article} {noun}", f"the {noun}"


def _made(scene: Scene, user: str, topic: str, other: str | None) -> Turn:
    lines = scene.rng.choice(PAIRED if other else VERSES)
    text = "\n".join(capitalised(line.format(x=topic, y=other)) for line in lines)
    words = [topic.removeprefix("the ")] + ([other.removeprefix("the ")] if other else [])
    more = "\n".join(
        capitalised(line) for line in scene.rng.choice(SECOND).format(x=topic).split("\n")
    )
    brief = f"it is a small rhyme about {topic}{f' and {other}' if other else ''}."
    return Turn(user, text, "poem", all=tuple((word,) for word in words), more=more, brief=brief)

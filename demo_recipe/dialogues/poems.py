"""Four-line poems around the words the user gives. Knows how poems are asked for and made."""

from dataclasses import replace

from demo_recipe.lexicon.coined import coined_word
from demo_recipe.scene import Scene, Turn
from demo_recipe.texts import phrases
from demo_recipe.voice import Kind, capitalise

SAYS = phrases("poems")

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
        made = _made(scene, scene.message(Kind.ORDER, SAYS["asks_any"]), topic, None)
        return replace(made, all=())
    if scene.chance(0.15):
        other_asked, other = _topic(scene)
        user = scene.message(Kind.ORDER, SAYS["asks"], x=f"{asked} and {other_asked}")
        return _made(scene, user, topic, other)
    return _made(scene, scene.message(Kind.ORDER, SAYS["asks"], x=asked), topic, None)


def _topic(scene: Scene) -> tuple[str, str]:
    """The topic as asked for and as the poem names it."""
    pick = scene.rng.random()
    if pick < 0.5:
        mood = scene.value("moods")
        return mood, mood
    if pick < 0.56:
        word = coined_word(scene.rng, scene.grade)
        return word, word
    noun = scene.value("animals" if pick < 0.78 else "nouns")
    article = scene.rng.choice(("the", "the", "an" if noun[0] in "aeiou" else "a", "my"))
    return f"{article} {noun}", f"the {noun}"


def _made(scene: Scene, user: str, topic: str, other: str | None) -> Turn:
    lines = scene.rng.choice(PAIRED if other else VERSES)
    text = "\n".join(capitalise(line.format(x=topic, y=other)) for line in lines)
    words = [topic.removeprefix("the ")] + ([other.removeprefix("the ")] if other else [])
    more = "\n".join(
        capitalise(line) for line in scene.rng.choice(SECOND).format(x=topic).split("\n")
    )
    brief = f"it is a small rhyme about {topic}{f' and {other}' if other else ''}."
    return Turn(user, text, "poem", all=tuple((word,) for word in words), more=more, brief=brief)

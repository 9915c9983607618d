"""Four-line poems around the words the user gives. Knows how poems are asked for and made."""

from dataclasses import replace

from demo_recipe.invented import coined_word
from demo_recipe.scene import Scene, Turn
from demo_recipe.texts import parts, phrases
from demo_recipe.voice import Kind, capitalise

SAYS = phrases("poems")


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
    text = _verse(scene, "paired_verses" if other else "verses", topic, other)
    words = [topic.removeprefix("the ")] + ([other.removeprefix("the ")] if other else [])
    more = _verse(scene, "more_verses", topic, other)
    brief = f"it is a small rhyme about {topic}{f' and {other}' if other else ''}."
    return Turn(user, text, "poem", all=tuple((word,) for word in words), more=more, brief=brief)


def _verse(scene: Scene, kind: str, topic: str, other: str | None) -> str:
    lines = scene.rng.choice(parts(kind)).split(" / ")
    return "\n".join(capitalise(line.format(x=topic, y=other)) for line in lines)

"""Small talk of all kinds, and the first message of a chat. Knows nothing of kvchat."""

from demo_recipe.dialogues.exchange import any_of, exchanged
from demo_recipe.dialogues.greetings import GREETINGS, HELLO, HOW_ARE_YOU
from demo_recipe.dialogues.moods import MOODS
from demo_recipe.scene import Scene, Turn

EXCHANGES = (*GREETINGS, *MOODS)


def play(scene: Scene) -> Turn:
    """Any exchange."""
    return any_of(scene, EXCHANGES)


def greet(scene: Scene) -> Turn:
    """A first message."""
    return exchanged(scene, scene.rng.choices((HELLO, HOW_ARE_YOU), (4, 1))[0])

"""Small talk of all kinds, and the first message of a chat. Knows nothing of kvchat."""

from kvchat.demo.dialogues.exchange import any_of, exchanged
from kvchat.demo.dialogues.greetings import GREETINGS, HELLO, HOW_ARE_YOU
from kvchat.demo.dialogues.moods import MOODS
from kvchat.demo.scene import Scene, Turn

EXCHANGES = (*GREETINGS, *MOODS)


def play(scene: Scene) -> Turn:
    """Any exchange."""
    return any_of(scene, EXCHANGES)


def greet(scene: Scene) -> Turn:
    """A first message."""
    return exchanged(scene, scene.rng.choices((HELLO, HOW_ARE_YOU), (4, 1))[0])

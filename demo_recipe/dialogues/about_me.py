"""Questions about the model itself, answered honestly. Knows what the demo model is and is not."""

from demo_recipe.dialogues.smalltalk import any_of, exchanges
from demo_recipe.scene import Scene, Turn
from demo_recipe.voice import Kind

EXCHANGES = exchanges("about_me")


def play(scene: Scene) -> Turn:
    """One question about the model."""
    return any_of(scene, EXCHANGES, Kind.QUESTION)

"""The one sentence for everything the demo model cannot do. Knows no prompt."""

from demo_recipe.scene import Turn

FALLBACK = (
    "I can't help with that: I am only a tiny demo model. "
    "Start a real one with `kvchat --model <hub id or directory>`."
)


def out_of_scope(user: str) -> Turn:
    """The turn in which `user` asks for something out of scope."""
    return Turn(user, FALLBACK, "fallback", all=((r"kvchat --model <hub id or directory>",),))

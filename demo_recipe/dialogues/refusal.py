"""What the demo model says to everything it cannot do. Knows no prompt."""

from demo_recipe.scene import Scene, Turn

REAL_MODEL = "`kvchat --model <hub id or directory>`"
# Said alike they would bore: each names a way to a real model.
REFUSALS = (
    f"I can't help with that: I am only a tiny demo model. Start a real one with {REAL_MODEL}.",
    f"That is beyond a tiny demo model. /model lists real ones, and {REAL_MODEL} starts one.",
    f"I am too small for that. Type /model to use another model, or start {REAL_MODEL}.",
)
# The shipped pair says the first alone. Taught with shares of 0.4, 0.3 and 0.3 in the fourteenth
# round, the other two were 71% of its first loss, and it forgot to refuse lists.
WEIGHTS = (1.0, 0.0, 0.0)


def out_of_scope(scene: Scene, user: str) -> Turn:
    """The turn in which `user` asks for something out of scope."""
    reply = scene.rng.choices(REFUSALS, WEIGHTS)[0]
    return Turn(user, reply, "fallback", all=((r"kvchat --model <hub id or directory>",),))

"""Everything the demo model knows about kvchat. Knows the topics; knows no chat."""

from demo_recipe.dialogues.knowledge.commands_engine import COMMANDS_ENGINE
from demo_recipe.dialogues.knowledge.commands_input import COMMANDS_INPUT
from demo_recipe.dialogues.knowledge.commands_turns import COMMANDS_TURNS
from demo_recipe.dialogues.knowledge.concepts import CONCEPTS
from demo_recipe.dialogues.knowledge.flags import FLAGS
from demo_recipe.dialogues.knowledge.memory import MEMORY
from demo_recipe.dialogues.knowledge.topic import Topic, asked
from demo_recipe.dialogues.knowledge.using import USING
from demo_recipe.scene import Scene, Turn

TOPICS: tuple[Topic, ...] = (
    *MEMORY,
    *CONCEPTS,
    *COMMANDS_TURNS,
    *COMMANDS_INPUT,
    *COMMANDS_ENGINE,
    *FLAGS,
    *USING,
)


def play(scene: Scene) -> Turn:
    """One question about kvchat."""
    return asked(scene, scene.rng.choices(TOPICS, [topic.weight for topic in TOPICS])[0])

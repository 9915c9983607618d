"""Everything the demo model knows about kvchat. Knows the topics; knows no chat."""

from kvchat.demo.dialogues.knowledge.commands_engine import COMMANDS_ENGINE
from kvchat.demo.dialogues.knowledge.commands_input import COMMANDS_INPUT
from kvchat.demo.dialogues.knowledge.commands_turns import COMMANDS_TURNS
from kvchat.demo.dialogues.knowledge.concepts import CONCEPTS
from kvchat.demo.dialogues.knowledge.flags import FLAGS
from kvchat.demo.dialogues.knowledge.memory import MEMORY
from kvchat.demo.dialogues.knowledge.topic import Topic, asked
from kvchat.demo.dialogues.knowledge.using import USING
from kvchat.demo.scene import Scene, Turn

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

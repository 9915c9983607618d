"""Questions about kvchat. What is asked and what is true stands in `texts/topics.txt`."""

from dataclasses import dataclass

from demo_recipe.grammar import Phrases
from demo_recipe.scene import Scene, Turn
from demo_recipe.texts import Record, phrases, records
from demo_recipe.voice import Kind

SAYS = phrases("topic")
WHAT_IS, HOW_TO = SAYS["what_is"], SAYS["how_to"]  # frames that fit any topic
WAYS = ("names", "tasks", "questions")


@dataclass(frozen=True, slots=True)
class Topic:
    """What can be asked, and what is true.

    more, brief  what "go on" adds to the answer, and the answer in a few words
    is_late      whether the last stages alone learnt it
    must         groups of patterns a right answer matches; never: patterns it does not
    asks         by way of asking: noun phrases for "what is ..." (names), verb phrases for "how do
                 I ..." (tasks), and whole questions that fit no frame (questions)
    """

    answer: str
    more: str
    brief: str
    must: tuple[tuple[str, ...], ...]
    never: tuple[str, ...]
    asks: dict[str, Phrases]
    weight: float
    is_late: bool


def _topic(record: Record) -> Topic:
    """A topic; `must` separates its groups by "&" and alternatives by "|"."""
    return Topic(
        record["answer"],
        record["more"],
        record["brief"],
        tuple(tuple(group.split("|")) for group in record["must"].split("&")),
        tuple(record["never"].split("|")) if "never" in record else (),
        {way: Phrases(record[way]) for way in WAYS if way in record},
        float(record.get("weight", 1)),
        "since" in record,
    )


TOPICS = tuple(_topic(record) for record in records("topics"))
LATE = tuple(topic for topic in TOPICS if topic.is_late)


def play(scene: Scene) -> Turn:
    """One question about kvchat."""
    return topic_turn(scene, scene.rng.choices(TOPICS, [topic.weight for topic in TOPICS])[0])


def play_late(scene: Scene) -> Turn:
    """One question about what came last to kvchat."""
    return topic_turn(scene, scene.rng.choice(LATE))


def topic_turn(scene: Scene, topic: Topic) -> Turn:
    """One question about a topic."""
    way = scene.rng.choice(tuple(topic.asks))
    if way == "names":
        user = scene.message(Kind.QUESTION, WHAT_IS, n=scene.draw(topic.asks[way]))
    elif way == "tasks":
        user = scene.message(Kind.QUESTION, HOW_TO, t=scene.draw(topic.asks[way]))
    else:
        user = scene.message(Kind.QUESTION, topic.asks[way])
    return Turn(
        user, topic.answer, "kvchat", topic.must, topic.never, more=topic.more, brief=topic.brief
    )

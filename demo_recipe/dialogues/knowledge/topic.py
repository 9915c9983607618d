"""A thing people ask about kvchat, and the ways of asking for it.

Knows the frames that fit any topic. The topics themselves, and with them everything the demo model
says about the program, are in the sibling modules and follow the program's own help.
"""

from dataclasses import dataclass, field

from demo_recipe.grammar import Phrases
from demo_recipe.scene import Scene, Turn
from demo_recipe.voice import Kind

WHAT_IS = Phrases("""
    what is {n}
    what's {n}
    what does {n} (do|mean|stand for)
    what is {n} (for|good for|about|used for|exactly)
    what is meant by {n}
    explain {n}
    explain {n} [to me|simply|briefly|in simple words|in one sentence|please|for beginners|quickly]
    (can|could|would) you explain {n} [to me|briefly|simply]
    (tell|teach) me (about|what you know about|something about|more about) {n}
    (tell me|do you know|I want to know|I'd like to know|can you tell me|I don't know|
        I wonder) what {n} (is|does|means|is for)
    (how|how exactly) does {n} work
    {n}
    (and|so|ok|now) {n}
    (what about|how about|and what about) {n}
    (describe|define|clarify) {n}
    why (is there|do we need|would I use|do you use|should I use|does kvchat have) {n}
    what do you know about {n}
    (when|why) (should|would|do) I (use|need) {n}
    what (can I do|do I do) with {n}
    (I don't understand|I never heard of|I am confused by|I'm curious about|I have a question about|
        help me understand|I read about) {n}
    (give me|I need) (a short explanation|an explanation|the definition|a definition|the meaning|
        details|information|info) (of|on|about) {n}
    (meaning|definition|purpose|use) of {n}
    (what is|what's) the (meaning|definition|purpose|use|point|idea|role) of {n}
    (what happens|what will happen|what changes) (with|when I use|if I use|if I type) {n}
    (does|is) {n} (useful|important|help|do anything)
    {n} in (kvchat|simple words|a nutshell|short|one sentence)
    how (do|can) I use {n}
    (who|what) needs {n}
    {n}, (what is that|what does it mean|explain|please explain|what is it)
""")
HOW_TO = Phrases("""
    how (do|can|could|would|should|may) I {t}
    how (do|can) (you|we) {t}
    how to {t}
    (is it possible|am I able|is there a way|is there any way|is there an option|
        is there a possibility) to {t}
    (can|could|may) I {t} [here|somehow|in kvchat|with kvchat]
    (can|does) (kvchat|it|this program) [let me] {t}
    I (want|need|would like|have|am trying|am going|wish) to {t}
    I'd (like|love) to {t}
    (tell|show|teach) me how to {t}
    (do you know|can you tell me|could you tell me|can you show me|please explain|explain|
        I don't know|I forgot|I wonder) how (to|I can|I) {t}
    (what|which) (command|key|option|setting) (do I use|do I need|should I use|is there) to {t}
    (what|which) (command|flag|option) (lets me|would|can) {t}
    what (do I|should I|must I) (type|enter|write|press|do|run|use) to {t}
    what is the (command|option|way|best way|right way|trick) to {t}
    what's the (command|option|way|best way) to {t}
    (the|a) (command|way|option) to {t}
    command to {t}
    {t}
    {t}, how
    {t} - how does that work
    please {t}
    (help me|let me|let's|I must|we need to|now I want to|I wish I could) {t}
    what if I want to {t}
    (suppose|say|assume) I want to {t}
    (where|when) (do|can) I {t}
    (in kvchat|with kvchat|here), how do I {t}
    is (there a|a) (command|flag|key|setting) to {t}
    (what|how) (exactly|about) (if I want to|when I want to|to) {t}
    how would one {t}
    (steps|instructions|help) to {t}
    I can't (figure out how to|find how to|manage to|) {t}
    (why can't I|how come I can't) {t}
""")


@dataclass(frozen=True, slots=True)
class Topic:
    """What can be asked, and what is true.

    names      noun phrases for "what is ..."
    tasks      verb phrases for "how do I ..."
    questions  whole questions that fit no frame
    must       groups of patterns a right answer matches; never: patterns it does not
    """

    answer: str
    more: str
    brief: str
    must: tuple[tuple[str, ...], ...]
    names: Phrases | None = None
    tasks: Phrases | None = None
    questions: Phrases | None = None
    never: tuple[str, ...] = ()
    weight: float = 1.0
    ways: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        given = (("names", self.names), ("tasks", self.tasks), ("questions", self.questions))
        object.__setattr__(self, "ways", tuple(name for name, phrases in given if phrases))


def asked(scene: Scene, topic: Topic) -> Turn:
    """One question about a topic."""
    way = scene.rng.choice(topic.ways)
    if way == "names" and topic.names:
        user = scene.message(Kind.QUESTION, WHAT_IS, n=scene.draw(topic.names))
    elif way == "tasks" and topic.tasks:
        user = scene.message(Kind.QUESTION, HOW_TO, t=scene.draw(topic.tasks))
    else:
        assert topic.questions is not None, topic.answer
        user = scene.message(Kind.QUESTION, topic.questions)
    return Turn(
        user, topic.answer, "kvchat", topic.must, topic.never, more=topic.more, brief=topic.brief
    )


def topic(
    answer: str,
    more: str,
    brief: str,
    must: str,
    *,
    names: str = "",
    tasks: str = "",
    questions: str = "",
    never: str = "",
    weight: float = 1.0,
) -> Topic:
    """A `Topic` from plain strings; `must` separates its groups by "&" and alternatives by "|"."""
    return Topic(
        answer,
        more,
        brief,
        tuple(tuple(group.strip().split("|")) for group in must.split("&")),
        Phrases(names) if names else None,
        Phrases(tasks) if tasks else None,
        Phrases(questions) if questions else None,
        tuple(never.split("|")) if never else (),
        weight,
    )

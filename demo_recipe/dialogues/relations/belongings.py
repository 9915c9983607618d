"""Favourites, where things are, when things begin. Knows how it is told and asked."""

from collections.abc import Callable

from demo_recipe.dialogues.sources import (
    NOUNS,
    city,
    clock_time,
    from_words,
    number,
    odd_thing,
    person,
    weekday,
)
from demo_recipe.facts import Relation, Slots
from demo_recipe.grammar import Phrases, Words
from demo_recipe.lexicon.places import SPOTS
from demo_recipe.lexicon.things import COLOURS, FOODS, OBJECTS, PETS, SPORTS
from demo_recipe.scene import Scene

_FAVOURITES: tuple[tuple[str, Callable[[Scene], str]], ...] = (
    ("colour", from_words(COLOURS)),
    ("color", from_words(COLOURS)),
    ("food", from_words(FOODS)),
    ("dish", from_words(FOODS)),
    ("snack", from_words(FOODS)),
    ("fruit", from_words(FOODS)),
    ("dessert", from_words(FOODS)),
    ("animal", from_words(PETS)),
    ("sport", from_words(SPORTS)),
    ("city", city),
    ("day", weekday),
    ("number", number),
    ("band", lambda scene: scene.name(NOUNS, 0.6)),
    ("singer", person),
    ("book", odd_thing),
    ("film", odd_thing),
    ("movie", odd_thing),
    ("game", odd_thing),
    ("song", odd_thing),
    ("word", odd_thing),
    ("toy", from_words(NOUNS)),
)


def _favourite_noun(scene: Scene) -> Slots:
    noun = scene.rng.choice(_FAVOURITES)[0] if scene.chance(0.85) else scene.value(NOUNS)
    return {"a": noun, "f": scene.rng.choice(("favourite", "favorite"))}


FAVOURITE = Relation(
    key="favourite {a}",
    tells=Phrases("""
        my {f} {a} is {v}
        my {f} {a}: {v}
        {v} is my {f} {a}
        {v} is the {a} I like (best|most)
        the {a} I (like|love) (best|most) is {v}
        my best-loved {a} is {v}
        I like {v} best of all {a}s
        of all {a}s I (like|love|prefer) {v}
        I (choose|prefer|pick) {v} as a {a}
        when it comes to a {a}, I (prefer|like) {v}
        my {f} {a} has always been {v}
        my all-time {f} {a} is {v}
        as a {a} nothing beats {v}
        the best {a} for me is {v}
        for me the best {a} is {v}
    """),
    asks=Phrases("""
        what is my {f} {a}
        what's my {f} {a}
        what was my {f} {a} [again]
        (which|what) {a} do I (like|love) (best|most)
        (which|what) {a} do I prefer
        (which|what) {a} is my {f} [one]
        my {f} {a}
        what {a} did I say I (like|prefer|love)
        what did I say my {f} {a} (is|was)
        (which|what) is my {f} {a}
        (give|tell|show) me my {f} {a}
        (name|say|guess|recall) my {f} {a}
        (which|what) {a} would I (choose|pick|want)
        do I have a {f} {a}
        the {a} I like best is (what|which)
        what about my {f} {a}
    """),
    indirect=Phrases("""
        my {f} {a}
        what my {f} {a} is
        (which|what) {a} I (like|love) (best|most)
        (which|what) {a} I prefer
        the {a} I like (best|most)
    """),
    clause="your favourite {a} is {v}",
    gap="your favourite {a}",
    subject=_favourite_noun,
    value=lambda scene: scene.rng.choice(_FAVOURITES)[1](scene),
)

PLURAL = ("keys", "glasses", "headphones", "scissors", "gloves")


def _object(scene: Scene) -> Slots:
    thing = scene.value(OBJECTS) if scene.chance(0.8) else scene.value(NOUNS)
    return {"a": thing, "is": "are" if thing in PLURAL else "is"}


WHEREABOUTS = Relation(
    key="place of {a}",
    tells=Phrases("""
        my {a} {is} {v}
        I (put|left|hid|placed|keep|store) my {a} {v}
        I've (put|left|hidden|placed) my {a} {v}
        you (can find|find) my {a} {v}
        my {a} (can be found|was left|was hidden) {v}
        I found my {a} {v}
        {v} {is} my {a}
        the place of my {a} is {v}
        I (always|usually) (keep|put|leave) my {a} {v}
        my {a} (lies|lie|sits|sit) {v}
        the {a}, I left it {v}
        I just put my {a} {v}
    """),
    asks=Phrases("""
        where {is} my {a}
        where did I (put|leave|hide|place) my {a}
        where do I (keep|store|find) my {a}
        where can I find my {a}
        where have I (put|left|hidden) my {a}
        where should I look for my {a}
        in (what|which) place {is} my {a}
        (help me find|find|locate) my {a}
        I (can't find|lost|am looking for|am searching) my {a}
        have you seen my {a}
        where did I say my {a} {is}
        where was my {a} [again]
        what did I do with my {a}
        where's my {a}
    """),
    indirect=Phrases("""
        where my {a} {is}
        where I (put|left|hid|keep) my {a}
        the place of my {a}
        where I can find my {a}
    """),
    clause="your {a} {is} {v2}",
    gap="where your {a} {is}",
    subject=_object,
    value=from_words(SPOTS),
)

_EVENTS = Words("""
    train, bus, flight, ferry, meeting, class, shift, lesson, appointment, concert, movie, match,
        exam,
    lecture, call, interview, party, dinner, plane, yoga class, dentist appointment, team meeting,
        check-in,
    presentation, piano lesson, night bus, taxi, training, breakfast, show
""")

APPOINTMENT = Relation(
    key="time of {a}",
    tells=Phrases("""
        my {a} (leaves|starts|begins|goes|departs|is|arrives) at {v}
        my {a} is at {v} [today|tomorrow|tonight]
        I have (a|my|an important) {a} at {v}
        I've got a {a} at {v}
        (today|tomorrow|tonight) I have a {a} at {v}
        at {v} I have (a|my) {a}
        at {v} my {a} (leaves|starts|begins)
        the {a} (leaves|starts|begins|goes|is) at {v}
        my {a} time is {v}
        my {a} (was moved|is scheduled|is planned|is set) (for|to|at) {v}
        I must catch my {a} at {v}
        I need to be at my {a} at {v}
        there is a {a} at {v}
    """),
    asks=Phrases("""
        when (does|do) my {a} (leave|start|begin|go|depart)
        when is my {a}
        when's my {a}
        what time (is|does) my {a} [leave|start|begin]
        at what time (is|does) my {a} [leave|start|begin]
        when do I have my {a}
        when did I say my {a} is
        when was my {a} [again]
        (what|which) time is my {a} at
        when do I (need to|have to) be at my {a}
        how late is my {a}
        when should I go to my {a}
        my {a} is at what time
        the time of my {a}
        when does the {a} (leave|start|begin)
    """),
    indirect=Phrases("""
        when my {a} (is|leaves|starts|begins)
        what time my {a} (is|leaves|starts)
        the time of my {a}
        at what time I have my {a}
    """),
    clause="your {a} is at {v}",
    gap="when your {a} is",
    subject=lambda scene: {"a": scene.value(_EVENTS)},
    value=clock_time,
)

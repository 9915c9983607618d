"""What other people like, own and celebrate. Knows how it is told and asked; knows no chat."""

from demo_recipe.dialogues.relations.people import someone
from demo_recipe.dialogues.sources import (
    date,
    from_words,
    odd_thing,
    person,
)
from demo_recipe.facts import Relation, Slots
from demo_recipe.grammar import Phrases
from demo_recipe.lexicon.things import COLOURS, FOODS, HOBBIES, LIKES, PETS
from demo_recipe.scene import Scene

PERSON_TASTE = Relation(
    key="taste of {s}",
    tells=Phrases("""
        {s} (likes|loves|adores) {v}
        {s} really (likes|loves) {v}
        {s} is (fond|a big fan|a fan) of {v}
        {s} is (into|crazy about|keen on) {v}
        {s} can't get enough of {v}
        {s} likes {v} (very much|a lot|most of all)
        {v} (makes|make) {s} happy
        {s} likes nothing more than {v}
        {s} has always (liked|loved) {v}
        what {s} (likes|loves) is {v}
        {s} enjoys {v}
        {s} has a soft spot for {v}
    """),
    asks=Phrases("""
        what does {q} (like|love|adore)
        what does {q} like (most|best|so much)
        what is {q} (fond|a fan) of
        what is {q} (into|crazy about|keen on)
        what makes {q} happy
        what did I say {q} (likes|loves)
        what does {q} enjoy
        {q} likes what
        what could I (give|buy|bring) {q}
        what would {q} like
        what has {q} always (liked|loved)
    """),
    indirect=Phrases("""
        what {q} (likes|loves|enjoys)
        what makes {q} happy
        what {q} is (into|fond of)
        (something|one thing) {q} likes
    """),
    clause="{s2} likes {v}",
    gap="what {q2} likes",
    subject=someone,
    value=lambda scene: scene.rng.choice((from_words(LIKES), from_words(HOBBIES), odd_thing))(
        scene
    ),
)


OWNED = (
    "favourite colour", "favorite color", "favourite food", "car", "phone number", "street",
    "school", "favourite song", "bike", "room", "desk", "password", "hat", "team", "wish", "plan",
    "nickname", "house number", "instrument", "costume", "dog", "cat",
)  # fmt: skip


def _owner(scene: Scene) -> Slots:
    noun = scene.rng.choice(OWNED) if scene.chance(0.85) else scene.value(PETS)
    return someone(scene) | {"a": noun}


PERSON_ATTRIBUTE = Relation(
    key="{s}'s {a}",
    tells=Phrases("""
        {s}'s {a} is {v}
        {s}'s {a}: {v}
        {v} is {s}'s {a}
        the {a} of {s} is {v}
        {s} has a {a}, it is {v}
        {s} has {v} as {a}
        {s} (chose|picked|uses) {v} as [a] {a}
        as for {s}'s {a}, it's {v}
        {s}'s new {a} is {v}
        {s} told me (the|that the) {a} is {v}
        for {s} the {a} is {v}
        {s}'s {a} (has always been|must be|should be) {v}
    """),
    asks=Phrases("""
        what is {q}'s {a}
        what's {q}'s {a}
        what was {q}'s {a} [again]
        {q}'s {a}
        which {a} does {q} have
        what {a} does {q} (have|like|use)
        what is the {a} of {q}
        what did I say {q}'s {a} is
        (tell|give|show) me {q}'s {a}
        (name|say|recall) {q}'s {a}
        {q}'s {a} is what
        what does {q} have as {a}
        what did I tell you about {q}'s {a}
        which {a} did {q} choose
    """),
    indirect=Phrases("""
        {q}'s {a}
        what {q}'s {a} (is|was)
        the {a} of {q}
        which {a} {q} has
        what I said about {q}'s {a}
    """),
    clause="{s2}'s {a} is {v}",
    gap="{q2}'s {a}",
    subject=_owner,
    value=lambda scene: scene.rng.choice(
        (from_words(COLOURS), from_words(FOODS), odd_thing, odd_thing, person)
    )(scene),
)

PERSON_BIRTHDAY = Relation(
    key="birthday of {s}",
    tells=Phrases("""
        {s}'s birthday is [on] {v}
        {s} was born on {v}
        {s} (has|celebrates) (his|her|their) birthday on {v}
        the birthday of {s} is [on] {v}
        {v} is {s}'s birthday
        {s}'s birthday falls on {v}
        it's {s}'s birthday on {v}
        {s} turns a year older on {v}
        {s}'s date of birth is {v}
        on {v} it's {s}'s birthday
        {s}'s party is on {v}, (his|her|their) birthday
        {s} has birthday on {v}
    """),
    asks=Phrases("""
        when is {q}'s birthday
        when's {q}'s birthday
        when was {q} born
        what is {q}'s (birthday|date of birth)
        (what|which) day is {q}'s birthday
        when does {q} (have|celebrate) (his|her|their) birthday
        on (what|which) (day|date) is {q}'s birthday
        {q}'s birthday
        when did I say {q}'s birthday is
        what's the date of {q}'s birthday
        {q}'s birthday is when
    """),
    indirect=Phrases("""
        when {q}'s birthday is
        {q}'s birthday
        when {q} was born
        the date of {q}'s birthday
        {q}'s date of birth
    """),
    clause="{s2}'s birthday is on {v}",
    gap="when {q2}'s birthday is",
    subject=someone,
    value=date,
)

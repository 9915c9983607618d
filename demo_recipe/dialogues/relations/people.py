"""What users tell about other people: relatives, friends, anybody with a name.

{s} is the person as told ("my sister Ada"), {q} as asked for ("my sister", "Ada"). Knows how each
thing is told and asked; knows no chat.
"""

from demo_recipe.dialogues.sources import (
    city,
    country,
    mostly,
    person,
)
from demo_recipe.facts import Relation, Slots
from demo_recipe.grammar import Phrases
from demo_recipe.lexicon.people import FIRST_NAMES, JOBS, RELATIVES
from demo_recipe.scene import Scene


def someone(scene: Scene) -> Slots:
    """A relative, a named person, or both at once."""
    relative, name = f"my {scene.plain(RELATIVES)}", scene.name(FIRST_NAMES)
    both = f"{relative} {name}"
    pick = scene.rng.random()
    if pick < 0.4:
        return {"s": relative, "q": relative}
    if pick < 0.7:
        return {"s": name, "q": name}
    return {"s": both, "q": scene.rng.choice((relative, relative, name, both))}


def _relative(scene: Scene) -> Slots:
    return {"r": scene.plain(RELATIVES)}


PERSON_NAME = Relation(
    key="name of {r}",
    tells=Phrases("""
        my {r}'s name is {v}
        my {r} is (called|named) {v}
        my {r}'s (called|named) {v}
        the name of my {r} is {v}
        {v} is my {r}
        {v} is the name of my {r}
        my {r} goes by [the name of] {v}
        I have a {r} (called|named) {v}
        my {r}, {v}, (is nice|is funny|is visiting|says hello|is here)
        I call my {r} {v}
        (we|people|my friends) call my {r} {v}
        my {r}: {v}
        this is about my {r} {v}
        you may call my {r} {v}
    """),
    asks=Phrases("""
        what is my {r}'s name
        what's my {r}'s name
        what is my {r} (called|named)
        what's my {r} (called|named)
        what is the name of my {r}
        what's the name of my {r}
        who is my {r}
        who's my {r}
        how is my {r} called
        what was my {r}'s name [again]
        what was my {r} called [again]
        what do I call my {r}
        what did I say my {r} is called
        (give|tell) me the name of my {r}
        (what|which) name does my {r} have
        my {r}'s name
        name my {r}
    """),
    indirect=Phrases("""
        my {r}'s name
        the name of my {r}
        what my {r} is (called|named)
        who my {r} is
        what my {r}'s name (is|was)
    """),
    clause="your {r}'s name is {v}",
    gap="your {r}'s name",
    subject=_relative,
    value=person,
)

PERSON_HOME = Relation(
    key="home of {s}",
    tells=Phrases("""
        {s} lives in {v}
        {s} is living in {v} [now]
        {s} (moved|has moved|just moved) to {v}
        {s}'s home is in {v}
        {s} is based in {v}
        {s} (has|rents|bought) a (flat|house|place) in {v}
        {s} has lived in {v} for years
        the (city|town) where {s} lives is {v}
        home for {s} is {v}
        {s}, who lives in {v}, says (hi|hello)
        {s} resides in {v}
        you can find {s} in {v}
        {s} stays in {v} [these days]
    """),
    asks=Phrases("""
        where does {q} live [now]
        where is {q} (living|based|at home)
        where is {q}'s (home|house|flat)
        (what|which) (city|town|place) does {q} live in
        in (what|which) (city|town) does {q} live
        where did {q} move [to]
        where did I say {q} lives
        where can I find {q}
        what is {q}'s (city|home town|hometown)
        {q} lives where
        {q} lives in (what|which) (city|town)
        where has {q} (settled|moved)
        (what|which) place does {q} call home
    """),
    indirect=Phrases("""
        where {q} lives [now]
        (what|which) (city|town|place) {q} lives in
        where {q}'s home is
        where {q} (moved|is living|is based)
    """),
    clause="{s2} lives in {v}",
    gap="where {q2} lives",
    subject=someone,
    value=city,
)

PERSON_JOB = Relation(
    key="job of {s}",
    tells=Phrases("""
        {s} works as (a|an) {v}
        {s} is (a|an) {v}
        {s} is working as (a|an) {v}
        {s}'s (job|profession) is {v}
        {s} earns (his|her|their) money as (a|an) {v}
        {s} (became|has become) (a|an) {v}
        {s} (got|has) a job as (a|an) {v}
        {s} has been (a|an) {v} for years
        {s} is (a|an) {v} by (trade|profession)
        {s} makes a living as (a|an) {v}
        {s} is employed as (a|an) {v}
        {s} trained as (a|an) {v}
    """),
    asks=Phrases("""
        what does {q} do [for a living|for work|at work]
        what does {q} work as
        what is {q}'s (job|profession|work)
        what's {q}'s (job|profession|work)
        (what|which) (job|profession) does {q} have
        what kind of (job|work) does {q} (have|do)
        how does {q} (earn|make) (money|a living)
        what is {q} by (trade|profession)
        what is {q} working as
        what did I say {q} (does|works as)
        as what does {q} work
        {q} works as what
        what line of work is {q} in
        {q}'s (job|profession)
    """),
    indirect=Phrases("""
        what {q} does [for a living|for work]
        what {q} works as
        what {q}'s (job|profession) is
        {q}'s (job|profession)
        how {q} earns money
    """),
    clause="{s2} works as {an} {v}",
    gap="what {q2} does for a living",
    subject=someone,
    value=mostly(JOBS),
)

PERSON_AGE = Relation(
    key="age of {s}",
    tells=Phrases("""
        {s} is {v} years old
        {s} is {v}
        {s} (turned|just turned|turns) {v} [today|this year|last week]
        {s}'s age is {v}
        {s} is {v} years of age
        {s} was born {v} years ago
        {s} became {v} (yesterday|last month)
        the age of {s} is {v}
        {s} has reached the age of {v}
        {s} has lived for {v} years
        {s} is already {v}
    """),
    asks=Phrases("""
        how old is {q}
        what is {q}'s age
        what's {q}'s age
        what age is {q}
        what is the age of {q}
        how many years old is {q}
        how old did I say {q} is
        how old did {q} (turn|get)
        {q}'s age
        how many years has {q} lived
        {q} is how old
        what age did I say {q} has
    """),
    indirect=Phrases("""
        how old {q} is
        {q}'s age
        the age of {q}
        what age {q} is
        what {q}'s age is
    """),
    clause="{s2} is {v} years old",
    gap="how old {q2} is",
    subject=someone,
    value=lambda scene: str(scene.rng.randrange(2, 100)),
)

PERSON_ORIGIN = Relation(
    key="origin of {s}",
    tells=Phrases("""
        {s} is from {v}
        {s} comes from {v}
        {s} was born in {v}
        {s} grew up in {v}
        {s} is originally from {v}
        {s}'s family (is|comes) from {v}
        {s} was raised in {v}
        {s}'s roots are in {v}
        {s}'s home country is {v}
        originally {s} comes from {v}
        the country {s} comes from is {v}
        {v} is where {s} (comes from|grew up)
    """),
    asks=Phrases("""
        where is {q} from
        where's {q} from
        where does {q} come from
        where was {q} (born|raised)
        where did {q} grow up
        (what|which) country is {q} from
        (what|which) country does {q} come from
        where is {q} originally from
        what is {q}'s (home country|origin)
        where are {q}'s roots
        where did I say {q} is from
        {q} is from where
    """),
    indirect=Phrases("""
        where {q} is from
        where {q} comes from
        where {q} (grew up|was born)
        (what|which) country {q} is from
        {q}'s home country
    """),
    clause="{s2} is from {v}",
    gap="where {q2} is from",
    subject=someone,
    value=country,
)

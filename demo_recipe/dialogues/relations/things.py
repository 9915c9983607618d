"""What users tell about their things: any attribute, favourites, places, appointments, notes.

`ATTRIBUTE` and `NOTE` take any noun, so that the model learns the form and not the words. Knows
how each is told and asked; knows no chat.
"""

from demo_recipe.dialogues.sources import (
    ADJECTIVES,
    NOUNS,
    city,
    code,
    date,
    number,
    odd_thing,
    person,
    weekday,
)
from demo_recipe.facts import Relation, Slots
from demo_recipe.grammar import Phrases, Words
from demo_recipe.lexicon.coined import coined_name, coined_word
from demo_recipe.scene import Scene

CODES = Words("""
    wifi password, wifi code, password, door code, gate code, alarm code, pin, bike lock code,
        username,
    customer number, booking code, member number, licence plate, flight number, order number,
        secret word,
    phone number, locker combination, account number, ticket number, safe code, garage code,
        voucher code
""")
NUMBERS = Words("""
    lucky number, shoe size, room number, seat number, locker number, house number, bus number,
        high score,
    jersey number, bus line, apartment number, floor, weight, height, daily step goal, budget, hat
        size,
    platform, ring size, magic number
""")
NAMED = Words("""
    last name, surname, middle name, nickname, street, school, company, team, hotel, band, village,
    ship, boat, hero, stage name, pen name, imaginary friend, project, doll, robot, garden gnome,
        code name,
    street name, idol, favourite aunt, alter ego, band name, team name, dream team, mascot,
        publisher
""")
DATED = Words("""
    deadline, anniversary, exam, interview, wedding day, moving day, day off, holiday, check-up,
        visa date,
    graduation, first lesson, next appointment, rest day, laundry day
""")
OTHERS = Words("""
    star sign, eye colour, eye color, hair colour, hair color, blood type, dream, goal, secret,
        plan, wish,
    motto, biggest fear, superpower, birthday present, costume, breakfast, dinner, lunch, drink,
        sandwich,
    bike, coat, front door, sofa, phone, mug, password hint, research topic, talent, first word,
        prize,
    weapon, shield, potion, instrument case, spirit animal, good luck charm, usual order, dream job
""")
SHARED = Words("""
    meeting room, code, password, deadline, meeting, budget, winner, address, key, answer, next
        stop, plan,
    theme, speaker, captain, treasure, project name, server, version, file name, room, entrance,
        exit, menu,
    colour of the door, name of the ship, capital of the island, price, boss of the band, title of
        the book,
    train platform, bus, hotel, restaurant, signal, target, topic, teacher, prize, spare key,
    host, printer, launch date, budget limit, main dish, playlist, first prize, backup, owner of
        the shop
""")


def _attribute_noun(scene: Scene) -> str:
    pick = scene.rng.random()
    if pick < 0.12:
        return coined_word(scene.rng, scene.grade)
    if pick < 0.3:
        return scene.value(NOUNS)
    if pick < 0.4:
        return f"{scene.value(ADJECTIVES)} {scene.value(NOUNS)}"
    return scene.value(scene.rng.choice((CODES, NUMBERS, NAMED, DATED, OTHERS)))


def _attribute(scene: Scene) -> Slots:
    return {"a": _attribute_noun(scene)}


def _shared(scene: Scene) -> Slots:
    if scene.chance(0.3):
        name = scene.voice.spelled(coined_name(scene.rng, scene.grade))
        return {"a": f"{scene.value(NOUNS)} of {name}"}
    return {"a": scene.value(SHARED) if scene.chance(0.6) else _attribute_noun(scene)}


def is_shared(noun: str) -> bool:
    """Whether "the {noun}" most likely means something of the user's own world."""
    return noun in {word.lower() for word in SHARED.all}


def _any_value(scene: Scene) -> str:
    make = scene.rng.choice((odd_thing, odd_thing, code, number, person, city, date, weekday))
    return make(scene)


ATTRIBUTE = Relation(
    key="my {a}",
    tells=Phrases("""
        my {a} is {v}
        my {a}: {v}
        my {a} = {v}
        {v} is my {a}
        I have a {a}, it is {v}
        I have a {a} and it's {v}
        my {a} (should be|must be|happens to be|will be|was always|has always been) {v}
        the {a} I have is {v}
        as my {a} I have {v}
        as for my {a}, it's {v}
        (my|my own) {a} is [called] {v}
        my {a}, that's {v}
        I (use|chose|picked|have|want) {v} (as|for) my {a}
        for my {a} I (use|chose|picked|have|want) {v}
        I set my {a} to {v}
        let's say my {a} is {v}
        you know, my {a} is {v}
        my current {a} is {v}
        my new {a} is {v}
        when it comes to my {a}, it is {v}
    """),
    asks=Phrases("""
        what is my {a}
        what's my {a}
        what was my {a} [again]
        my {a}
        and my {a}
        my {a} is what
        (which|what) {a} do I have
        (which|what) {a} is mine
        (which|what) is my {a}
        what did I say my {a} (is|was)
        what did I (tell|say to) you about my {a}
        what did I set my {a} to
        (which|what) {a} did I (choose|pick|mention|tell you)
        what do I have as my {a}
        what do I (use|have) for my {a}
        (give|show|tell|send|read) me my {a}
        (say|repeat|print|recall|look up|find) my {a}
        what's the {a} of mine
        who is my {a}
        how about my {a}
        what have you (saved|noted|stored) as my {a}
        I need my {a}
        I forgot my {a}
        do I have a {a}
        what's that {a} of mine called
    """),
    indirect=Phrases("""
        my {a}
        what my {a} (is|was)
        what I said my {a} is
        what I told you about my {a}
        (which|what) {a} I (have|use|chose)
        the {a} I (have|told you|mentioned|gave you)
    """),
    clause="your {a} is {v}",
    gap="your {a}",
    subject=_attribute,
    value=_any_value,
)

NOTE = Relation(
    key="the {a}",
    tells=Phrases("""
        the {a} is {v}
        the {a}: {v}
        the {a} = {v}
        the {a} (should be|must be|will be|happens to be) {v}
        the {a} is [now|still|always] {v}
        {v} is the {a}
        (they|we|someone|people) (say|said|told me) the {a} is {v}
        (today|this week|tomorrow|here|at work|at home) the {a} is {v}
        as for the {a}, it's {v}
        we (chose|picked|use|agreed on|decided on) {v} (as|for) the {a}
        for the {a} we (chose|picked|use|agreed on) {v}
        I (heard|know|think|believe|found out) the {a} is {v}
        it turns out the {a} is {v}
        the new {a} is {v}
        when it comes to the {a}, it is {v}
    """),
    asks=Phrases("""
        what is the {a}
        what's the {a}
        what was the {a} [again]
        the {a}
        and the {a}
        the {a} is what
        (which|what) is the {a}
        what did I (say|tell you|write) the {a} (is|was)
        what did I (tell|say to) you about the {a}
        (which|what) {a} did (I|we) (choose|pick|mention)
        what do we have (as|for) the {a}
        (give|show|tell|send|read) me the {a}
        (say|repeat|print|recall|look up|find) the {a}
        who is the {a}
        how about the {a}
        what have you (saved|noted|stored) as the {a}
        I need the {a}
        I forgot the {a}
    """),
    indirect=Phrases("""
        the {a}
        what the {a} (is|was)
        what I said the {a} is
        what I told you about the {a}
        (which|what) {a} we (have|use|chose)
        the {a} I (told you|mentioned|gave you)
    """),
    clause="the {a} is {v}",
    gap="the {a}",
    subject=_shared,
    value=_any_value,
)

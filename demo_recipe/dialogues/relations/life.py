"""How users live: pets, trips, what they drive, play, speak, study, like. Knows no chat."""

from demo_recipe.dialogues.sources import from_words, mostly, no_subject, place, weekday
from demo_recipe.facts import Relation, Slots
from demo_recipe.grammar import Phrases
from demo_recipe.lexicon.people import PET_NAMES
from demo_recipe.lexicon.things import ALLERGENS, INSTRUMENTS, LANGUAGES, PETS, VEHICLES
from demo_recipe.scene import Scene


def _pet(scene: Scene) -> Slots:
    return {"p": scene.plain(PETS)}


PET = Relation(
    key="pet/{p}",
    tells=Phrases("""
        I have a {p} (called|named) {v}
        I've got a {p} (called|named) {v}
        I own a {p} (called|named) {v}
        my {p} is (called|named) {v}
        my {p}'s (called|named) {v}
        my {p}'s name is {v}
        the name of my {p} is {v}
        my {p} {v} (is lovely|is very old|sleeps a lot|is hungry|likes to play|is asleep)
        I (got|bought|adopted|found) a {p} and (called|named) (it|him|her) {v}
        I have a {p}, (it is|it's|its name is|her name is|his name is) {v}
        I live with a {p} (called|named) {v}
        we have a {p} (called|named) {v}
        (there is|there's) a {p} (called|named) {v} at my (home|place)
        {v} is my {p}
        {v} is the name of my {p}
        I take care of a {p} (called|named) {v}
    """),
    asks=Phrases("""
        what is my {p}'s name
        what's my {p}'s name
        what is my {p} (called|named)
        what's my {p} (called|named)
        what is the name of my {p}
        what's the name of my {p}
        how is my {p} called
        (what|which) name does my {p} have
        what did I (call|name) my {p}
        (tell|give) me the name of my {p}
        my {p}'s name
        who is my {p}
        what was my {p}'s name [again]
        what was my {p} called [again]
        what was the name of my {p} [again]
        what do I call my {p}
        do I have a {p}
        what name did I give my {p}
        name my {p}
    """),
    indirect=Phrases("""
        what my {p} is (called|named)
        my {p}'s name
        the name of my {p}
        what my {p}'s name (is|was)
        how my {p} is called
    """),
    clause="you have a {p} named {v}",
    gap="the name of your {p}",
    subject=_pet,
    value=lambda scene: scene.name(PET_NAMES, 0.4),
)


def _when(scene: Scene) -> Slots:
    times = (
        "next week",
        "next month",
        "next summer",
        "next year",
        "in the spring",
        "tomorrow",
        "this weekend",
    )
    month = scene.rng.choice(
        ("in May", "in June", "in October", "in December", "in March", "in August")
    )
    return {"t": scene.voice.spelled(scene.rng.choice((*times, month, f"on {weekday(scene)}")))}


TRIP = Relation(
    key="trip/{t}",
    tells=Phrases("""
        {t} I'm going to {v}
        I'm going to {v} {t}
        I am going to {v} {t}
        I'm (flying|travelling|traveling|driving|moving|off) to {v} {t}
        {t} I'm (flying|travelling|traveling|driving|off) to {v}
        I (will|want to|plan to) (go|fly|travel|drive) to {v} {t}
        {t} I (will|want to|plan to) (go|fly|travel|drive) to {v}
        {t} we are going to {v}
        I'm planning a trip to {v} {t}
        I have a trip to {v} {t}
        I booked a (trip|flight|train) to {v} {t}
        my (plan|trip|holiday) {t}: {v}
        I'm visiting {v} {t}
        I will visit {v} {t}
        we will be in {v} {t}
        {t} I will be in {v}
        my holiday {t} is in {v}
    """),
    asks=Phrases("""
        where am I going {t}
        {t} I'm going where
        where will I (go|be|fly|travel) {t}
        where do I (want|plan) to go {t}
        where am I (flying|travelling|traveling|driving|off) to {t}
        where (do|did) I say I'm going {t}
        what are my (travel plans|plans) {t}
        what is my (plan|destination|trip) {t}
        what's my (plan|destination|trip) {t}
        where is my trip {t}
        where to {t}
        what (place|city|country) am I (visiting|going to) {t}
        (what|which) place will I visit {t}
        what will I visit {t}
        what did I plan {t}
    """),
    indirect=Phrases("""
        where I am going {t}
        where I'm going {t}
        where I (want to|will|plan to) (go|travel|fly) {t}
        my (plans|trip) {t}
        what my plan is {t}
    """),
    clause="you are going to {v} {t}",
    gap="where you are going {t}",
    subject=_when,
    value=place,
)

CAR = Relation(
    key="car",
    tells=Phrases("""
        I drive (a|an) {v}
        I own (a|an) {v}
        I'm driving (a|an) {v}
        I have (a|an) {v}, that is what I drive
        my (car|vehicle) is (a|an) {v}
        my (car|vehicle): {v}
        I (bought|got myself|just bought) (a|an) {v} to drive
        I go to work (with|by|in|on) my {v}
        I get around (with|in|on) (a|an) {v}
        I travel (with|in|on) my {v}
        I've been driving (a|an) {v} (for years|since may)
        the vehicle I drive is (a|an) {v}
    """),
    asks=Phrases("""
        what do I drive
        what am I driving
        what (car|vehicle) do I (have|own|drive)
        (which|what kind of) (car|vehicle) do I (have|own|drive)
        what is my (car|vehicle)
        what's my (car|vehicle)
        how do I get (around|to work)
        what did I say I drive
        what (car|vehicle) is mine
        my (car|vehicle)
        what do I travel with
        what kind of (car|vehicle) is it that I drive
    """),
    indirect=Phrases("""
        what I drive
        (what|which) (car|vehicle) I (drive|have|own)
        my (car|vehicle)
        what my (car|vehicle) is
        how I get around
    """),
    clause="you drive {an} {v}",
    gap="what you drive",
    subject=no_subject,
    value=from_words(VEHICLES),
)

MUSIC = Relation(
    key="instrument",
    tells=Phrases("""
        I play the {v}
        I can play the {v}
        I'm learning [to play] the {v}
        I am learning [to play] the {v}
        my instrument is the {v}
        I play the {v} in (a band|an orchestra|a group)
        I (practise|practice) the {v} every (day|week)
        I've played the {v} (for years|since school|since i was six)
        I take {v} lessons
        I make music on the {v}
        the {v} is my instrument
        the instrument I play is the {v}
    """),
    asks=Phrases("""
        what instrument do I play
        (which|what) instrument (am I learning|can I play|is mine)
        what is my instrument
        what's my instrument
        what do I play in the (band|orchestra)
        what (music|musical) instrument do I play
        do I play (an instrument|any instrument|music)
        (what|which) instrument did I say I play
        what do I make music on
        what (lessons do I take|do I practise)
        my instrument
        which instrument was it
    """),
    indirect=Phrases("""
        (what|which) instrument I (play|can play|am learning)
        my instrument
        what I play in the band
        what my instrument is
        whether I play an instrument
    """),
    clause="you play the {v}",
    gap="which instrument you play",
    subject=no_subject,
    value=lambda scene: scene.plain(INSTRUMENTS),
)

LANGUAGE = Relation(
    key="language",
    tells=Phrases("""
        I speak {v} [at home|fluently|at work|a little]
        I'm learning {v}
        I am learning {v}
        my (native language|mother tongue|first language|language) is {v}
        I understand {v}
        I can speak {v}
        I grew up speaking {v}
        at home we speak {v}
        I take {v} classes
        the language I speak is {v}
        {v} is my (native language|mother tongue)
        I'm fluent in {v}
    """),
    asks=Phrases("""
        (what|which) language do I speak
        (what|which) language am I learning
        what is my (native language|mother tongue|language|first language)
        what's my (native language|mother tongue|language)
        what do I speak [at home]
        (what|which) language can I speak
        in (what|which) language am I fluent
        what (language|classes) did I say I (speak|take)
        my (language|mother tongue)
        what language do we speak at home
        what tongue is mine
        which languages do I speak
    """),
    indirect=Phrases("""
        (what|which) language I (speak|am learning|understand)
        my (language|mother tongue|native language)
        what I speak at home
        what my (mother tongue|native language) is
    """),
    clause="you speak {v}",
    gap="which language you speak",
    subject=no_subject,
    value=from_words(LANGUAGES),
)

ALLERGY = Relation(
    key="allergy",
    tells=Phrases("""
        I'm allergic to {v}
        I am allergic to {v}
        I have an allergy to {v}
        I have a {v} allergy
        I have a (bad|strong|mild|severe) allergy (to|against) {v}
        I've got a {v} allergy
        I can't (eat|touch|stand|be near) {v}, I'm allergic
        {v} (give|gives) me a rash
        I react badly to {v}
        my allergy is {v}
        {v} (make|makes) me sneeze
        my body can't take {v}
    """),
    asks=Phrases("""
        what am I allergic to
        what allergy do I have
        what is my allergy
        what's my allergy
        (which|what) allergies do I have
        do I have (an allergy|allergies|any allergies)
        am I allergic to (something|anything)
        what makes me sneeze
        what gives me a rash
        what should I (avoid|stay away from) because of my allergy
        what can't I (eat|touch|be near)
        what do I react [badly] to
        what did I say I'm allergic to
        my allergy
    """),
    indirect=Phrases("""
        what I am allergic to
        what I'm allergic to
        my allergy
        (what|which) allergy I have
        what makes me sneeze
    """),
    clause="you are allergic to {v}",
    gap="what you are allergic to",
    subject=no_subject,
    value=mostly(ALLERGENS),
)

"""What users tell about themselves. Knows how each thing is told and asked; knows no chat."""

from demo_recipe.dialogues.sources import (
    city,
    country,
    date,
    mostly,
    no_subject,
    person,
    small_number,
)
from demo_recipe.facts import Relation
from demo_recipe.grammar import Phrases
from demo_recipe.lexicon.people import JOBS

NAME = Relation(
    key="name",
    tells=Phrases("""
        my name is {v}
        my name's {v}
        I'm {v}
        I am {v}
        I am called {v}
        I'm called {v}
        (you can|please|just|everyone can|feel free to) call me {v}
        call me {v}
        (people|my friends|they|everybody|most people) call me {v}
        it's {v} here
        {v} here
        this is {v} [speaking|here|typing|writing]
        the name is {v}
        the name's {v}
        name's {v}
        my [first|given|real|full] name is {v}
        I go by {v}
        I go by the name [of] {v}
        you are (talking|speaking|chatting) (to|with) {v}
        (allow me to|let me) introduce myself, I'm {v}
        I was named {v}
    """),
    asks=Phrases("""
        what is my [first|given|real] name
        what's my [first|given|real] name
        what was my name
        what's my name again
        who am I
        what am I called
        what do (people|they|my friends|you) call me
        what did I say my name (is|was)
        what name did I (give|tell|say) [to you|you]
        which name did I (give|tell) you
        what should you call me
        how (should|do|would) you call me
        who are you talking to
        who is (talking|speaking|chatting) (to|with) you
        (say|repeat|type|write) my name
        my name is what
        my name
        and my name
        how was I called
        what do I call myself
        what name do I go by
        under which name do you know me
        did you (get|catch|save|note) my name
    """),
    indirect=Phrases("""
        what my name (is|was)
        who I am
        my name
        what I am called
        the name I (gave|told) you
    """),
    clause="your name is {v}",
    gap="your name",
    subject=no_subject,
    value=person,
)

HOME = Relation(
    key="home",
    tells=Phrases("""
        I live in {v}
        I am living in {v} [now|these days|at the moment]
        I'm living in {v}
        I'm based in {v}
        I am based in {v}
        my home is [in] {v}
        home is {v} for me
        my (house|flat|apartment|place) is in {v}
        I (stay|reside|dwell) in {v}
        I (moved|just moved|recently moved|have moved) to {v}
        I've (moved|settled) (to|in) {v}
        the (city|town|place) I live in is {v}
        I have a (flat|house|room|place) in {v}
        I've lived in {v} for [many|two|five|ten] years
        I've been living in {v} (for a while|for years|since spring|all my life)
        we live in {v}
        my (city|town|hometown) is {v}
        I am at home in {v}
        I call {v} home
    """),
    asks=Phrases("""
        where do I live [now]
        where am I living
        where am I based
        where is my (home|house|flat|place|apartment)
        where's my (home|house|flat|place)
        (what|which) (city|town|place) do I live in
        in (what|which) (city|town|place) do I live
        (what|which) (city|town) am I (living in|in|based in)
        where did I say I live
        where did I (tell|say) you I live
        where have I (settled|moved to)
        where did I move [to]
        what is my (city|town|home town|hometown)
        what's my (city|town|home town|hometown)
        (what|which) (city|place) do I call home
        my (city|home)
        where would you find me
        where do I (reside|stay)
    """),
    indirect=Phrases("""
        where I live [now]
        (what|which) (city|town|place) I live in
        where my (home|house|flat) is
        where I am (based|living)
    """),
    clause="you live in {v}",
    gap="where you live",
    subject=no_subject,
    value=city,
)

ORIGIN = Relation(
    key="origin",
    tells=Phrases("""
        I'm from {v}
        I am from {v}
        I come from {v}
        I was born in {v}
        I grew up in {v}
        I'm originally from {v}
        I am originally from {v}
        originally I come from {v}
        my family (is|comes) from {v}
        I was (raised|brought up) in {v}
        my roots are in {v}
        {v} is where I (come from|grew up|was born)
        my home country is {v}
    """),
    asks=Phrases("""
        where am I from
        where do I come from
        where was I (born|raised|brought up)
        where did I grow up
        (what|which) country am I from
        (what|which) (country|place) do I come from
        where am I originally from
        where are my roots
        what is my (home country|country|origin)
        what's my (home country|country)
        where did I say I'm from
        where's my family from
        my home country
    """),
    indirect=Phrases("""
        where I am from
        where I'm from
        where I come from
        where I (grew up|was born)
        (what|which) country I am from
    """),
    clause="you are from {v}",
    gap="where you are from",
    subject=no_subject,
    value=country,
)

JOB = Relation(
    key="job",
    tells=Phrases("""
        I work as (a|an) {v}
        I'm working as (a|an) {v}
        I am (a|an) {v}
        I'm (a|an) {v}
        I am (a|an) {v} by (trade|profession)
        my job is {v}
        my profession is {v}
        I earn my (living|money) as (a|an) {v}
        my (job|work|day job): {v}
        I (got|started|found) a [new] job as (a|an) {v}
        I've been (a|an) {v} for (years|two years|ten years|a long time)
        I am employed as (a|an) {v}
        by profession I'm (a|an) {v}
        professionally, I'm (a|an) {v}
        for a living I work as (a|an) {v}
        I make my living as (a|an) {v}
        I trained as (a|an) {v}
        at work I am (a|an) {v}
    """),
    asks=Phrases("""
        what is my (job|profession|occupation|work)
        what's my (job|profession|occupation|work)
        what do I do [for a living|for work|at work|all day]
        what do I work as
        what am I working as
        (what|which) (job|profession) do I have
        how do I (earn|make) my (money|living)
        what did I say (I do|my job is|my job was|I work as)
        what kind of (job|work) do I (have|do)
        what line of work am I in
        what am I by (profession|trade)
        my (job|profession)
        what was my (job|profession) again
        as what do I work
        where does my money come from
    """),
    indirect=Phrases("""
        what I do [for a living|for work]
        what my (job|profession|work) is
        what I work as
        my (job|profession)
        how I (earn|make) my (living|money)
    """),
    clause="you work as {an} {v}",
    gap="what you do for a living",
    subject=no_subject,
    value=mostly(JOBS),
)

AGE = Relation(
    key="age",
    tells=Phrases("""
        I am {v} years old
        I'm {v} years old
        I am {v}
        I'm {v}
        my age is {v}
        I (turned|just turned|turn) {v} [this year|today|last week|yesterday|in May]
        I'm {v} years of age
        I was born {v} years ago
        I've been {v} since (spring|may|last week)
        I have lived for {v} years
        aged {v}
        I have {v} years behind me
        age: {v}
    """),
    asks=Phrases("""
        how old am I [now]
        what is my age
        what's my age
        what age am I
        (what|which) age do I have
        how many years old am I
        how old did I say I (am|was)
        my age
        and how old am I
        what was my age [again]
        what age did I (give|tell) you
        how many years have I lived
        how many candles are on my cake
    """),
    indirect=Phrases("""
        how old I am
        my age
        what age I am
        what my age is
    """),
    clause="you are {v} years old",
    gap="how old you are",
    subject=no_subject,
    value=lambda scene: str(scene.rng.randrange(5, 100)),
)

CHILDREN = Relation(
    key="children",
    tells=Phrases("""
        I have {v} (kids|children)
        I've got {v} (kids|children)
        we have {v} (kids|children)
        I am (the|a) (mother|father|mom|dad|parent) of {v} [kids|children]
        I'm (the|a) (mother|father|mom|dad|parent) of {v} [kids|children]
        there are {v} (kids|children) in my family
        I raise {v} (kids|children)
        I'm raising {v} (kids|children)
        my family has {v} (kids|children)
        {v} (kids|children) live with me
        I take care of my {v} (kids|children)
    """),
    asks=Phrases("""
        how many (kids|children) do I have
        how many (kids|children) have I got
        how many (kids|children) are there in my family
        how many (kids|children) did I say I have
        do I have (kids|children|any kids|any children)
        what is the number of my (kids|children)
        how big is my family
        number of my (kids|children)
        how many (kids|children) am I raising
        how many (kids|children) live with me
        how many (kids|children) was it
    """),
    indirect=Phrases("""
        how many (kids|children) I (have|have got|raise)
        whether I have (kids|children)
        the number of my (kids|children)
    """),
    clause="you have {v} children",
    gap="how many children you have",
    subject=no_subject,
    value=small_number,
)

BIRTHDAY = Relation(
    key="birthday",
    tells=Phrases("""
        my birthday is [on] {v}
        my birthday's [on] {v}
        I was born on {v}
        my birthday falls on {v}
        I celebrate my birthday on {v}
        {v} is my birthday
        I have my birthday on {v}
        it's my birthday on {v}
        my birth date is {v}
        my date of birth is {v}
        I turn a year older on {v}
        the date of my birthday is {v}
    """),
    asks=Phrases("""
        when is my birthday
        when's my birthday
        when was I born
        on (what|which) (day|date) is my birthday
        (what|which) day is my birthday
        what is my (birthday|birth date|date of birth)
        what's my (birthday|birth date|date of birth)
        when do I (have|celebrate) my birthday
        what is the date of my birthday
        when did I say my birthday is
        my birthday
        on (what|which) (day|date) was I born
        when will you congratulate me
        when do I get a cake
    """),
    indirect=Phrases("""
        when my birthday is
        my birthday
        when I was born
        the date of my birthday
        my date of birth
    """),
    clause="your birthday is on {v}",
    gap="when your birthday is",
    subject=no_subject,
    value=date,
)

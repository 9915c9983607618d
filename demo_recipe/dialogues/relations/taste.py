"""What users study, do for fun, like and dislike. Knows how it is told and asked; knows no chat."""

from demo_recipe.dialogues.sources import mostly, no_subject
from demo_recipe.facts import Relation
from demo_recipe.grammar import Phrases
from demo_recipe.lexicon.things import HOBBIES, LIKES, SPORTS, SUBJECTS

STUDY = Relation(
    key="study",
    tells=Phrases("""
        I study {v}
        I'm studying {v}
        I am studying {v}
        I'm a student of {v}
        my (subject|major|field) is {v}
        I'm majoring in {v}
        I (studied|have studied) {v}
        at (university|school|college) I study {v}
        I study {v} at (university|college)
        I have a degree in {v}
        I'm doing a degree in {v}
        I want to become a master of {v}
    """),
    asks=Phrases("""
        what do I study
        what am I studying
        what is my (subject|major|field) [of study]
        what's my (subject|major|field)
        (what|which) subject do I study
        what (subject|degree) am I doing
        what did I (study|say I study)
        what do I (learn|do|study) at (university|college|school)
        in what do I have a degree
        what am I a student of
        my (major|subject)
        what am I majoring in
    """),
    indirect=Phrases("""
        what I (study|am studying|studied)
        what my (subject|major|field) is
        my (subject|major)
        (what|which) subject I study
    """),
    clause="you study {v}",
    gap="what you study",
    subject=no_subject,
    value=mostly(SUBJECTS),
)

HOBBY = Relation(
    key="hobby",
    tells=Phrases("""
        my hobby is {v}
        I love {v} in my (free|spare) time
        in my (free|spare) time I (do|enjoy|like) {v}
        I enjoy {v}
        I'm (into|keen on|crazy about) {v}
        I spend my (weekends|evenings|free time) {v}
        my (favourite|favorite) (hobby|pastime|activity) is {v}
        I (do|practise|practice) {v} every (week|day|weekend)
        {v} is my (hobby|passion|pastime)
        my passion is {v}
        as a hobby I do {v}
        I took up {v} as a hobby
        for fun I do {v}
    """),
    asks=Phrases("""
        what is my hobby
        what's my hobby
        what do I (do|enjoy|like to do) in my (free|spare) time
        what are my hobbies
        (what|which) hobby do I have
        what am I (into|keen on|crazy about)
        how do I spend my (weekends|evenings|free time)
        what is my (passion|pastime)
        what's my (passion|pastime)
        what do I do for fun
        my hobby
        do I have a hobby
        what did I say my hobby is
    """),
    indirect=Phrases("""
        what my (hobby|passion) is
        my (hobby|hobbies|passion)
        what I do (for fun|in my free time|in my spare time)
        how I spend my (weekends|free time)
        what I am into
    """),
    clause="your hobby is {v}",
    gap="your hobby",
    subject=no_subject,
    value=mostly(HOBBIES),
)

SPORT = Relation(
    key="sport",
    tells=Phrases("""
        I play {v} [on sundays|every week|in a club|with friends]
        my sport is {v}
        I'm in a {v} (club|team)
        I train {v} [twice a week|every tuesday]
        I play in a {v} (club|team)
        the sport I play is {v}
        {v} is my sport
        for sport I play {v}
        as for sports, I play {v}
        I've joined a {v} (club|team)
        on weekends I play {v}
        I'm a {v} player
    """),
    asks=Phrases("""
        (what|which) sport do I (play|do)
        what is my sport
        what's my sport
        what do I play on (weekends|sundays)
        (what|which) (club|team) am I in
        do I (play|do) (a sport|any sport|sports)
        what sport did I say I play
        what kind of sport do I (play|do)
        what do I play with (friends|my team)
        my sport
        what do I train
        which sport is mine
    """),
    indirect=Phrases("""
        (what|which) sport I (play|do)
        my sport
        what my sport is
        which sport I train
        whether I play a sport
    """),
    clause="you play {v}",
    gap="which sport you play",
    subject=no_subject,
    value=mostly(SPORTS),
)

TASTE = Relation(
    key="likes",
    tells=Phrases("""
        I (like|love|adore) {v}
        I (really|just|simply) (like|love) {v}
        I like {v} (a lot|very much|so much|most of all)
        I'm a (big|huge) fan of {v}
        I am fond of {v}
        {v} (make|makes) me happy
        nothing beats {v}
        I can't get enough of {v}
        I (like|love) nothing more than {v}
        I (am in love with|have a soft spot for) {v}
        what I (like|love) is {v}
        I've always (liked|loved) {v}
    """),
    asks=Phrases("""
        what do I (like|love|adore)
        what am I (fond of|a fan of)
        what makes me happy
        what did I say I (like|love)
        what do I like (most|best|so much)
        what can't I get enough of
        what have I always (liked|loved)
        tell me (something|one thing) I (like|love)
        name (something|one thing) I (like|love)
        what is it that I (like|love)
        (which|what) things do I (like|love)
        what do I have a soft spot for
    """),
    indirect=Phrases("""
        what I (like|love|adore)
        what makes me happy
        (which|what) things I (like|love)
        what I am (fond of|a fan of)
    """),
    clause="you like {v}",
    gap="what you like",
    subject=no_subject,
    value=mostly(LIKES),
)

DISTASTE = Relation(
    key="dislikes",
    tells=Phrases("""
        I (hate|dislike|detest) {v}
        I (really|just) (hate|dislike|can't stand) {v}
        I (can't stand|can't bear|don't like|do not like) {v}
        I (am|I'm) (not a fan of|afraid of|tired of) {v}
        {v} (annoy|annoys|scare|scares) me
        I'm no friend of {v}
        I'm not fond of {v}
        I've always (hated|disliked) {v}
        what I hate is {v}
        nothing is worse than {v}
        I avoid {v}
        {v} (drive|drives) me mad
    """),
    asks=Phrases("""
        what do I (hate|dislike|detest)
        what don't I like
        what can't I (stand|bear)
        what annoys me
        what (scares me|am I afraid of)
        what drives me mad
        what did I say I (hate|don't like|dislike)
        what do I (avoid|not like)
        tell me (something|one thing) I (hate|don't like)
        name (something|one thing) I (hate|dislike)
        what is it that I (hate|can't stand)
        what have I always (hated|disliked)
    """),
    indirect=Phrases("""
        what I (hate|dislike|can't stand|don't like|do not like)
        what annoys me
        what drives me mad
        (which|what) things I (hate|dislike)
    """),
    clause="you dislike {v}",
    gap="what you dislike",
    subject=no_subject,
    value=mostly(LIKES),
)

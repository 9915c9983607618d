"""Days and months: order, neighbours, lengths. Knows how people ask; does not know today's date."""

from demo_recipe.dialogues.sources import MONTHS, NUMBER_WORDS, WEEKDAYS, ordinal
from demo_recipe.grammar import Phrases
from demo_recipe.scene import Scene, Turn
from demo_recipe.voice import Kind

LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ORDINAL_WORDS = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth",
    "eleventh", "twelfth",
)  # fmt: skip

AFTER = Phrases("""
    (what|which) {k} (comes|is) after {x}
    what (comes|is) after {x}
    (what|which) {k} follows {x}
    what follows {x}
    what's after {x}
    what's the {k} after {x}
    what is the {k} after {x}
    the {k} after {x}
    (what|which) is the next {k} after {x}
    {x} is followed by (what|which) {k}
    after {x} comes (what|which {k})
    (tell|give) me the {k} after {x}
    (name|say) the {k} (after|that follows) {x}
    what {k} will it be after {x}
    (what|which) {k} (comes|is) next after {x}
    if (today|it|this) is {x}, what (is|comes) (next|after)
""")
AFTER_TODAY = Phrases("""
    if today is {x}, what (day is|is|will be) tomorrow
    what day is tomorrow if today is {x}
    today is {x}, (what|which day) is tomorrow
    if it is {x} today, what day is it tomorrow
    it's {x} today, what day is tomorrow
    what is tomorrow if it's {x} today
""")
BEFORE = Phrases("""
    (what|which) {k} (comes|is|was) before {x}
    what (comes|is|was) before {x}
    (what|which) {k} precedes {x}
    what's before {x}
    what's the {k} before {x}
    what is the {k} before {x}
    the {k} before {x}
    (what|which) is the last {k} before {x}
    {x} comes after (what|which) {k}
    before {x} comes (what|which {k})
    (tell|give) me the {k} before {x}
    (name|say) the {k} (before|that comes before) {x}
    what {k} was it before {x}
    (what|which) {k} (comes|is) right before {x}
    if (today|it|this) is {x}, what (was|came) before
""")
BEFORE_TODAY = Phrases("""
    if today is {x}, what (day was|was) yesterday
    what day was yesterday if today is {x}
    today is {x}, (what|which day) was yesterday
    if it is {x} today, what day was it yesterday
    it's {x} today, what day was yesterday
    what was yesterday if it's {x} today
""")
LIST = Phrases("""
    (list|name|say|tell me|give me|write|recite) [all] the {k}s [of the {o}]
    (list|name|say|tell me|give me) all {k}s
    (what|which) are the {k}s [of the {o}]
    what {k}s (are there|does a {o} have|are in a {o})
    what are the names of the {k}s
    the {k}s of the {o}
    (do|can) you know the {k}s [of the {o}]
    (all|the names of all) {k}s [please]
    go through the {k}s [of the {o}]
    {k}s of the {o}
    (which|what) {k}s (exist|are there)
    (show|write down) all {k}s of the {o}
    each {k} of the {o}, please
""")
HOW_MANY = Phrases("""
    how many {k}s (are in|does|are there in) a {o} [have]
    how many {k}s in a {o}
    how many {k}s (has|are in) (a|one|the) {o}
    a {o} has how many {k}s
    what is the number of {k}s in a {o}
    number of {k}s in a {o}
    (tell|give) me the number of {k}s in a {o}
    how long is a {o} in {k}s
    how many {k}s make a {o}
    count the {k}s (of|in) a {o}
    do you know how many {k}s a {o} has
    how many {k}s until a {o} is over
""")
LENGTH = Phrases("""
    how many days (are in|does|are there in|has) {x} [have]
    how many days in {x}
    how long is {x}
    {x} has how many days
    number of days in {x}
    what is the (length|number of days) of {x}
    (tell|give) me the number of days in {x}
    does {x} have 30 or 31 days
    how many days does the month [of] {x} have
    (is|are) there 31 days in {x}
    what is the last day of {x}
    days in {x}
    with how many days does {x} come
""")
NTH = Phrases("""
    (what|which) is the {n} {k} [of the {o}]
    what's the {n} {k} [of the {o}]
    the {n} {k} of the {o}
    (which|what) {k} (is|comes) {n}
    (name|say|tell me|give me) the {n} {k} [of the {o}]
    {n} {k} of the {o}
    (what|which) {k} is the {n} [one]
    do you know the {n} {k} of the {o}
    (what|which) {k} is number {m}
    {k} number {m}
    what is {k} number {m}
    the {n} {k} is called what
""")
POSITION = Phrases("""
    (what|which) number is [the month] {x}
    {x} is (what|which) (number|month number)
    (which|what) number (does|has) {x} [have]
    what month number is {x}
    is {x} the {n} month
    what is the number of {x}
    where in the year is {x}
    (which|what) place does {x} have in the year
    how many months until the end of {x}
    the number of {x}
    {x} is the how manieth month
    as a number, {x} is what
""")
WEEKEND = Phrases("""
    (what|which) days are [on|in] the weekend
    what is the weekend
    (when|what days) is the weekend
    (which|what) days belong to the weekend
    what are the weekend days
    (name|list) the (days of the weekend|weekend days)
    (which|what) days are free of work
    when does the weekend (start|begin)
    the weekend is (what|which days)
    (is|are) saturday and sunday the weekend
    weekend days
    on (what|which) days do people not work
""")
_SETS = {"day": WEEKDAYS, "month": MONTHS}
_WHOLE = {"day": "week", "month": "year"}


def play(scene: Scene) -> Turn:
    """One question about days or months."""
    makers = (after, before, everything, how_many, length, nth, position, weekend)
    return scene.rng.choices(makers, (5, 5, 1.5, 1, 2.5, 2.5, 1, 0.6))[0](scene)


def after(scene: Scene) -> Turn:
    kind, at = _pick(scene)
    names = _SETS[kind]
    phrases = AFTER_TODAY if kind == "day" and scene.chance(0.25) else AFTER
    answer = names[(at + 1) % len(names)]
    return _turn(scene, phrases, f"After {names[at]} comes {answer}.", answer, k=kind, x=names[at])


def before(scene: Scene) -> Turn:
    kind, at = _pick(scene)
    names = _SETS[kind]
    phrases = BEFORE_TODAY if kind == "day" and scene.chance(0.25) else BEFORE
    answer = names[at - 1]
    return _turn(scene, phrases, f"Before {names[at]} comes {answer}.", answer, k=kind, x=names[at])


def everything(scene: Scene) -> Turn:
    kind, _ = _pick(scene)
    listed = ", ".join(_SETS[kind])
    return _turn(scene, LIST, f"{listed}.", listed, k=kind, o=_WHOLE[kind])


def how_many(scene: Scene) -> Turn:
    kind, whole, number = scene.rng.choice(
        (("day", "week", 7), ("month", "year", 12), ("day", "year", 365))
    )
    reply = f"A {whole} has {number} {kind}s."
    return _turn(scene, HOW_MANY, reply, f"{number} {kind}s", k=kind, o=whole)


def length(scene: Scene) -> Turn:
    at = scene.rng.randrange(12)
    reply = f"{MONTHS[at]} has {LENGTHS[at]} days{', 29 in a leap year' if at == 1 else ''}."
    return _turn(scene, LENGTH, reply, f"{LENGTHS[at]} days", x=MONTHS[at])


def nth(scene: Scene) -> Turn:
    kind, at = _pick(scene)
    name = _SETS[kind][at]
    count = ORDINAL_WORDS[at] if scene.chance(0.6) else ordinal(at + 1)
    reply = f"{name} is the {ORDINAL_WORDS[at]} {kind} of the {_WHOLE[kind]}."
    number = str(at + 1) if scene.chance(0.6) else NUMBER_WORDS[at + 1]
    return _turn(scene, NTH, reply, name, k=kind, o=_WHOLE[kind], n=count, m=number)


def position(scene: Scene) -> Turn:
    at = scene.rng.randrange(12)
    reply = f"{MONTHS[at]} is the {ORDINAL_WORDS[at]} month of the year."
    return _turn(scene, POSITION, reply, ORDINAL_WORDS[at], x=MONTHS[at], n=ORDINAL_WORDS[at])


def weekend(scene: Scene) -> Turn:
    reply = "The weekend is Saturday and Sunday."
    return _turn(scene, WEEKEND, reply, "saturday and sunday")


def _pick(scene: Scene) -> tuple[str, int]:
    kind = scene.rng.choice(("day", "month"))
    return kind, scene.rng.randrange(len(_SETS[kind]))


def _turn(scene: Scene, phrases: Phrases, reply: str, answer: str, **slots: str) -> Turn:
    user = scene.message(Kind.QUESTION, phrases, **slots)
    return Turn(user, reply, "calendar", all=((answer,),))

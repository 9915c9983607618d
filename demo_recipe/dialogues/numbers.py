"""Small arithmetic: sums and differences to 20, products to 10 times 10, comparing, counting.

All number pairs of this range are trained; what is held out is the phrasing. Larger numbers belong
to the fallback. Knows how people ask for sums; knows no chat.
"""

from collections.abc import Callable

from demo_recipe.dialogues.refusal import out_of_scope
from demo_recipe.dialogues.sources import NUMBER_WORDS, person
from demo_recipe.grammar import Phrases, Words
from demo_recipe.scene import Scene, Turn
from demo_recipe.voice import Kind

PLUS = Phrases("""
    {a} + {b}
    {a}+{b}
    {a} plus {b}
    what is {a} + {b}
    what's {a} + {b}
    what is {a} plus {b}
    what's {a} plus {b}
    how much is {a} (plus|+|and) {b}
    (calculate|compute|add|solve|work out) {a} + {b}
    add {a} and {b}
    add {b} to {a}
    {a} and {b} (makes|make|is|are|equals|together) what
    the sum of {a} and {b}
    what is the sum of {a} and {b}
    what (do you get|do I get) (if you|if I|when you) add {a} and {b}
    {a} + {b} =
    {a} + {b} = what
    {a} plus {b} (is|equals|makes) what
    (tell|give) me {a} + {b}
    (can you|do you know how to) add {a} and {b}
    sum {a} and {b}
    sum up {a} and {b}
    what does {a} (plus|+) {b} (make|equal|give)
    if I add {b} to {a}, what (is it|do I get)
    (the|give me the) total of {a} and {b}
    what do {a} and {b} (make|add up to)
    {a} more than {b} is what
    how many are {a} and {b}
    math: {a} + {b}
""")
PLUS_STORY = Phrases("""
    I have {a} {n} and get {b} more, how many do I have [now]
    I had {a} {n} and bought {b} more, how many {n} (are there|do I have)
    if I have {a} {n} and (you give me|I find|I buy|somebody gives me) {b} more, how many do I have
    {p} has {a} {n} and (gets|finds|buys) {b} more, how many does {p} have
    there are {a} {n} on the table and I add {b}, how many are there [now]
    {a} {n} and {b} {n}, how many (is that|in total|altogether)
    I ate {a} {n} yesterday and {b} today, how many (in total|altogether|was that)
    if you put {a} {n} and {b} {n} together, how many are there
    {p} (has|owns) {a} {n} and I have {b}, how many do we have together
    (suppose|imagine|say) there are {a} {n}, then {b} more come, how many now
    we need {a} {n} for me and {b} for {p}, how many is that
    I saw {a} {n}, later {b} more {n}, how many did I see
""")
MINUS = Phrases("""
    {a} - {b}
    {a}-{b}
    {a} minus {b}
    what is {a} - {b}
    what's {a} - {b}
    what is {a} minus {b}
    what's {a} minus {b}
    how much is {a} (minus|-|less) {b}
    (calculate|compute|subtract|solve|work out) {a} - {b}
    (subtract|take away|take) {b} from {a}
    {a} take away {b}
    the difference between {a} and {b}
    what is the difference between {a} and {b}
    what (do you get|do I get) (if you|if I|when you) (subtract|take) {b} from {a}
    {a} - {b} =
    {a} minus {b} (is|equals|makes) what
    (tell|give) me {a} - {b}
    what (is left|remains) if I take {b} from {a}
    {b} less than {a}
    what does {a} (minus|-) {b} (make|equal|give)
    math: {a} - {b}
""")
MINUS_STORY = Phrases("""
    I have {a} {n} and (lose|eat|sell|give away) {b}, how many (are left|do I have left|remain)
    I had {a} {n} and (lost|ate|sold|gave away) {b}, how many (are left|do I have now|remain)
    if I have {a} {n} and give {b} to {p}, how many are left
    {p} has {a} {n} and (loses|eats|sells) {b}, how many (are left|does {p} have)
    there are {a} {n} and {b} (break|go away|disappear), how many are left
    of {a} {n} I used {b}, how many are left
    {a} {n}, {b} (are gone|get lost), how many (are left|remain)
    (suppose|imagine|say) there are {a} {n} and I take {b}, how many are left
    from {a} {n} I take {b}, what remains
    we baked {a} {n} and {p} took {b}, how many are there now
    {p} and I have {a} {n} together, {b} are mine, how many has {p}
    I need {a} {n} and have {b}, how many are missing
""")
TIMES = Phrases("""
    {a} times {b}
    {a} * {b}
    {a} x {b}
    what is {a} times {b}
    what's {a} times {b}
    what is {a} (*|x) {b}
    how much is {a} times {b}
    multiply {a} (by|and|with) {b}
    (calculate|compute|work out) {a} (times|*|x) {b}
    {a} multiplied by {b}
    what is {a} multiplied by {b}
    the product of {a} and {b}
    what is the product of {a} and {b}
    {a} times {b} (is|equals|makes) what
    {a} * {b} =
    (tell|give) me {a} times {b}
    I have {a} (boxes|bags) with {b} {n} each, how many {n} are there
    {a} people eat {b} {n} each, how many is that
""")
COMPARE = Phrases("""
    (which|what) is (bigger|larger|greater|more), {a} or {b}
    (which|what) is (bigger|larger|greater|more): {a} or {b}
    (which|what) number is (bigger|larger|greater|higher), {a} or {b}
    is {a} (bigger|larger|greater|more) than {b}
    is {a} (smaller|less) than {b}
    {a} or {b}, which is (bigger|larger|more)
    (which|what) is (smaller|less), {a} or {b}
    (which|what) number is (smaller|lower), {a} or {b}
    compare {a} and {b}
    what is the (larger|bigger|smaller) number of {a} and {b}
    {a} or {b}: which one is (smaller|less|lower)
    is {b} more or less than {a}
""")
COUNT_UP = Phrases("""
    count to {b}
    count up to {b}
    count from 1 to {b}
    count from one to {b}
    (say|list|write) the numbers [from 1] to {b}
    (can|could) you count to {b}
    (list|give me|name) the first {b} numbers
    numbers from 1 to {b}
    let's count to {b}
    (show|tell) me the numbers from 1 to {b}
    do you know how to count to {b}
    count until {b}
""")
COUNT_DOWN = Phrases("""
    count down from {b}
    count (backwards|back) from {b} [to 1]
    (do|start|give me) a countdown from {b}
    countdown from {b}
    (can|could) you count down from {b}
    (say|list) the numbers from {b} [down] to 1
    count from {b} to 1
    numbers from {b} down to 1
    {b} second countdown
    let's count down from {b}
    count from {b} down
    start at {b} and count down
""")
MORE = Phrases("""
    (and|plus|now plus|add) {b}
    (and|plus) {b} more
    (now|then|and) add {b} [to that|to it]
    what if I add {b} [more]
    add {b} (to that|to it|more)
    and what is that plus {b}
    that plus {b}
    plus another {b}
    increase it by {b}
    {b} more
    and if you add {b}
    with {b} more
""")
LESS = Phrases("""
    (and minus|minus|now minus) {b}
    (now|then|and) (subtract|take away) {b} [from that|from it]
    what if I take away {b}
    (subtract|take away) {b} (from that|from it)
    and what is that minus {b}
    that minus {b}
    minus another {b}
    decrease it by {b}
    {b} less
    and if you (subtract|take) {b}
    and without {b}
    less {b}
""")
NOUNS = Words(
    "apples, coins, books, pencils, eggs, cookies, cards, marbles, balls, cups, stamps, flowers, "
    "stones"
)
_Turns = list[Turn]


def play(scene: Scene) -> _Turns:
    """One sum, sometimes with a follow-up that goes on from its result."""
    makers: tuple[Callable[[Scene], Turn], ...] = (plus, minus, times, compare, count, beyond)
    turn = scene.rng.choices(makers, (5, 3.5, 2, 1, 1, 1.5))[0](scene)
    return [turn, *_further(scene, turn)]


def plus(scene: Scene) -> Turn:
    a = scene.rng.randrange(21)
    b = scene.rng.randrange(21 - a)
    is_story = scene.chance(0.2) and min(a, b) > 0
    return _sum(scene, PLUS_STORY if is_story else PLUS, f"{a} + {b}", a + b, a, b)


def minus(scene: Scene) -> Turn:
    a = scene.rng.randrange(21)
    b = scene.rng.randrange(a + 1)
    is_story = scene.chance(0.2) and min(a, b) > 0
    return _sum(scene, MINUS_STORY if is_story else MINUS, f"{a} - {b}", a - b, a, b)


def times(scene: Scene) -> Turn:
    a, b = scene.rng.randrange(11), scene.rng.randrange(11)
    return _sum(scene, TIMES, f"{a} * {b}", a * b, a, b)


def compare(scene: Scene) -> Turn:
    a, b = scene.rng.sample(range(101 if scene.chance(0.5) else 21), 2)
    reply = f"{max(a, b)} is greater than {min(a, b)}."
    user = scene.message(Kind.QUESTION, COMPARE, a=str(a), b=str(b))
    return Turn(user, reply, "numbers", all=((f"{max(a, b)} is greater",),))


def count(scene: Scene) -> Turn:
    end = scene.rng.randrange(3, 21)
    numbers = [str(number) for number in range(1, end + 1)]
    is_down = scene.chance(0.35)
    user = scene.message(Kind.ORDER, COUNT_DOWN if is_down else COUNT_UP, b=_number(scene, end))
    listed = ", ".join(numbers[::-1] if is_down else numbers)
    return Turn(user, f"{listed}.", "numbers", all=((listed,),))


def beyond(scene: Scene) -> Turn:
    """A sum outside the range: too large, or below zero."""
    shape = scene.rng.randrange(4)
    a, b = scene.rng.randrange(2, 20), scene.rng.randrange(2, 20)
    if shape == 0:
        phrases, a = PLUS, scene.rng.randrange(26 - b, 26)
    elif shape == 1:
        phrases, a, b = MINUS, min(a, b), max(a, b) + 1
    elif shape == 2:
        phrases, a = TIMES, a + 10
    else:
        phrases, a = scene.rng.choice((PLUS, MINUS)), scene.rng.randrange(21, 1000)
    slots = {"n": scene.value(NOUNS), "p": person(scene)}
    return out_of_scope(scene, scene.message(Kind.QUESTION, phrases, a=str(a), b=str(b), **slots))


def _sum(scene: Scene, phrases: Phrases, sides: str, result: int, a: int, b: int) -> Turn:
    user = scene.message(
        Kind.QUESTION, phrases, a=_number(scene, a), b=_number(scene, b),
        n=scene.value(NOUNS), p=person(scene),
    )  # fmt: skip
    return Turn(user, f"{sides} = {result}.", "sum", all=((rf"\b{result}\b",),))


def _further(scene: Scene, turn: Turn) -> _Turns:
    if turn.skill != "sum" or not scene.chance(0.15):
        return []
    result = int(turn.reply.split(" = ")[1][:-1])
    if result > 20:
        return []
    if scene.chance(0.6):
        b = scene.rng.randrange(21 - result)
        user = scene.message(Kind.BARE, MORE, b=_number(scene, b))
        return [
            Turn(user, f"{result} + {b} = {result + b}.", "sum", all=((rf"\b{result + b}\b",),))
        ]
    b = scene.rng.randrange(result + 1)
    user = scene.message(Kind.BARE, LESS, b=_number(scene, b))
    return [Turn(user, f"{result} - {b} = {result - b}.", "sum", all=((rf"\b{result - b}\b",),))]


def _number(scene: Scene, number: int) -> str:
    return NUMBER_WORDS[number] if number <= 20 and scene.chance(0.12) else str(number)

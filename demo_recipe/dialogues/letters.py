"""Spelling, counting letters, reversing. The reply spells the word first and reads the answer off.

Knows how people ask about letters; the words are in `lexicon.spelling`.
"""

from demo_recipe.grammar import Grade, Phrases
from demo_recipe.lexicon.coined import coined_word
from demo_recipe.lexicon.odd import any_word
from demo_recipe.lexicon.people import FIRST_NAMES
from demo_recipe.lexicon.spelling import SPELLED
from demo_recipe.lexicon.things import ANIMALS
from demo_recipe.scene import Scene, Turn
from demo_recipe.voice import Kind, capitalised

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
NUMBER_OF = ("never", "once", "twice", "3 times", "4 times", "5 times")

SPELL = Phrases("""
    spell {w}
    spell the word {w}
    spell {w} (for me|out|letter by letter|correctly|slowly)
    how do you spell {w}
    how do I spell {w}
    how is {w} (spelled|spelt|written)
    how would you spell {w}
    how (do|should) I write {w}
    what is the (right|correct) spelling of {w}
    (what's|what is) the spelling of {w}
    (give|tell|show) me the (letters|spelling) of {w}
    (write|say|read) {w} letter by letter
    what (letters|characters) are in {w}
    which letters does {w} have
    the letters of {w}
    break {w} into letters
    {w}, how is that spelled
    list the letters (in|of) {w}
    do you know how to spell {w}
    I (don't know|forgot) how to spell {w}
    split {w} into [its] letters
""")
REVERSE = Phrases("""
    reverse {w}
    reverse the word {w}
    (write|spell|say|type|read|print) {w} backwards
    (write|spell|say|type|read|print) the word {w} backwards
    what is {w} backwards
    what's {w} backwards
    {w} backwards
    {w} (in reverse|reversed|spelled backwards)
    what is {w} (in reverse|reversed|spelled backwards|read backwards)
    how do you (spell|write|say) {w} backwards
    turn {w} around
    flip [the word] {w}
    (give|show|tell) me {w} (backwards|in reverse|reversed)
    what do you get if you reverse {w}
    {w} from back to front
    how is {w} (spelled|written) backwards
    mirror the word {w}
    (put|write) the letters of {w} in reverse [order]
    if you read {w} backwards, what is it
    spell {w} from the end
""")
COUNT = Phrases("""
    how many letters (are in|are there in|has) {w}
    how many letters does {w} have
    how many letters in {w}
    how many letters has the word {w}
    how many letters does the word {w} have
    how many letters are in the word {w}
    count the letters (in|of) {w}
    count the letters of the word {w}
    how long is [the word] {w}
    what is the length of [the word] {w}
    number of letters in {w}
    (tell|give) me the (number of letters|letter count) (in|of) {w}
    {w} has how many letters
    how many characters are in {w}
    how many characters does {w} have
    letters in {w}
    (what's|what is) the letter count of {w}
    how many letters do I need to write {w}
    with how many letters is {w} (written|spelled)
""")
FIRST = Phrases("""
    what is the first letter (of|in) {w}
    what's the first letter (of|in) {w}
    (which|what) letter does {w} (start|begin) with
    {w} (starts|begins) with (which|what) letter
    first letter of {w}
    (tell|give) me the first letter of {w}
    with (which|what) letter does {w} (start|begin)
    what does {w} (start|begin) with
    how does {w} (start|begin)
    the word {w} (starts|begins) with what
    (name|say) the first letter of {w}
    the initial of {w}
""")
LAST = Phrases("""
    what is the last letter (of|in) {w}
    what's the last letter (of|in) {w}
    (which|what) letter does {w} (end|finish) with
    {w} (ends|finishes) with (which|what) letter
    last letter of {w}
    (tell|give) me the last letter of {w}
    with (which|what) letter does {w} (end|finish)
    what does {w} (end|finish) (with|in)
    how does {w} (end|finish)
    the word {w} ends with what
    (name|say) the last letter of {w}
    the final letter of {w}
""")
OCCURS = Phrases("""
    how many {c}'s are in {w}
    how many {c}s are (there in|in) {w}
    how many times (does|is) {c} (appear in|in|occur in) {w}
    how often (is|does) [the letter] {c} (in|appear in|occur in) {w}
    count the {c}s in {w}
    count the letter {c} in {w}
    how many times is the letter {c} in {w}
    how many letters {c} (are in|does) {w} [have]
    number of {c}s in {w}
    is there (a|an) {c} in {w}
    does {w} (have|contain) (a|an) {c}
    does {w} contain the letter {c}
    is the letter {c} in {w}
    {w} has how many {c}s
""")
NEIGHBOUR = Phrases("""
    (which|what) letter (comes|is) {d} {c}
    what (comes|is) {d} [the letter] {c} [in the alphabet]
    the letter {d} {c}
    in the alphabet, what (comes|is) {d} {c}
    (tell|give) me the letter {d} {c}
    (name|say) the letter {d} {c}
    (which|what) is the letter {d} {c}
    {d} {c} comes (which|what) letter
    what letter do I get {d} {c}
    in the abc, what is {d} {c}
    alphabet: what comes {d} {c}
    (which|what) letter is right {d} {c}
""")
RECITE = Phrases("""
    (say|recite|list|write|type|show|tell me|give me) the [whole] (alphabet|abc)
    what is the alphabet
    (what are|list) (the|all) letters of the alphabet
    (do|can) you know the alphabet
    the alphabet [please]
    the abc [please]
    all letters from a to z
    (say|list|write) (all|the) letters from a to z
    (a to z|abc)
    how does the alphabet go
    go through the alphabet
    (do you|can you) (know|say) (your|the) abc
""")


def play(scene: Scene) -> Turn:
    """One question about letters."""
    makers = (spell, reverse, count, first, last, occurs, neighbour, recite)
    return scene.rng.choices(makers, (5, 4, 4, 2, 2, 3, 1.5, 0.5))[0](scene)


def spell(scene: Scene) -> Turn:
    word = _word(scene)
    return _turn(scene, SPELL, word, "", rf": {_in_order(word)}")


def reverse(scene: Scene) -> Turn:
    word = _word(scene)
    backwards = word[::-1]
    found = f"Backwards: {spelled(backwards)}."
    return _turn(scene, REVERSE, word, found, rf"backwards: {_in_order(backwards)}")


def count(scene: Scene) -> Turn:
    word = _word(scene)
    return _turn(scene, COUNT, word, f"That is {len(word)} letters.", rf"\b{len(word)} letters")


def first(scene: Scene) -> Turn:
    word = _word(scene)
    return _turn(scene, FIRST, word, f"It starts with {word[0]}.", f"starts with {word[0]}")


def last(scene: Scene) -> Turn:
    word = _word(scene)
    return _turn(scene, LAST, word, f"It ends with {word[-1]}.", f"ends with {word[-1]}")


def occurs(scene: Scene) -> Turn:
    word = _word(scene)
    letter = scene.rng.choice(word) if scene.chance(0.75) else scene.rng.choice(ALPHABET)
    times = word.count(letter)
    found = f"{letter} is in it {NUMBER_OF[times]}" if times else f"There is no {letter} in it"
    found = capitalised(found)
    return _turn(scene, OCCURS, word, f"{found}.", found, c=letter)


def neighbour(scene: Scene) -> Turn:
    at = scene.rng.randrange(1, 25)
    direction, step = scene.rng.choice((("after", 1), ("before", -1)))
    letter, answer = ALPHABET[at], ALPHABET[at + step]
    link = "is followed by" if step == 1 else "comes after"
    reply = f"{letter.upper()} {link} {answer.upper()}."
    user = scene.message(Kind.QUESTION, NEIGHBOUR, c=letter, d=direction)
    return Turn(user, reply, "letters", all=((rf"\b{answer}\b",),))


def recite(scene: Scene) -> Turn:
    user = scene.message(Kind.ORDER, RECITE)
    return Turn(user, f"{' '.join(ALPHABET)}.", "letters", all=(("x y z",),))


def spelled(word: str) -> str:
    """The letters of a word, joined by spaces: one token each."""
    return " ".join(word)


def _word(scene: Scene) -> str:
    # The letters of a token are learnt from words that have it: training takes them from all lists.
    if scene.grade is Grade.TRAIN and scene.chance(0.4):
        return any_word(scene.rng)
    pick = scene.rng.random()
    if pick < 0.12:
        return coined_word(scene.rng, scene.grade)
    if pick < 0.2:
        return FIRST_NAMES.draw(scene.rng, scene.grade).lower()
    return (ANIMALS if pick < 0.35 else SPELLED).draw(scene.rng, scene.grade)


def _turn(scene: Scene, phrases: Phrases, word: str, found: str, answer: str, **slots: str) -> Turn:
    """A question about a word; the reply spells it and then says what was `found`."""
    shown = word.capitalize() if not scene.voice.is_lower and scene.chance(0.08) else word
    if scene.chance(0.12):
        shown = f'"{shown}"'
    user = scene.message(Kind.QUESTION, phrases, w=shown, **slots)
    reply = f"{word}: {spelled(word)}. {found}".strip()
    return Turn(user, reply, "letters", all=((answer,),))


def _in_order(word: str) -> str:
    return r"\W*".join(word) + r"\b"

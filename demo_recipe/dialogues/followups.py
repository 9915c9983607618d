"""What people say about the reply they just got: more, shorter, in other words, again.

Also repeats what the user said. Knows the last turn only, through its `more` and `brief` texts.
"""

import re

from demo_recipe.grammar import Phrases
from demo_recipe.scene import Scene, Turn, out_of_scope
from demo_recipe.texts import phrases
from demo_recipe.voice import Kind

SAYS = phrases("followups")

LONG = 240  # characters; nobody asks to repeat more
NO_MORE = "There is nothing more to say about that."
NOT_SHORTER = "I can't say that any shorter."
NOT_OTHER = "I have no other words for that."


def play(scene: Scene) -> Turn:
    """Something about the last reply; the scene must have at least one turn."""
    last = scene.turns[-1]
    pick = scene.rng.random() if len(last.reply) < LONG and len(last.user) < LONG else 0.0
    if pick < 0.35:
        return more(scene, last)
    if pick < 0.58:
        return shorter(scene, last)
    if pick < 0.76:
        return other(scene, last)
    return again(scene, last) if pick < 0.9 else quote(scene, last)


def more(scene: Scene, last: Turn) -> Turn:
    """Go on with the last reply."""
    return _reworked(scene, last, "more", last.more or NO_MORE, last.more)


def shorter(scene: Scene, last: Turn) -> Turn:
    """The last reply in a few words."""
    reply = f"In short: {last.brief}" if last.brief else NOT_SHORTER
    return _reworked(scene, last, "shorter", reply, last.brief)


def other(scene: Scene, last: Turn) -> Turn:
    """The last reply in other words."""
    reply = f"In other words: {last.brief}" if last.brief else NOT_OTHER
    return _reworked(scene, last, "other", reply, last.brief)


def again(scene: Scene, last: Turn) -> Turn:
    """The last reply once more; it can be continued and shortened as before."""
    turn = _turn(scene, SAYS["again"], last.reply, (last.reply,))
    return Turn(turn.user, turn.reply, turn.skill, turn.all, more=last.more, brief=last.brief)


def quote(scene: Scene, last: Turn) -> Turn:
    """The user's own last message."""
    return _turn(scene, SAYS["quote"], f'You said: "{last.user}"', (last.user,))


def is_continuable(turn: Turn) -> bool:
    """Whether the turn has more to give than its reply."""
    return bool(turn.more or turn.brief)


def _reworked(scene: Scene, last: Turn, way: str, reply: str, source: str) -> Turn:
    phrases = SAYS[way]
    if last.skill == "fallback":
        return out_of_scope(scene.message(Kind.BARE, phrases))
    return _turn(scene, phrases, reply, _key_words(source))


def _turn(scene: Scene, phrases: Phrases, reply: str, words: tuple[str, ...]) -> Turn:
    user = scene.message(Kind.BARE, phrases)
    return Turn(user, reply, "follow-up", tuple((re.escape(word),) for word in words))


def _key_words(text: str) -> tuple[str, ...]:
    """The longest word of a text: enough to tell it from every other reply."""
    words = re.findall(r"\w+", text)
    return (max(words, key=len),) if words else ()

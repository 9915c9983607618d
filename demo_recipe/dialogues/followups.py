"""What people say about the reply they just got: more, shorter, in other words, again.

Also repeats what the user said. Knows the last turn only, through its `more` and `brief` texts.
"""

import re

from demo_recipe.dialogues.refusal import out_of_scope
from demo_recipe.grammar import Phrases
from demo_recipe.scene import Scene, Turn
from demo_recipe.voice import Kind

MORE = Phrases("""
    (tell|give|show) me more [about it|about that|please|details]
    (more|more please|and then|then what|go on|continue|carry on|keep going|and|next|what next|
        what else|anything else)
    (continue|extend|lengthen) (it|that|this|the story|the poem|your answer|please|from there)
    (make|write) it longer
    (what|and what) (happens|happened|comes) (next|then|after that)
    (a bit|a little|some) more [please|detail|details|about it]
    (elaborate|expand|go deeper|explain further|say more|explain more|write more) [on that|on it|
        please]
    (can|could) you (continue|go on|tell me more|elaborate|say more|explain further|write more|
        make it longer)
    (I want|I'd like|I would like|I need) (more|to hear more|more details|to know more|
        a longer version)
    (the next|another|one more) (part|verse|line|paragraph|chapter|stanza|sentence)
    how does (it|the story|that) (continue|go on|end)
    (is there|do you know) (more|anything else|something else)
    (add|write) (something|a bit|another sentence|another verse|some lines|a second part) [to it]
    (longer|longer please|too short|that is too short|not enough|keep talking|don't stop)
    (why|how so|in more detail|in detail|with more details)
""")
SHORTER = Phrases("""
    (shorter|shorter please|too long|that is too long|briefly|in short|in brief|tldr|tl dr|
        to the point|sum up)
    (make|say|tell|write|put) (it|that|this) (shorter|more briefly|in short|in one sentence|
        in fewer words|more concisely|short)
    (shorten|condense|compress|cut|trim|summarize|summarise) (it|that|this|your answer|the answer|
        the story|the poem|please)
    (can|could) you (shorten|summarize|summarise) (it|that|this|your answer|the story)
    (can|could) you (say|tell|make|put) (it|that) (shorter|briefly|in one sentence|in fewer words)
    (give me|I want|I need|I'd like) (a short version|the short version|a summary|the gist|
        one sentence|a shorter version|the essence)
    (a short version|the short version|a summary|the gist|one sentence|fewer words|less words|
        less text) [please]
    (be|be more) (brief|concise|short)
    (what's|what is) the (gist|short version|summary|essence)
    sum (it|that) up
    (in|with) (one sentence|a few words|fewer words|ten words)
    (that was|that's|it is|it's) (too long|a bit long|too much|very long)
""")
OTHER = Phrases("""
    (rephrase|reword|paraphrase|reformulate|restate) (it|that|this|your answer|the answer|please)
    (say|tell|put|explain|write|express) (it|that|this) (differently|another way|in other words|
        in another way|again differently|in simple words|more simply|simpler|with other words)
    (can|could) you (rephrase|reword|paraphrase) (it|that|this|your answer)
    (can|could) you (say|tell|put|explain) (it|that) (differently|another way|in other words|
        more simply)
    (in other words|simpler|simpler please|more simply|differently please|another wording|
        other words please|once more in simple words)
    (I don't|I do not|I didn't) (understand|get) (it|that|this|your answer|what you mean|
        that answer)
    (explain|say) (it|that) (to a child|for beginners|for dummies|so that I understand)
    (what|and what) does that mean
    (make|put) it (simpler|easier|in plain words|in plain english)
    (use|with) (other|simpler|plain|easier|different) words
    (that's|that is|it is|it was) (too complicated|hard to understand|confusing|unclear|not clear)
    (what do you mean|how do you mean that) [by that|by this]
""")
AGAIN = Phrases("""
    (repeat|say|tell me|write|print|show) (that|it|this|your answer|your last answer|
        the last answer|your reply|what you said) [again|once more|please]
    (say|tell me) (again|once more)
    (again|once more|one more time|repeat|repeat please|come again|say again)
    (what did you|what have you) [just] (say|said|write|answer|tell me)
    (what was|what is) (your last answer|your answer|the last answer|that again|your reply)
    (can|could) you (repeat|say) (that|it|your answer|the answer) [again|once more]
    (I missed|I didn't hear|I did not read|I lost) (that|your answer|it|what you said)
    your (last|previous) (answer|reply|message|sentence) [again|please]
    what was that [again]
    (the same|that|it) (again|once more) [please]
""")
QUOTE = Phrases("""
    what did I [just] (say|write|ask|type)
    what (was|is) my (last|previous) (message|question|sentence|input|line)
    (repeat|quote|say|echo) (my last message|my last question|what I said|what I wrote|
        what I just said|my words|my last sentence|me)
    what have I [just] (said|written|asked|typed)
    (can|could) you (repeat|quote) (my last message|what I said|my question|my words)
    (do you|can you) remember (what I just said|my last message|my last question|what I just asked|
        what I wrote)
    my last (message|question|sentence|words) [again|please]
    what was the last thing I (said|wrote|asked|typed)
    the last thing I (said|wrote|asked) was what
    (tell me|show me) (my last message|what I just said|my last question)
""")
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
    reply = last.more or NO_MORE
    return _reworked(scene, last, MORE, reply, last.more)


def shorter(scene: Scene, last: Turn) -> Turn:
    """The last reply in a few words."""
    reply = f"In short: {last.brief}" if last.brief else NOT_SHORTER
    return _reworked(scene, last, SHORTER, reply, last.brief)


def other(scene: Scene, last: Turn) -> Turn:
    """The last reply in other words."""
    reply = f"In other words: {last.brief}" if last.brief else NOT_OTHER
    return _reworked(scene, last, OTHER, reply, last.brief)


def again(scene: Scene, last: Turn) -> Turn:
    """The last reply once more; it can be continued and shortened as before."""
    turn = _turn(scene, AGAIN, last.reply, (last.reply,))
    return Turn(turn.user, turn.reply, turn.skill, turn.all, more=last.more, brief=last.brief)


def quote(scene: Scene, last: Turn) -> Turn:
    """The user's own last message."""
    return _turn(scene, QUOTE, f'You said: "{last.user}"', (last.user,))


def is_continuable(turn: Turn) -> bool:
    """Whether the turn has more to give than its reply."""
    return bool(turn.more or turn.brief)


def _reworked(scene: Scene, last: Turn, phrases: Phrases, reply: str, source: str) -> Turn:
    if last.skill == "fallback":
        return out_of_scope(scene, scene.message(Kind.BARE, phrases))
    return _turn(scene, phrases, reply, _key_words(source))


def _turn(scene: Scene, phrases: Phrases, reply: str, words: tuple[str, ...]) -> Turn:
    user = scene.message(Kind.BARE, phrases)
    return Turn(user, reply, "follow-up", tuple((re.escape(word),) for word in words))


def _key_words(text: str) -> tuple[str, ...]:
    """The longest word of a text: enough to tell it from every other reply."""
    words = re.findall(r"\w+", text)
    return (max(words, key=len),) if words else ()

"""Facts in conversation: told, asked for, corrected, confirmed, summed up.

Every reply repeats a fact in its one canonical clause, so that recalling it is finding and copying
that clause. Knows how facts are talked about; `relations` knows which facts there are.
"""

import re

from demo_recipe.dialogues.relations import NOTE, WEIGHTED, is_shared
from demo_recipe.facts import Fact, draw_fact, with_new_value
from demo_recipe.scene import Scene, Turn
from demo_recipe.texts import phrases
from demo_recipe.voice import Kind, capitalise

SAYS = phrases("telling")
NOTHING_TOLD = "You haven't told me anything about yourself yet."


def tell(scene: Scene) -> Turn:
    """Tell one to three new facts in one message; records them."""
    count = scene.rng.choices((1, 2, 3), (0.78, 0.17, 0.05))[0]
    facts = [new_fact(scene) for _ in range(count)]
    facts = list({fact.key: fact for fact in facts}.values())
    turn = statement_turn(scene, facts)
    record(scene, facts)
    return turn


def statement_turn(scene: Scene, facts: list[Fact]) -> Turn:
    """The turn in which these facts are told; records nothing."""
    statements = [scene.draw(fact.relation.tells, **fact.slots) for fact in facts]
    joined = statements[0]
    for statement in statements[1:]:
        joined += scene.rng.choice((" and ", ", ", ". ", ", and ")) + statement
    return Turn(
        user=scene.finish(Kind.STATEMENT, joined),
        reply=f"Got it: {joined_clauses(facts)}.",
        skill="tell",
        all=tuple((re.escape(fact.value),) for fact in facts),
    )


def ask(scene: Scene) -> Turn:
    """Ask for a told fact, or now and then for one that was never told."""
    if scene.chance(0.18):
        return never_told(scene)
    if not scene.facts:
        return tell(scene)
    return question_turn(scene, scene.rng.choice(list(scene.facts.values())))


def question_turn(scene: Scene, fact: Fact) -> Turn:
    """The turn in which a told fact is recalled."""
    return Turn(
        user=question(scene, fact),
        reply=f"{capitalise(fact.clause)}.",
        skill="recall",
        all=((re.escape(fact.value),),),
    )


def never_told(scene: Scene) -> Turn:
    """A question about something the user never told."""
    fact = new_fact(scene)
    while fact.relation is NOTE and not is_shared(fact.slots["a"]):
        # "What is the tower of Babel?" is a question about the world, not about the user.
        fact = new_fact(scene)
    return _unknown(question(scene, fact), fact)


def _unknown(user: str, fact: Fact) -> Turn:
    return Turn(
        user=user,
        reply=f"You haven't told me {fact.gap} yet.",
        skill="never told",
        all=(("haven't told", "not told", "don't know", "didn't tell"),),
    )


def correct(scene: Scene) -> Turn:
    """Correct a told fact, or tell one if there is none; records the new value."""
    if not scene.facts:
        return tell(scene)
    last = list(scene.facts.values())[-1]
    is_short = scene.chance(0.4) and _was_just_said(scene, last)
    old = last if is_short or scene.chance(0.4) else scene.rng.choice(list(scene.facts.values()))
    new = with_new_value(old, scene)
    turn = correction_turn(scene, old, new, is_short)
    record(scene, [new])
    return turn


def correction_turn(scene: Scene, old: Fact, new: Fact, is_short: bool) -> Turn:
    """The turn that replaces `old` by `new`; a short one names the value alone."""
    if is_short:
        text = scene.draw(SAYS["short_fixes"], v=new.slots["v"], o=old.slots["v"])
        user = scene.voice.finish(text, Kind.STATEMENT, scene.rng)
    else:
        statement = scene.draw(new.relation.tells, **new.slots)
        user = scene.voice.finish(scene.draw(SAYS["fixes"], x=statement), Kind.STATEMENT, scene.rng)
    return Turn(
        user=user,
        reply=f"Updated: {new.clause}.",
        skill="correct",
        all=((re.escape(new.value),),),
    )


def confirm(scene: Scene) -> Turn:
    """A yes-or-no question about a told fact, now and then about one never told."""
    if not scene.facts or scene.chance(0.15):
        fact = new_fact(scene)
        return _unknown(_claim(scene, fact), fact)
    fact = scene.rng.choice(list(scene.facts.values()))
    is_true = scene.chance(0.5)
    claim = fact if is_true else with_new_value(fact, scene)
    return Turn(
        user=_claim(scene, claim),
        reply=f"{'Yes' if is_true else 'No'}, {fact.clause}.",
        skill="confirm",
        all=(("^yes" if is_true else "^no",), (re.escape(fact.value),)),
    )


def _claim(scene: Scene, fact: Fact) -> str:
    """A question whether a fact is so."""
    statement = scene.draw(fact.relation.tells, **fact.slots)
    return scene.voice.finish(scene.draw(SAYS["confirms"], x=statement), Kind.QUESTION, scene.rng)


def recap(scene: Scene) -> Turn:
    """Everything told so far in this chat, in the order of telling."""
    facts = list(scene.facts.values())
    reply = f"You told me that {joined_clauses(facts)}." if facts else NOTHING_TOLD
    return Turn(
        user=scene.message(Kind.QUESTION, SAYS["recaps"]),
        reply=reply,
        skill="recap",
        all=tuple((re.escape(fact.value),) for fact in facts),
    )


def question(scene: Scene, fact: Fact) -> str:
    """Ask for a fact directly, or behind "do you know" and its kin."""
    if scene.chance(0.35):
        indirect = scene.draw(fact.relation.indirect, **fact.slots)
        text = scene.draw(SAYS["embedded"], i=indirect)
        return scene.voice.finish(text, Kind.QUESTION, scene.rng)
    return scene.message(Kind.QUESTION, fact.relation.asks, **fact.slots)


def new_fact(scene: Scene) -> Fact:
    """A fact whose key is not taken in this scene."""
    relations, weights = zip(*WEIGHTED, strict=True)
    while True:
        fact = draw_fact(scene.rng.choices(relations, weights)[0], scene)
        if fact.key not in scene.facts:
            return fact


def record(scene: Scene, facts: list[Fact]) -> None:
    """Remember facts as the latest told."""
    for fact in facts:
        scene.facts.pop(fact.key, None)
        scene.facts[fact.key] = fact


def joined_clauses(facts: list[Fact]) -> str:
    """The clauses as one enumeration: a, b and c."""
    clauses = [fact.clause for fact in facts]
    if len(clauses) == 1:
        return clauses[0]
    return f"{', '.join(clauses[:-1])} and {clauses[-1]}"


def _was_just_said(scene: Scene, fact: Fact) -> bool:
    """Whether the last turn told this one fact, so that "I meant Tim" has a meaning."""
    return bool(scene.turns) and scene.turns[-1].reply.endswith(f": {fact.clause}.")

"""A few code snippets people ask any chat program for. Knows how they are asked for.

Code outside this set belongs to the fallback: a snippet that looks right and is not would be a lie.
"""

from demo_recipe.dialogues.snippets import SNIPPETS
from demo_recipe.grammar import Phrases
from demo_recipe.scene import Scene, Turn
from demo_recipe.voice import Kind

ASKS = Phrases("""
    how (do|can|would) I {t} in {l}
    how (do|would) you {t} in {l}
    how to {t} in {l}
    (show|tell|teach) me how to {t} in {l}
    (show|give) me (code|some code|{l} code) to {t}
    {l} code to {t}
    {l}: {t}
    {t} in {l}
    {t} (with|using) {l}
    (write|give me|show me) (code|a snippet|a script|a program|a few lines) (to|in {l} to) {t}
    (write|give me|show me) a {l} (snippet|script|program|example) to {t}
    (write|give me) {l} code (to|that can) {t}
    I (want|need|have) to {t} in {l}
    I need {l} code to {t}
    what is the {l} code to {t}
    what does {l} code to {t} look like
    (code|snippet|example) to {t} in {l}
    using {l}, how do I {t}
    (can|could) you {t} in {l}
    (can|could) you (show|write) me {l} code to {t}
    a {l} example to {t}
    help me {t} in {l}
    with {l}, {t}
""")
ASKS_THING = Phrases("""
    (show|give|write) me {n} in {l}
    (write|make|code) {n} in {l}
    {n} in {l}
    {l} {n}
    {n} (with|using) {l}
    (show|give|write) me an example of {n} in {l}
    what does {n} look like in {l}
    how does {n} look in {l}
    how (do|can) I (write|make|code|use) {n} in {l}
    how to (write|make|use) {n} in {l}
    (I need|I want|I'd like) {n} in {l}
    an example of {n} in {l}
    example: {n} in {l}
    (can|could) you (show|write) [me] {n} in {l}
    {l} code for {n}
    the syntax of {n} in {l}
    (code|snippet|example) for {n} in {l}
    (explain|demonstrate) {n} in {l}
""")


def play(scene: Scene) -> Turn:
    """Ask for one snippet."""
    snippet = scene.rng.choice(SNIPPETS)
    if scene.chance(0.5):
        task = scene.draw(snippet.tasks)
        user = scene.message(Kind.QUESTION, ASKS, t=task, l=snippet.language)
    else:
        user = scene.message(
            Kind.QUESTION, ASKS_THING, n=scene.draw(snippet.things), l=snippet.language
        )
    tag = snippet.language.lower()
    reply = f"```{tag}\n{snippet.code}\n```"
    return Turn(
        user, reply, "code", all=((snippet.mark,),), more=snippet.about, brief=snippet.about
    )

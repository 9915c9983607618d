"""A few code snippets people ask any chat program for. Knows how they are asked for.

Code outside this set belongs to the fallback: a snippet that looks right and is not would be a lie.
"""

from dataclasses import dataclass

from demo_recipe.grammar import Phrases
from demo_recipe.scene import Scene, Turn
from demo_recipe.texts import Record, phrases, records
from demo_recipe.voice import Kind

SAYS = phrases("code")


@dataclass(frozen=True, slots=True)
class Snippet:
    """A piece of code; `tasks` are verb phrases, `things` noun phrases for it.

    mark    a pattern every right answer matches
    """

    language: str
    tasks: Phrases
    things: Phrases
    code: str
    about: str
    mark: str


def _snippet(record: Record) -> Snippet:
    tasks, things = (Phrases(record[name]) for name in ("tasks", "things"))
    code = record["code"].replace("\\n", "\n")
    return Snippet(record["language"], tasks, things, code, record["about"], record["mark"])


SNIPPETS = tuple(map(_snippet, records("snippets")))


def play(scene: Scene) -> Turn:
    """Ask for one snippet."""
    snippet = scene.rng.choice(SNIPPETS)
    if scene.chance(0.5):
        task = scene.draw(snippet.tasks)
        user = scene.message(Kind.QUESTION, SAYS["asks"], t=task, l=snippet.language)
    else:
        user = scene.message(
            Kind.QUESTION, SAYS["asks_thing"], n=scene.draw(snippet.things), l=snippet.language
        )
    tag = snippet.language.lower()
    reply = f"```{tag}\n{snippet.code}\n```"
    return Turn(
        user, reply, "code", all=((snippet.mark,),), more=snippet.about, brief=snippet.about
    )

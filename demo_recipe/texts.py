"""The words and phrases of the dialogues: `texts/*.txt`, which a person can read and change.

A file has records, separated by empty lines; each line of a record is one field, `name: text`. A
line that begins with `#` is a comment. Phrases are separated by semicolons, words by commas.
"""

from functools import cache
from importlib import resources

from demo_recipe.grammar import Phrases, Words

Record = dict[str, str]


@cache
def records(name: str) -> tuple[Record, ...]:
    """All records of `texts/<name>.txt`, in order."""
    path = resources.files("demo_recipe").joinpath(f"texts/{name}.txt")
    parsed: list[Record] = [{}]
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line:
            parsed.append({})
        elif not line.startswith("#"):
            field, text = line.split(": ", 1)
            parsed[-1][field] = text
    return tuple(record for record in parsed if record)


def phrases(module: str) -> dict[str, Phrases]:
    """The sets of phrases of one module, by name."""
    record = next(record for record in records("phrases") if record["name"] == module)
    return {name: Phrases(text) for name, text in record.items() if name != "name"}


WORDS = {name: Words(text) for name, text in records("words")[0].items()}


def parts(name: str) -> tuple[str, ...]:
    """The parts of stories and poems of one kind."""
    return tuple(records("tales")[0][name].split("; "))

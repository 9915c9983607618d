"""Lists that grow and shrink, which the demo model does not keep: the fallback answers for them.

Copying a whole list and changing one thing in it is more than a model of this size has learnt, so
it says so rather than lose an item. Knows how lists are talked about.
"""

from demo_recipe.invented import coined_word
from demo_recipe.scene import Scene, Turn, out_of_scope
from demo_recipe.texts import WORDS, phrases
from demo_recipe.voice import Kind

SAYS = phrases("lists")

NAMED = ("shopping", "to-do", "packing")
KINDS = ("guest", "wish", "grocery", "reading", "todo", "party", "travel", "gift", "task")
SUPPLIES = {
    "shopping": "foods", "grocery": "foods", "to-do": "chores", "todo": "chores", "task": "chores",
    "packing": "gear", "travel": "gear", "guest": "first_names", "party": "first_names",
}  # fmt: skip


def play(scene: Scene) -> list[Turn]:
    """A list is begun, or asked for, and perhaps the user goes on as if there were one."""
    name = scene.rng.choice((*NAMED, *NAMED, *KINDS))
    turns = [begin(scene, name) if scene.chance(0.7) else go_on(scene, name)]
    while scene.chance(0.35):
        turns.append(go_on(scene, name))
    return turns


def begin(scene: Scene, name: str) -> Turn:
    """Open a list with one to four items."""
    phrases = SAYS[f"starts_of {name}"] if name in NAMED and scene.chance(0.35) else SAYS["starts"]
    return out_of_scope(scene.message(Kind.BARE, phrases, **_slots(scene, name)))


def go_on(scene: Scene, name: str) -> Turn:
    """Change the list that is not there, or ask what is on it."""
    operation = scene.rng.choices(tuple(OPERATIONS), tuple(OPERATIONS.values()))[0]
    phrases = SAYS[operation]
    if operation == "shows" and name in NAMED and scene.chance(0.35):
        phrases = SAYS[f"shows_of {name}"]
    kind = Kind.QUESTION if operation in QUESTIONS else Kind.ORDER
    return out_of_scope(scene.message(kind, phrases, **_slots(scene, name)))


# What is done to a list, and how often.
OPERATIONS = {
    "adds": 0.34, "removes": 0.24, "shows": 0.2, "counts": 0.06, "holds": 0.07, "swaps": 0.06,
    "clears": 0.03,
}  # fmt: skip
QUESTIONS = ("shows", "counts", "holds")


def _slots(scene: Scene, name: str) -> dict[str, str]:
    items = _fresh(scene, name, [], scene.rng.choice((1, 1, 2, 2, 3, 4)))
    other = _fresh(scene, name, items, 1)
    return {"l": name, "i": _spoken(scene, items), "j": _spoken(scene, other)}


def _fresh(scene: Scene, name: str, others: list[str], count: int) -> list[str]:
    items: list[str] = []
    while len(items) < count:
        item = _item(scene, name)
        if item not in others and item not in items:
            items.append(item)
    return items


def _item(scene: Scene, name: str) -> str:
    if scene.chance(0.1):
        return scene.voice.spell(coined_word(scene.rng, scene.grade))
    supply = SUPPLIES.get(name)
    if supply is None or scene.chance(0.05):
        return f"{scene.value('adjectives')} {scene.value('nouns')}"
    if supply == "foods" and scene.chance(0.04):
        return f"{scene.rng.randrange(2, 13)} {scene.value('foods')}"
    return scene.value(supply)


def _spoken(scene: Scene, bare: list[str]) -> str:
    """The items as a user enumerates them, with articles that the list leaves out."""
    items = [_dressed(scene, item) for item in bare]
    if len(items) == 1 or scene.chance(0.4):
        return ", ".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def _dressed(scene: Scene, item: str) -> str:
    if item[0].isdigit() or item[0].isupper() or not scene.chance(0.15):
        return item
    if item in WORDS["gear"].all:
        return f"{scene.rng.choice(('a', 'the', 'my'))} {item}"
    return f"{scene.rng.choice(('some', 'the'))} {item}" if item in WORDS["foods"].all else item

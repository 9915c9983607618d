"""Lists that grow and shrink, which the demo model does not keep: the fallback answers for them.

Copying a whole list and changing one thing in it is more than a model of this size has learnt, so
it says so rather than lose an item. Knows how lists are talked about.
"""

from demo_recipe.dialogues.refusal import out_of_scope
from demo_recipe.dialogues.sources import ADJECTIVES, NOUNS
from demo_recipe.grammar import Phrases
from demo_recipe.lexicon.coined import coined_word
from demo_recipe.lexicon.people import FIRST_NAMES
from demo_recipe.lexicon.things import CHORES, FOODS, GEAR
from demo_recipe.scene import Scene, Turn
from demo_recipe.voice import Kind

KINDS = ("guest", "wish", "grocery", "reading", "todo", "party", "travel", "gift", "task")
SUPPLIES = {
    "shopping": FOODS, "grocery": FOODS, "to-do": CHORES, "todo": CHORES, "task": CHORES,
    "packing": GEAR, "travel": GEAR, "guest": FIRST_NAMES, "party": FIRST_NAMES,
}  # fmt: skip

STARTS = Phrases("""
    {l} list: {i}
    my {l} list: {i}
    (start|make|create|begin|open) a {l} list (with|:) {i}
    (start|make|create|begin) a [new] {l} list and put {i} on it
    (put|add|write|place) {i} (on|to|onto|in) (my|the|a) {l} list
    (I want|I need|I'd like) a {l} list with {i}
    (here is|here's|this is) my {l} list: {i}
    on my {l} list (is|are|there is|there are|I have) {i}
    my {l} list (has|contains|is|includes) {i}
    (note|save|remember|keep) (my|this|a) {l} list: {i}
    new {l} list: {i}
    {i} (go|goes|belong|belongs) on my {l} list
    a {l} list please: {i}
    for my {l} list: {i}
    let's (make|start|write) a {l} list: {i}
    (write|note) down my {l} list: {i}
""")
STARTS_OF = {
    "shopping": Phrases("""
        I (need to|have to|must|should|want to|will) (buy|get) {i}
        we (need|have to buy|should get) {i} (from the shop|at the store|for dinner)
        remind me to buy {i}
        things to buy: {i}
        to buy: {i}
        I'm out of {i}, put (it|them) on my shopping list
    """),
    "to-do": Phrases("""
        I (need to|have to|must|should) {i} today, make a list
        (things to do|my tasks|to do|todo|my to-dos): {i}
        add {i} to my (to-dos|todos|tasks)
        put {i} on my (todos|agenda|task list)
        my tasks (for today|today) are {i}
        (today|tomorrow) I have to {i}
    """),
    "packing": Phrases("""
        I (need to|have to|must|should|want to) (pack|take|bring) {i}
        (things|stuff) to pack: {i}
        to pack: {i}
        for the (trip|holiday|journey) I (need|will take) {i}
        in my (suitcase|bag|backpack) I (put|want|need) {i}
        don't let me forget to pack {i}
    """),
}
ADDS = Phrases("""
    add {i}
    add {i} (to it|to that|to the list|to my list|to this|too|as well|also)
    add {i} to (my|the) {l} list
    [and] also {i}
    also (add|put|I need|we need|write) {i}
    (put|write|place|note) {i} (on it|on the list|there|on there|down too|on that list)
    put {i} on (my|the) {l} list
    {i} (too|as well|also)
    plus {i}
    and {i}
    I (also|still) need {i}
    I (forgot|almost forgot) {i}
    we need {i} too
    (one more thing|one more|another one|another item|also this): {i}
    don't forget {i}
    (append|include|insert|throw in) {i}
    my {l} list (also needs|needs|is missing|should also have) {i}
    (there should be|I want) {i} on it [too]
    (the list|it) (needs|should have|should include|is missing) {i}
    oh and {i}
    make that list longer with {i}
    extend the list (by|with) {i}
""")
REMOVES = Phrases("""
    (remove|delete|drop|erase|cross out|scratch|strike|take away|cancel) {i}
    (remove|delete|drop|erase|cross off|scratch|strike) {i} from (it|the list|my list|there|that)
    (remove|delete|drop|erase) {i} from (my|the) {l} list
    take {i} off
    take {i} off (the list|my list|it|there)
    take {i} off (my|the) {l} list
    take off {i}
    cross {i} off
    I (don't|do not) need {i} (anymore|any more|after all)
    we (don't|do not) need {i} (anymore|any more)
    no {i} (please|after all|anymore)
    I (already have|got|have got|bought|found) {i}
    I (already|just) (did|got|have) {i}
    {i} (is|are) done
    done with {i}[, remove it|]
    {i}: (done|finished|check|got it|not needed)
    (finished|completed|checked) {i}
    (forget|skip|leave out|without) {i}
    tick off {i}
    (mark|tick|check) {i} (as done|off)
    {i} can go
    get rid of {i}
    {i} (should not|shouldn't|doesn't|does not) (be|belong) on (it|the list|there)
    (I changed my mind|on second thought), (no|remove|drop) {i}
    everything but {i}
""")
SHOWS = Phrases("""
    what is on (my|the) [{l}] list [now]
    what's on (my|the) [{l}] list [now]
    (show|read|tell|give|print|list|repeat) [me] (my|the) [{l}] list [again]
    how does (my|the) [{l}] list look [now]
    what does (my|the) [{l}] list look like [now]
    (my|the) {l} list [please]
    what (do I have|is there|have I got|have we got) on (my|the) [{l}] list
    what (items|things) are on (it|the list|my list|my {l} list)
    what is (left|still there|on it) [now]
    what's (left|still there|on it)
    (which|what) items are left
    the [whole|full|current] list [please|again]
    (do you remember|can you show me|can you read me|let me see) (my|the) [{l}] list
    where are we with the list
    what did I put on (the|my) [{l}] list
    what (remains|is left) on (the|my) [{l}] list
    (summarize|sum up) (the|my) [{l}] list
    everything on (the|my) [{l}] list
    so what's on it
    what was on (the|my) [{l}] list [again]
    what do I (still|have to) (need|get|do) from (the|my) [{l}] list
""")
SHOWS_OF = {
    "shopping": Phrases("""
        what do I (need|have) to (buy|get)
        what (should|must) I (buy|get) [at the store|from the shop]
        what am I (buying|shopping for)
        what else do I need to buy
        what do we need from the shop
        what do I still (need|have to buy|need to buy)
    """),
    "to-do": Phrases("""
        what do I (have|need) to do [today]
        what are my (tasks|todos|to-dos)
        (show|list|read) [me] my (tasks|todos|to-dos)
        what should I (still do|do today|do next)
        what (tasks|todos) (are left|do I have)
        what do I still (have|need) to do
    """),
    "packing": Phrases("""
        what do I (have|need) to (pack|take|bring)
        what (should|must) I (pack|take|bring)
        what am I (packing|taking)
        what do I still (have|need) to pack
        what goes in my (bag|suitcase)
        what else do I need to pack
    """),
}
COUNTS = Phrases("""
    how many (items|things|entries) are on (it|the list|my list|my {l} list)
    how many (items|things|entries) (does it have|are there|do I have|are left)
    how long is (the|my) [{l}] list
    (count|number of) [the] (items|things) on (it|the list|my {l} list)
    count (the|my) [{l}] list
    how much is on (the|my) [{l}] list
    how many is that [now]
    what is the (length|size) of (the|my) [{l}] list
    how big is (the|my) [{l}] list
    how many things do I have on (the|my) [{l}] list
    tell me how many items are on (the|my) [{l}] list
    the number of (items|things) on the list
""")
HOLDS = Phrases("""
    (is|are) {i} on (it|the list|my list|my {l} list|there)
    do I have {i} on (it|the list|my list|my {l} list)
    did I (add|put|write) {i} [on the list|there|to the list]
    does (it|the list|my {l} list) (have|contain|include) {i}
    have I (added|put) {i} [to it|to the list]
    {i} (is|are) on the list, right
    is there {i} on (it|the list|my {l} list)
    what about {i}, (is that|are they) on the list
    check (if|whether) {i} (is|are) on (it|the list|my {l} list)
    (did we put|have we got) {i} on (it|the list)
    do you (see|find) {i} on (it|the list|my {l} list)
    on the list, is there {i}
""")
CLEARS = Phrases("""
    (clear|empty|delete|erase|wipe|reset) (the|my) [{l}] list
    (clear|empty|delete|erase|wipe|reset) (it|everything|all of it|the whole list)
    remove (everything|all items|all of it|all)
    start (over|again|from scratch) with (the|my|a new) [{l}] list
    throw (the|my) [{l}] list away
    I don't need (the|my) [{l}] list (anymore|any more)
    everything (is|on the list is) done
    all (done|of it is done|items are done)
    take everything off [the list]
    make (the|my) [{l}] list empty
    nothing should be on (the|my) [{l}] list
    get rid of (the|my) [{l}] list
""")
SWAPS = Phrases("""
    (replace|swap|exchange) {i} (with|by|for) {j}
    (change|switch) {i} to {j}
    {j} instead of {i}
    (put|take|write) {j} instead of {i}
    not {i} but {j}
    (take|cross) {i} off and (put|add) {j}
    remove {i} and add {j}
    swap out {i} for {j}
    I'd rather have {j} than {i}
    (make|turn) {i} into {j}
    (change|swap) {i} for {j}
    add {j} and remove {i}
""")


def play(scene: Scene) -> list[Turn]:
    """A list is begun, or asked for, and perhaps the user goes on as if there were one."""
    name = scene.rng.choice((*STARTS_OF, *STARTS_OF, *KINDS))
    turns = [begin(scene, name) if scene.chance(0.7) else go_on(scene, name)]
    while scene.chance(0.35):
        turns.append(go_on(scene, name))
    return turns


def begin(scene: Scene, name: str) -> Turn:
    """Open a list with one to four items."""
    phrases = STARTS_OF[name] if name in STARTS_OF and scene.chance(0.35) else STARTS
    return out_of_scope(scene, scene.message(Kind.BARE, phrases, **_slots(scene, name)))


def go_on(scene: Scene, name: str) -> Turn:
    """Change the list that is not there, or ask what is on it."""
    makers, weights = zip(*_OPERATIONS, strict=True)
    phrases, kind = scene.rng.choices(makers, weights)[0]
    if phrases is SHOWS and name in SHOWS_OF and scene.chance(0.35):
        phrases = SHOWS_OF[name]
    return out_of_scope(scene, scene.message(kind, phrases, **_slots(scene, name)))


_OPERATIONS: tuple[tuple[tuple[Phrases, Kind], float], ...] = (
    ((ADDS, Kind.ORDER), 0.34), ((REMOVES, Kind.ORDER), 0.24), ((SHOWS, Kind.QUESTION), 0.2),
    ((COUNTS, Kind.QUESTION), 0.06), ((HOLDS, Kind.QUESTION), 0.07), ((SWAPS, Kind.ORDER), 0.06),
    ((CLEARS, Kind.ORDER), 0.03),
)  # fmt: skip


def _slots(scene: Scene, name: str) -> dict[str, str]:
    items = _fresh(scene, name, [], scene.rng.choice((1, 1, 2, 2, 3, 4)))
    other = _fresh(scene, name, items, 1)
    return {"l": name, "i": _spoken(scene, items), "j": _spoken(scene, other)}


def _fresh(scene: Scene, name: str, taken: list[str], count: int) -> list[str]:
    items: list[str] = []
    while len(items) < count:
        item = _item(scene, name)
        if item not in taken and item not in items:
            items.append(item)
    return items


def _item(scene: Scene, name: str) -> str:
    if scene.chance(0.1):
        return scene.voice.spelled(coined_word(scene.rng, scene.grade))
    supply = SUPPLIES.get(name)
    if supply is None or scene.chance(0.05):
        return f"{scene.value(ADJECTIVES)} {scene.value(NOUNS)}"
    if supply is FOODS and scene.chance(0.04):
        return f"{scene.rng.randrange(2, 13)} {scene.value(FOODS)}"
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
    if item in GEAR.all:
        return f"{scene.rng.choice(('a', 'the', 'my'))} {item}"
    return f"{scene.rng.choice(('some', 'the'))} {item}" if item in FOODS.all else item

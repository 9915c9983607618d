"""Commands on turns: undo, retry, edit, branch. None of them removes a turn."""

import re
from dataclasses import replace

from kvchat.chat.conversation import Turn
from kvchat.chat.turn_costs import turn_costs
from kvchat.core.errors import UsageError
from kvchat.core.text import one_line, whole_number
from kvchat.terminal import warmth
from kvchat.terminal.commands import Argument, Command, CommandContext, Group
from kvchat.terminal.history_view import show_where_it_stands, tree_rows, turn_summary
from kvchat.terminal.view import Choice

_MAX_SAMPLES = 16
_SAMPLES = re.compile(r"(?:-n\s*)?(\d+)$")


async def undo(context: "CommandContext", arguments: str) -> None:
    count = _count(arguments)
    turn: Turn | None = None
    for _ in range(count):
        back = context.controller.undo()
        if back is None:
            break
        turn = back
    if turn is None:
        raise UsageError("This is the beginning.")
    context.say(f"Back before: {turn_summary(turn, 60)}  (/redo returns)")
    context.conversation_changed()


async def redo(context: "CommandContext", arguments: str) -> None:
    if not context.controller.redo():
        raise UsageError("There is nothing further on.")
    _show_where_it_stands(context)


async def rewind(context: "CommandContext", arguments: str) -> None:
    controller = context.controller
    turns = controller.user_turns
    if not turns:
        raise UsageError("There is no message to go back to.")
    if arguments:
        turn = controller.user_turn(arguments)
    else:
        choices = [Choice(f"{n}. {turn_summary(t, 60)}") for n, t in enumerate(turns, start=1)]
        index = await context.page.choose("Go back to before", choices, len(turns) - 1)
        if index is None:
            return
        turn = turns[index]
    controller.move(turn.parent_id)
    context.page.put_text(turn.text)
    context.say(f"Back before: {turn_summary(turn, 60)}  (the other branch is kept: /tree)")
    context.conversation_changed()


async def edit(context: "CommandContext", arguments: str) -> None:
    controller = context.controller
    turn = controller.user_turn(arguments)
    conversation = controller.require_conversation()
    cost = await controller.engine.cost(conversation.context_ids(turn.parent_id))
    if not await context.confirm_cost(cost, f"/edit {arguments}".strip()):
        return
    controller.edited = turn
    context.page.put_text(turn.text)
    number = controller.user_turns.index(turn) + 1
    context.notice(f"Editing message {number}: what you send next takes its place, as a branch.")


async def retry(context: "CommandContext", arguments: str) -> None:
    match = _SAMPLES.match(arguments)
    if arguments and match is None:
        raise UsageError(f"{one_line(arguments)} is no number of answers.", "/retry [-n K]")
    count = whole_number(match[1]) if match is not None else 1
    if count is None or not 1 <= count <= _MAX_SAMPLES:
        raise UsageError(f"Between 1 and {_MAX_SAMPLES} answers can be asked for at once.")
    options = replace(context.controller.options, num_samples=count)
    controller = context.controller
    asked = controller.require_conversation().context_ids(controller.user_turn("").turn_id)
    if await context.confirm_cost(await controller.engine.cost(asked), "/retry"):
        context.answer_again(options)


async def continue_(context: "CommandContext", arguments: str) -> None:
    context.continue_answer()


async def fork(context: "CommandContext", arguments: str) -> None:
    session = context.controller.fork(one_line(arguments))
    context.say(f"This is a copy now: {one_line(session.conversation.label)}")
    for note in session.notes:
        context.say(note)
    context.conversation_changed()


async def tree(context: "CommandContext", arguments: str) -> None:
    conversation = context.controller.require_conversation()
    costs = await turn_costs(context.controller.engine, conversation)
    marks = {turn_id: warmth.for_tree(each) for turn_id, each in costs.items()}
    rows = tree_rows(conversation, context.page.render_context, marks)
    context.page.write([*rows, context.page.painter.text("")])


async def switch(context: "CommandContext", arguments: str) -> None:
    conversation = context.controller.require_conversation()
    leaves = conversation.leaves()
    if arguments:
        number = whole_number(arguments)
        if number is None or number not in {turn.turn_id for turn in conversation.turns()}:
            raise UsageError(f"{one_line(arguments)} is no turn.", "/tree shows their numbers.")
        turn_id = conversation.latest_below(number)
    else:
        costs = await turn_costs(context.controller.engine, conversation)
        choices = [
            Choice(
                one_line(_trail(context, leaf), 70),
                warmth.for_list(costs[leaf.turn_id].cost) if leaf.turn_id in costs else "",
            )
            for leaf in leaves
        ]
        here = [leaf.turn_id for leaf in leaves]
        current = here.index(conversation.tip_id) if conversation.tip_id in here else 0
        index = await context.page.choose("Go on from", choices, current)
        if index is None:
            return
        turn_id = leaves[index].turn_id
    context.controller.move(turn_id)
    _show_where_it_stands(context)


def _show_where_it_stands(context: "CommandContext") -> None:
    show_where_it_stands(context.controller.require_conversation(), context.page)
    context.conversation_changed()


def _trail(context: "CommandContext", leaf: Turn) -> str:
    """Return one line on a branch: its last turn's number, the last message and its answer."""
    path = context.controller.require_conversation().path(leaf.turn_id)
    texts = [turn_summary(turn, 32) for turn in path[-2:]]
    return f"{leaf.turn_id}. {': '.join(texts)}"


def _count(arguments: str) -> int:
    if not arguments:
        return 1
    count = whole_number(arguments)
    if count is None or count < 1:
        raise UsageError(f"{one_line(arguments)} is no number of turns.")
    return count


COMMANDS = (
    Command("undo", "step back before your last message", undo, Group.TURNS, "[n]", ("pop",)),
    Command("redo", "take back an undo", redo, Group.TURNS),
    Command(
        "rewind",
        "go back to one of your messages and have it in the prompt",
        rewind,
        Group.TURNS,
        "[n]",
        argument=Argument.TURN,
    ),
    Command(
        "edit",
        "edit a message; sending it makes a branch",
        edit,
        Group.TURNS,
        "[n]",
        argument=Argument.TURN,
    ),
    Command(
        "retry",
        "answer the last message again, beside the answers there are",
        retry,
        Group.TURNS,
        "[-n K]",
        ("regen", "regenerate"),
    ),
    Command("continue", "go on with an answer that was cut off", continue_, Group.TURNS),
    Command(
        "fork", "go on in a copy of the conversation", fork, Group.TURNS, "[title]", ("branch",)
    ),
    Command(
        "tree",
        "show all branches",
        tree,
        Group.TURNS,
        aliases=("branches",),
        is_available_while_answering=True,
    ),
    Command("switch", "go to another branch", switch, Group.TURNS, "[turn]"),
)

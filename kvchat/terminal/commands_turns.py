"""Commands on turns: undo, retry, edit, branch. None of them removes a turn."""

import re
from dataclasses import replace

from kvchat.chat import making_room
from kvchat.chat.compaction import NoSummary, is_cut
from kvchat.chat.conversation import Conversation, Turn
from kvchat.chat.events import AnswerEnded
from kvchat.chat.host import turn_costs
from kvchat.chat.messages import MessageNumbers, find_place
from kvchat.core.errors import ContextTooLong, KvchatError, UsageError
from kvchat.core.text import one_line, whole_number
from kvchat.core.types import FinishReason
from kvchat.terminal import warmth
from kvchat.terminal.commands import Argument, Command, CommandContext, Group
from kvchat.terminal.history_view import show_where_it_stands, tree_rows, turn_summary
from kvchat.terminal.room import oldest_in_words
from kvchat.terminal.status import about, format_seconds, plural
from kvchat.terminal.theme import Role
from kvchat.terminal.view import Choice

_MAX_SAMPLES = 16
_SAMPLES = re.compile(r"(?:-n\s*)?(\d+)$")


async def undo(context: "CommandContext", arguments: str) -> None:
    """step back before your last message"""
    count = _count(arguments)
    undone = context.controller.place.undo(count)
    if not undone:
        raise UsageError("This is the beginning: there is no message to undo.")
    turn = undone[-1]
    what = what_stands_for_older(turn) if turn.summary_of is not None else turn_summary(turn, 60)
    place = "before the first message" if len(undone) < count else "before"
    context.say(f"Back {place}: {what}  (/redo returns)")
    context.conversation_changed()


async def redo(context: "CommandContext", arguments: str) -> None:
    """take back an undo"""
    conversation = context.controller.require_conversation()
    before = {turn.turn_id for turn in conversation.path()}
    if not context.controller.place.redo():
        raise UsageError(
            "Nothing was undone, and nothing follows here.", "/tree shows all branches."
        )
    returned = [turn for turn in conversation.path() if turn.turn_id not in before]
    context.say(f"Back after: {_returned_in_words(returned)}  (/undo steps back)")
    context.conversation_changed()


def what_stands_for_older(turn: Turn) -> str:
    """Return what took the place of earlier messages, by the turn that stands for them."""
    return "leaving out the oldest messages" if is_cut(turn) else "/compact"


def _returned_in_words(turns: list[Turn]) -> str:
    """Return in one line what /redo brought back: a summary, an answer, or messages."""
    if turns[0].summary_of is not None:
        return what_stands_for_older(turns[0])
    messages = [turn for turn in turns if turn.is_message]
    if not messages:
        return f"the answer {turn_summary(turns[-1], 60)}"
    last = turn_summary(messages[-1], 60)
    return last if len(messages) == 1 else f"{last}, the last of {len(messages)} messages"


async def rewind(context: "CommandContext", arguments: str) -> None:
    """go back before one of your messages, with its text in the prompt"""
    controller = context.controller
    turns = controller.place.user_turns
    if not turns:
        raise UsageError("There is no message to go back to.")
    if arguments:
        turn = controller.place.user_turn(arguments)
    else:
        numbers = MessageNumbers(controller.require_conversation())
        choices = [Choice(f"{numbers.of(turn)}. {turn_summary(turn, 60)}") for turn in turns]
        index = await context.page.choose("Go back before", choices, len(turns) - 1)
        if index is None:
            return
        turn = turns[index]
    controller.place.move(turn.parent_id)
    context.page.put_text(turn.text)
    context.say(f"Back before: {turn_summary(turn, 60)}  (the other branch is kept: /tree)")
    context.conversation_changed()


async def edit(context: "CommandContext", arguments: str) -> None:
    """edit a message; sending it makes a branch"""
    controller = context.controller
    number, text = [*arguments.split(maxsplit=1), "", ""][:2]
    turn = controller.place.user_turn(number)
    conversation = controller.require_conversation()
    cost = await controller.engine.cost(conversation.context_ids(turn.parent_id))
    if not await context.confirm_cost(cost, f"/edit {number}".strip()):
        return
    if text.strip():
        context.send_instead(turn, text.strip())
        return
    controller.place.edited = turn
    context.page.put_text(turn.text)
    shown = MessageNumbers(conversation).of(turn)
    context.notice(f"Editing message {shown}: what you send next takes its place, as a branch.")


async def retry(context: "CommandContext", arguments: str) -> None:
    """answer the last message again, beside the answers there are"""
    match = _SAMPLES.match(arguments)
    if arguments and match is None:
        raise UsageError(f"{one_line(arguments)} is no number of answers.", "/retry [-n how many]")
    count = whole_number(match[1]) if match is not None else 1
    if count is None or not 1 <= count <= _MAX_SAMPLES:
        raise UsageError(f"Between 1 and {_MAX_SAMPLES} answers can be asked for at once.")
    options = replace(context.controller.options, num_samples=count)
    controller = context.controller
    last = controller.place.user_turn("")
    if arguments == str(count):
        _say_it_is_no_message(context, count, last)
    asked = controller.require_conversation().context_ids(last.turn_id)
    cost = await controller.engine.cost(asked)
    if await context.confirm_cost(cost, "/retry", gap=False):  # an empty row begins the answer
        context.answer_again(options)


def _say_it_is_no_message(context: "CommandContext", count: int, last: Turn) -> None:
    """Say that a number after /retry is one of answers, if an earlier message has it too."""
    numbers = MessageNumbers(context.controller.require_conversation())
    turns = context.controller.place.user_turns
    if any(numbers.of(turn) == count for turn in turns if turn is not last):
        answers = "1 more answer" if count == 1 else f"{count} more answers"
        context.say(
            f"{answers} to the last message: /retry takes a number of answers, "
            f"/rewind {count} goes back to message {count}.",
            gap=False,
        )


async def btw(context: "CommandContext", arguments: str) -> None:
    """ask aside: neither question nor answer joins the conversation"""
    if not arguments:
        raise UsageError("Ask what?", "/btw QUESTION")
    context.ask_aside(arguments)


async def compact(context: "CommandContext", arguments: str) -> None:
    """let a summary take the place of the older messages, on a new branch"""
    controller = context.controller
    plan = making_room.planned(controller, arguments)
    before = len(controller.context_ids)
    cost = await controller.engine.cost(controller.context_ids[: plan.num_tokens])
    if not await context.confirm_cost(cost, "/compact"):
        return
    kept = sum(turn.is_message for turn in plan.kept)
    some = about(controller.host.model)
    last = "the last one stays as it is" if kept == 1 else f"the last {kept} stay as they are"
    context.say(
        f"Summarising {plural(len(plan.messages), 'message')}, {some}{plan.num_tokens:,} of "
        f"{before:,} tokens; {last if kept else 'none stays'}."
    )
    try:
        ended = await context.show_summary(plan, arguments)
        if ended.reason is FinishReason.CANCELLED:
            context.say("Stopped: nothing is compacted.")
            return
        change = making_room.take_summary(controller, plan, ended)
    except (NoSummary, ContextTooLong) as error:
        await _leave_out(context, error)
        return
    context.say(
        f"Compacted: {some}{before:,} tokens became {change.num_after:,}. It cost "
        f"{_reading(ended)}, and the next message reads the {change.num_after:,} once. All "
        f"messages are kept: /undo or /switch {change.old_branch} goes back."
    )
    context.conversation_changed()


async def _leave_out(context: "CommandContext", error: KvchatError) -> None:
    """Leave out the oldest messages, if that is needed and wanted; else raise the error."""
    controller = context.controller
    plan = making_room.planned_leaving_out(controller, isinstance(error, ContextTooLong))
    if plan is None:
        raise error
    context.say(error.message)
    oldest = oldest_in_words(len(plan.messages))
    if not await context.confirm(f"Leave out {oldest} instead?", for_scripts=True):
        context.say("Nothing is changed. /new begins another conversation, /rewind goes back.")
        return
    change, some = making_room.leave_out(controller, plan), about(controller.host.model)
    context.say(
        f"Left out {oldest}: {some}{change.num_before:,} tokens became {change.num_after:,}. All "
        f"messages are kept: /undo or /switch {change.old_branch} goes back."
    )
    context.conversation_changed()


def _reading(ended: AnswerEnded) -> str:
    """Return what an answer cost: the tokens that were read and written, and the time."""
    read, written = ended.usage.prefilled_tokens, ended.usage.completion_tokens
    return f"{read:,} read, {written:,} written, {format_seconds(ended.timing.total_s)}"


async def continue_(context: "CommandContext", arguments: str) -> None:
    """go on with an answer that was cut off, or answer a message that has none"""
    context.continue_answer()


async def fork(context: "CommandContext", arguments: str) -> None:
    """go on in a copy of the conversation"""
    session = context.controller.fork(one_line(arguments))
    context.say(f"This is a copy now: {one_line(session.conversation.label)}")
    for note in session.notes:
        context.say(note)
    if (problem := session.saving_problem()) is not None:
        context.say(problem, Role.WARNING)
    context.conversation_changed()


async def tree(context: "CommandContext", arguments: str) -> None:
    """show all branches"""
    conversation = context.controller.require_conversation()
    costs = await turn_costs(context.controller.engine, conversation)
    marks = {turn_id: warmth.for_tree(each) for turn_id, each in costs.items()}
    rows = tree_rows(conversation, context.page.render_context, marks)
    context.page.write([*rows, context.page.painter.text("")])


async def switch(context: "CommandContext", arguments: str) -> None:
    """go to another branch"""
    conversation = context.controller.require_conversation()
    leaves = _ends(conversation)
    if arguments:
        place = find_place(conversation, arguments)
        if place is None:
            raise UsageError(f"{one_line(arguments)} is no message.", "/tree shows their numbers.")
        turn_id = conversation.latest_below(place.turn_id)
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
    context.controller.place.move(turn_id)
    show_where_it_stands(context.controller.require_conversation(), context.page)
    context.conversation_changed()


def _ends(conversation: Conversation) -> list[Turn]:
    """Return the last turn of every branch; of a copied branch, that of the newest copy."""
    originals = conversation.originals()
    newest = {originals[turn.turn_id]: turn.turn_id for turn in conversation.turns()}
    leaves = conversation.leaves()
    return [leaf for leaf in leaves if newest[originals[leaf.turn_id]] == leaf.turn_id]


def _trail(context: "CommandContext", leaf: Turn) -> str:
    """Return one line on a branch: its last message's number, that message and its answer."""
    conversation = context.controller.require_conversation()
    path = [turn for turn in conversation.path(leaf.turn_id) if turn.summary_of is None]
    texts = [turn_summary(turn, 32) for turn in path[-2:]] or ["a summary"]
    separator = context.page.painter.look.glyphs.separator
    return f"{MessageNumbers(conversation).of(leaf)}. {separator.join(texts)}"


def _count(arguments: str) -> int:
    if not arguments:
        return 1
    count = whole_number(arguments)
    if count is None or count < 1:
        raise UsageError(f"{one_line(arguments)} is no number of messages.", "/undo [how many]")
    return count


COMMANDS = (
    Command(undo, Group.TURNS, "[how many]", ("pop",)),
    Command(redo, Group.TURNS),
    Command(rewind, Group.TURNS, "[message]", argument=Argument.TURN),
    Command(edit, Group.TURNS, "[message [TEXT]]", argument=Argument.TURN),
    Command(retry, Group.TURNS, "[-n how many]", ("regen", "regenerate")),
    Command(compact, Group.TURNS, "[what matters most]", ("compress",)),
    Command(btw, Group.TURNS, "QUESTION"),
    Command(continue_, Group.TURNS),
    Command(fork, Group.TURNS, "[title]", ("branch",)),
    Command(tree, Group.TURNS, aliases=("branches",), takes_turn=False),
    Command(switch, Group.TURNS, "[message|message.answer]"),
)

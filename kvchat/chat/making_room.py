"""Compacts the open conversation, and makes room in a full context by its policy: functions on a
ChatController.

Room is made on a new branch, as /compact makes it: the old branch keeps all messages. What stays is
read again once, at the latest in a pause (`moved_kv.py`), so a good part of the context is freed at
once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvchat.chat.answer_settings import ContextPolicy
from kvchat.chat.attachment import attached_files
from kvchat.chat.compaction import (
    CompactionPlan,
    checked_summary,
    excerpt_request,
    max_summary_tokens,
    num_asking_tokens,
    plan_compaction,
    plan_dropping,
    plan_leaving_out,
    request_text,
    require_substance,
    summary_options,
)
from kvchat.chat.conversation import ROOT, Conversation, Role, Turn
from kvchat.chat.events import AnswerEnded
from kvchat.chat.messages import MessageNumbers
from kvchat.chat.tools import ToolResult
from kvchat.core.errors import UsageError

if TYPE_CHECKING:
    from kvchat.chat.controller import ChatController
    from kvchat.chat.reply import Reply


@dataclass(frozen=True, slots=True)
class Change:
    """A context that was cut: how many of the user's messages it lost, its tokens before and after,
    and the message that /switch takes to go back.
    """

    num_messages: int
    num_before: int
    num_after: int
    old_branch: int


def planned(controller: "ChatController", focus: str = "") -> CompactionPlan:
    """Return what /compact would summarise; raises UsageError if that is nothing."""
    limit = controller.host.context_limit
    return plan_compaction(controller.require_conversation(), limit, num_asking(controller, focus))


def num_asking(controller: "ChatController", focus: str = "") -> int:
    """Return the tokens of a request for a summary below the conversation, and of the summary."""
    limit = controller.host.context_limit
    return num_asking_tokens(controller.num_tokens(request_text(focus, limit)), limit)


def planned_leaving_out(
    controller: "ChatController", was_refused: bool = False
) -> CompactionPlan | None:
    """Return which of the oldest messages to leave out where there is no summary.

    None if the conversation can go on as it is; not if it `was_refused` as too long, by a server
    that may hold less than it tells.
    """
    limit = controller.host.context_limit
    if was_refused:
        limit = min(limit, len(controller.context_ids))
    return plan_leaving_out(controller.require_conversation(), limit)


def summarise(
    controller: "ChatController",
    plan: CompactionPlan,
    focus: str = "",
    notify: Callable[[], None] | None = None,
) -> "Reply":
    """Let the model summarise a plan's older turns; the answer joins no conversation.

    Raises NoSummary where the context has no room for one.
    """
    host, session = controller.host, controller.require_session()
    limit, request = host.context_limit, request_text(focus, host.context_limit)
    options = summary_options(controller.options, host.model, limit)
    if plan.is_excerpt:
        text = excerpt_request(plan.older, request, limit, controller.num_tokens)
        return session.ask_apart(text, options, notify)
    return session.ask_aside(request, options, notify, plan.older[-1].turn_id)


def num_opening_tokens(
    controller: "ChatController", plan: CompactionPlan, summary: str | None
) -> int:
    """Return the tokens of what stands before the turns that a plan keeps."""
    empty = Conversation("", 0.0, tools=controller.require_conversation().tools)
    said = "".join(plan.opening(summary))
    return len(controller.host.model.user_ids(empty, ROOT, said, plan.older[0].system))


def compact(controller: "ChatController", plan: CompactionPlan, summary: str) -> Change:
    """Continue with a summary in place of the plan's older turns.

    Raises UsageError, and changes nothing, if the summary would save no token.
    """
    if num_opening_tokens(controller, plan, summary) >= plan.num_tokens:
        raise UsageError(
            "The summary is as long as what it stands for, so nothing has changed.",
            "/new begins another conversation.",
        )
    return _changed(controller, plan, summary)


def leave_out(controller: "ChatController", plan: CompactionPlan) -> Change:
    """Continue without the plan's older turns, but for an earlier summary among them."""
    return _changed(controller, plan, None)


@dataclass(frozen=True, slots=True)
class Need:
    """What the next answer needs of a context of `limit` tokens.

    num_before   the tokens of the conversation so far
    num_next     the tokens that follow it: a message, results of tools, or nothing
    keeps_last   whether the last message stays, because its answer goes on
    """

    limit: int
    num_before: int
    num_next: int
    keeps_last: bool

    @property
    def num_answer(self) -> int:
        """The tokens to leave for the answer, where that is possible."""
        return max_summary_tokens(self.limit)

    @property
    def is_full(self) -> bool:
        """Whether there is no room for such an answer."""
        return self.num_before + self.num_next + self.num_answer > self.limit

    def num_left(self, num_opening: int) -> int:
        """Return how many tokens may stay between an opening and what is next; below 0: none."""
        return self.limit - num_opening - self.num_next - 1


def need(
    controller: "ChatController", text: str | None, results: tuple[ToolResult, ...] = ()
) -> Need | None:
    """Return what the answer to a message needs, None if there is room for it.

    `text` None continues the last answer, or answers `results` of its calls. Returns None too where
    the policy is to stop, and for a message that replaces another one. Raises ContextTooLong for a
    message that no context could hold.
    """
    ready, conversation = controller.host.ready, controller.conversation
    if ready is None or conversation is None or controller.place.edited is not None:
        return None
    if controller.options.context_policy is ContextPolicy.STOP or not conversation.path():
        return None
    num_next = controller.num_next_tokens(text, results)
    needed = Need(ready.context_limit, len(controller.context_ids), num_next, text is None)
    num_asked = num_next + needed.num_answer
    if controller.options.context_policy is ContextPolicy.COMPACT:
        num_asked = max(num_asked, num_asking(controller))  # while it still fits
    return needed if needed.num_before + num_asked > needed.limit else None


def drop(controller: "ChatController", needed: Need) -> Change | None:
    """Leave out the oldest messages until half of the context is free.

    The system prompt stays, and so do the files of the first message and pinned files, if there is
    room for them. Returns None, and changes nothing, where that makes no room for the message.
    """
    path = controller.require_conversation().path()
    for files in dict.fromkeys((_files_that_stay(controller, path), "")):
        plan = _plan_dropping(controller, needed, path, files)
        if plan is not None:
            return leave_out(controller, plan)
    return None


def _plan_dropping(
    controller: "ChatController", needed: Need, path: list[Turn], files: str
) -> CompactionPlan | None:
    whole = CompactionPlan(tuple(path), (), files=files)
    num_opening = num_opening_tokens(controller, whole, None)
    most = needed.num_left(num_opening)
    room = min((needed.limit - num_opening) // 2, most - needed.num_answer)
    plan = plan_dropping(controller.require_conversation(), room, needed.keeps_last)
    if not plan.messages or plan.num_kept_tokens > most:
        return None
    return replace(plan, files=_files_that_stay(controller, plan.older) if files else "")


def _files_that_stay(controller: "ChatController", turns: "list[Turn] | tuple[Turn, ...]") -> str:
    """Return the files of the first turn, and the pinned files of the others, each once."""
    pinned = {file.name for files in controller.pins.paths().values() for file in files}
    texts = [
        text
        for turn in turns
        if turn.role is Role.USER
        for name, text in attached_files(turn.text)
        if turn is turns[0] or name in pinned
    ]
    return "".join(dict.fromkeys(texts))


def plan_summary(controller: "ChatController", needed: Need) -> CompactionPlan | None:
    """Return what a summary is to take the place of; None where it would not make room."""
    conversation = controller.require_conversation()
    whole = CompactionPlan(tuple(conversation.path()), ())
    num_opening = num_opening_tokens(controller, whole, "")
    most = needed.num_left(num_opening + max_summary_tokens(needed.limit))
    num_request, most_kept = num_asking(controller), most - needed.num_answer
    try:
        plan = plan_compaction(
            conversation, needed.limit, num_request, most_kept, needed.keeps_last
        )
    except UsageError:  # the last message has no answer, for example
        return None
    return plan if plan.messages and plan.num_kept_tokens <= most else None


def take_summary(controller: "ChatController", plan: CompactionPlan, ended: AnswerEnded) -> Change:
    """Let the summary that the model wrote take the place of a plan's older turns.

    Raises NoSummary for an answer that is none, and UsageError as `compact`; changes nothing then.
    """
    summary = checked_summary(ended.text, ended.reason)
    require_substance(summary, controller.num_tokens(summary), plan.num_tokens, plan.older)
    return compact(controller, plan, summary)


def _changed(controller: "ChatController", plan: CompactionPlan, summary: str | None) -> Change:
    """Change the context; results that go with the next message still do, if their calls stay."""
    numbers = MessageNumbers(controller.require_conversation())
    old_branch = numbers.of(plan.messages[-1])
    held, num_before = controller.held_results, len(controller.context_ids)
    controller.require_session().compact(plan, summary)
    controller.place.reset()
    if held and plan.kept:
        controller.hold_results(held)
    return Change(len(plan.messages), num_before, len(controller.context_ids), old_branch)

"""Compacts the open conversation: functions on a ChatController. `compaction.py` decides and words.

The summary joins no conversation before it is taken.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvchat.chat.compaction import (
    CompactionPlan,
    checked_summary,
    excerpt_request,
    num_asking_tokens,
    plan_compaction,
    plan_leaving_out,
    request_text,
    require_substance,
    summary_options,
)
from kvchat.chat.conversation import ROOT, Conversation
from kvchat.chat.events import AnswerEnded
from kvchat.core.errors import UsageError

if TYPE_CHECKING:
    from kvchat.chat.controller import ChatController
    from kvchat.chat.reply import Reply


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


def summary_in(controller: "ChatController", plan: CompactionPlan, ended: AnswerEnded) -> str:
    """Return the summary in the answer to `summarise`; raises NoSummary if it is none."""
    summary = checked_summary(ended.text, ended.reason)
    require_substance(summary, controller.num_tokens(summary), plan.num_tokens, plan.older)
    return summary


def num_opening_tokens(
    controller: "ChatController", plan: CompactionPlan, summary: str | None
) -> int:
    """Return the tokens of what stands before the turns that a plan keeps."""
    empty = Conversation("", 0.0, tools=controller.require_conversation().tools)
    said = "".join(plan.opening(summary))
    return len(controller.host.model.user_ids(empty, ROOT, said, plan.older[0].system))


def compact(controller: "ChatController", plan: CompactionPlan, summary: str) -> int:
    """Continue with a summary in place of the plan's older turns; return the tokens saved.

    Raises UsageError, and changes nothing, if the summary would save no token.
    """
    if num_opening_tokens(controller, plan, summary) >= plan.num_tokens:
        raise UsageError(
            "The summary is as long as what it stands for, so nothing has changed.",
            "/new begins another conversation.",
        )
    before = len(controller.context_ids)
    controller.require_session().compact(plan, summary)
    controller.place.reset()
    return before - len(controller.context_ids)


def leave_out(controller: "ChatController", plan: CompactionPlan) -> None:
    """Continue without the plan's older turns, but for an earlier summary among them."""
    controller.require_session().compact(plan, None)
    controller.place.reset()

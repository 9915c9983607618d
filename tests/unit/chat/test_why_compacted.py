"""Why a compacted conversation is read: its summary was never prefilled, so nothing was lost."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.compaction import CompactionPlan
from kvchat.chat.controller import ChatController
from kvchat.chat.making_room import compact, leave_out
from kvchat.chat.store import SessionStore
from kvchat.chat.why import Reuse, cause, explain, reuse_of
from support.tiny_host import ask, tiny_host

TEXT = "Of the twelve ships in the harbour of Grimstad three are red and nine are blue. "


@pytest.fixture
def controller(checkpoint: Path, tmp_path: Path) -> Iterator[ChatController]:
    host = tiny_host(checkpoint, SessionStore(tmp_path / "sessions"), kept=tmp_path / "kv")
    host.wait_until_ready()
    controller = ChatController(host, lambda name, hear: host, None, AskOptions())
    controller.begin_new()
    yield controller
    controller.close_session()
    host.close()


def answered(controller: ChatController, question: str) -> Reuse:
    session = controller._ensure_session()
    ended = ask(session, question)
    return reuse_of(session.conversation, ended.turn_id, ended.usage.cached, ended.miss_reason)


@pytest.mark.parametrize("has_summary", [True, False])
@pytest.mark.parametrize("num_kept", [0, 2])
def test_the_summary_was_read_for_the_first_time_and_not_evicted(controller, num_kept, has_summary):
    """It was told to be read again, as it had been evicted from memory."""
    for number in range(3):
        answered(controller, f"{number} {TEXT}")
    path = tuple(controller.require_conversation().path())
    cut = len(path) - num_kept
    plan = CompactionPlan(path[:cut], path[cut:])

    compact(controller, plan, TEXT) if has_summary else leave_out(controller, plan)
    first, second = answered(controller, "How many?"), answered(controller, "And blue?")

    told = "\n".join(explain(first, str))
    assert (cause(first), first.num_lost) == ("", 0), "nothing was read again"
    assert "was compacted, and no model had read it so yet." in told
    assert "evicted" not in told
    assert cause(second) == ""

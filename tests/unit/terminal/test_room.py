"""A full context goes on: by leaving out the oldest messages, or by a summary, as the policy says.

The scripted tokenizer has one token per byte.
"""

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvchat.chat.answer_settings import AskOptions, ContextPolicy, changed
from kvchat.chat.attachment import PinFiles, read_attachment
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.compaction import LEFT_OUT, OPENING, CompactionPlan
from kvchat.chat.controller import ChatController
from kvchat.chat.conversation import Role
from kvchat.chat.documents import document
from kvchat.chat.events import AnswerEnded, AnswerFailed
from kvchat.chat.host import ChatHost
from kvchat.chat.making_room import summarise
from kvchat.chat.store import SessionStore
from kvchat.chat.tools import ToolResult, ToolSet
from kvchat.core.errors import ContextTooLong, UsageError
from kvchat.core.types import FinishReason
from kvchat.terminal.commands_turns import what_stands_for_older
from kvchat.terminal.room import RoomMaker
from support.scripted_engine import BLOCK_SIZE, Script, ScriptedEngine, scripted_build

LIMIT = 1200
SYSTEM = "You are Kim."
SUMMARY = "Ada has a dog called Rex, and they like the fog at sea."
TOOLS = ToolSet([{"name": "look", "parameters": {"type": "object", "properties": {}}}])


def _author(question: str, sample: int) -> Script:
    if question.startswith("Summarise"):
        return Script("No." if "badly" in question else SUMMARY, 64)
    if question == "call":
        return Script('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', 64)
    return Script(f"You said {question[:60]}", 64)


class Chat:
    """A controller with a full context ahead of it, and what was said beside the answers."""

    def __init__(self, controller: ChatController, policy: str) -> None:
        self.controller = controller
        self.said: list[str] = []
        self.stops = False
        self.usages: list[AnswerEnded] = []
        controller.options = changed(controller.options, "context-policy", policy)
        self.room = RoomMaker(controller, self._summary, self.said.append)

    async def _summary(self, plan: CompactionPlan) -> AnswerEnded:
        last = list(summarise(self.controller, plan))[-1]
        if isinstance(last, AnswerFailed):
            raise last.error
        assert isinstance(last, AnswerEnded)
        self.usages.append(last)
        return replace(last, reason=FinishReason.CANCELLED) if self.stops else last

    def say(self, text: str) -> AnswerEnded:
        """Send a message as the front ends do; raises what refuses it."""
        if not asyncio.run(self.room.make(text)):
            raise UsageError("stopped")
        last = list(self.controller.ask(text))[-1]
        if isinstance(last, AnswerFailed):
            raise last.error
        assert isinstance(last, AnswerEnded)
        return last

    def make_early(self) -> None:
        asyncio.run(self.room.make_early())

    def make(self, results: tuple[ToolResult, ...] = ()) -> bool:
        return asyncio.run(self.room.make(None, results))

    @property
    def path(self) -> list[str]:
        return [turn.text for turn in self.controller.require_conversation().path()]

    @property
    def messages(self) -> list[str]:
        return [turn.text for turn in self.controller.place.user_turns]

    @property
    def system(self) -> str | None:
        return self.controller.require_conversation().path()[0].system


Open = Callable[..., Chat]


@pytest.fixture
def open_chat(model: ChatModel, tmp_path: Path) -> Iterator[Open]:
    hosts: list[tuple[ChatHost, ChatController]] = []

    def begin(policy: str, session_id: str = "", which: ChatModel = model) -> Chat:
        store = SessionStore(tmp_path / "sessions")
        host = ChatHost(which, scripted_build(which, _author, max_context=LIMIT), store)
        host.wait_until_ready()
        session = host.open_session(session_id) if session_id else None
        pins = PinFiles(tmp_path / "pins.json")
        tools = TOOLS if which is not model else None
        controller = ChatController(
            host, lambda name, hear: host, session, AskOptions(), SYSTEM, pins=pins, tools=tools
        )
        hosts.append((host, controller))
        return Chat(controller, policy)

    yield begin
    for host, controller in hosts:
        controller.close_session()
        host.close()


def _fill(chat: Chat, count: int, words: str = "fog " * 20) -> None:
    for number in range(count):
        chat.say(f"{number} {words}")


def test_without_a_policy_a_full_context_refuses_the_message(open_chat: Open) -> None:
    chat = open_chat("stop")
    with pytest.raises(ContextTooLong):
        _fill(chat, 20)
    assert chat.said == []
    assert chat.messages[0].startswith("0 ")


@pytest.mark.parametrize("policy", ["drop", "compact"])
def test_a_chat_passes_its_window_four_times_and_keeps_its_system_prompt(open_chat, policy):
    chat = open_chat(policy)
    num_read = []
    for number in range(40):
        ended = chat.say(f"{number} {'fog ' * 20}")
        num_read.append(ended.usage.prefilled_tokens)
        assert ended.reason is FinishReason.STOP, "there was room for the whole answer"
    conversation = chat.controller.require_conversation()
    whole = sum(len(t.token_ids) for t in conversation.turns() if t.copy_of is None)
    assert whole > 4 * LIMIT
    assert chat.system == SYSTEM
    assert len(chat.controller.context_ids) < LIMIT
    assert chat.messages[-1].startswith("39 ")
    assert max(num_read) < LIMIT * 0.7, "half of the context, the opening and the message"
    assert sum(count > 150 for count in num_read) == len(chat.said), "only where room was made"
    numbers = {text.split()[0] for text in (t.text for t in conversation.turns()) if "fog" in text}
    assert numbers >= {str(number) for number in range(40)}, "all messages are in the file"


def test_what_was_left_out_is_said_in_one_line_with_its_price(open_chat: Open) -> None:
    chat = open_chat("drop")
    _fill(chat, 8)
    [said] = chat.said
    assert said.startswith("The context is full: left out the oldest ")
    assert "tokens became" in said
    assert "the next answer reads" in said
    number = int(said.partition("/switch ")[2].split()[0])
    assert chat.path[0] == LEFT_OUT
    assert chat.messages[0].startswith(f"{number} "), "the first that stays follows the last gone"


def test_room_is_made_early_where_no_message_fits_and_the_last_one_stays(open_chat: Open) -> None:
    """The next message would wait for what stays to be read; /retry needs the last one."""
    chat = open_chat("drop")
    read_ahead: list[list[int]] = []
    chat.controller.host.read_ahead = read_ahead.append  # type: ignore[method-assign]
    number = 0
    while not chat.said:
        number += 1
        chat.say(f"{number} {'fog ' * 20}")
        chat.make_early()
    assert chat.messages[-1].startswith(f"{number} ")
    assert read_ahead == [chat.controller.context_ids]
    assert "is read again while you type" in chat.said[0]
    list(chat.controller.retry(chat.controller.options))
    assert chat.say("Hello").usage.prefilled_tokens < 100


def test_what_stays_is_moved_where_the_model_lets_it(open_chat, monkeypatch):
    """Only the note that messages were left out is read, once, and the loss is said in one line."""
    monkeypatch.setattr(ScriptedEngine, "moves_kv", True)
    chat = open_chat("drop")
    num_read = []
    for number in range(30):
        num_said = len(chat.said)
        num_read.append(chat.say(f"{number} {'fog ' * 20}").usage.prefilled_tokens)
        asyncio.run(chat.room.make_early())
        if len(chat.said) > num_said:
            assert "less exact until what stays is read again in a pause" in chat.said[-1]
            assert "\n" not in chat.said[-1]
    assert len(chat.said) > 3
    assert max(num_read) <= max(num_read[:3]) + 2 * BLOCK_SIZE


def test_undo_goes_back_behind_what_made_room(open_chat: Open) -> None:
    chat = open_chat("drop")
    while not chat.said:
        before = list(chat.controller.context_ids)
        chat.say("fog " * 20)
    assert chat.controller.context_ids[: len(before)] != before
    [opening, *_] = chat.controller.require_conversation().path()
    assert what_stands_for_older(opening) == "leaving out the oldest messages"
    chat.controller.place.undo(2)
    assert chat.controller.context_ids == before


def test_a_restart_makes_the_same_prompt_again(open_chat: Open) -> None:
    chat = open_chat("drop")
    _fill(chat, 9)
    before = chat.controller.context_ids
    assert chat.said
    session_id = chat.controller.require_session().session_id
    chat.controller.close_session()

    again = open_chat("drop", session_id)

    assert again.controller.context_ids == before


@pytest.mark.parametrize("kind", ["md", "json"])
def test_an_exported_document_has_what_was_left_out(open_chat: Open, kind: str) -> None:
    chat = open_chat("drop")
    _fill(chat, 30)
    assert len(chat.said) > 2
    text = document(chat.controller.require_conversation(), kind)
    numbers = [int(number) for number in re.findall(r"\b(\d+) (?:fog ){17}", text)]
    assert numbers == list(range(30))
    assert LEFT_OUT not in text


def test_the_request_for_a_summary_finds_the_whole_history_cached(open_chat: Open) -> None:
    chat = open_chat("compact")
    while not chat.usages:
        chat.say("fog " * 20)
    [ended] = chat.usages
    usage = ended.usage
    assert usage.prompt_tokens - usage.cached.total < 350, "the request, and a block"
    assert chat.path[0] == f"{OPENING}{SUMMARY}"
    assert f"{usage.cached.total:,} of {usage.prompt_tokens:,} tokens cached" in chat.said[0]


def test_where_no_summary_is_written_messages_are_left_out_in_time(open_chat, monkeypatch):
    """Each message asked for a summary again, and answers were cut off at the context's end."""
    chat = open_chat("compact")
    monkeypatch.setattr("kvchat.chat.compaction._REQUEST", "Summarise badly, in {} words.")

    ended = [chat.say(f"{number} {'fog ' * 20}") for number in range(40)]

    assert all(each.reason is FinishReason.STOP for each in ended)
    assert chat.path[0] == LEFT_OUT
    changes = [sentence for sentence in chat.said if "left out" in sentence]
    assert len(changes) > 4
    assert len(chat.usages) <= len(changes) + 1, "a summary is asked for once each time"


def test_a_summary_that_is_stopped_sends_nothing(open_chat: Open) -> None:
    chat = open_chat("compact")
    chat.stops = True
    with pytest.raises(UsageError, match="stopped"):
        _fill(chat, 20)
    assert chat.said == ["Stopped: nothing is compacted."]
    assert not chat.controller.is_unanswered


@pytest.mark.parametrize("policy", ["drop", "compact"])
def test_a_message_that_no_room_suffices_for_changes_nothing(open_chat: Open, policy: str) -> None:
    chat = open_chat(policy)
    _fill(chat, 3)
    before = chat.controller.context_ids
    with pytest.raises(ContextTooLong):
        chat.say("fog " * (LIMIT // 4))
    assert chat.controller.context_ids == before
    assert chat.said == []


def test_a_long_message_takes_the_place_of_as_many_as_it_needs(open_chat: Open) -> None:
    chat = open_chat("drop")
    _fill(chat, 5)
    chat.say("fog " * 220)
    assert chat.messages == ["fog " * 220]
    assert chat.system == SYSTEM


def test_files_of_the_first_message_and_pinned_ones_stay(open_chat: Open, tmp_path: Path) -> None:
    """The conversation is about them: without them its questions have no answers."""
    paths = {name: tmp_path / f"{name}.txt" for name in ("begun", "pinned", "other")}
    for name, path in paths.items():
        path.write_text(f"{name} of Grimstad")
    chat = open_chat("drop")
    chat.controller.pins.put("harbour", [paths["pinned"]])
    for name in paths:
        chat.controller.attached = (read_attachment(paths[name]),)
        chat.say(name)
    _fill(chat, 24)

    assert len(chat.said) > 2
    first = chat.path[0]
    assert first.endswith(LEFT_OUT)
    assert first.count("begun of Grimstad") == first.count("pinned of Grimstad") == 1
    assert "other of Grimstad" not in first


def test_files_without_room_are_left_out_too(open_chat: Open, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("fog " * 200)
    chat = open_chat("drop")
    chat.controller.attached = (read_attachment(path),)
    chat.say("What is it?")
    chat.say("fog " * 100)
    assert chat.path[0] == LEFT_OUT


def test_an_answer_that_goes_on_keeps_its_message_with_calls_and_results(open_chat, tool_model):
    chat = open_chat("drop", which=tool_model)
    chat.controller.options = replace(chat.controller.options, max_calls=None)
    _fill(chat, 5)
    chat.say("call")
    assert chat.controller.require_conversation().path()[-1].calls
    results = (ToolResult("look", "a long view " * 30),)

    assert chat.make(results)

    assert chat.said
    assert chat.messages[-1] == "call"
    last = list(chat.controller.give_results(results))[-1]
    assert isinstance(last, AnswerEnded)
    [*_, asked, called, given, _] = chat.controller.require_conversation().path()
    assert (asked.text, given.results) == ("call", results)
    assert called.role is Role.ASSISTANT


def test_results_that_go_with_the_next_message_still_do(open_chat, tool_model):
    chat = open_chat("drop", which=tool_model)
    chat.controller.options = replace(chat.controller.options, max_calls=None)
    _fill(chat, 5)
    chat.say("call")
    chat.controller.hold_results((ToolResult("look", "a view"),))
    chat.say("fog " * 40)
    assert chat.said
    assert chat.messages[-2:] == ["call", "fog " * 40]
    assert chat.controller.require_conversation().path()[-2].results[0].text == "a view"


def test_a_policy_has_three_names() -> None:
    for policy in ContextPolicy:
        assert changed(AskOptions(), "--context-policy", policy.upper()).context_policy is policy
    with pytest.raises(UsageError, match="must be one of stop, drop, compact"):
        changed(AskOptions(), "context-policy", "forget")

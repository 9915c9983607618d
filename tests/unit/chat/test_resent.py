"""Resent conversations: the ids that were generated are used again, also after a restart."""

import os
import sqlite3
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvchat.chat.answer_memory import AnswerMemory, ContextDigest, KnownAnswer
from kvchat.chat.conversation import Role
from kvchat.chat.events import AnswerEnded
from kvchat.chat.fields import Fields
from kvchat.chat.host import ChatHost
from kvchat.chat.incoming import IncomingChat
from kvchat.chat.prefixes import ResentChats
from kvchat.chat.resent_chat import Difference, Message, ResentChat, SeenChats, resent_chat
from kvchat.chat.tools import ToolCall, ToolSet
from kvchat.core.errors import UsageError
from kvchat.core.types import FinishReason
from support.tiny_host import answer_options, finish

U, A = partial(Message, Role.USER), partial(Message, Role.ASSISTANT)
ANSWER = KnownAnswer((1, 2, 3), FinishReason.STOP)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[AnswerMemory]:
    opened = AnswerMemory(tmp_path / "answers.db")
    yield opened
    opened.close()


def answered(
    chats: ResentChats, messages: list[Message], system: str | None = None
) -> tuple[AnswerEnded, list[int]]:
    """Ask, remember the answer, and return it with the ids that were fed."""
    asked = chats.ask(resent_chat(system, messages), answer_options(6))
    fed = asked.session.conversation.context_ids()
    ended = finish(asked.reply)
    chats.remember(asked, ended)
    return ended, fed


@pytest.mark.parametrize("is_restarted", [False, True])
def test_the_ids_of_an_answer_are_those_that_were_generated(host, tmp_path, is_restarted):
    """Random weights answer with ids that no text encodes to: only the memory knows them."""
    chats = ResentChats(host, AnswerMemory(tmp_path / "answers.db"))
    first, fed = answered(chats, [U("one")], "Be brief.")
    if is_restarted:
        chats.close()
        chats = ResentChats(host, AnswerMemory(tmp_path / "answers.db"))

    resent = [U("one"), A(f" {first.text}\n"), U("two")]
    second, fed_again = answered(chats, resent, "Be brief.")

    assert fed_again[: len(fed)] == fed
    assert len(fed) + first.usage.completion_tokens <= second.usage.cached.total + 8
    assert second.usage.prefilled_tokens < second.usage.prompt_tokens // 2
    chats.close()


def test_an_answer_in_another_conversation_is_encoded(host: ChatHost, memory: AnswerMemory) -> None:
    chats = ResentChats(host, memory)
    first, _ = answered(chats, [U("one")])

    ended, fed = answered(chats, [U("another"), A(first.text), U("two")])

    assert ended.usage.prompt_tokens == len(fed)


def test_neighbours_of_one_role_are_joined() -> None:
    chat = resent_chat("", [U("a"), U("b"), A("c")])

    assert chat.messages == (U("a\n\nb"), A("c"))
    assert chat.system is None
    assert chat.is_continuation


@pytest.mark.parametrize("messages", [[], [A("x")], [U("x"), A("y"), U(" ")]])
def test_what_cannot_be_answered_is_refused(messages: list[Message]) -> None:
    with pytest.raises(UsageError):
        resent_chat(None, messages)


def test_white_space_around_an_answer_does_not_count(memory: AnswerMemory) -> None:
    digest = ContextDigest("tokenizer")
    digest.extend([5, 6])
    memory.put(digest.key("text\n"), ANSWER)

    assert memory.find(digest.key(" text")) == ANSWER
    digest.extend([7])
    assert memory.find(digest.key("text")) is None


def test_the_least_recently_used_answers_go_first(tmp_path: Path) -> None:
    memory = AnswerMemory(tmp_path / "answers.db", max_bytes=100 * 4 * 10)
    long = KnownAnswer(tuple(range(100)), FinishReason.STOP)
    for number in range(600):
        memory.put(b"%d" % number, long)
        memory.find(b"0")

    assert memory.find(b"0") == long
    assert memory.find(b"1") is None
    [(count,)] = sqlite3.connect(tmp_path / "answers.db").execute("SELECT COUNT(*) FROM answers")
    assert count < 300
    memory.close()


@pytest.mark.parametrize("kind", ["garbage", "directory", "link"])
def test_a_file_that_cannot_be_used_costs_the_restart_only(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "answers.db"
    if kind == "garbage":
        path.write_bytes(b"no database" * 1000)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")

    memory = AnswerMemory(path)
    memory.put(b"key", ANSWER)

    assert memory.find(b"key") == ANSWER
    assert not (tmp_path / "elsewhere").exists()
    memory.close()


def test_the_file_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        AnswerMemory(tmp_path / "made" / "answers.db").close()
    finally:
        os.umask(before)

    assert (tmp_path / "made" / "answers.db").stat().st_mode & 0o777 == 0o600


def test_a_damaged_row_is_not_known(tmp_path: Path) -> None:
    memory = AnswerMemory(tmp_path / "answers.db")
    memory.put(b"key", ANSWER)
    with sqlite3.connect(tmp_path / "answers.db") as other:
        other.execute("UPDATE answers SET ids = x'010203', finish = 'no reason'")

    assert memory.find(b"key") is None
    memory.close()


def test_the_date_of_a_conversation_stays_what_it_was(memory: AnswerMemory) -> None:
    assert memory.first_time(b"began", 1000.7) == 1000.0
    assert memory.first_time(b"began", 2000.0) == 1000.0


def test_a_continued_conversation_has_no_difference() -> None:
    seen = SeenChats()

    assert seen.note("s", (U("a"),)) is None
    assert seen.note("s", (U("a"), A("b"), U("c"))) is None
    assert seen.note("s", (U("a"), A("b"), U("another c"))) is None
    assert seen.note("s", (U("something else"),)) is None


@pytest.mark.parametrize(
    ("system", "answer", "found"),
    [
        ("Today is Tuesday.", "b", ("system", 9, "Monday.", "Tuesday.")),
        ("Today is Monday.", "b!", (1, 1, "", "!")),
    ],
)
def test_a_changed_system_prompt_or_earlier_message_is_found(system, answer, found):
    seen = SeenChats()
    seen.note("Today is Monday.", (U("a"), A("b"), U("c")))

    difference = seen.note(system, (U("a"), A(answer), U("c"), A("d"), U("e")))

    assert difference is not None
    names = ("message", "character", "was", "now")
    assert difference.as_dict() == dict(zip(names, found, strict=True))


@pytest.mark.parametrize(
    ("system", "tools", "place"),
    [
        (f"Number 2.\n{'Be good. ' * 9}", "f", "system"),
        (f"Number 1.\n{'Be good. ' * 9}", "g", "tools"),
        (f"Number 1.\n{'Be good. ' * 9}", "f", None),
        ("You are another agent.", "f", None),
    ],
)
def test_what_changed_before_another_first_message_is_found(system, tools, place):
    """A new session begins with another message: nothing was said of what it read anew."""
    seen = SeenChats()
    seen.note(f"Number 1.\n{'Be good. ' * 9}", (U("a"),), ToolSet([{"name": "f"}]))

    found = seen.note(system, (U("b"),), ToolSet([{"name": tools}]))

    assert (found.place if found is not None else None) == place


def sent(*roles: str, change: int | None = None) -> ResentChat:
    """Return what a client has sent: an item for each role, the one at `change` with another text.

    An answer calls a tool if a result follows it.
    """
    request = IncomingChat()
    item = Fields({"id": "call"})
    for number, role in enumerate(roles):
        text = f"{role} {number}" + ("!" if number == change else "")
        request.next_item()
        if role == "system":
            request.instruct(text)
        elif role == "user":
            request.ask(text)
        elif role == "result":
            request.add_result(item, "id", text)
        else:
            is_called = roles[number + 1 : number + 2] == ("result",)
            calls = [("call", ToolCall("look", {}))] if is_called else []
            request.answer(text, calls)
    return request.chat()


@pytest.mark.parametrize(
    ("roles", "changes"),
    [
        (("user", "answer", "user", "answer", "user"), range(1, 4)),
        (
            ("user", "user", "user", "answer", "answer", "user", "user", "answer", "user"),
            range(3, 8),
        ),
        (("system", "user", "answer", "user", "system", "user", "answer", "user"), range(2, 7)),
        (("answer", "user", "user", "answer", "user"), range(4)),
        (("user", "answer", "result", "user", "answer", "user", "answer", "user"), range(1, 7)),
    ],
)
def test_a_changed_message_is_named_by_its_index_in_the_client_s_list(roles, changes):
    """Neighbours of one role counted as one, and system messages and results not at all."""
    for change in changes:
        seen, before, now = SeenChats(), sent(*roles), sent(*roles, change=change)
        assert seen.note(before.system, before.messages) is None

        found = seen.note(now.system, now.messages)

        assert found is not None
        where = found.as_sent(now)
        assert where.place == change
        assert where.character == len(f"{roles[change]} {change}")
        assert where.now.startswith("!")


def test_what_is_no_message_is_named_as_it_is() -> None:
    seen = SeenChats()
    seen.note("s", (U("a"), A("b"), U("c")))

    found = seen.note("t", (U("a"), A("b"), U("c"), A("d"), U("e")))

    assert found is not None
    assert found.as_sent(sent("system", "user", "answer", "user")).place == "system"


def test_of_joined_calls_and_texts_each_is_found() -> None:
    """All texts come before all calls in what is compared."""
    call = ToolCall("look", {"at": "x"})
    group = [A("one"), Message(Role.ASSISTANT, "two", (call,)), A("three")]
    chat = resent_chat(None, [U("a"), *group, U("b")], indexes=[3, 5, 6, 9, 10])

    whole = chat.messages[1].whole
    for text, index in (("one", 5), ("two", 6), ("three", 9), (call.key, 6)):
        place = whole.index(text)
        found = Difference(1, place + 1, "", "").as_sent(chat)
        assert (found.place, found.character) == (index, 1)

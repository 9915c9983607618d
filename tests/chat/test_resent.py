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
from kvchat.chat.host import ChatHost
from kvchat.chat.resent import ResentChats
from kvchat.chat.resent_chat import Message, SeenChats, resent_chat
from kvchat.core.errors import UsageError
from kvchat.core.types import FinishReason
from kvchat.server.conversations import RequestChat
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
def test_the_ids_of_an_answer_are_those_that_were_generated(
    host: ChatHost, tmp_path: Path, is_restarted: bool
) -> None:
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


def test_a_changed_system_prompt_is_found() -> None:
    seen = SeenChats()
    seen.note("Today is Monday.", (U("a"), A("b"), U("c")))

    found = seen.note("Today is Tuesday.", (U("a"), A("b"), U("c"), A("d"), U("e")))

    assert found is not None
    assert found.as_dict() == {
        "message": "system",
        "character": 9,
        "was": "Monday.",
        "now": "Tuesday.",
    }


def test_a_changed_earlier_message_is_found() -> None:
    seen = SeenChats()
    seen.note(None, (U("a"), A("b"), U("c"), A("d"), U("e")))

    found = seen.note(None, (U("a"), A("b!"), U("c"), A("d"), U("e")))

    assert found is not None
    assert (found.place, found.character, found.now) == (1, 1, "!")


def test_messages_that_the_client_did_not_send_are_not_counted() -> None:
    """A chat that begins with an answer gets an empty message before it, and all places were one
    too high.
    """
    seen = SeenChats()
    seen.note(None, (U(""), A("a"), U("b"), A("c"), U("d")))

    found = seen.note(None, (U(""), A("a"), U("b!"), A("c"), U("d")))

    assert found is not None
    assert found.place == 2
    assert found.counted_without(1).place == 1
    system = seen.note("s", (U(""), A("a"), U("b!"), A("c"), U("d")))
    assert system is not None
    assert system.counted_without(1).place == "system"


def test_the_message_before_a_chat_that_begins_with_an_answer_is_not_the_client_s() -> None:
    request = RequestChat()
    request.instruct("Be brief.")
    request.answer("Hello!")
    request.ask("a")
    assert request.chat().num_added == 1

    request = RequestChat()
    request.ask("a")
    assert request.chat().num_added == 0

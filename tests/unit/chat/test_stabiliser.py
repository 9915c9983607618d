"""Lines of a system prompt that change go to the end, and what was sent before stays as it was."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvchat.chat.answer_memory import AnswerMemory, ResponseMemory
from kvchat.chat.conversation import Role
from kvchat.chat.prefixes import ResentChats
from kvchat.chat.resent_chat import Message, ResentChat, resent_chat
from kvchat.chat.stabiliser import NOTE, Stabiliser
from kvchat.chat.tools import ToolResult, ToolSet
from support.stabilisers import codec, new_stabiliser
from support.tiny_host import answer_options, finish

U, A = partial(Message, Role.USER), partial(Message, Role.ASSISTANT)
RULES = "\n".join(f"Rule {number}: be good in way {number}." for number in range(8))


def dated(day: object, rules: str = RULES) -> str:
    return f"You are an agent.\nThe number is {day}.\n{rules}"


STABLE = f"You are an agent.\n{RULES}"


def note(day: object) -> str:
    return NOTE.format(f"The number is {day}.")


def texts(chat: ResentChat) -> list[str]:
    return [message.text for message in chat.messages]


def test_a_line_that_changes_is_moved_behind_the_last_question() -> None:
    stabiliser = new_stabiliser()
    first = resent_chat(dated(1), [U("a")])
    assert stabiliser.stabilised(first) == first, "nothing is known to change"

    second = stabiliser.stabilised(resent_chat(dated(2), [U("b")]))

    assert second.system == STABLE
    assert texts(second) == [f"b\n\n{note(2)}"]


def test_a_line_that_is_gone_is_told_once_to_hold_no_more() -> None:
    """The newest note went on to say it."""
    stabiliser = new_stabiliser()
    for day in (1, 2):
        stabiliser.stabilised(resent_chat(dated(day), [U("a")]))
    said = [U("a"), A("x"), U("b")]

    stabiliser.stabilised(resent_chat(STABLE, said))
    last = stabiliser.stabilised(resent_chat(STABLE, [*said, A("y"), U("c")]))

    gone = NOTE.format("What the note before says does not hold any more.")
    assert texts(last) == [f"a\n\n{note(2)}", "x", f"b\n\n{gone}", "y", "c"]


def test_messages_keep_the_notes_that_they_were_sent_with() -> None:
    stabiliser = new_stabiliser()
    stabiliser.stabilised(resent_chat(dated(1), [U("a")]))
    stabiliser.stabilised(resent_chat(dated(2), [U("a")]))
    stabiliser.stabilised(resent_chat(dated(3), [U("a"), A("x"), U("b")]))
    same = stabiliser.stabilised(resent_chat(dated(3), [U("a"), A("x"), U("b"), A("y"), U("c")]))
    stabiliser.stabilised(resent_chat(dated(9), [U("another conversation")]))

    last = stabiliser.stabilised(
        resent_chat(dated(4), [U("a"), A("x"), U("b"), A("y"), U("c"), A("z"), U("d")])
    )

    assert texts(same)[-1] == "c", "a note that says nothing new is left out"
    asked = [f"a\n\n{note(2)}", "x", f"b\n\n{note(3)}", "y", "c", "z", f"d\n\n{note(4)}"]
    assert texts(last) == asked
    assert last.system == STABLE


def test_a_question_that_is_asked_again_gets_the_newest_note() -> None:
    stabiliser = new_stabiliser()
    for day in (1, 2):
        stabiliser.stabilised(resent_chat(dated(day), [U("a")]))

    assert texts(stabiliser.stabilised(resent_chat(dated(3), [U("a")]))) == [f"a\n\n{note(3)}"]


def test_lines_that_come_and_go_and_several_that_change_are_found() -> None:
    stabiliser = new_stabiliser()
    stabiliser.stabilised(resent_chat(f"cch=aa\n{STABLE}\nfiles: /a", [U("a")]))
    stabiliser.stabilised(resent_chat(f"cch=bb\n{STABLE}\nfiles: /a", [U("a")]))

    chat = stabiliser.stabilised(resent_chat(f"cch=cc\n{STABLE}\n\nfiles: /b\n1 file", [U("a")]))

    assert chat.system == STABLE
    assert texts(chat) == ["a\n\n" + NOTE.format("cch=cc\nfiles: /b\n1 file")]


def test_counting_remembers_nothing() -> None:
    stabiliser = new_stabiliser()
    for day in (1, 2):
        chat = resent_chat(dated(day), [U("a")])
        assert stabiliser.stabilised(chat, is_kept=False) == chat


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (dated(1), dated(1)),
        ("You are a cook.\nCook.", "You are a pilot.\nFly."),
        ("one line 1", "one line 2"),
        (dated(1), None),
    ],
)
def test_what_does_not_change_or_has_little_in_common_stays(before: str, now: str | None) -> None:
    stabiliser = new_stabiliser()
    stabiliser.stabilised(resent_chat(before, [U("a")]))
    chat = resent_chat(now, [U("a")])

    assert stabiliser.stabilised(chat) == chat


def test_other_tools_are_another_prompt() -> None:
    stabiliser, tools = new_stabiliser(), ToolSet([{"name": "f"}])
    stabiliser.stabilised(resent_chat(dated(1), [U("a")], tools))
    chat = resent_chat(dated(2), [U("a")])

    assert stabiliser.stabilised(chat) == chat


def test_a_result_of_a_tool_is_followed_by_the_note() -> None:
    stabiliser = new_stabiliser()
    stabiliser.stabilised(resent_chat(dated(1), [U("a")]))
    result = Message(Role.USER, "", results=(ToolResult("f", "x"),))
    chat = ResentChat(dated(2), (U("a"), A("b"), result))

    [*_, last] = stabiliser.stabilised(chat).messages

    assert last.results == result.results
    assert last.text == note(2)


BILLING = "x-anthropic-billing-header: cc_version=2.1.{}; cc_entrypoint=cli;"
TOOLS = ToolSet([{"name": "f", "description": "A tool of the agent. " * 40}])


def of_agent(day: int, directory: str) -> str:
    where = f"<env>\n  Working directory: {directory}\n  Platform: linux\n</env>"
    date = f"Today's date: 2026-11-{day:02}"
    return f"{BILLING.format(day)}\nYou are an agent.\n{date}\n{where}\n{RULES}"


def test_known_lines_are_moved_from_the_first_request_on() -> None:
    """Nothing was known until a second prompt, which was read anew, tools and all."""
    first = new_stabiliser().stabilised(resent_chat(of_agent(1, "/a"), [U("a")], TOOLS))
    other = new_stabiliser().stabilised(resent_chat(of_agent(2, "/b"), [U("a")], TOOLS))

    assert first.system == other.system
    assert "billing" not in (first.system or "")
    lines = "Today's date: 2026-11-01\n  Working directory: /a"
    assert texts(first) == ["a\n\n" + NOTE.format(lines)]
    assert first.moved == (BILLING.format(1), *lines.split("\n"))


def test_of_chats_without_tools_only_the_billing_is_left_out_by_default() -> None:
    stabiliser = new_stabiliser(is_for_all=False)
    plain = resent_chat(of_agent(1, "/a"), [U("a")])

    found = stabiliser.stabilised(plain)

    assert found.system == (plain.system or "").partition("\n")[2]
    assert texts(found) == ["a"]
    assert "Working" not in (stabiliser.stabilised(replace(plain, tools=TOOLS)).system or "")


def test_what_is_known_outlives_the_server(tmp_path: Path) -> None:
    """The notes of a conversation were lost with it, and all behind them was read again."""
    path = tmp_path / "answers.db"

    def stabilised(*asked: tuple[int, list[Message]]) -> list[ResentChat]:
        stabiliser = new_stabiliser(path=path)
        found = [stabiliser.stabilised(resent_chat(dated(day), said)) for day, said in asked]
        stabiliser.close()
        return found

    stabilised((1, [U("a")]))
    [second] = stabilised((2, [U("b")]))
    assert (second.system, texts(second)) == (STABLE, [f"b\n\n{note(2)}"])

    [third] = stabilised((3, [U("b"), A("x"), U("c")]))
    [last] = stabilised((3, [U("b"), A("x"), U("c"), A("y"), U("d")]))

    asked = [f"b\n\n{note(2)}", "x", f"c\n\n{note(3)}"]
    assert texts(third) == asked
    assert texts(last) == [*asked, "y", "d"]
    assert b"number" not in path.read_bytes()


@pytest.mark.parametrize("record", [{}, {"prompts": 1, "note": 1}, {"prompts": [[1], ["a"]]}])
def test_a_record_of_another_form_is_a_miss(record: dict[str, object]) -> None:
    class Others(ResponseMemory):
        def find(self, name: str) -> dict[str, object]:
            return record

    chat = resent_chat(dated(1), [U("a"), A("b"), U("c")])

    assert Stabiliser(Others(None, codec())).stabilised(chat) == chat


def test_usage_says_which_line_changed_though_nothing_was_read_again(host, tmp_path):
    chats = ResentChats(
        host, AnswerMemory(tmp_path / "answers.db"), new_stabiliser(is_for_all=False)
    )
    read, found = [], []
    for day in (1, 2, 2):
        system = f"{BILLING.format(day)}\nYou are an agent.\n{RULES}"
        asked = chats.ask(resent_chat(system, [U("go on")]), answer_options(3))
        read.append(finish(asked.reply).usage.prefilled_tokens)
        found.append(asked.difference.as_dict() if asked.difference is not None else None)
    chats.close()

    assert found == [
        None,
        {
            "message": "system",
            "character": BILLING.index("{}"),
            "was": BILLING.format(1),
            "now": BILLING.format(2),
            "is_moved": True,
        },
        None,
    ]
    assert max(read[1:]) < 20 < read[0]


@pytest.mark.parametrize("is_stabilised", [False, True])
def test_a_growing_conversation_under_a_changing_date_is_read_once(host, tmp_path, is_stabilised):
    """The date stood before the rules, so that every request computed all of its prompt."""
    stabiliser = new_stabiliser() if is_stabilised else None
    chats = ResentChats(host, AnswerMemory(tmp_path / "answers.db"), stabiliser)
    messages: list[Message] = []
    prefilled = []
    for day in range(4):
        messages.append(U("go on"))
        asked = chats.ask(resent_chat(dated(day, RULES[:100]), messages), answer_options(3))
        ended = finish(asked.reply)
        chats.remember(asked, ended)
        prefilled.append(ended.usage.prefilled_tokens)
        messages.append(A(ended.text or "x"))

    shortest = len(f"go on\n\n{note(3)}")
    assert (prefilled[-1] < 2 * shortest) == is_stabilised
    chats.close()

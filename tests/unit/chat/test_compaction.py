"""Compacting, asking aside, and the numbers of messages on branches and copies."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvchat.chat import making_room
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.compaction import (
    LEFT_OUT,
    OPENING,
    NoSummary,
    checked_summary,
    excerpt_request,
    max_summary_tokens,
    num_asking_tokens,
    plan_compaction,
    plan_leaving_out,
    request_text,
    require_substance,
)
from kvchat.chat.controller import ChatController
from kvchat.chat.conversation import Conversation, Role
from kvchat.chat.host import ChatHost
from kvchat.chat.messages import MessageNumbers, MessageTree, TreeNode, find_place, in_words
from kvchat.chat.store import SessionStore
from kvchat.core.errors import UsageError
from kvchat.core.types import FinishReason
from support.scripted_engine import Script, scripted_build
from support.turns import turn


@pytest.fixture
def controller(model: ChatModel, tmp_path: Path) -> Iterator[ChatController]:
    def author(question: str, sample: int) -> Script:
        is_summary = question.startswith("Summarise")
        return Script("Rex is a dog." if is_summary else f"You said {question}", 16)

    host = ChatHost(model, scripted_build(model, author), SessionStore(tmp_path / "sessions"))
    host.wait_until_ready()
    controller = ChatController(host, lambda name, hear: host, None, AskOptions())
    yield controller
    controller.close_session()
    host.close()


def _say(controller: ChatController, *texts: str) -> None:
    for text in texts:
        list(controller.ask(text))


def _conversation(controller: ChatController) -> Conversation:
    return controller.require_conversation()


def _drawn(controller: ChatController) -> list[str]:
    """The displayed tree: depth by spaces, messages by number, labels in brackets, the tip *."""
    conversation = _conversation(controller)
    numbers, tree = MessageNumbers(conversation), MessageTree(conversation)
    rows: list[str] = []

    def draw(node: TreeNode, depth: int) -> None:
        mark = "*" if node is tree.tip else ""
        if node.turn is None and node is not tree.root:
            opening = node.opening
            rows.append(
                f"{' ' * depth}[{opening.system or ''}{'S' if opening.summary_of else ''}]{mark}"
            )
        elif node.turn is not None:
            who = "" if node.turn.role is Role.USER else "a"
            rows.append(f"{' ' * depth}{who}{numbers.of(node.turn)}{mark}")
        for child in node.children:
            draw(child, depth + (len(node.children) > 1))

    draw(tree.root, 0)
    return rows


def test_a_message_has_one_number_on_every_branch_and_in_every_copy(controller):
    """/tree counted turns, /edit messages of the path, and /system doubled everything."""
    _say(controller, "one", "two")
    controller.place.edited = controller.place.user_turn("2")
    _say(controller, "two, edited")
    assert _drawn(controller) == ["1", "a1", " 2", " a2", " 3", " a3*"]
    assert controller.place.user_turn("3").text == "two, edited"
    with pytest.raises(UsageError, match="Message 2 is on another branch"):
        controller.place.user_turn("2")
    with pytest.raises(UsageError, match="on this branch they are numbered 1 and 3"):
        controller.place.user_turn("9")

    controller.set_system("Be brief.")
    assert _drawn(controller) == ["1", "a1", " 2", " a2", " 3", " a3", " [Be brief.]*"]
    assert controller.place.user_turn("3").text == "two, edited"
    _say(controller, "three")
    assert _drawn(controller)[-3:] == [" [Be brief.]", " 4", " a4*"]


def test_going_back_to_a_system_prompt_copies_nothing_again(controller: ChatController) -> None:
    _say(controller, "one")
    for system in ("Be brief.", None, "Be brief.", None):
        controller.set_system(system)
    assert len(_conversation(controller)) == 4
    assert _drawn(controller) == ["1", "a1*"]
    assert controller.ids_with_system(None) == controller.context_ids


def test_a_place_is_named_by_message_and_answer(controller: ChatController) -> None:
    _say(controller, "one")
    list(controller.retry(AskOptions()))
    conversation = _conversation(controller)
    first, second = conversation.children(1)
    assert find_place(conversation, "1") == conversation.turn(1)
    assert find_place(conversation, "1.1") == first
    assert find_place(conversation, "1.2") == second
    for unknown in ("1.3", "2", "x", "1.x", "", "0"):
        assert find_place(conversation, unknown) is None
    assert in_words([1, 2, 3, 5, 7, 8]) == "1 to 3, 5 and 7 to 8"


def test_a_summary_takes_the_place_of_older_messages_on_a_new_branch(controller):
    long = "My dog is called Rex. " * 20
    _say(controller, long, "two", "three", "four")
    plan = making_room.planned(controller)
    assert [turn.text for turn in plan.messages] == [long, "two"]
    before = list(controller.context_ids)
    [*_, ended] = making_room.summarise(controller, plan)
    assert ended.text == "Rex is a dog."
    assert ended.usage.cached.total > plan.num_tokens - 16, "all but the request is cached"
    assert controller.context_ids == before, "asking for it changes nothing"

    change = making_room.compact(controller, plan, ended.text)

    path = _conversation(controller).path()
    assert path[0].text == f"{OPENING}Rex is a dog."
    assert [turn.text for turn in path[2:]] == ["three", "You said three", "four", "You said four"]
    after = len(controller.context_ids)
    assert (change.num_before, change.num_after) == (len(before), after)
    assert len(before) - after > 200
    assert [
        MessageNumbers(_conversation(controller)).of(t) for t in controller.place.user_turns
    ] == [3, 4]
    assert _drawn(controller) == ["1", "a1", "2", "a2", "3", "a3", "4", "a4", "[S]*"]
    _say(controller, "five")
    assert _drawn(controller)[-3:] == ["[S]", "5", "a5*"]
    place = find_place(_conversation(controller), "2")
    assert place is not None
    controller.place.move(_conversation(controller).latest_below(place.turn_id))
    assert controller.context_ids == before, "the old branch is as it was"


def test_undo_goes_back_to_before_compacting_in_one_step(controller: ChatController) -> None:
    """It went back before the newest kept message, and only /switch led to the old branch."""
    _say(controller, "Rex " * 100, "two", "three")
    first = controller.context_ids
    making_room.compact(controller, making_room.planned(controller), "Rex is a dog.")
    compacted = controller.context_ids
    _say(controller, "four " * 60)
    second = controller.context_ids
    making_room.compact(controller, making_room.planned(controller), "Rex is still a dog.")
    twice = controller.context_ids
    assert len(twice) < len(second)

    undone = [controller.place.undo()[0] for _ in range(3)]

    summaries = [turn.summary_of is not None for turn in undone]
    assert summaries == [True, False, True]
    assert controller.context_ids == first
    seen = []
    while controller.context_ids != twice:
        assert controller.place.redo()
        seen.append(controller.context_ids)
    assert seen == [compacted, second, twice]


def test_undo_after_another_system_prompt_is_that_of_a_message(controller: ChatController) -> None:
    _say(controller, "Rex " * 100, "two", "three")
    making_room.compact(controller, making_room.planned(controller), "Rex is a dog.")
    controller.set_system("Be brief.")

    [turn] = controller.place.undo()

    assert turn.text == "three"


@pytest.mark.parametrize(
    ("num_tokens", "num_replaced", "is_taken"),
    [(5, 1000, False), (31, 2100, False), (40, 100_000, True), (31, 1900, True), (3, 100, True)],
)
def test_a_summary_far_too_short_is_refused(num_tokens, num_replaced, is_taken):
    turns = [turn(1, text="Ada has a dog called Rex.")]
    if is_taken:
        require_substance("Ada's dog is Rex.", num_tokens, num_replaced, turns)
        return
    with pytest.raises(UsageError, match="far too short, so nothing is compacted"):
        require_substance("Ada's dog is Rex.", num_tokens, num_replaced, turns)


_SAID = [
    turn(1, text="My name is Ada, and I cannot find my dog. I am sorry: he is called Rex."),
    turn(2, 1, Role.ASSISTANT, "Where did you see Rex, your dog? I cannot help with that yet."),
    turn(3, 2, text="Behind the harbour of Bergen, at 17:40."),
]


@pytest.mark.parametrize(
    "answer",
    [
        "I cannot do that.",
        "I can't do that, because I do not have what you are asking me for in this place today.",
        "I’m sorry, but I cannot help with that.",
        "Sorry, that is not something that I know. Try /model for a larger one.",
        "Es tut mir leid, das kann ich nicht.",
        "Jeg beklager, men det er ikke mulig.",
        "The weather will be sunny tomorrow.",
    ],
)
def test_a_refusal_in_words_is_no_summary(answer: str) -> None:
    """31 tokens of "I can't do that" took the place of a conversation of 1,900."""
    with pytest.raises(UsageError, match="says nothing of the conversation, so nothing"):
        require_substance(answer, 31, 1900, _SAID)


@pytest.mark.parametrize(
    "summary",
    [
        "Ada looks for Rex.",
        "The user lost a dog, Rex, at the harbour.",
        "Rex was seen at 17:40.",
        "Ada cannot find her dog Rex, who was behind Bergen's harbour at 17:40.",
        "He is lost.",
        "艾达在找她的狗雷克斯。",
    ],
)
def test_a_short_summary_is_taken(summary: str) -> None:
    require_substance(summary, 31, 1900, _SAID)


def test_a_compacted_conversation_is_the_same_after_a_restart(controller: ChatController) -> None:
    _say(controller, "Rex " * 100, "two", "three")
    making_room.compact(controller, making_room.planned(controller), "Rex is a dog.")
    _say(controller, "four")
    drawn, ids, session = _drawn(controller), controller.context_ids, controller.require_session()

    controller.begin_new()
    controller.open(session.session_id)
    assert (_drawn(controller), controller.context_ids) == (drawn, ids)
    assert controller.host.store is not None
    [summary] = controller.host.store.summaries()
    assert summary.num_turns == 3, "two kept messages and a new one"


def test_forgetting_a_message_removes_its_copies_and_the_summaries_of_it(controller):
    _say(controller, "Rex " * 100, "a secret", "three " * 20, "four")
    making_room.compact(controller, making_room.planned(controller), "There is a secret.")
    _say(controller, "five", "six")
    making_room.compact(controller, making_room.planned(controller), "Of a secret.")
    place = find_place(_conversation(controller), "2")
    assert place is not None
    controller.place.forget(place.turn_id)
    assert _drawn(controller) == ["1", "a1*"]
    assert controller.host.store is not None
    data = controller.host.store.read_bytes(controller.require_session().session_id)
    assert b"secret" not in data


def test_a_summary_that_saves_nothing_changes_nothing(controller: ChatController) -> None:
    _say(controller, "one")
    before = controller.context_ids
    with pytest.raises(UsageError, match="as long as what it stands for"):
        making_room.compact(controller, making_room.planned(controller), "Many words. " * 50)
    assert controller.context_ids == before


def test_large_newest_messages_are_summarised_too(controller: ChatController) -> None:
    _say(controller, "one", "word " * 100)
    plan = plan_compaction(_conversation(controller), context_limit=1000)
    assert plan.kept == ()
    plan = plan_compaction(_conversation(controller), context_limit=100_000)
    assert [turn.text for turn in plan.messages] == ["one"]


def test_asking_aside_leaves_no_trace(controller: ChatController) -> None:
    _say(controller, "one")
    session = controller.require_session()
    assert controller.host.store is not None
    before = controller.host.store.read_bytes(session.session_id), controller.context_ids

    [*_, ended] = controller.ask_aside("and aside?")
    controller.note_ended(ended)

    assert ended.text == "You said and aside?"
    assert ended.usage.cached.total > 0
    after = controller.host.store.read_bytes(session.session_id), controller.context_ids
    assert after == before
    assert controller.last is None or controller.last.turn_id != 0


@pytest.mark.parametrize(
    ("text", "reason", "why"),
    [
        (" \n", FinishReason.STOP, "wrote no summary"),
        ("", FinishReason.LENGTH, "wrote no summary"),
        (request_text("the dog", 4096), FinishReason.STOP, "repeated the request"),
        (request_text("", 900).replace(" ", "\n"), FinishReason.STOP, "repeated the request"),
        (request_text("", 900) + " Summarise", FinishReason.STOP, "repeated the request"),
        ("Write only the summary, in at most 200 words.", FinishReason.STOP, "repeated"),
    ],
)
def test_what_is_no_summary_is_refused_in_one_sentence(text, reason, why):
    with pytest.raises(UsageError, match=why) as refused:
        checked_summary(text, reason)
    assert "nothing is compacted" in refused.value.message


@pytest.mark.parametrize(
    ("text", "reason", "summary"),
    [
        ("\nAda has a dog.\n", FinishReason.STOP, "Ada has a dog."),
        ("Ada has 1.5 dogs. Rex is a", FinishReason.LENGTH, "Ada has 1.5 dogs."),
        ("- Ada has a dog\n- Rex is", FinishReason.TIMEOUT, "- Ada has a dog"),
        ("艾达有一只狗。他叫", FinishReason.LENGTH, "艾达有一只狗。"),
        ("Ada has a", FinishReason.LENGTH, "Ada has a ..."),
    ],
)
def test_of_a_summary_the_whole_sentences_are_taken(text, reason, summary):
    """One that was cut off at its limit compacted nothing, and a full context was a dead end."""
    assert checked_summary(text, reason) == summary


# A full context

_LIMIT = 1000
_ASKING = num_asking_tokens(100, _LIMIT)


def _chat(*num_tokens: int) -> Conversation:
    """A conversation of exchanges of so many tokens."""
    conversation = Conversation("", 0.0)
    for number, count in enumerate(num_tokens):
        question, answer = 2 * number + 1, 2 * number + 2
        text = f"message {number}"
        conversation.add(turn(question, question - 1, text=text, ids=(1,) * 10))
        said = turn(answer, question, Role.ASSISTANT, ids=(2,) * (count - 10))
        conversation.add(said)
    return conversation


@pytest.mark.parametrize(
    "num_tokens", [(10 * (100,)), (30, 400, 300, 270), (500, 500), (400, 300, 300), (90 * (11,))]
)
def test_a_full_context_is_summarised_as_far_as_the_request_fits(num_tokens):
    """The request was put below all but the last messages: there was no room for it."""
    plan = plan_compaction(_chat(*num_tokens), _LIMIT, _ASKING)

    assert not plan.is_excerpt
    assert 0 < plan.num_tokens <= _LIMIT - _ASKING
    num_kept = sum(len(each.token_ids) for each in plan.kept)
    assert num_kept + max_summary_tokens(_LIMIT) < 0.8 * _LIMIT, "it can go on"


@pytest.mark.parametrize("num_tokens", [(1000,), (20, 980), (980, 20), (30, 950, 20)])
def test_of_one_message_that_fills_the_context_an_excerpt_is_summarised(num_tokens):
    plan = plan_compaction(_chat(*num_tokens), _LIMIT, _ASKING)

    assert plan.is_excerpt
    assert sum(len(each.token_ids) for each in plan.kept) <= 250


def test_an_excerpt_has_the_beginning_and_the_end_and_fits() -> None:
    turns = [
        turn(1, text="My dog is Rex."),
        turn(2, 1, Role.ASSISTANT, text="word " * 900 + "Bye."),
    ]

    asked = excerpt_request(turns, "Summarise.", 400, len)

    assert len(asked) <= 400
    assert "User: My dog is Rex." in asked
    assert asked.endswith("Bye.\n\nSummarise.")
    assert "word" in excerpt_request(turns, "Summarise.", 10_000, len).partition("Rex.")[2]
    with pytest.raises(NoSummary, match="no room"):
        excerpt_request(turns, "Summarise.", 60, len)


@pytest.mark.parametrize(
    ("num_tokens", "kept"),
    [
        ((100, 100), None),
        (10 * (100,), ["message 5", "message 6", "message 7", "message 8", "message 9"]),
        ((20, 900), []),
        ((900, 20), ["message 1"]),
    ],
)
def test_without_a_summary_the_oldest_messages_are_left_out(num_tokens, kept):
    plan = plan_leaving_out(_chat(*num_tokens), _LIMIT)

    assert (plan and [each.text for each in plan.kept if each.is_message]) == kept


def test_leaving_out_is_a_branch_that_undo_goes_back_from(controller: ChatController) -> None:
    _say(controller, "Rex " * 100, "two", "three")
    before = controller.context_ids
    making_room.compact(controller, making_room.planned(controller), "Rex is a dog.")
    _say(controller, "four " * 60)
    compacted = controller.context_ids
    plan = plan_leaving_out(_conversation(controller), len(compacted))
    assert plan is not None
    making_room.leave_out(controller, plan)

    path = _conversation(controller).path()

    assert path[0].text == f"{OPENING}Rex is a dog.\n\n{LEFT_OUT}", "the earlier summary stays"
    assert len(controller.context_ids) < len(compacted)
    controller.place.undo()
    assert controller.context_ids == compacted
    controller.place.move(6)
    assert controller.context_ids == before
    plan = plan_leaving_out(_conversation(controller), len(before))
    assert plan is not None
    making_room.leave_out(controller, plan)
    assert _conversation(controller).path()[0].text == LEFT_OUT

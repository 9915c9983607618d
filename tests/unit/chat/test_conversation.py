"""The tree of turns: branches stay, contexts are the ids on a path, nothing is lost."""

import random

import pytest

from kvchat.chat.conversation import ROOT, Conversation, Role
from support.turns import branching_conversation, turn


def test_a_context_is_the_ids_on_the_path_and_no_others() -> None:
    conversation = branching_conversation()

    assert conversation.context_ids() == [1, 101, 2, 102, 3, 103]
    assert conversation.context_ids(6) == [1, 101, 4, 104, 5, 105, 6, 106]
    assert conversation.context_ids(ROOT) == []
    conversation.check()


def test_siblings_and_leaves_are_the_alternatives() -> None:
    conversation = branching_conversation()

    assert [t.turn_id for t in conversation.siblings(4)] == [2, 4]
    assert [t.turn_id for t in conversation.leaves()] == [3, 6]
    assert conversation.latest_below(1) == 6
    assert conversation.latest_below(2) == 3


def test_an_answer_that_has_not_stopped_by_itself_is_partial() -> None:
    conversation = branching_conversation()

    assert [t.turn_id for t in conversation.turns() if t.is_partial] == [4, 6]


def test_the_label_is_the_title_or_the_first_message_on_one_line() -> None:
    conversation = branching_conversation()
    assert conversation.label == "héllo 😀"

    conversation.title = ""

    assert conversation.label == "first question"
    assert Conversation("x", 0.0).label == ""


def test_a_label_says_where_it_is_cut() -> None:
    """Lists showed "about the history of the Roman empire and i"."""
    conversation = Conversation("x", 0.0)
    conversation.waiting = ("Tell me about the history of the Roman empire and its emperors",)
    assert conversation.label == "Tell me about the history of the Roman empire and its emper…"


def test_a_turn_needs_a_parent_that_is_there() -> None:
    conversation = branching_conversation()
    with pytest.raises(AssertionError, match="turn 40 is not there"):
        conversation.add(turn(7, 40))
    with pytest.raises(AssertionError, match="turn 9 is not there"):
        conversation.move_tip(9)


def test_a_replaced_turn_keeps_its_place() -> None:
    conversation = branching_conversation()
    conversation.replace(conversation.turn(4).with_ids((9, 9, 9), "t1-other"))

    assert conversation.context_ids(5) == [1, 101, 9, 9, 9, 5, 105]
    with pytest.raises(AssertionError):
        conversation.replace(turn(4, 2, Role.ASSISTANT))


def test_a_random_tree_agrees_with_a_list_of_paths() -> None:
    rng = random.Random(2)
    conversation = Conversation("x", 0.0)
    paths: dict[int, list[int]] = {ROOT: []}
    for number in range(1, 200):
        parent = rng.choice(list(paths))
        conversation.move_tip(parent)
        conversation.add(turn(conversation.next_turn_id, parent))
        paths[number] = [*paths[parent], number, number + 100]
        conversation.check()
        somewhere = rng.choice(list(paths))
        assert conversation.context_ids(somewhere) == paths[somewhere]
        assert conversation.tip_id == number

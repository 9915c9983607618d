"""Conversations that a client resends behind a full context: the oldest messages are left out."""

import random
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest

from kvchat.chat.answer_memory import AnswerMemory
from kvchat.chat.answer_settings import ContextPolicy
from kvchat.chat.chat_model import read_chat_model
from kvchat.chat.compaction import max_summary_tokens, num_left_out
from kvchat.chat.conversation import Role
from kvchat.chat.host import ChatHost
from kvchat.chat.prefixes import ResentChats
from kvchat.chat.resent_chat import KeptPart, Message, resent_chat
from kvchat.core.errors import ContextTooLong
from kvchat.model.checkpoint.source import find_model
from support.tiny_host import answer_options, finish, tiny_host

U, A = partial(Message, Role.USER), partial(Message, Role.ASSISTANT)


@pytest.fixture
def chats(host: ChatHost) -> Iterator[ResentChats]:
    opened = ResentChats(host, AnswerMemory(None))
    yield opened
    opened.close()


def test_a_chat_of_many_windows_goes_on_and_what_stays_is_cached(host, chats):
    """The cut moves by half a context at once: each message between two cuts is a hit."""
    assert host.ready is not None
    limit, messages = host.ready.context_limit, []
    asked_tokens, cuts, prefilled = 0, [0], []
    while asked_tokens < 3 * limit:
        messages.append(U(f"{len(messages)} " + "fog " * 3))
        options = answer_options(6, context_policy=ContextPolicy.DROP)
        asked = chats.ask(resent_chat("Be brief.", messages), options)
        path = asked.session.conversation.path()
        first, last = path[0], path[-1]
        ended = finish(asked.reply)
        chats.remember(asked, ended)

        assert first.system == "Be brief."
        assert last.text == messages[-1].text
        asked_tokens += ended.usage.completion_tokens + len(last.token_ids)
        if asked.num_left_out == cuts[-1]:
            prefilled.append(ended.usage.prefilled_tokens - len(last.token_ids))
        cuts.append(asked.num_left_out)
        messages.append(A(ended.text))
        asked.session.close()

    assert cuts == sorted(cuts)
    assert 3 <= len(set(cuts)) < len(cuts) / 3
    assert max(prefilled) <= 16, "a block, and the end of the answer before"


def test_a_request_that_comes_while_the_model_loads_is_cut_too(checkpoint: Path) -> None:
    """The first request to a server that had just started was refused: it knew of no limit."""
    loading = tiny_host(checkpoint, None)
    chats = ResentChats(loading, AnswerMemory(None))
    limit = read_chat_model(find_model(str(checkpoint))).max_context
    messages = [U("fog " * (limit // 8)), A("yes")] * 9 + [U("so")]

    asked = chats.ask(
        resent_chat(None, messages), answer_options(4, context_policy=ContextPolicy.DROP)
    )

    assert asked.num_left_out > 0
    assert finish(asked.reply).usage.completion_tokens
    asked.session.close()
    chats.close()
    loading.close()


def test_a_longer_conversation_leaves_out_what_a_shorter_one_did() -> None:
    draw = random.Random(0)
    for _ in range(200):
        limit, opening = draw.randint(600, 3000), draw.randint(0, 100)
        lengths = [draw.randint(1, limit // 6) for _ in range(60)]
        begins = sorted(draw.sample(range(0, 60, 2), 25))
        cuts = [num_left_out(lengths[: n + 1], begins, opening, limit) for n in range(60)]

        assert cuts == sorted(cuts)
        ends = list(accumulate(lengths, initial=0))
        for last, (before, cut) in enumerate(zip([0, *cuts], cuts, strict=False)):
            num_tokens = ends[last + 1] - ends[cut]
            assert cut == 0 or cut in begins
            is_last_resort = not any(cut < begin <= last for begin in begins)
            assert num_tokens + opening + max_summary_tokens(limit) <= limit or is_last_resort
            if cut > before and not is_last_resort:
                assert num_tokens <= (limit - opening) // 2


def test_results_of_calls_stay_with_their_calls() -> None:
    assert num_left_out([300, 300, 300, 300], [0, 3], 0, 1000) == 3


@pytest.mark.parametrize("policy", [ContextPolicy.STOP, ContextPolicy.COMPACT])
def test_other_policies_refuse_and_a_summary_names_the_way_out(host, chats, policy):
    assert host.ready is not None
    long = "fog " * host.ready.context_limit

    with pytest.raises(ContextTooLong) as refused:
        chats.ask(resent_chat(None, [U(long), A("yes"), U("so")]), answer_options(4))
    options = answer_options(4, context_policy=policy)
    with pytest.raises(ContextTooLong) as refused_too:
        chats.ask(resent_chat(None, [U(long), A("yes"), U("so")]), options)

    assert "context_policy" not in refused.value.hint
    assert ("context_policy drop" in refused_too.value.hint) == (policy is ContextPolicy.COMPACT)


def test_a_message_that_no_context_holds_is_refused_with_drop_too(host, chats):
    assert host.ready is not None
    options = answer_options(4, context_policy=ContextPolicy.DROP)
    long = "fog " * host.ready.context_limit

    with pytest.raises(ContextTooLong):
        chats.ask(resent_chat(None, [U("one"), A("yes"), U(long)]), options)


def test_the_parts_to_keep_move_with_the_cut() -> None:
    chat = resent_chat("s", [U("one"), A("two"), U("three"), A("four"), U("five")])
    parts = tuple(KeptPart(number, 60.0) for number in (0, 1, 3, 5))

    rest = type(chat)(chat.system, chat.messages, None, parts, chat.sent).without_oldest(2)

    assert [message.text for message in rest.messages] == ["three", "four", "five"]
    assert [part.num_messages for part in rest.kept] == [0, 1, 3]
    assert [each.index for group in rest.sent for each in group] == [2, 3, 4]

"""One setting reaches a template's switch for thinking, whatever the template calls it."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime

import pytest

from kvchat.chat import answer_settings
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.conversation import Role
from kvchat.chat.host import ChatHost
from kvchat.chat.json_requests import parse_request
from kvchat.chat.session import ChatSession
from kvchat.chat.template import NewTurn, TurnFormat, turn_format
from kvchat.chat.thinking import Think
from kvchat.chat.tokenizer import ChatTokenizer
from kvchat.core.errors import UsageError
from support import template_zoo as zoo
from support.checkpoints import never_stopping, save_checkpoint, tiny_model
from support.tiny_host import answer_options, finish, tiny_host
from support.tokenizer_zoo import byte_level, text_files

CLOCK = datetime(2025, 3, 4, 5, 6)
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


def format_of(source: str | None) -> TurnFormat:
    files = text_files(byte_level(), source)
    return turn_format(files, ChatTokenizer(files))


def opening(source: str, think: Think) -> str:
    ids = format_of(source).opening(NewTurn("hi", CLOCK, think=think))
    return str(byte_level().decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize(
    ("source", "known"),
    [
        (None, "auto"),
        (zoo.CHATML, "auto"),
        (zoo.TOGGLED, "auto on off"),
        (zoo.DEFAULTED, "auto on off"),
        (zoo.EFFORT, "auto low medium high"),
        (zoo.EFFORT_OR_NONE, "auto off low medium high"),
    ],
)
def test_a_template_says_which_settings_it_knows(source: str | None, known: str) -> None:
    assert format_of(source).switch.known == tuple(Think(word) for word in known.split())


def test_each_setting_reaches_the_template_under_its_own_name() -> None:
    assert not opening(zoo.TOGGLED, Think.AUTO).endswith(EMPTY_THOUGHT)
    assert opening(zoo.TOGGLED, Think.OFF).endswith(EMPTY_THOUGHT)
    assert opening(zoo.DEFAULTED, Think.ON).endswith("<think>\n")
    assert not opening(zoo.DEFAULTED, Think.AUTO).endswith("<think>\n")
    assert "Reasoning: medium" in opening(zoo.EFFORT, Think.AUTO)
    assert "Reasoning: high" in opening(zoo.EFFORT, Think.HIGH)
    assert opening(zoo.EFFORT_OR_NONE, Think.OFF).startswith("[none]")
    assert opening(zoo.EFFORT_OR_NONE, Think.HIGH).startswith("[high]")


def test_a_setting_that_a_template_ignores_changes_nothing_and_is_said() -> None:
    for source, think in ((zoo.CHATML, Think.OFF), (zoo.EFFORT, Think.OFF), (zoo.TOGGLED, "low")):
        form, think = format_of(source), Think(think)
        assert form.opening(NewTurn("hi", CLOCK, think=think)) == form.opening(NewTurn("hi", CLOCK))
        assert (form.switch.problem(think, "m") or "").count(".") == 1
    assert format_of(zoo.TOGGLED).switch.problem(Think.OFF, "m") is None


def test_a_later_turn_is_asked_with_the_setting_of_its_own_time() -> None:
    form = format_of(zoo.TOGGLED)
    off, auto = (
        form.following(NewTurn("and?", CLOCK, think=think), None)
        for think in (Think.OFF, Think.AUTO)
    )
    assert off[: len(auto)] == auto
    assert byte_level().decode(off[len(auto) :], skip_special_tokens=False) == EMPTY_THOUGHT


def test_the_setting_has_a_name_among_the_answer_settings() -> None:
    changed = answer_settings.changed(AskOptions(), "think", "Off")
    assert changed.think is Think.OFF
    assert dict(answer_settings.describe(changed))["think"] == "off"
    with pytest.raises(UsageError, match="must be one of auto, on, off, low, medium, high"):
        answer_settings.changed(AskOptions(), "think", "perhaps")


def test_a_request_may_name_the_setting() -> None:
    request = parse_request({"prompt": "hi", "think": "low"}, 1)
    assert request.options(AskOptions()).think is Think.LOW
    with pytest.raises(UsageError, match="think of line 3 is 'no'"):
        parse_request({"prompt": "hi", "think": "no"}, 3)


@pytest.fixture(scope="module")
def thinking_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatHost]:
    directory = tmp_path_factory.mktemp("toggled")
    save_checkpoint(directory, never_stopping(tiny_model("llama")), zoo.DEFAULTED)
    host = tiny_host(directory, None)
    host.wait_until_ready()
    yield host
    host.close()


def test_a_retry_with_another_setting_asks_again_and_keeps_the_first_question(thinking_host):
    session = thinking_host.new_session()
    plain = answer_options(4)
    finish(session.ask("hi", plain))
    finish(session.retry(plain))
    (question,) = _questions(session)

    finish(session.retry(replace(plain, think=Think.ON)))
    finish(session.retry(replace(plain, think=Think.ON)))
    finish(session.retry(plain))

    first, second = _questions(session)
    assert first == question
    assert second.token_ids[: len(first.token_ids)] == first.token_ids
    assert thinking_host.model.starts_thinking(second.token_ids)
    assert not thinking_host.model.starts_thinking(first.token_ids)
    assert len(session.conversation.children(first.turn_id)) == 3
    assert len(session.conversation.children(second.turn_id)) == 2


def test_a_new_system_prompt_keeps_how_the_first_turn_was_asked(thinking_host: ChatHost) -> None:
    session = thinking_host.new_session()
    finish(session.ask("hi", replace(answer_options(4), think=Think.ON)))
    session.set_system("Be brief.")
    assert thinking_host.model.starts_thinking(session.conversation.path()[0].token_ids)


def _questions(session: ChatSession) -> list:  # type: ignore[type-arg]
    return [turn for turn in session.conversation.turns() if turn.role is Role.USER]

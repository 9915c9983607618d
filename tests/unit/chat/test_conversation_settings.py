"""A conversation goes on with the settings that it had, of its answers and of its model."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvchat.chat import answer_settings
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.controller import ChatController
from kvchat.chat.conversation_settings import changes, restored
from kvchat.chat.host import ChatHost
from kvchat.chat.store import SessionStore
from kvchat.core.types import SamplingParams
from support.scripted_engine import Script, scripted_build
from support.tiny_host import finish

Open = Callable[..., ChatController]
PLAIN = AskOptions(chosen=frozenset())


@pytest.fixture
def open_chat(model: ChatModel, tmp_path: Path) -> Iterator[Open]:
    """Begin a process with its own host, as `kvchat` or `kvchat -r ID` does."""
    opened: list[ChatController] = []

    def begin(session_id: str = "", options: AskOptions = PLAIN, **others: Any) -> ChatController:
        store = SessionStore(tmp_path / "sessions")
        plain = replace(model, sampling_defaults={})
        build = scripted_build(plain, lambda question, _: Script("Yes."))
        host = ChatHost(plain, build, store, settings={"draft": "ngram"})  # type: ignore[arg-type]
        session = host.open_session(session_id) if session_id else None
        opened.append(ChatController(host, lambda *_: host, session, options, **others))
        return opened[-1]

    yield begin
    for controller in opened:
        controller.close_session()
        controller.host.close()


def _say(controller: ChatController, *settings: str) -> str:
    """Set values, ask a question, close the conversation; return its id."""
    for setting in settings:
        name, value = setting.split("=")
        controller.options = answer_settings.changed(controller.options, name, value)
    finish(controller.ask("Is it?"))
    session_id = controller.require_session().session_id
    controller.close_session()
    return session_id


def test_what_was_set_in_a_conversation_holds_when_it_is_opened_again(open_chat: Open) -> None:
    """A chat at temperature 0 came back at the default after `kvchat -c`."""
    session_id = _say(open_chat(), "temperature=0.1", "max-tokens=50", "stop=END", "think=on")

    again = open_chat(session_id)

    assert again.options.sampling == SamplingParams(temperature=0.1)
    assert (again.options.max_tokens, again.options.stops) == (50, ("END",))
    assert again.options.think == "on"
    assert again.require_conversation().settings == {
        "draft": "ngram",
        "temperature": 0.1,
        "max_tokens": 50,
        "stop": ["END"],
        "think": "on",
    }


def test_a_flag_wins_over_what_a_conversation_had(open_chat: Open) -> None:
    session_id = _say(open_chat(), "temperature=0.1", "top-k=5")

    again = open_chat(session_id, given={"temperature": 0.9})

    assert again.options.sampling == SamplingParams(temperature=0.9, top_k=5)


def test_the_settings_of_one_conversation_do_not_follow_into_another(open_chat: Open) -> None:
    plain = _say(open_chat())
    controller = open_chat()
    warm = _say(controller, "temperature=1.5")

    controller.open(plain)
    assert controller.options.sampling == SamplingParams()
    controller.open(warm)
    assert controller.options.sampling == SamplingParams(temperature=1.5)


def test_the_flags_of_a_script_are_not_saved_with_the_conversation(open_chat: Open) -> None:
    session_id = _say(open_chat(), "temperature=0.1")

    script = open_chat(session_id, AskOptions(is_one_shot=True), given={"max_tokens": 3})
    assert script.options.max_tokens == 3
    _say(script)

    again = open_chat(session_id).options
    assert again.max_tokens is None
    assert again.sampling == SamplingParams(temperature=0.1)


def test_settings_are_written_when_they_change_and_not_with_each_message(open_chat, tmp_path):
    controller = open_chat()
    finish(controller.ask("One"))
    finish(controller.ask("Two"))
    session_id = _say(controller, "top-p=0.5")

    lines = (tmp_path / "sessions" / f"{session_id}.jsonl").read_text().splitlines()
    assert sum('"type":"settings"' in line for line in lines) == 2


def test_values_that_are_not_allowed_are_left_out() -> None:
    saved = {"temperature": -1, "top_k": "many", "seed": None, "stop": ["", 3], "model": "x"}

    assert restored({**saved, "max_tokens": 7, "top_p": None}) == {"seed": None, "max_tokens": 7}


def test_a_value_that_the_process_has_anyway_is_no_change() -> None:
    configured = answer_settings.with_values(PLAIN, {"temperature": 0.2})

    assert changes(configured, configured) == {}
    assert changes(answer_settings.changed(configured, "top-k", "3"), configured) == {"top_k": 3}
    assert changes(configured, PLAIN) == {"temperature": 0.2}

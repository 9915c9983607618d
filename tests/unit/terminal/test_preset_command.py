"""/preset: saves how a conversation goes, and begins another one so."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvchat.chat.answer_settings import AskOptions, changed
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.controller import ChatController
from kvchat.chat.host import ChatHost
from kvchat.chat.presets import Preset, Presets
from kvchat.chat.store import SessionStore
from kvchat.chat.surroundings import Surroundings
from kvchat.core.errors import GenerationError, UsageError
from support.scripted_engine import Script, scripted_build
from unit.terminal.test_controller_turns import ask, do


@pytest.fixture
def asked_for() -> list[tuple[str, Any]]:
    return []


@pytest.fixture
def chat(
    model: ChatModel, store: SessionStore, tmp_path: Path, asked_for: list[tuple[str, Any]]
) -> Iterator[ChatController]:
    def host(hear: Any = None) -> ChatHost:
        build = scripted_build(model, lambda question, _: Script(f"You said {question}."))
        return ChatHost(model, build, store, hear)  # type: ignore[arg-type]

    def another(name: str, hear: Any, saved: Any) -> ChatHost:
        asked_for.append((name, saved))
        return host(hear)

    names = Surroundings(list, list, Presets(tmp_path / "presets"))
    controller = ChatController(host(), another, None, AskOptions(), surroundings=names)
    yield controller
    controller.close_session()
    controller.host.close()


def test_a_saved_preset_begins_a_conversation_as_it_was(chat, asked_for, tmp_path):
    chat.set_system("Be brief.")
    chat.options = changed(changed(chat.options, "temperature", "0.2"), "stop", "END")
    (tmp_path / "notes.md").write_text("red")

    said = do(chat, f"/preset save brief {tmp_path}/notes.md")
    chat.set_system(None)
    chat.options = changed(chat.options, "temperature", "1.5")
    ask(chat, "before")
    began = do(chat, "/preset brief")
    ask(chat, "after")

    assert "`kvchat --preset brief` begins with it." in said
    assert "A new conversation with brief: " in began
    assert not asked_for  # the model is the same
    assert (chat.options.sampling.temperature, chat.options.stops) == (0.2, ("END",))
    [turn] = chat.place.user_turns
    assert (turn.system, "notes.md:\n" in turn.text) == ("Be brief.", True)
    assert "brief" in do(chat, "/preset")
    assert "Deleted: brief" in do(chat, "/preset rm brief")


def test_a_preset_of_another_model_loads_it_with_its_settings(chat, asked_for):
    chat.surroundings.presets.write(
        "fast", Preset({"model": "other", "weights": "int4", "tools": True})
    )

    said = do(chat, "/preset fast")

    assert asked_for == [("other", None)]
    assert "starts with what a chat cannot change: weights, tools." in said


def test_a_preset_that_names_what_is_gone_changes_nothing(chat: ChatController) -> None:
    chat.surroundings.presets.write("gone", Preset({"system": "@/nowhere/prompt.txt"}))
    ask(chat, "one")
    before = chat.require_session()

    for line, words in (
        ("/preset gone", "cannot be read"),
        ("/preset nosuch", "There is no preset nosuch"),
        ("/preset save", "takes a name"),
        ("/preset save a/b", "cannot be called"),
    ):
        with pytest.raises(UsageError, match=words):
            raise_said(do(chat, line))
    assert chat.require_session() is before


def test_a_file_that_is_gone_leaves_the_preset_s_model_and_closes_the_old_one(chat):
    """The old model stayed in memory, with its thread."""
    old = chat.host
    chat.surroundings.presets.write("p", Preset({"model": "other"}, ("/nowhere/a.md",)))

    with pytest.raises(UsageError, match="cannot be read"):
        raise_said(do(chat, "/preset p"))

    assert chat.host is not old
    with pytest.raises(GenerationError, match="is closed"):
        old.status().result()


def test_flags_hold_beside_a_preset_and_a_prompt_is_no_name_of_a_file(chat):
    chat.settings = replace(chat.settings, given={"seed": 7})
    chat.set_system("@all: be brief")

    do(chat, "/preset save own")
    do(chat, "/preset own")
    ask(chat, "x")

    assert chat.options.seed == 7
    assert (chat.place.user_turns[0].system or "").strip() == "@all: be brief"


def raise_said(text: str) -> None:
    raise UsageError(text)

"""!COMMAND at the prompt, and the project file of the working directory."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvchat.chat.controller import ChatController
from kvchat.chat.project_file import ProjectFile
from kvchat.terminal.command_runner import build_registry
from kvchat.terminal.commands import Message
from support.script_commands import SureCommands, carry_out
from unit.terminal.conftest import StartChat
from unit.terminal.test_controller_turns import ask, do


class AtTerminal(SureCommands):
    """A person who says yes."""

    is_at_terminal = True


def type_line(controller: ChatController, line: str) -> str:
    return carry_out(controller, line, AtTerminal)


def test_the_output_of_a_command_is_shown_and_goes_with_the_next_message(controller, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "mine")  # the user's own commands see what the user has

    said = type_line(controller, "!seq 50; echo $MY_TOKEN; printf '\\033[31mred'; exit 3")
    ask(controller, "why?")

    assert "[13 lines before]" in said
    assert "\n49\n50\nmine\n" in said
    assert "\x1b" not in said
    assert "[exit code 3]" in said
    assert "to your next message?" in said
    [turn] = controller.place.user_turns
    assert turn.text.startswith("seq 50; echo $MY_TOKEN")
    assert "\n1\n2\n" in turn.text
    assert turn.text.endswith("why?")


def test_only_a_line_that_a_person_typed_runs_a_command(controller: ChatController) -> None:
    """A script's lines may be another person's."""
    registry = build_registry()

    assert registry.parse("!ls") == Message("!ls")
    for text in ("!", "! ", " !ls", "!ls\nand more", "a !ls"):
        assert registry.parse(text, is_typed=True) == Message(text)
    assert "at a terminal only" in do_or_error(controller, "/run touch x")


def do_or_error(controller: ChatController, line: str) -> str:
    try:
        return do(controller, line)
    except Exception as error:
        return str(error)


def test_a_project_file_joins_the_system_prompt_once_the_user_says_so(controller, tmp_path):
    (tmp_path / "AGENTS.md").write_text("Use tabs.\n")
    (tmp_path / "CLAUDE.md").write_text("Use spaces.\n")
    state = tmp_path / "state" / "projects.json"
    project = ProjectFile(tmp_path, state)

    assert [project.is_new(), project.is_new(), ProjectFile(tmp_path, state).is_new()] == [
        True,
        False,
        False,
    ]
    assert project.joined("Be brief.") == "Be brief."
    project.use(True)
    again = ProjectFile(tmp_path, state)
    assert again.is_used
    assert again.joined("Be brief.") == "Be brief.\n\nUse tabs."
    assert again.joined(None) == "Use tabs."
    (tmp_path / "AGENTS.md").unlink()
    assert again.joined(None) == "Use spaces."
    (tmp_path / "CLAUDE.md").unlink()
    assert (again.is_used, again.joined("x")) == (False, "x")
    assert not ProjectFile(tmp_path / "elsewhere", state).is_used


def test_the_text_that_was_joined_is_taken_out_though_the_file_has_changed(tmp_path):
    """/project off left the old rules, and /project on doubled them."""
    (tmp_path / "AGENTS.md").write_text("Use tabs.")
    project = ProjectFile(tmp_path, None)
    project.use(True)
    joined = project.joined("Be brief.")
    (tmp_path / "AGENTS.md").write_text("Use spaces.")

    assert project.without(joined) == "Be brief."
    assert project.joined(project.without(joined), project.read()) == "Be brief.\n\nUse spaces."


def test_a_project_file_that_cannot_be_read_is_not_decided_on(controller, tmp_path, monkeypatch):
    """Every later start in that directory ended with an error."""
    (tmp_path / "AGENTS.md").write_bytes(b"a\0b")
    project = ProjectFile(tmp_path, tmp_path / "projects.json")
    controller.surroundings = replace(controller.surroundings, project=project)

    assert "is not a text file" in do_or_error(controller, "/project on")

    assert not project.is_used


def test_a_first_chat_in_a_directory_asks_and_later_commands_change_it(
    start_chat: StartChat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "AGENTS.md").write_text("Use tabs.")
    monkeypatch.chdir(tmp_path)
    chat = start_chat()
    chat.wait_for("Use AGENTS.md of this directory in the system prompt of chats here?")

    chat.type("\x1b[B\r")
    chat.wait_for("AGENTS.md is in the system prompt of")
    chat.type("/system\r")
    chat.wait_for("System prompt: Use tabs.")
    chat.type("/project off\r")
    chat.wait_for("AGENTS.md is left out of")
    chat.type("/system\r")
    chat.wait_for("There is no system prompt")

"""Tools in the chat, at a real terminal: asked for, run, shown, saved, and continued later."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.chat_screen import ChatScreen
from support.scripted_engine import write_tool_checkpoint

READ = 'call read_file {"path": "a.txt"}'


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tools")


@pytest.fixture
def chat(start_chat: Callable[..., ChatScreen], tmp_path: Path) -> ChatScreen:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "a.txt").write_text("alpha\nbeta\n")
    return start_chat("--tools", str(tmp_path / "work"))


def wait_for_answers(chat: ChatScreen, count: int) -> None:
    """Wait until so many answers have ended: a command that comes before is kept waiting.

    A call and the answer to its result have a line of statistics each.
    """
    chat.wait_for(lambda text: text.count("first token") >= count)


def test_a_call_is_asked_for_run_and_answered(chat: ChatScreen) -> None:
    chat.enter(READ)
    chat.wait_for('Run read_file(path="a.txt")?')
    assert "tool_call" not in chat.text

    chat.type("\r")

    chat.wait_for("I got")
    chat.wait_for("beta")
    chat.wait_for("alpha and 1 more line")


def test_a_call_that_is_refused_is_not_run_and_the_model_is_told(chat: ChatScreen) -> None:
    chat.enter('call run_command {"command": "echo ran > b.txt"}')
    chat.wait_for("Run run_command")

    chat.type("no\r")

    chat.wait_for("not run: run_command")
    chat.wait_for("the user does not allow this call")


@pytest.mark.parametrize("rows", [10, 6, 4, 3])
@pytest.mark.parametrize("columns", [80, 40])
@pytest.mark.parametrize("words", ["ls", "echo one two three four five six seven && " * 3 + "ls"])
def test_a_question_on_a_small_screen_shows_the_choice_that_enter_picks(
    start_chat: Callable[..., ChatScreen], tmp_path: Path, rows: int, columns: int, words: str
) -> None:
    """On four rows the question took all of them, and Enter picked a "yes" that was not seen."""
    chat = start_chat("--tools", str(tmp_path), rows=rows, columns=columns)
    shown = ("yes", "always", "no ", "never") if rows >= 6 else ("Run ",)
    chat.enter(f'call run_command {{"command": "{words}"}}').wait_for_shown("Run ")
    chat.wait_for(lambda _: "❯ yes" in chat.shown or "❯ no" in chat.shown)
    chat.wait_for(lambda _: all(word in chat.shown for word in shown))
    chat.wait_for_shown("run_command {" if columns == 80 else "run_comm")  # the toolbar is last
    begin, end = 'run_command(command="', f'{words[-9:]}")'
    if "❯ yes" in chat.shown:
        assert begin in chat.shown, chat.shown
        assert end in chat.shown, chat.shown
    chat.type("never").wait_for_shown("❯ never").type("\r").wait_for("not run: run_command")


def test_the_end_of_a_long_call_is_seen_before_it_is_allowed(chat: ChatScreen) -> None:
    """The question ended after 1,000 characters, with yes highlighted: the rest ran unseen."""
    chat.enter('call run_command {"command": "echo ' + "x" * 1200 + '; echo ran > b.txt"}')

    chat.wait_for_shown('; echo ran > b.txt")')
    chat.wait_for_shown("Run this call of run_command, shown above?")
    chat.type("no\r").wait_for("not run: run_command")


def test_the_end_of_a_call_is_seen_on_a_small_screen(start_chat, tmp_path):
    """Its length was counted in characters: at 40x12 wide ones filled the screen, and neither the
    end nor the choices were seen, of which Enter took yes.
    """
    chat = start_chat("--tools", str(tmp_path), columns=40, rows=12)
    chat.enter('call run_command {"command": "echo ' + "\u6f22" * 350 + '; echo ran > b.txt"}')

    chat.wait_for_shown("Run run_command, shown above?").wait_for_shown("never  this tool")
    assert '; echo ran > b.txt")' in chat.text
    chat.type("no\r").wait_for("not run: run_command")


def test_a_call_too_long_to_be_shown_is_not_allowed_by_enter(chat: ChatScreen) -> None:
    chat.paste('call run_command {"command": "echo ' + "x" * 9000 + '; echo ran > b.txt"}')
    chat.type("\r").wait_for_shown("characters of it?")

    chat.type("\r")

    chat.wait_for("not run: run_command")


def test_a_call_is_asked_for_with_what_a_terminal_does_not_show(chat: ChatScreen) -> None:
    """Marks that turn the direction of text, and spaces, were left out of the question."""
    chat.enter('call run_command {"command": "echo \u202ea"}')
    chat.wait_for('Run run_command(command="echo \\u202ea")?').type("no\r")
    wait_for_answers(chat, 2)

    chat.enter('call run_command {"command": "echo a\\u0020\\u0020 b"}')

    chat.wait_for('run_command(command="echo a   b")\n\nRun this call')


def test_enter_meant_for_a_half_typed_message_does_not_run_the_call(chat: ChatScreen) -> None:
    """The question opened during typing, with yes highlighted, and the Enter ran the command."""
    chat.type('call run_command {"command": "echo ran > b.txt"}\rthen tell me')
    chat.wait_for("Run run_command").type("\r")

    chat.wait_for("not run: run_command")
    chat.wait_for_shown("then tell me")


def test_a_tool_that_is_always_allowed_is_asked_for_once(chat: ChatScreen) -> None:
    chat.enter(READ)
    chat.wait_for("Run read_file").type("always\r")
    wait_for_answers(chat, 2)

    chat.enter('call read_file {"path": "gone.txt"}')
    chat.wait_for("there is no file gone.txt")
    wait_for_answers(chat, 4)

    chat.enter("/tools")
    chat.wait_for("read_file (runs at once)")
    chat.wait_for("run_command (asks first)")
    chat.enter("/tools never run_command")
    chat.wait_for("run_command never runs.")
    chat.enter('call run_command {"command": "true"}')
    chat.wait_for("not run: run_command")


def test_a_command_that_is_always_allowed_is_listed(chat: ChatScreen) -> None:
    """The list said that run_command asks first, and nothing of the command that did not ask."""
    chat.enter('call run_command {"command": "true"}')
    chat.wait_for("Run run_command").type("always\r")
    wait_for_answers(chat, 2)

    chat.enter("/tools").wait_for("run_command (asks first, but for 1 allowed call)")
    chat.wait_for('runs at once: run_command(command="true")')
    chat.enter("/tools ask run_command").wait_for("run_command asks first.")
    chat.enter("/tools").wait_for("run_command (asks first)")


def test_escape_stops_a_command_and_gives_the_prompt_back(chat: ChatScreen) -> None:
    chat.enter('call run_command {"command": "sleep 1000"}')
    chat.wait_for("Run run_command").type("\r")
    chat.wait_for("running run_command")

    chat.type("\x1b")

    chat.wait_for("Stopped. What the tools returned goes with your next message.")
    chat.enter("hello")
    chat.wait_for("[stopped by the user]")


def test_escape_at_the_question_runs_nothing(chat: ChatScreen) -> None:
    chat.enter(READ)
    chat.wait_for("Run read_file").type("\x1b")

    chat.wait_for("not run: read_file")
    chat.wait_for("Stopped.")


def test_calls_and_results_are_there_again_in_a_resumed_chat(chat, start_chat, tmp_path):
    chat.enter(READ)
    chat.wait_for("Run read_file").type("\r")
    wait_for_answers(chat, 2)
    chat.enter("/tree")
    chat.wait_for("result: alpha and 1 more line")
    chat.enter("/exit")
    assert chat.finish() == 0

    again = start_chat("--tools", str(tmp_path / "work"), "--continue")
    again.wait_for('read_file(path="a.txt")')
    assert "other tools" not in again.text
    again.enter("/undo")
    again.enter(READ)
    again.wait_for("Run read_file")


def test_tools_are_offered_to_a_conversation_that_began_without(start_chat, tmp_path):
    before = start_chat()
    before.enter("hello")
    before.wait_for("You said 'hello'")
    before.enter("/tools")
    before.wait_for("No tools are offered to the model.")
    before.enter("/exit")
    assert before.finish() == 0

    after = start_chat("--tools", str(tmp_path), "--continue")
    after.wait_for("/tools here offers them")
    after.enter("/tools here")
    after.wait_for("The tools are offered in this conversation from now on.")
    after.enter(READ)
    after.wait_for("Run read_file")


def test_the_prompt_does_not_wait_for_tools_that_start_late(start_chat, tmp_path):
    (tmp_path / "work").mkdir()
    started = tmp_path / "started"
    chat = start_chat("--tools", str(tmp_path / "work"), "--late", str(started))
    chat.wait_for("starting MCP servers")
    chat.enter("/tools")
    chat.wait_for("their tools come later")
    chat.enter('call echo {"a": 1}')
    # It waited "for your message before it, and that for /".
    why = "/retry waits for your message before it, and that for the MCP servers"
    chat.enter("/retry").wait_for(why).type("\x15")

    started.touch()

    chat.wait_for("The MCP server gone does not answer")
    chat.wait_for("Run echo(a=1)?").type("\r")
    wait_for_answers(chat, 2)
    chat.enter("/tools")
    chat.wait_for("echo (asks first)")


def test_tools_that_fill_the_context_are_named(start_chat, tmp_path):
    """/compact and /new were named as the ways out, and neither helped."""
    chat = start_chat("--tools", str(tmp_path), "--context", "256")
    chat.enter("hello").wait_for("The tools have ")
    chat.wait_for(lambda text: "start without --tools, or with fewer." in " ".join(text.split()))

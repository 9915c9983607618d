"""What a typed line means."""

import pytest

from kvchat.terminal.command_runner import build_registry
from kvchat.terminal.commands import Invocation, Message, Unknown

_REGISTRY = build_registry()


@pytest.mark.parametrize(
    ("line", "name", "arguments"),
    [
        ("/help", "help", ""),
        ("/help undo", "help", "undo"),
        ("/HELP", "help", ""),
        ("/?", "help", ""),
        ("?", "help", ""),
        (":q", "exit", ""),
        ("/quit", "exit", ""),
        ("/bye ", "exit", ""),
        ("/clear", "new", ""),
        ("/new my title", "new", "my title"),
        ("/load 3", "resume", "3"),
        ("/save", "export", ""),
        ("/regen", "retry", ""),
        ("/retry -n 4", "retry", "-n 4"),
        ("/branch", "fork", ""),
        ("/tokens", "context", ""),
        ("/read a.txt b.txt", "file", "a.txt b.txt"),
        ("/set temperature 0", "set", "temperature 0"),
        ("/rew", "rewind", ""),
        ("/swi 4", "switch", "4"),
        ("/system You are brief.", "system", "You are brief."),
    ],
)
def test_commands_are_found_by_name_alias_and_clear_beginning(line, name, arguments):
    parsed = _REGISTRY.parse(line)

    assert isinstance(parsed, Invocation)
    assert (parsed.command.name, parsed.arguments) == (name, arguments)


@pytest.mark.parametrize(
    "line",
    [
        "hello",
        "",
        "/etc/hosts",
        "/etc/hosts is a file",
        "//comment",
        "// a comment",
        "/* a comment */",
        " /help",
        "\t/help",
        "/help\nwith a second line",
        "a /help in the middle",
        "what is /help?",
        "/tmp/x.txt /help",
    ],
)
def test_everything_else_is_a_message(line: str) -> None:
    assert _REGISTRY.parse(line) == Message(line)


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [
        ("/hepl", "help"),
        ("/clearly", "clear"),
        ("/unod x", "undo"),
        ("/re", "reset"),
        ("/etc", "set"),
    ],
)
def test_unknown_commands_are_never_messages_and_name_the_closest(line, suggestion):
    parsed = _REGISTRY.parse(line)

    assert isinstance(parsed, Unknown)
    assert parsed.suggestion == suggestion
    assert f"Did you mean /{suggestion}?" in str(parsed)


@pytest.mark.parametrize("line", ["/xyzzy", "/nonsense", "/banana"])
def test_a_name_like_no_other_is_pointed_to_the_list(line: str) -> None:
    """/nonsense was answered with /tokens."""
    parsed = _REGISTRY.parse(line)

    assert isinstance(parsed, Unknown)
    assert "/help lists them" in str(parsed)


def test_an_ambiguous_beginning_is_unknown() -> None:
    assert isinstance(_REGISTRY.parse("/ren"), Invocation)
    assert isinstance(_REGISTRY.parse("/res"), Unknown), "reset or resume"


def test_every_command_has_a_line_of_help_and_names_nobody_else_has() -> None:
    words = [word for command in _REGISTRY.commands for word in command.words]

    assert len(words) == len(set(words))
    assert all(command.help and len(command.help) < 80 for command in _REGISTRY.commands)


def test_the_commands_that_were_promised_are_there() -> None:
    promised = (
        "help exit new resume undo redo retry edit fork tree switch system set show stats context "
        "model file export import rename delete copy editor rewind cache spec"
    )
    for name in promised.split():
        command = _REGISTRY.find(name)
        assert command is not None
        assert command.name == name


@pytest.mark.parametrize("line", ["/", "/ help", "/help?", "/helpp", "/1 is not a name", "/exit!"])
def test_what_begins_as_a_command_and_is_none_is_never_sent(line: str) -> None:
    """A lone slash and `/help?` went to the model."""
    unknown = _REGISTRY.parse(line)
    assert isinstance(unknown, Unknown)
    assert "There is no command /" in str(unknown)
    if line == "/help?":  # "There is no command /help?. Did you mean /help?" said it twice
        assert "Without the question mark it is /help." in str(unknown)
    elif line.startswith("/help"):
        assert "Did you mean /help?" in str(unknown)

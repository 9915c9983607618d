"""A prompt without a flag, a bare -r, a title where an id could stand, and what else is typed."""

import os
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from kvchat.cli.command_line import spelled_out
from kvchat.cli.settings import name_to_keep
from kvchat.core.errors import UsageError
from support.commands import Shell
from support.direct_shell import DirectShell
from support.fork_server import ForkServer
from support.pty_screen import PtyScreen

VALUED = ("-p", "--prompt", "-m", "--model", "-r", "--resume", "-n")
COMMANDS = ("bench", "sessions", "models", "cache", "config")
GREEDY = ("--temperature", "0", "--max-tokens", "4")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["hello there"], ["--prompt=hello there"]),
        (["-q", "hello there", "--json"], ["-q", "--json", "--prompt=hello there"]),
        (["-m", "bench", "hi"], ["-m", "bench", "--prompt=hi"]),
        (["-qm", "bench", "hi"], ["-qm", "bench", "--prompt=hi"]),
        (["-mbench", "hi"], ["-mbench", "--prompt=hi"]),
        (["--", "-5 plus 3"], ["--prompt=-5 plus 3"]),
        (["bench", "turns", "-r"], ["bench", "turns", "-r"]),
        (["-m", "tiny", "cache", "status"], ["-m", "tiny", "cache", "status"]),
        (["-r"], ["--resume="]),
        (["--resume", "-m", "tiny"], ["--resume=", "-m", "tiny"]),
        (["-r", "the cats"], ["-r", "the cats"]),
        (["-r", "the cats", "And Tom?"], ["-r", "the cats", "--prompt=And Tom?"]),
        (["-p", "-r"], ["-p", "-r"]),
        (["-p"], ["-p"]),
        ([], []),
    ],
)
def test_a_command_line_is_spelled_out(typed: list[str], meant: list[str]) -> None:
    assert spelled_out(typed, VALUED, COMMANDS) == meant


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        (["-p", "one", "two"], "There are two prompts: 'two' and that of --prompt."),
        (["--prompt=one", "two"], "There are two prompts"),
        (["tell", "me"], "There are 2 prompts: 'tell', 'me'. Put a prompt of several words"),
        (["sesions"], "There is no command 'sesions'. Is `kvchat sessions` meant?"),
        (["help"], "Is `kvchat --help` meant?"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(typed: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        spelled_out(typed, VALUED, COMMANDS)
    assert sentence in str(refused.value)


def test_a_prompt_needs_no_flag_alone_and_after_a_pipe(shell: Shell, tiny: str) -> None:
    flagged = shell.run("-m", tiny, *GREEDY, "-p", "Hi there")
    plain = shell.run("-m", tiny, *GREEDY, "Hi there")
    assert plain.returncode == 0
    assert plain.stdout == flagged.stdout

    flagged = shell.run("-m", tiny, *GREEDY, "-p", "Shorter", stdin=b"a text\n")
    plain = shell.run("-m", tiny, "Shorter", *GREEDY, stdin=b"a text\n")
    assert plain.stdout == flagged.stdout


def test_a_conversation_whose_only_message_was_refused_is_not_kept(shell: Shell, tiny: str) -> None:
    refused = shell.run("-m", tiny, *GREEDY, stdin=b"word " * 20_000)

    assert refused.returncode == 4
    assert not shell.sessions


def test_a_conversation_without_a_message_is_named(shell: Shell, tiny: str) -> None:
    """The list had a row without any words. A chat that is killed can leave such a file."""
    assert shell.run("-m", tiny, *GREEDY, "Hi").returncode == 0
    [kept] = shell.sessions
    header, *_ = kept.read_text().splitlines(keepends=True)
    kept.write_text(header)

    [row] = shell.run("sessions").stdout.splitlines()
    assert row.decode().endswith(f"0 turns  (no message) ({Path(tiny).name})")


def test_a_title_names_a_conversation_and_several_are_listed(shell: Shell, tiny: str) -> None:
    for title in ("Cats and dogs", "Cats alone", "Birds"):
        assert shell.run("-m", tiny, *GREEDY, "Hi", "--title", title).returncode == 0

    assert shell.run("-m", tiny, *GREEDY, "-r", "bir", "And?").returncode == 0
    assert b"# Birds" in shell.run("sessions", "show", "birds").stdout
    several = shell.run("-m", tiny, "-r", "cats", "And?")
    assert several.returncode == 5
    assert b"cats could be 2 sessions: " in several.stderr
    assert b" Cats alone" in several.stderr
    assert b" Cats and dogs" in several.stderr


def test_a_bare_resume_needs_a_terminal(shell: Shell, tiny: str) -> None:
    done = shell.run("-m", tiny, "Hi", "-r")
    assert done.returncode == 2
    assert b"--resume needs a terminal to let you choose." in done.stderr


def test_a_bare_resume_opens_the_picker(shell: Shell, tiny: str, fork_server: ForkServer) -> None:
    shell.run("-m", tiny, *GREEDY, "Hi", "--title", "Birds")
    environment = {"HOME": str(shell.home)}
    chat = PtyScreen(fork_server, "kvchat", ["-m", tiny, "-r"], environment=environment)
    with closing(chat):
        chat.wait_for("Go on with").wait_for("Birds").type("\r").wait_for_shown("❯ Hi")
        chat.type("\x04")
        assert chat.finish() == 0


def test_models_are_listed_with_their_sizes(shell: Shell) -> None:
    hub = shell.home / "hub"
    snapshot = hub / "models--org--small" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"x" * 2048)
    (hub / "models--org--small" / "refs").mkdir()
    (hub / "models--org--small" / "refs" / "main").write_text("0123")
    (hub / "models--org--pickled" / "snapshots" / "0123").mkdir(parents=True)
    (hub / "models--org--pickled" / "snapshots" / "0123" / "model.bin").write_bytes(b"x")

    done = shell.run("models", "list", HF_HUB_CACHE=str(hub))
    demo, pickled, small = done.stdout.decode().splitlines()
    assert demo.split()[0] == "demo"
    assert "MiB  shipped with kvchat" in demo
    assert small.split()[:3] == ["org/small", "2", "KiB"]
    assert pickled.endswith("Hugging Face cache, no safetensors weights")


def test_config_shows_what_a_chat_would_use(direct: DirectShell) -> None:
    shown = direct.run("--model", "org/other", "config", "show", "--origin").stdout.decode()
    lines = {line.split()[0]: line for line in shown.splitlines()}
    assert '"org/other"' in lines["model"]
    assert lines["model"].endswith(" --model")
    assert lines["spec"].split()[1] == "false"
    assert str(direct.home / ".cache/kvchat/kv") in lines["cache_dir"]
    assert "the model's own, else 0.7" in lines["temperature"]
    assert "10% of what is free: " in lines["disk_cache"]


@pytest.mark.parametrize(("code", "told"), [(0, ""), (130, ""), (3, "Error 3"), (143, "Error 143")])
def test_make_chat_takes_leaving_by_ctrl_c_for_no_failure(tmp_path, code, told):
    """`make chat` ended with "make: *** Error 130" after Ctrl-C twice."""
    (tmp_path / "kvchat").write_text(f"exit {code}\n")
    stamp = tmp_path / "installed"
    stamp.touch()
    makefile = Path(__file__).parents[3] / "Makefile"
    # `sh FILE` reads a file that another process may still hold open, where running it would fail;
    # -o takes the stamp for new, whatever the clock and the times of the checkout's files say.
    made = subprocess.run(
        ["make", "-f", makefile, "-o", stamp, "chat", f"BIN=sh {tmp_path}", f"STAMP={stamp}"],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
        check=False,
    )

    assert made.stdout == ""
    assert (told in made.stderr) if told else made.stderr == ""
    assert bool(made.returncode) is bool(told)


@pytest.mark.parametrize("typed", [("--temp", "0", "-p", "hi"), ("--temp", "0", "hi")])
def test_a_flag_that_does_not_exist_is_named(direct: DirectShell, typed: tuple[str, ...]) -> None:
    """Its value was taken for a prompt: "There are two prompts: '0' and that of --prompt.\""""
    done = direct.run(*typed)

    assert done.returncode == 2
    assert b"No such option: --temp" in done.stderr


def test_a_conversation_keeps_a_models_path_and_the_name_of_the_demo(tmp_path, monkeypatch):
    """With a directory `demo` where one is, -m demo is still the shipped model."""
    for name in ("demo", "tiny"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)

    assert name_to_keep("demo") == "demo"
    assert name_to_keep("tiny") == str(tmp_path / "tiny")
    assert name_to_keep("org/tiny") == "org/tiny"

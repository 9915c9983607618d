"""Arguments, files and streams that are not expected: one sentence, and the rest goes on."""

import json
import subprocess
from dataclasses import replace

import pytest

from kvchat.core.text import sanitize
from support.checkpoints import save_checkpoint, tiny_model
from support.commands import Shell, objects
from support.direct_shell import DirectShell

GREEDY = ("--temperature", "0", "--max-tokens", "4")


def test_odd_arguments_leave_the_rest_of_a_script_alone(shell, tiny):
    """Each ended the whole run with "This is a bug"."""
    nobody = b"~nobody-of-that-name/x is in no home directory"
    odd = {
        "/file ~nobody-of-that-name/x": nobody,
        "/file a\0b": b"NUL character",
        "/pin ~nobody-of-that-name/x": nobody,
        "/copy \u00b2": b"messages with an answer here are 1.",
    }
    lines = "\n".join(["one", *odd, "two\n"]).encode()
    done = shell.run("-m", tiny, *GREEDY, "--input-format", "lines", stdin=lines)

    assert b"bug" not in done.stderr
    for sentence in odd.values():
        assert done.stderr.count(sentence) == [*odd.values()].count(sentence), done.stderr
    [kept] = shell.sessions
    assert kept.read_text().count('"role":"user"') == 2


def test_a_directory_of_nobody_is_named(direct: DirectShell) -> None:
    for flag in ("--sessions-dir", "--cache-dir"):
        done = direct.run(flag, "~nobody-of-that-name/x", "-p", "x")
        assert done.returncode == 2
        assert b"~nobody-of-that-name/x is in no home directory" in done.stderr
    assert direct.run("-m", "~nobody-of-that-name/x", "-p", "x").returncode == 3


def test_what_a_foreign_file_says_does_not_act_on_the_terminal(direct, tmp_path):
    """Errors and `models info` passed escape sequences on as the file had them."""
    checkpoint = save_checkpoint(tmp_path / "evil", tiny_model("llama"))
    config = json.loads((checkpoint / "config.json").read_text())
    config["model_type"] = "\x1b[31mred\u202e"
    (checkpoint / "config.json").write_text(json.dumps(config))
    (direct.home / "evil.jsonl").write_text('{"kvchat": "session", "version": "\\u001b[2J"}\n')

    for arguments in (
        ("-m", str(checkpoint), "-p", "x"),
        ("models", "info", str(checkpoint)),
        ("sessions", "import", "evil.jsonl"),
    ):
        done = direct.run(*arguments)
        for stream in (done.stdout.decode(), done.stderr.decode()):
            assert sanitize(stream) == stream, arguments


def test_a_batch_takes_the_system_prompt_of_the_flags_unless_a_request_has_one(shell, tiny):
    """--system was ignored without a word, and so were --file and --title."""
    own = [{"role": "system", "content": "x"}, {"role": "user", "content": "Hi"}]
    requests = [
        {"id": "flags", "prompt": "Hi"},
        {"id": "none", "prompt": "Hi", "system": None},
        {"id": "own", "messages": own},
    ]
    lines = "\n".join(map(json.dumps, requests)).encode()
    batch = ("-m", tiny, *GREEDY, "--input-format", "jsonl")

    done = shell.run(*batch, "--system", "Be brief, be polite, be on time.", stdin=lines)

    read = {a["id"]: a["usage"]["prompt_tokens"] for a in objects(done.stdout)}
    assert read["flags"] > read["own"] > read["none"]
    assert shell.run(*batch, "--title", "x", stdin=lines).returncode == 2
    assert shell.run(*batch, "-f", "x", stdin=lines).returncode == 2
    refused = shell.run(*batch, "--tools", stdin=lines)
    assert refused.returncode == 2, "tools were not offered, and nothing said so"
    assert b"has no place for tools" in refused.stderr


@pytest.mark.parametrize("form", ["prompt", "lines", "batch"])
def test_a_model_that_takes_too_long_to_load_ends_with_124(form, shell, tiny):
    """The limit was one on the answer alone: a script waited for a slow disk without end."""
    given = {
        "prompt": (("-p", "Hi"), b""),
        "lines": ((), b"Hi\nagain\n"),
        "batch": (("--input-format", "jsonl"), b'{"prompt": "Hi"}\n'),
    }
    arguments, stdin = given[form]
    limited = ("--timeout", "0.05", "--json")
    done = replace(shell, module="support.slow_kvchat").run(
        "-m", tiny, *GREEDY, *limited, *arguments, stdin=stdin
    )

    assert done.returncode == 124
    assert done.stderr.decode().splitlines() == ["kvchat: The model was not loaded within 0.05 s."]
    [answer] = objects(done.stdout)
    assert answer["error"]["code"] == 124


@pytest.mark.parametrize(
    ("name", "value"), [("stop", ""), ("timeout", "inf"), ("temperature", "nan")]
)
def test_no_setting_is_kept_that_every_start_would_refuse(direct, name, value):
    """`config set timeout inf` wrote a file that not even `config unset` could read."""
    assert direct.run("config", "set", name, value).returncode == 2
    assert direct.run("config", "show").returncode == 0


def test_any_text_can_be_a_system_prompt(direct: DirectShell) -> None:
    assert direct.run("config", "set", "system", 'Say "a\x7fb" \\ \u00e9').returncode == 0

    shown = direct.run("config", "show").stdout.decode()

    [line] = [line for line in shown.splitlines() if line.startswith("system")]
    assert json.loads(line.split(maxsplit=1)[1]) == 'Say "a\x7fb" \\ \u00e9'


def test_a_directory_before_the_subcommand_counts(shell: Shell, tiny: str) -> None:
    """`kvchat --sessions-dir D sessions rm` looked into the usual directory."""
    elsewhere = ("--sessions-dir", str(shell.home / "elsewhere"))
    shell.run("-m", tiny, *GREEDY, *elsewhere, "-p", "Hi", "--title", "over there")

    assert b"over there" in shell.run(*elsewhere, "sessions").stdout
    assert b"over there" in shell.run("sessions", *elsewhere).stdout
    assert b"over there" not in shell.run("sessions").stdout
    assert b"1 in " + elsewhere[1].encode() in shell.run(*elsewhere, "doctor").stdout


def test_what_an_encoding_lacks_becomes_a_question_mark(shell: Shell, tiny: str) -> None:
    """It ended `kvchat sessions` with an unexpected UnicodeEncodeError."""
    shell.run("-m", tiny, *GREEDY, "-p", "Hi", "--title", "caf\u00e9")

    done = shell.run("sessions", PYTHONIOENCODING="ascii")

    assert done.returncode == 0
    assert b"caf?" in done.stdout


def test_a_damaged_conversation_can_be_exported_as_it_is(shell: Shell, tiny: str) -> None:
    shell.run("-m", tiny, *GREEDY, "-p", "Hi")
    [kept] = shell.sessions
    kept.write_bytes(kept.read_bytes() + b'{"type": "turn", "text": "\xff')

    done = shell.run("sessions", "export", kept.stem, "--format", "jsonl")

    assert done.returncode == 0, done.stderr
    assert b'"kvchat":"session"' in done.stdout


def test_a_pipe_closed_before_a_subcommand_prints_is_told_by_the_exit_code(shell: Shell) -> None:
    command = " ".join(shell.command("config", "show"))
    done = subprocess.run(
        ["bash", "-c", f"{command} | true; echo ${{PIPESTATUS[0]}}"],
        env={**shell.environment, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        timeout=180,
    )

    assert done.stdout.split() == [b"141"]
    assert done.stderr == b""


def test_a_title_that_cannot_be_saved_is_told(shell: Shell, tiny: str) -> None:
    shell.run("-m", tiny, *GREEDY, "-p", "Hi " * 100)
    [kept] = shell.sessions

    done = shell.run_on_full_disk(1, "sessions", "rename", kept.stem, "name")

    assert done.returncode == 6
    assert b"cannot be saved" in done.stderr


def test_a_value_may_hold_an_equals_sign(shell: Shell, tiny: str) -> None:
    """`/set stop x=1` stopped at "x 1", and `/system set the table` lost its first word."""
    lines = b"/set stop x=1\n/set\n/set top-p=0.5\n/system set the table=now\n/system\n"

    told = shell.run("-m", tiny, "--input-format", "lines", stdin=lines).stderr.decode()

    assert "'x=1'" in told
    assert "top-p is 0.5" in told
    assert "System prompt: set the table=now" in told


def test_a_system_prompt_is_read_from_a_file_and_samples_are_told_apart(direct, tiny):
    """-s took "@prompt.txt" for the prompt itself, and two answers had a blank line between."""
    (direct.home / "prompt.txt").write_text(" Be brief.\n")
    asked = ("-m", tiny, *GREEDY, "-p", "x", "-n", "2")

    done = direct.run(*asked, "-s", f"@{direct.home}/prompt.txt")
    missing = direct.run(*asked, "-s", "@none.txt")

    lines = done.stdout.decode().splitlines()
    assert [line for line in lines if line.startswith("---")] == [
        "--- 1 of 2 ---",
        "--- 2 of 2 ---",
    ]
    [kept] = direct.home.rglob("*.jsonl")
    assert '"system":"Be brief."' in kept.read_text()
    assert (missing.returncode, b"none.txt cannot be read" in missing.stderr) == (6, True)

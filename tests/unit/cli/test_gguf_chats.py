"""A chat with a GGUF file: the answers, the KV after a restart, what `models info` says."""

import json
from pathlib import Path

import pytest

from support.checkpoints import never_stopping, save_checkpoint, tiny_model
from support.commands import Shell
from support.gguf_files import write_gguf
from support.next_heads import write_gguf_with_head

FLAGS = ("--temperature", "0", "--max-tokens", "8", "--block-size", "4", "--dtype", "float32")
SAID = b"I like ships.\nDo you?\nWhich ones?\n"


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A file in blocks of 8 bits, and the checkpoint that holds what its blocks hold."""
    place = tmp_path_factory.mktemp("twins")
    model = never_stopping(tiny_model("llama"))
    path = write_gguf(place / "m-Q8_0.gguf", model, "Q8_0")
    return str(path), str(save_checkpoint(place / "twin", model))


def test_three_turns_equal_the_twins_and_a_restart_finds_the_kv(shell, twins):
    lines = (*FLAGS, "--input-format", "lines", "--json")
    runs = [shell.patient.run("-m", twins[0], *lines, stdin=SAID)]
    [first] = (path.stem for path in shell.sessions)  # ids of one second have no order
    runs.append(shell.patient.run("-m", twins[1], *lines, stdin=SAID))
    answers = [[json.loads(line)["text"] for line in run.stdout.splitlines()] for run in runs]
    assert len(answers[0]) == 3
    assert answers[0] == answers[1]

    more = ("-r", first, "--fork", *FLAGS, "-p", "And now?", "--json")
    warm, cold = (
        json.loads(shell.patient.run("-m", twins[0], *more, *flags).stdout)
        for flags in ((), ("--no-cache",))
    )
    assert warm["usage"]["cached_tokens"]["disk"] > 40
    assert cold["usage"]["cached_tokens"]["total"] == 0
    assert warm["text"] == cold["text"]


def test_models_info_describes_a_gguf_file(shell: Shell, twins: tuple[str, str]) -> None:
    done = shell.run("models", "info", twins[0], "--json")
    facts = json.loads(done.stdout)
    assert facts["supported"] == "yes"
    assert facts["blocks"] == "Q8_0 8.5; together 8.5 bits a weight"
    assert facts["memory"].endswith("for the weights")
    assert facts["dtype"] == "bfloat16"
    assert facts["chat_template"].startswith("append-safe")
    assert "drafts" not in facts


def test_a_file_with_a_head_for_the_next_token_answers_with_and_without_it(shell, tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf_with_head(path, "glm4_moe", "Q8_0")

    facts = json.loads(shell.run("models", "info", str(path), "--json").stdout)
    asked = ("-m", str(path), *FLAGS, "-p", "I like ships.", "--json")
    with_head, without = (
        json.loads(shell.patient.run(*asked, flag).stdout) for flag in ("--spec", "--no-spec")
    )

    assert facts["drafts"] == "its own head for the next token, by --spec"
    assert facts["layers"] == 2
    assert with_head["text"] == without["text"] != ""


def test_a_damaged_file_gives_one_sentence_and_exit_code_3(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(20))
    done = shell.run("-m", str(tmp_path / "m.gguf"), "-p", "hi")
    assert done.returncode == 3
    assert done.stdout == b""
    assert done.stderr.count(b"\n") == 1

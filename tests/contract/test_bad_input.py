"""Bad input gets one clear sentence and the right exit code, and loses nothing."""

import json
from pathlib import Path

import pytest

from kvchat.cli import chat, doctor, models
from kvchat.core.errors import StoreError
from kvchat.core.text import sanitize
from support.checkpoints import save_checkpoint, tiny_model
from support.commands import Shell
from support.direct_shell import DirectShell


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("-p", ""), 2, "The input is empty."),
        (("-p", "x", "--temperature", "nan"), 2, "--temperature is nan"),
        (("-p", "x", "-c", "-r", "1"), 2, "exclude each other"),
        (("-p", "x", "--fork"), 2, "--fork needs"),
        (("--no-such-flag",), 2, "kvchat: No such option"),
        (("-p", "x", "--disk-cache", "9" * 400 + "G"), 2, "more than any machine has"),
        (("-p", "x", "-f", "missing.txt"), 6, "missing.txt cannot be read"),
        (("-p", "x", "-m", "/no/such/place"), 3, "There is no model directory"),
        (("-p", "x", "-m", "org/never-heard-of"), 3, "is not on this machine"),
        (("-p", "x", "-c"), 5, "There is no saved conversation yet"),
        (("-p", "x", "-r", "2026"), 5, "No conversation's id begins with 2026"),
        (("sessions", "show", "nope"), 5, "No conversation's id begins with nope"),
        (("config", "set", "temprature", "1"), 2, "is no setting"),
        (("config", "set", "temperature", "hot"), 2, "temperature is 'hot', but must be a number"),
        (("config", "unset", "temprature"), 2, "is no setting"),
        (("bench", "nonsense"), 2, "There is no scenario"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_mistake_gets_a_sentence_and_its_code(direct, arguments, code, sentence):
    done = direct.run(*arguments)

    assert done.returncode == code, done.stderr
    assert sentence.encode() in done.stderr
    assert b"Traceback" not in done.stderr
    assert done.stdout == b""
    assert direct.sessions == []


def test_settings_come_from_flag_environment_file_in_this_order(direct: DirectShell) -> None:
    assert direct.run("config", "set", "temperature", "0.3").returncode == 0
    assert direct.run("config", "set", "top_k", "40").returncode == 0

    shown = direct.run("config", "show", "--origin", KVCHAT_TEMPERATURE="0.9").stdout.decode()

    [temperature] = [line for line in shown.splitlines() if line.startswith("temperature")]
    [top_k] = [line for line in shown.splitlines() if line.startswith("top_k")]
    assert temperature.split() == ["temperature", "0.9", "KVCHAT_TEMPERATURE"]
    assert top_k.split()[1] == "40"
    assert top_k.endswith("config.toml")


def test_a_setting_can_be_taken_out_again_and_a_directory_is_one_from_everywhere(direct):
    assert direct.run("config", "set", "temperature", "0.3").returncode == 0
    assert direct.run("config", "set", "cache_dir", "kept").returncode == 0
    assert direct.run("config", "unset", "temperature").returncode == 0
    (direct.home / "here").mkdir()
    for name, text in (("adapter", "./lora"), ("model", "here"), ("draft", "ngram")):
        assert direct.run("config", "set", name, text).returncode == 0

    shown = direct.run("config", "show").stdout.decode().splitlines()

    set_ones = ("model ", "adapter", "temperature", "draft", "cache_dir")
    assert [line.split() for line in shown if line.startswith(set_ones)] == [
        ["model", f'"{direct.home / "here"}"'],
        ["adapter", f'"{direct.home / "lora"}"'],
        ["draft", '"ngram"'],
        ["temperature", "the", "model's", "own,", "else", "0.7"],
        ["cache_dir", f'"{direct.home / "kept"}"'],
    ]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("temperature = ", "cannot be read"),
        ("nonsense = 1", "which is no setting"),
        ('temperature = "hot"', "must be a number"),
        ('dtype = "int2"', "is 'int2', but must be one of auto, float32"),
    ],
)
def test_a_bad_configuration_file_is_named(direct, content, sentence):
    path = direct.home / ".config/kvchat/config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(content)

    done = direct.run("-p", "x")

    assert done.returncode == 2
    assert sentence.encode() in done.stderr
    assert b"config.toml" in done.stderr


def test_a_bad_environment_variable_is_named(direct: DirectShell) -> None:
    done = direct.run("-p", "x", KVCHAT_SEED="soon")

    assert done.returncode == 2
    assert b"KVCHAT_SEED is 'soon', but must be a whole number" in done.stderr


def test_a_level_that_this_processor_cannot_run_is_refused(shell, direct):
    """It ended the process in an illegal instruction, after "is no setting and is ignored"."""
    refused = shell.run("-p", "x", KVCHAT_CPU="z80")
    shown = direct.run("config", "show", KVCHAT_CPU="z80")

    assert refused.returncode == 2
    assert b"KVCHAT_CPU is 'z80', but must be one of x86-64-v2, x86-64-v3" in refused.stderr
    assert b"no setting" not in refused.stderr + shown.stderr
    assert shown.returncode == 0
    assert b'\nKVCHAT_CPU           "z80"\n' in shown.stdout


def test_weights_in_pickles_are_never_opened(direct: DirectShell, tmp_path: Path) -> None:
    directory = tmp_path / "pickled"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")

    done = direct.run("-m", str(directory), "-p", "x")

    assert done.returncode == 3
    assert b"pickle" in done.stderr
    assert not list(direct.home.rglob("owned"))


def test_an_unsupported_architecture_is_named_with_its_reason(direct, tmp_path):
    checkpoint = save_checkpoint(tmp_path / "m", tiny_model("llama"))
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"model_type": "recurrent_gemma", "architectures": ["RecurrentGemmaForCausalLM"]}
    (checkpoint / "config.json").write_text(json.dumps(config))

    done = direct.run("-m", str(checkpoint), "-p", "x")

    assert done.returncode == 3
    assert b"RecurrentGemmaForCausalLM (recurrent_gemma) is not supported" in done.stderr
    assert b"keeps state other than keys and values" in done.stderr
    assert b"such as Qwen3.5" in done.stderr


def test_damaged_weights_are_told_apart_from_a_bug(direct: DirectShell, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "m", tiny_model("llama"))
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])

    done = direct.run("-m", str(checkpoint), "-p", "x")

    assert done.returncode == 3
    assert b"cannot be read" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_directory_that_cannot_be_written_is_named(shell: Shell, tiny: str) -> None:
    """A file where the directory should be: not even root can write there."""
    (shell.home / "taken").write_text("")

    done = shell.run("-m", tiny, "--sessions-dir", "taken/sessions", "-p", "x")

    assert done.returncode == 6
    assert b"taken/sessions" in done.stderr


def test_sessions_are_listed_shown_exported_imported_renamed_and_removed(shell, tiny):
    shell.run("-m", tiny, "--max-tokens", "3", "-p", "Hello there", "--title", "greeting")
    name = shell.sessions[0].stem

    assert b"greeting" in shell.run("sessions").stdout
    assert b"Hello there" in shell.run("sessions", "show", name).stdout
    exported = shell.run("sessions", "export", name, "--format", "json")
    (shell.home / "copy.json").write_bytes(exported.stdout)
    assert shell.run("sessions", "export", name, "by-ending.json").returncode == 0
    assert (shell.home / "by-ending.json").read_bytes() == exported.stdout
    assert shell.run("sessions", "export", name, "text.md").returncode == 0
    assert b"Export as json or jsonl" in shell.run("sessions", "import", "text.md").stderr
    imported = shell.run("sessions", "import", "copy.json").stdout.decode().strip()
    assert b"Hello there" in shell.run("sessions", "show", imported).stdout
    again = shell.run("-m", tiny, "--max-tokens", "3", "-r", imported, "-p", "more")
    assert again.returncode == 0
    assert shell.run("sessions", "rename", name, " ").returncode == 2
    assert shell.run("sessions", "rename", name, "renamed").returncode == 0
    assert b"renamed" in shell.run("sessions", "list").stdout
    assert shell.run("sessions", "rm", name, imported).returncode == 0
    assert shell.sessions == []


def test_an_export_keeps_what_a_terminal_must_not_see(direct: DirectShell) -> None:
    """A model's delete character was in the exported file and not in what went into a pipe."""
    text = "a\x7fb \x1b[31mred \u202e \ud800 end"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]
    (direct.home / "odd.json").write_text(json.dumps(messages))
    name = direct.run("sessions", "import", "odd.json").stdout.decode().strip()

    for ending in ("json", "jsonl", "md"):
        printed = direct.run("sessions", "export", name, "--format", ending).stdout.decode()
        assert direct.run("sessions", "export", name, f"copy.{ending}").returncode == 0
        assert (direct.home / f"copy.{ending}").read_text() == printed
        assert sanitize(printed) == printed
    exported = json.loads((direct.home / "copy.json").read_text())
    assert exported["messages"][1]["content"] == text


def test_models_info_says_what_a_model_is_and_whether_it_runs(shell: Shell, tiny: str) -> None:
    done = shell.run("models", "info", tiny, "--json")

    facts = json.loads(done.stdout)
    assert done.returncode == 0
    assert facts["supported"] == "yes"
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["chat_template"].startswith("append-safe")
    assert "tokens in" in facts["fits_on_device"]


@pytest.mark.parametrize(
    "run",
    [
        lambda: chat.run_chat({}, chat.ChatRequest(prompt="hi")),
        lambda: models.info("demo", "cpu", False),
        lambda: doctor.examine(None),
    ],
)
def test_a_removed_working_directory_is_said(run, tmp_path, monkeypatch):
    """A library of torch ended the process with an error of its own."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    with pytest.raises(StoreError, match="working directory has been removed"):
        run()

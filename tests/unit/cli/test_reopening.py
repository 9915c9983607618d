"""`kvchat -c` goes on with the conversation's own model; flags say otherwise."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kvchat.cli.build import with_model_of
from kvchat.cli.model_names import whole_name
from kvchat.cli.settings import Settings, resolve
from kvchat.core.errors import ModelError
from kvchat.model.checkpoint.used_models import UsedModel
from support.commands import Shell
from support.direct_shell import DirectShell
from support.fact_memory import FactMemory

SAVED = {"draft": "/models/small.gguf", "kv_dtype": "int8"}


def _settings(config: str = "", tmp_path: Path | None = None, **flags: Any) -> Settings:
    path = (tmp_path or Path("/nonexistent")) / "config.toml"
    if config:
        path.write_text(config)
    return resolve(flags, {}, path)


def test_a_conversation_brings_its_model_and_how_that_ran(tmp_path: Path) -> None:
    """A coding chat was handed to the demo model by `kvchat -c`."""
    configured = _settings('model = "demo"\ndraft = "ngram"\nadapter = "/a"\n', tmp_path)

    chosen = configured.in_conversation("/models/coder.gguf", SAVED)

    names = ("model", "draft", "adapter", "kv_dtype", "endpoint")
    wanted = ["/models/coder.gguf", "/models/small.gguf", None, "int8", None]
    assert [chosen[name] for name in names] == wanted
    assert chosen.of_model("/models/coder.gguf") == SAVED


@pytest.mark.parametrize("flags", [{"model": "other"}, {"endpoint": "http://localhost:1"}])
def test_a_flag_for_the_model_or_a_server_wins(flags: dict[str, str]) -> None:
    given = _settings(**flags)
    assert given.in_conversation("/models/coder.gguf", SAVED) == given


def test_another_flag_wins_for_itself_alone() -> None:
    chosen = _settings(kv_dtype="k8v4").in_conversation("/models/coder.gguf", SAVED)
    assert (chosen["kv_dtype"], chosen["draft"]) == ("k8v4", "/models/small.gguf")


def test_the_server_of_a_conversation_is_asked_again_and_no_other(tmp_path: Path) -> None:
    configured = _settings('endpoint = "http://elsewhere:1"\n', tmp_path)

    remote = configured.in_conversation("qwen3-32b", {"endpoint": "work"})
    local = configured.in_conversation("/models/coder.gguf", SAVED)

    assert (remote["endpoint"], remote["model"]) == ("work", "qwen3-32b")
    assert local["endpoint"] == "none"
    assert remote.of_model("qwen3-32b") == {"endpoint": "work"}
    assert "endpoint" not in local.of_model("/models/coder.gguf")


def test_a_conversation_of_an_earlier_version_takes_no_draft_of_another_model(tmp_path):
    configured = _settings('draft = "small"\n', tmp_path)
    assert configured.in_conversation("/models/coder.gguf", None)["draft"] is None
    assert configured.in_conversation("demo", None)["draft"] == "small"


def test_values_that_a_hand_broke_are_those_of_this_process() -> None:
    chosen = _settings().in_conversation("demo", {"kv_dtype": "int9", "max_context": -3})
    assert (chosen["kv_dtype"], chosen["max_context"]) == ("auto", None)


def test_a_model_that_is_gone_is_asked_for(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone.gguf")
    with pytest.raises(ModelError, match=r"not at .*gone.gguf any more. Name where it is"):
        with_model_of(_settings(incognito=True), gone, {})


def test_the_file_name_of_a_model_that_was_used_names_it(tmp_path, monkeypatch):
    """A model was named by its whole path every time."""
    monkeypatch.setattr("kvchat.cli.model_names.memory_of", lambda settings: memory)
    memory, path = FactMemory(), tmp_path / "coder-q4.gguf"
    path.write_bytes(b"")
    used = asdict(UsedModel("s1-x", 3, 1.0))
    memory.set("used models", "all", {str(path): used})

    assert whole_name(_settings(), "coder-q4") == str(path)
    assert whole_name(_settings(), "coder-q4.gguf") == str(path)
    for other in ("demo", "coder", "org/coder-q4", "ollama:coder-q4"):
        assert whole_name(_settings(), other) == other
    assert whole_name(_settings(endpoint="work"), "coder-q4") == "coder-q4"


def test_a_single_prompt_is_no_conversation_to_go_on_with(shell: Shell, tiny: str) -> None:
    """After a script had run, `kvchat -c` went on with the script's answer."""
    brief = ("--temperature", "0", "--max-tokens", "2")
    assert shell.run("-m", tiny, *brief, "-p", "Hi").returncode == 0

    refused = shell.run("-c", *brief, "-p", "More")
    assert b"`kvchat -c --last` goes on with the last of them." in refused.stderr
    assert shell.run("-c", "--last", *brief, "-p", "More").returncode == 0
    answered = shell.run("-c", *brief, "-p", "And more", "--json")  # with the tiny model again

    assert answered.returncode == 0, answered.stderr
    [session] = [
        json.loads(line) for line in shell.run("sessions", "list", "--json").stdout.splitlines()
    ]
    assert (session["model"], session["turns"]) == (tiny, 3)
    assert shell.run("--last", "-p", "x").returncode == 2


def test_a_list_without_conversations_says_so(direct: DirectShell) -> None:
    """It printed nothing, and a new user wondered whether it had worked."""
    listed = direct.run("sessions")
    assert (listed.stdout, listed.stderr) == (b"", b"kvchat: No conversation is saved yet.\n")


def test_an_alias_stands_for_a_model_until_it_is_deleted(direct: DirectShell, tiny: str) -> None:
    asked = ("--temperature", "0", "--max-tokens", "2", "--json", "-p", "x")
    assert b"There are no aliases." in direct.run("models", "alias").stderr
    assert direct.run("models", "alias", "small", tiny).returncode == 0

    done = direct.run("-m", "small", *asked)
    listed = direct.run("models", "alias").stdout.decode()

    assert json.loads(done.stdout)["model"]["name"] == tiny
    assert listed == f"small  {tiny}\n"
    assert f"{Path(tiny).name} (small) " in direct.run("models").stdout.decode()
    assert direct.run("models", "alias", "small", "--rm").returncode == 0
    assert direct.run("-m", "small", *asked).returncode == 3
    for bad in (("demo", tiny), ("a/b", tiny), ("small",), ("small", "--rm"), ("x", "/nowhere")):
        assert direct.run("models", "alias", *bad).returncode in (2, 3)


def test_a_preset_counts_as_flags_do_and_holds_when_resumed(direct: DirectShell, tiny: str) -> None:
    """Its values would else have been lost by `kvchat -c`, which compares with the defaults."""
    place = direct.home / ".config/kvchat/presets"
    place.mkdir(parents=True)
    (place / "t.toml").write_text(f'model = "{tiny}"\nsystem = "Be brief."\nmax_tokens = 3\n')
    (place / "bad.toml").write_text("nosuch = 1\n")

    greedy = ("--json", "-p", "x", "--temperature", "0")  # a drawn token may end the answer
    first = direct.run("--preset", "t", *greedy)
    longer = direct.run("--preset", "t", *greedy, "--max-tokens", "5")
    listed = direct.run("presets").stdout.decode()

    assert json.loads(first.stdout)["usage"]["completion_tokens"] == 3
    assert json.loads(longer.stdout)["usage"]["completion_tokens"] == 5
    assert json.loads(first.stdout)["model"]["name"] == tiny
    assert direct.run("--preset", "none", "-p", "x").returncode == 2
    assert direct.run("--preset", "bad", "-p", "x").returncode == 2
    assert "max-tokens 3" in listed
    assert "bad.toml sets 'nosuch', which is no setting." in listed

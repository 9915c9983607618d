"""Presets: what their files may hold, and Modelfiles read as such."""

from pathlib import Path

import pytest

from kvchat.chat.modelfile import read_modelfile
from kvchat.chat.presets import Preset, Presets
from kvchat.core.errors import UsageError
from kvchat.core.paths import text_or_file

WHOLE = Preset(
    {
        "model": "/m/coder.gguf",
        "system": 'Write "Rust".\nNo prose.',
        "temperature": 0.2,
        "top_k": 5,
        "stop": ("END",),
        "format": '{"type": "object"}',
        "tools": True,
        "kv_budget": "25%",
    },
    ("manual", "docs/*.md"),
)


def test_a_preset_is_read_as_it_was_written(tmp_path: Path) -> None:
    presets = Presets(tmp_path / "presets")
    assert presets.names() == []

    path = presets.write("coder.v2", WHOLE)

    assert presets.names() == ["coder.v2"]
    assert presets.read("coder.v2") == WHOLE
    assert path.stat().st_mode & 0o777 == 0o600
    assert "file manual, file docs/*.md, model /m/coder.gguf, " in WHOLE.line()
    presets.remove("coder.v2")
    assert presets.names() == []


def test_files_beside_a_preset_are_found_from_everywhere(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Be brief.")
    (tmp_path / "x.toml").write_text('system = "@prompt.txt"\nfile = ["prompt.txt", "apin"]\n')

    preset = Presets(tmp_path).read("x")

    assert preset.values["system"] == f"@{tmp_path}/prompt.txt"
    assert preset.files == (f"{tmp_path}/prompt.txt", "apin")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("temperatur = 1", "x.toml sets 'temperatur', which is no setting."),
        ("temperature = 'hot'", "temperature in .*x.toml is 'hot', but must be a number."),
        ("temperature 1", "x.toml cannot be read: "),
        ("file = 3", "file in .*x.toml is 3, but must be a text or a list of texts."),
    ],
)
def test_a_bad_preset_is_refused_with_its_file(tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "x.toml").write_text(content)
    with pytest.raises(UsageError, match=sentence):
        Presets(tmp_path).read("x")


def test_names_of_presets_are_no_paths(tmp_path: Path) -> None:
    presets = Presets(tmp_path)
    presets.write("coder", WHOLE)
    for name in ("../coder", ".x", "a/b", "", "a" * 65, "a\n"):
        with pytest.raises(UsageError, match="cannot be called"):
            presets.read(name)
    with pytest.raises(UsageError, match=r"no preset code\. Did you mean coder\?"):
        presets.read("code")
    with pytest.raises(UsageError, match="no preset other"):
        presets.remove("other")
    with pytest.raises(UsageError, match="No presets are kept here"):
        Presets(None).read("coder")


def test_a_modelfile_becomes_a_preset_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    path = tmp_path / "Modelfile"
    path.write_text(
        "# a comment\n"
        "FROM ./coder-q4.gguf\n"
        "adapter lora\n"
        'SYSTEM """You write Rust.\nParameter names are short.\n"""\n'
        "PARAMETER temperature 0.2\n"
        "PARAMETER num_ctx 4096\n"
        "PARAMETER num_predict -1\n"
        'PARAMETER stop "<|end|>"\n'
        "PARAMETER stop User:\\n\n"
        "PARAMETER mirostat 2\n"
        'TEMPLATE """{{ .Prompt }}\nPARAMETER top_k 3\n"""\n'
        "MESSAGE user hi\n"
    )

    preset, notes = read_modelfile(path)

    assert preset.values == {
        "model": f"{tmp_path}/coder-q4.gguf",
        "adapter": f"{tmp_path}/lora",
        "system": "You write Rust.\nParameter names are short.",
        "temperature": 0.2,
        "max_context": 4096,
        "stop": ("<|end|>", "User:\n"),
    }
    assert notes == [
        "TEMPLATE is left out: the model's own chat template is used.",
        "Left out, as kvchat has nothing like it: PARAMETER mirostat, MESSAGE.",
    ]


def test_a_model_of_ollama_and_a_file_that_is_no_modelfile(tmp_path: Path) -> None:
    path = tmp_path / "Modelfile"
    path.write_text('FROM llama3.2:1b\nSYSTEM "Be brief."')
    assert read_modelfile(path)[0].values == {"model": "ollama:llama3.2:1b", "system": "Be brief."}
    path.write_text("hello\nworld of text\n")
    with pytest.raises(UsageError, match="has no FROM"):
        read_modelfile(path)
    path.write_text("FROM x\nPARAMETER temperature hot\n")
    with pytest.raises(UsageError, match=r"PARAMETER temperature in .*Modelfile is 'hot'"):
        read_modelfile(path)


def test_a_foreign_modelfile_sets_nothing_but_how_answers_are_generated(tmp_path: Path) -> None:
    """It could have allowed tools, named a server, and put any file into the system prompt."""
    path = tmp_path / "Modelfile"
    path.write_text(
        "FROM x\nSYSTEM @~/secret.txt\nPARAMETER tools true\nPARAMETER allow_tool run_command\n"
        "PARAMETER endpoint http://example.org\nPARAMETER num_ctx 512\n"
    )

    preset, [note] = read_modelfile(path)

    assert preset.values == {"model": "ollama:x", "system": " @~/secret.txt", "max_context": 512}
    assert text_or_file(preset.values["system"]) == " @~/secret.txt"
    assert note.endswith("PARAMETER tools, PARAMETER allow_tool, PARAMETER endpoint.")

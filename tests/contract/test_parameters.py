"""The contract of parameters: flags, variables, keys of config.toml, /set and JSON fields of each.

One table says what they are, so every place accepts the same values and refuses a bad one in the
same words. All runs in this process, and no model is loaded.
"""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from kvchat.chat import answer_settings
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.json_requests import BadRequest, JsonRequest
from kvchat.cli import config
from kvchat.cli.app import app
from kvchat.cli.batch import read_requests
from kvchat.cli.build import ask_options
from kvchat.cli.flags import CHAT_FLAGS, OF_BENCH, OF_CHAT, OF_SERVER, values_of
from kvchat.cli.settings import resolve
from kvchat.core.errors import UsageError
from kvchat.core.parameters import BY_NAME, OF_ANSWERS, PARAMETERS, Kind, Parameter
from kvchat.core.toml_text import write_table
from kvchat.core.types import SamplingParams

COMMANDS = typer.main.get_command(app)

# Every parameter: a text that it takes, and one that it does not, with the words for that.
VALUES: dict[str, tuple[str, str, str]] = {
    "model": ("org/name:Q4_K_M", " ", "is empty. Leave it out for the default."),
    "model_dir": ("models", "", "is an empty text."),
    "endpoint": ("http://127.0.0.1:1", "", "is empty. Leave it out for the default."),
    "adapter": ("lora", "", "is empty. Leave it out for the default."),
    "draft": ("ngram", "", "is empty. Leave it out for the default."),
    "spec": ("on", "maybe", "is 'maybe', but must be true or false."),
    "device": ("cpu", "tpu", "is 'tpu', but must be one of auto, cpu, cuda."),
    "dtype": ("float16", "int2", "is 'int2', but must be one of auto, float32, bfloat16, float16."),
    "weights": ("int4", "int2", "is 'int2', but must be one of auto, int8, int4."),
    "threads": ("2", "0", "is 0, but must be 1 to 1024."),
    "max_context": ("512", "-1", "is -1, but must be 1 or more."),
    "keep_alive": ("10", "-1", "is -1.0, but must be 0 (off) or more."),
    "graphs": ("off", "2", "is '2', but must be true or false."),
    "system": ("Be brief.", "a\0b", "has a NUL character, which no setting can hold."),
    "temperature": ("0", "hot", "is 'hot', but must be a number."),
    "top_p": ("0.5", "1.5", "is 1.5, but must be above 0 and at most 1."),
    "top_k": ("5", "2.5", "is '2.5', but must be a whole number."),
    "min_p": ("0.1", "-1", "is -1.0, but must be 0 to 1."),
    "repetition_penalty": ("1.1", "0", "is 0.0, but must be 0.01 to 100."),
    "seed": ("7", "soon", "is 'soon', but must be a whole number."),
    "max_tokens": ("16", "0", "is 0, but must be 1 or more."),
    "repetition_limit": ("256", "5", "is 5, but must be 0 (off) or at least 128."),
    "stop": ("END", "", "is an empty text, which would stop every answer."),
    "think": ("low", "hard", "is 'hard', but must be one of auto, on, off, low, medium, high."),
    "format": (
        "json",
        "xml",
        "is 'xml', which is no file and no schema. Give a file, a JSON schema, "
        "or a form like 'name: string, age?: integer, tags: string[]'.",
    ),
    "context_policy": ("drop", "x", "is 'x', but must be one of stop, drop, compact."),
    "kv_budget": ("25%", "0%", "is '0%', but must be a size like 512M or 25%."),
    "timeout": ("30", "0", "is 0.0, but must be more than 0 seconds and at most 1e9."),
    "tools": ("yes", "x", "is 'x', but must be true or false."),
    "allow_tool": ("read_file", "", "is an empty text."),
    "tool_env": ("TOKEN", "", "is an empty text."),
    "kv_dtype": (
        "int8",
        "int9",
        "is 'int9', but must be one of auto, float32, bfloat16, float16, int8, fp8, k8v4, int4.",
    ),
    "block_size": ("32", "24", "is 24, but must be a power of two up to 1024."),
    "device_cache": ("512M", "lots", "is 'lots', but must be a size like 8G, 512M or 20%."),
    "host_cache": ("0", "1e9", "is '1e9', but must be a size like 8G, 512M or 20%."),
    "disk_cache": ("5%", "2", "is 2 bytes. Give a unit: 2G, or 2B if bytes are meant."),
    "trace_log": ("trace.jsonl", "", "is empty. Leave it out for the default."),
    "shared_cache": ("valkey://box:6379/0", "", "is empty. Leave it out for the default."),
    "prefill_at": ("http://box:8642", "", "is empty. Leave it out for the default."),
    "shared_key_file": ("team.key", "", "is empty. Leave it out for the default."),
    "share": ("all", "some", "is 'some', but must be one of pins, all."),
    "shared_encryption": ("off", "2", "is '2', but must be true or false."),
    "shared_deadline": ("200", "0", "is 0, but must be 1 to 60000."),
    "cache_dir": ("kv", "", "is empty. Leave it out for the default."),
    "cache": ("no", "x", "is 'x', but must be true or false."),
    "incognito": ("on", "x", "is 'x', but must be true or false."),
    "sessions_dir": ("s", "", "is empty. Leave it out for the default."),
    "color": ("never", "blue", "is 'blue', but must be one of auto, always, never."),
    "accessible": ("1", "x", "is 'x', but must be true or false."),
    "stats": ("true", "x", "is 'x', but must be true or false."),
    "quiet": ("on", "x", "is 'x', but must be true or false."),
}
# The settings of JSON: the same values as JSON has them, and bad ones with the words for them.
BAD_FIELDS: dict[str, tuple[Any, str]] = {
    "temperature": (-1, "is -1, but must be 0 to 100."),
    "top_p": ("x", "is 'x', but must be a number."),
    "top_k": (2.5, "is 2.5, but must be a whole number."),
    "min_p": (2, "is 2, but must be 0 to 1."),
    "repetition_penalty": (True, "is True, but must be a number."),
    "seed": ("7", "is '7', but must be a whole number."),
    "max_tokens": (0, "is 0, but must be 1 or more."),
    "repetition_limit": (5, "is 5, but must be 0 (off) or at least 128."),
    "stop": (5, "is 5, but must be a text or a list of texts."),
    "think": ("hard", "is 'hard', but must be one of auto, on, off, low, medium, high."),
    "format": (5, "is 5, but must be text, json or a schema."),
    "context_policy": ("x", "is 'x', but must be one of stop, drop, compact."),
    "kv_budget": (0.25, "is 0.25, but must be a size."),
}
SWITCHES = ("--json", "--raw", "-c", "--continue", "--last", "--fork", "-q", "--quiet", "--stats")
SWITCHES += ("--spec", "--no-spec", "--no-cache", "--incognito", "--accessible", "--debug")


def params(*arguments: str, command: str | None = None) -> dict[str, Any]:
    """Return what the parser makes of a command line."""
    parser = COMMANDS.commands[command] if command else COMMANDS  # type: ignore[attr-defined]
    return dict(parser.make_context("kvchat", list(arguments)).params)


def test_the_table_is_whole() -> None:
    assert VALUES.keys() == BY_NAME.keys()
    assert BAD_FIELDS.keys() == {parameter.name for parameter in OF_ANSWERS}


@pytest.mark.parametrize("command", [None, "serve"])
@pytest.mark.parametrize("name", VALUES)
def test_a_flag_a_variable_and_a_key_mean_the_same(tmp_path, name, command):
    """`kvchat serve` had half of the flags of `kvchat`: --top-k was no such option."""
    parameter, text = BY_NAME[name], VALUES[name][0]
    is_switch = parameter.kind is Kind.SWITCH
    value = parameter.parsed(text, "")
    if command is not None and parameter not in OF_SERVER:
        with pytest.raises(Exception, match="No such option"):
            params(parameter.flag, command=command)
        return

    typed = [parameter.flag] if is_switch and value else [parameter.flag, text]
    typed = [f"--no-{parameter.dashed}"] if is_switch and not value else typed
    flags = params(*typed, command=command)
    file = tmp_path / "config.toml"
    write_table(file, {name: value})

    assert resolve(flags, {}, tmp_path / "none")[name] == value
    assert resolve({}, {parameter.variable: text}, tmp_path / "none")[name] == value
    assert resolve({}, {}, file)[name] == value


@pytest.mark.parametrize("name", VALUES)
def test_a_bad_value_is_refused_in_one_wording(tmp_path: Path, name: str) -> None:
    parameter, (_, text, words) = BY_NAME[name], VALUES[name]
    flags = {} if parameter.kind is Kind.SWITCH else {parameter.flag: {name: text}}
    tries = {place: (flag, {}) for place, flag in flags.items()}
    if text:  # an empty variable is none
        tries[parameter.variable] = ({}, {parameter.variable: text})

    for place, (flag, environment) in tries.items():
        with pytest.raises(UsageError) as caught:
            resolve(flag, environment, tmp_path / "none")
        assert str(caught.value) == f"{place} {words}"
        assert caught.value.exit_code == 2


@pytest.mark.parametrize(("name", "bad"), [(n, bad) for n, (bad, _) in BAD_FIELDS.items()])
def test_a_bad_key_of_the_file_is_named_with_the_file(tmp_path, name, bad):
    file = tmp_path / "config.toml"
    write_table(file, {name: bad})

    with pytest.raises(UsageError) as caught:
        resolve({}, {}, file)

    assert str(caught.value) == f"{name} in {file} {BAD_FIELDS[name][1]}"


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_a_line_of_json_has_the_fields_of_the_flags(tmp_path: Path, name: str) -> None:
    parameter, text = BY_NAME[name], VALUES[name][0]
    value = parameter.parsed(text, "")
    bad, words = BAD_FIELDS[name]
    lines = [{"prompt": "x", name: each} for each in (value, bad, None)]
    content = "\n".join(map(json.dumps, lines)).encode()

    good, refused, missing = read_requests(io.BytesIO(content))

    flags = resolve({name: text}, {}, tmp_path / "none")
    assert isinstance(good, JsonRequest)
    base = AskOptions(chosen=frozenset(), repetition_limit=128)
    assert good.options(base) == ask_options(flags).for_model({})
    assert isinstance(refused, BadRequest)
    assert str(refused.error) == f"{name} of line 2 {words}"
    assert isinstance(missing, JsonRequest)
    assert missing.values == {}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_set_takes_what_the_flag_takes(tmp_path: Path, name: str) -> None:
    parameter, (text, bad, words) = BY_NAME[name], VALUES[name]
    base = ask_options(resolve({}, {}, tmp_path / "none")).for_model({})

    changed = answer_settings.changed(base, parameter.flag, text)

    assert changed == ask_options(resolve({name: text}, {}, tmp_path / "none")).for_model({})
    with pytest.raises(UsageError) as caught:
        answer_settings.changed(base, name, bad or '""')
    assert str(caught.value) == f"{parameter.dashed} {words}"


@pytest.mark.parametrize(
    ("name", "word", "value"),
    [
        ("top_k", "off", 0),
        ("top_p", "off", 1.0),
        ("repetition_limit", "off", 0),
        ("repetition_limit", "default", 128),
        ("seed", "random", None),
        ("max_tokens", "none", None),
        ("stop", "none", ()),
    ],
)
def test_set_takes_a_value_back(name: str, word: str, value: object) -> None:
    options = AskOptions(SamplingParams(top_k=3, top_p=0.5), 7, 5, ("x",), repetition_limit=500)

    changed = answer_settings.changed(options, name, word)

    holder = changed.sampling if hasattr(changed.sampling, name) and name != "seed" else changed
    assert getattr(holder, "stops" if name == "stop" else name) == value


def test_the_rest_of_the_command_line_is_as_before() -> None:
    given = values_of(
        CHAT_FLAGS,
        params("-p", "Hi", "-f", "a", "-f", "b", "-r", "12", "--title", "T", "-n", "3", "--json"),
    )

    assert given == {
        "preset": None,
        "prompt": "Hi",
        "file": ("a", "b"),
        "last": False,
        "continue_": False,
        "resume": "12",
        "fork": False,
        "title": "T",
        "samples": 3,
        "schema": None,
        "json": True,
        "output_format": "text",
        "input_format": "text",
        "raw": False,
    }
    for flag in SWITCHES:
        assert any(value is not None for value in params(flag).values())
    assert params("-m", "x", "-s", "y")["system"] == "y"
    assert params("Hello")["prompt"] == "Hello"
    served = params("--host", "::1", "--port", "0", "--api-key", "k", command="serve")
    assert values_of(OF_SERVER, served)["port"] == 0
    measured = params("turns", "--block-size", "32", "--quick", command="bench")
    assert values_of(OF_BENCH, measured)["block_size"] == 32


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("-n", "abc"), "--samples is 'abc', but must be a whole number."),
        (("-n", "0"), "--samples is 0, but must be 1 to 1024."),
        (("-f", ""), "--file is an empty text."),
        (
            ("--output-format", "xml"),
            "--output-format is 'xml', but must be one of text, json, stream-json.",
        ),
        (("serve", "--port", "65536"), "--port is 65536, but must be 0 to 65535."),
        (("serve", "--top-k", "-1"), "--top-k is -1, but must be 0 (off) or more."),
        (("--top-k", "-1", "serve"), "--top-k is -1, but must be 0 (off) or more."),
        (("bench", "--repeats", "0"), "--repeats is 0, but must be 1 or more."),
        (("bench", "--device", "tpu"), "--device is 'tpu', but must be one of auto, cpu, cuda."),
    ],
    ids=" ".join,
)
def test_a_bad_flag_of_a_command_is_refused_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    with pytest.raises(UsageError) as caught:
        app(list(arguments), standalone_mode=False, prog_name="kvchat")

    assert str(caught.value) == sentence


# Help


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize(
    ("arguments", "parameters"), [((), OF_CHAT), (("serve",), OF_SERVER), (("bench",), OF_BENCH)]
)
def test_help_has_every_flag_with_its_choices_under_headings(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    parameters: tuple[Parameter, ...],
    columns: int,
) -> None:
    """Choices were not shown, and sentences on commands ended in the middle."""
    monkeypatch.setenv("COLUMNS", str(columns))

    app([*arguments, "--help"], standalone_mode=False, prog_name="kvchat")

    page = capsys.readouterr().out
    words = " ".join(page.split())
    assert not re.search(r"\w\.\.\.", words.replace("scenarios...", ""))
    assert max(map(len, page.splitlines())) <= columns
    for parameter in parameters:
        assert parameter.full_help in words, parameter.name
        assert f"\n{parameter.group}:\n" in page
    if not arguments:
        assert "its peer or its ceiling, JSON on the last line." in words


@pytest.mark.parametrize(
    ("command", "subcommands"),
    [
        ("sessions", "list show export import rename rm"),
        ("cache", "status tree why verify gc clear path"),
        ("models", "list info fit"),
        ("config", "show path set"),
    ],
)
def test_subcommands_are_those_of_the_contract(command: str, subcommands: str) -> None:
    group: Any = COMMANDS.commands[command]  # type: ignore[attr-defined]

    assert set(subcommands.split()) <= group.commands.keys()


@pytest.mark.parametrize("name", ["adapter", "cache_dir", "sessions_dir", "model", "draft"])
def test_a_path_is_stored_so_that_it_holds_in_every_directory(tmp_path, monkeypatch, name):
    """`config set adapter ./lora` meant another directory wherever kvchat was started."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.chdir(tmp_path)

    config.set_value(name, "./here")

    file = tmp_path / ".config/kvchat/config.toml"
    assert resolve({}, {}, file)[name] == str(tmp_path / "here")


def test_settings_are_shown_with_what_decides_where_nothing_is_set(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)

    config.show({"top_k": "5"}, with_origin=True)

    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert [*lines][: len(PARAMETERS)] == [parameter.name for parameter in PARAMETERS]
    assert lines["top_k"].split() == ["5", "--top-k"]
    assert lines["seed"].startswith("a new one per answer  ")

"""The text side of a checkpoint, in all the places and shapes checkpoints keep it."""

import json
import os
from itertools import product
from pathlib import Path

import pytest

from kvchat.core.errors import ModelError
from kvchat.model.checkpoint.source import ModelSource
from kvchat.model.checkpoint.text_files import read_text_files
from kvchat.model.files.text_settings import TextFiles
from support.tokenizer_zoo import byte_level


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(directory: Path, name: str, content: object) -> None:
    (directory / name).write_text(json.dumps(content))


def read(directory: Path) -> TextFiles:
    return read_text_files(ModelSource("m", directory))


def test_a_tokenizer_alone_is_enough(directory: Path) -> None:
    files = read(directory)

    assert files.tokenizer_json == (directory / "tokenizer.json").read_text()
    assert files == TextFiles(files.tokenizer_json, None)


def test_a_template_file_goes_before_every_other_place(directory: Path) -> None:
    write(directory, "chat_template.json", {"chat_template": "third"})
    assert read(directory).chat_template == "third"
    write(directory, "tokenizer_config.json", {"chat_template": "second"})
    assert read(directory).chat_template == "second"
    (directory / "chat_template.jinja").write_text("héllo {{ x }}", encoding="utf-8")
    assert read(directory).chat_template == "héllo {{ x }}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "rag", "template": "r"}], None),
        ([], None),
        (["text"], None),
        ([{"template": "nameless"}], None),
        ({"default": "d"}, None),
        (5, None),
        (None, None),
    ],
)
def test_of_several_templates_the_default_is_taken(directory, template, expected):
    write(directory, "tokenizer_config.json", {"chat_template": template})

    assert read(directory).chat_template == expected


def test_special_tokens_may_be_words_or_descriptions(directory: Path) -> None:
    write(
        directory,
        "special_tokens_map.json",
        {"eos_token": "</s>", "unk_token": {"content": "<unk>", "lstrip": False}, "bos_token": []},
    )
    write(
        directory,
        "tokenizer_config.json",
        {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "<end>", "x": "y"},
    )

    assert read(directory).special_tokens == {
        "bos_token": "<s>",
        "eos_token": "<end>",
        "unk_token": "<unk>",
    }


def test_a_null_in_the_tokenizers_configuration_hides_nothing(directory: Path) -> None:
    """`"bos_token": null` beside a map that names one is how some converters write it."""
    write(directory, "special_tokens_map.json", {"eos_token": "</s>"})
    write(directory, "tokenizer_config.json", {"eos_token": None})

    assert read(directory).special_tokens == {"eos_token": "</s>"}


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 5}, (7, 8)),
        ({"eos_token_id": 7}, {"eos_token_id": 5}, (7,)),
        ({}, {"eos_token_id": [5]}, (5,)),
        ({}, {"text_config": {"eos_token_id": 4}}, (4,)),
        ({"eos_token_id": None}, {"eos_token_id": 0}, (0,)),
        ({"eos_token_id": [None, "x", 3]}, {}, (3,)),
        ({"eos_token_id": True}, {"eos_token_id": 2}, (2,)),
        ({}, {"text_config": [1]}, ()),
        ({}, {}, ()),
    ],
)
def test_stop_ids_are_those_of_generation_before_those_of_the_model(
    directory: Path,
    generation: dict,
    config: dict,
    expected: tuple[int, ...],  # type: ignore[type-arg]
) -> None:
    write(directory, "generation_config.json", generation)
    write(directory, "config.json", config)

    assert read(directory).stop_token_ids == expected


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_length": 9}, None),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"do_sample": True, "min_p": 0.1}, {"min_p": 0.1}),
        ({"temperature": None, "top_p": "0.9", "top_k": True}, {}),
        ({"temperature": -1, "top_p": 0, "top_k": -1, "min_p": 0.2}, {"min_p": 0.2}),
    ],
)
def test_the_authors_sampling_is_taken_over(
    directory: Path,
    generation: dict,
    expected: dict | None,  # type: ignore[type-arg]
) -> None:
    write(directory, "generation_config.json", generation)
    wanted = {"temperature": 0.6, "top_k": 20, "top_p": 0.95} if expected is None else expected

    assert read(directory).sampling_defaults == wanted


def test_a_bos_is_added_only_where_the_configuration_asks(directory: Path) -> None:
    for value, expected in ((True, True), (False, False), ("yes", False), (None, False)):
        write(directory, "tokenizer_config.json", {"add_bos_token": value})
        assert read(directory).adds_bos is expected


_SETTINGS = ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json")
_NO_OBJECTS = (
    b"{",
    b"[1, 2]",
    b"[" * 100_000,
    b"\xff",
    b"\xff\xfe{}",
    b"",
    b'{"a": NaN',
    b"9" * 5000,
)


@pytest.mark.parametrize(
    ("names", "contents", "reason"),
    [
        (_SETTINGS, _NO_OBJECTS, ": it is not"),
        (("tokenizer.json", "chat_template.jinja"), (b"\xff\xfe{{ x }}",), ""),
    ],
)
def test_a_damaged_file_is_told_by_name(directory, names, contents, reason):
    """A template in another encoding ended in a UnicodeDecodeError."""
    for name, content in product(names, contents):
        path = directory / name
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(content)

        with pytest.raises(ModelError, match=f"{name} cannot be read{reason}"):
            read(directory)
        path.unlink() if before is None else path.write_bytes(before)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "config.json",
    ],
)
def test_a_named_pipe_in_place_of_a_file_is_told_and_not_waited_for(name, directory):
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)

    with pytest.raises(ModelError, match=f"{name} cannot be read: it is a named pipe"):
        read(directory)


def test_a_pipe_among_older_vocabulary_files_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "vocab.json")

    with pytest.raises(ModelError, match=r"vocab.json cannot be read: it is a named pipe"):
        read(tmp_path)


def test_a_vocabulary_elsewhere_is_not_opened(tmp_path: Path) -> None:
    """A tokenizer_config.json can name files, which transformers opened wherever they were."""
    write(tmp_path, "outside.json", {"secret": 0, "<|endoftext|>": 1})
    (tmp_path / "outside.txt").write_text("#version: 0.2\n")
    checkpoint = tmp_path / "m"
    checkpoint.mkdir()
    write(checkpoint, "config.json", {"model_type": "gpt2"})
    names = {
        "vocab_file": str(tmp_path / "outside.json"),
        "vocab": str(tmp_path / "outside.json"),
        "merges_file": str(tmp_path / "outside.txt"),
        "merges": str(tmp_path / "outside.txt"),
    }
    write(checkpoint, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", **names})

    assert "secret" not in read(checkpoint).tokenizer_json


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("top_k", "Infinity", None),
        ("top_k", "1e400", None),
        ("top_k", "NaN", None),
        ("top_k", "7.5", None),
        ("top_k", "40.0", 40),
        ("top_k", "1" + "0" * 40, None),
        ("temperature", "1" + "0" * 400, None),
        ("temperature", "NaN", None),
        ("temperature", "true", None),
    ],
)
def test_a_sampling_default_that_is_no_possible_one_is_left_out(name, value, kept, directory):
    """An infinite top_k ended in a traceback at the first token."""
    (directory / "generation_config.json").write_text(f'{{"{name}": {value}}}')

    assert read(directory).sampling_defaults == ({} if kept is None else {name: kept})


@pytest.mark.parametrize("token", [-1, 1 << 31, 10**30])
def test_a_stop_id_that_no_token_has_is_left_out(token: int, directory: Path) -> None:
    write(directory, "generation_config.json", {"eos_token_id": [token, 5]})

    assert read(directory).stop_token_ids == (5,)


def test_without_a_tokenizer_nothing_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer.json, and none could be made"):
        read(tmp_path)


def test_older_vocabulary_files_are_converted(tmp_path: Path) -> None:
    """GPT-2's own layout: a vocabulary and merges, no tokenizer.json."""
    content = json.loads(byte_level().to_str())["model"]
    write(tmp_path, "vocab.json", {**content["vocab"], "<|endoftext|>": len(content["vocab"])})
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    write(tmp_path, "config.json", {"model_type": "gpt2"})
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})

    converted = json.loads(read(tmp_path).tokenizer_json)

    assert converted["model"]["vocab"].items() >= content["vocab"].items()

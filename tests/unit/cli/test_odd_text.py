"""Checkpoints whose text side is odd, and input of all sizes: one sentence and the exit code."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from support.commands import Shell, objects
from support.odd_tokenizers import GPT2_END, one_token_for_all
from support.tokenizer_zoo import byte_tokenizer

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TEN_MEGABYTES = b"word " * 2_000_000
TOO_LONG = "10,000,000 characters, which are more than twice the 512 tokens"


def panicking() -> Tokenizer:
    """Return a tokenizer whose regular expression backtracks without end on a run of a's."""
    tokenizer = byte_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("(a+)+$"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


@pytest.fixture
def odd(tiny: str, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, for a test to make odd."""
    return Path(shutil.copytree(tiny, tmp_path / "odd"))


def test_an_end_of_text_in_a_prompt_is_thirteen_bytes_of_text(shell: Shell, odd: Path) -> None:
    (odd / "tokenizer.json").write_text(one_token_for_all().files.tokenizer_json)
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), GPT2_END)
    (odd / "tokenizer_config.json").write_text(json.dumps(names))
    (odd / "chat_template.jinja").unlink()
    prompt = f"Hello{GPT2_END} x"

    done = shell.run("-m", str(odd), "--json", "--max-tokens", "2", "-p", prompt)

    assert objects(done.stdout)[0]["usage"]["prompt_tokens"] == len(prompt)


@pytest.mark.parametrize("name", ["panics", "has no unknown token"])
def test_a_tokenizer_that_fails_is_told(shell: Shell, odd: Path, name: str) -> None:
    """A panic of the library, which is no Exception, came out as a traceback."""
    bad = panicking() if name == "panics" else Tokenizer(models.WordLevel({"b": 0}))
    bad.save(str(odd / "tokenizer.json"))
    (odd / "chat_template.jinja").unlink()

    done = shell.run("-m", str(odd), "-p", "a" * 40 + "b")

    assert done.returncode == 3
    assert b"kvchat: The checkpoint's tokenizer cannot encode this text" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("source", "flags", "code", "sentence"),
    [
        ("{{ " + "(" * 3000 + ")" * 3000 + " }}", (), 3, "is not valid"),
        (ENDLESS, ("--timeout", "0.2"), 124, "longer than 0.2 s"),
    ],
    ids=["nested", "endless"],
)
def test_a_template_out_of_bounds_is_told(shell, odd, source, flags, code, sentence):
    (odd / "chat_template.jinja").write_text(source)

    done = shell.run("-m", str(odd), "-p", "x", *flags)

    assert done.returncode == code
    assert sentence in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1


def test_ten_megabytes_are_refused_in_a_sentence_whichever_way_they_come(shell, tiny):
    long = TEN_MEGABYTES.decode()
    said = {"role": "user", "content": long}
    requests = [
        {"prompt": long},
        {
            "messages": [
                said,
                {"role": "assistant", "content": "y"},
                {"role": "user", "content": "x"},
            ]
        },
        {"prompt": "x", "system": long},
    ]
    lines = "".join(json.dumps(request) + "\n" for request in requests).encode()

    batch = shell.run("-m", tiny, "--input-format", "jsonl", stdin=lines)
    piped = shell.run("-m", tiny, stdin=TEN_MEGABYTES)

    assert [TOO_LONG in result["error"]["message"] for result in objects(batch.stdout)] == [
        True
    ] * 3
    assert batch.returncode == piped.returncode == 4
    assert TOO_LONG in piped.stderr.decode()
    assert piped.stderr.count(b"\n") == 1

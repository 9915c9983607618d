"""Programs of other projects as users start them, with kvchat's server: `llm`, and `aider`.

They are looked for on the PATH, as `make test-clients` puts them there: their packages do not suit
kvchat's own environment.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvchat.chat.chat_model import ChatModel
from support.commands import Shell
from support.scripted_engine import Script, text_model, write_text_checkpoint
from support.server_process import served
from unit.remote.test_kvchat_server import served as scripted

KEY = "a-key-of-the-test"
BROKEN, MENDED = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
TIMEOUT_S = 300


def program(name: str, package: str) -> str:
    """Return the path of a program, or skip the test."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: `make test-clients`, or pip install {package}")
    return found


def run(home: Path, *command: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end, in a home directory of its own."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=home,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **variables},
        timeout=TIMEOUT_S,
    )


def test_llm_chats_and_tells_what_was_cached(tmp_path: Path) -> None:
    llm = program("llm", "llm")
    settings = tmp_path / "settings"
    settings.mkdir()
    with served(Shell(tmp_path), "-m", "demo", "--api-key", KEY) as server:
        model = "- model_id: kv\n  model_name: demo\n  api_key_name: kv\n"
        model += f"  api_base: {server.url}/v1\n"
        (settings / "extra-openai-models.yaml").write_text(model)
        asked = (llm, "-m", "kv", "--key", KEY)
        said = [
            run(tmp_path, *asked, *words, LLM_USER_PATH=str(settings))
            for words in (
                ("My dog is called Rex.",),
                ("-c", "--usage", "What is my dog called?"),
                ("--no-stream", "Hello"),
            )
        ]
        wrong = run(tmp_path, llm, "-m", "kv", "--key", "no", "Hi", LLM_USER_PATH=str(settings))

    assert [answer.returncode for answer in said] == [0, 0, 0], said[0].stderr + said[1].stderr
    assert "Rex" in said[1].stdout
    assert "cached_tokens" in said[1].stderr
    assert said[2].stdout.strip()
    assert wrong.returncode != 0
    assert "key" in wrong.stderr.lower()


def test_aider_edits_a_file(tmp_path: Path) -> None:
    """The engine is scripted, for the demo model writes no code: aider's requests are real."""
    aider = program("aider", "aider-chat, in an environment of its own")
    model: ChatModel = text_model(write_text_checkpoint(tmp_path / "scripted"))
    source = tmp_path / "add.py"
    source.write_text(BROKEN)
    heard: list[str] = []

    def author(question: str, sample: int) -> Script:
        heard.append(question)
        return Script(f"The sign was wrong.\n\nadd.py\n```\n{MENDED}```\n")

    flags = "--no-git --yes-always --no-pretty --no-check-update --analytics-disable"
    flags += " --no-show-model-warnings --map-tokens 0 --edit-format whole"
    with scripted(model, author) as url:
        edited = run(
            tmp_path,
            *(aider, "--model", "openai/scripted", *flags.split()),
            *("--message", "Mend add.", "add.py"),
            OPENAI_API_KEY=KEY,
            OPENAI_API_BASE=f"{url}/v1",
        )

    assert edited.returncode == 0, edited.stdout + edited.stderr
    assert source.read_text() == MENDED, edited.stdout
    assert any("Mend add." in question for question in heard)


OLLAMA = """
import sys
import ollama

client = ollama.Client(sys.argv[1], headers={"Authorization": f"Bearer {sys.argv[2]}"})
[model] = client.list().models
said = {"role": "user", "content": "My dog is called Rex."}
options = {"temperature": 0, "num_predict": 60}
answer = client.chat(model.model, [said], options=options)
asked = {"role": "user", "content": "What is my dog called?"}
parts = list(client.chat(model.model, [said, answer.message, asked], stream=True, options=options))
print(model.model, client.show(model.model).capabilities, client.ps().models[0].context_length)
print("".join(part.message.content for part in parts), parts[-1].done_reason)
print(client.generate(model.model, "My dog is called Rex.", options=options).eval_count)
"""


def test_ollamas_own_client_chats(tmp_path: Path) -> None:
    python = Path(__file__).resolve().parents[2] / ".clients" / "ollama" / "bin" / "python"
    if not python.exists():
        pytest.skip("ollama's client is not installed: `make test-clients`")
    with served(Shell(tmp_path), "-m", "demo", "--api-key", KEY) as server:
        done = run(tmp_path, str(python), "-c", OLLAMA, server.url, KEY)

    about, said, count = done.stdout.splitlines()
    assert about.startswith("demo:latest ['completion'")
    assert "Rex" in said
    assert said.endswith(" stop")
    assert int(count) > 0

"""--endpoint on the command line: names, keys, and what is said when no server can be used."""

import json
import re
import threading
import tomllib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvchat.cli.endpoints import endpoint_address
from kvchat.cli.running_server import Announcement, announced, running_server
from kvchat.cli.settings import Settings, resolve, unknown_variables
from kvchat.core.errors import UsageError
from support.commands import Shell
from support.direct_shell import DirectShell
from support.fake_llm_server import FakeServer, chunks, fake_server, models, raw_server
from support.fork_server import ForkServer
from support.pty_screen import PtyScreen

CONFIG = """
[endpoints.work]
url = "https://llm.example.org"
model = "big"
key_variable = "WORK_KEY"

[endpoints.home]
url = "http://localhost:1"
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("KVCHAT_ENDPOINT_KEY", raising=False)
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    return path


def test_a_named_server_has_its_model_and_key(config, monkeypatch):
    monkeypatch.setenv("WORK_KEY", "secret")
    address = endpoint_address("work", "", config)

    assert (address.url, address.model, address.key) == ("https://llm.example.org", "big", "secret")
    assert endpoint_address("work", "other", config).model == "other"
    assert resolve({}, {}, config)["endpoint"] is None  # the table is no setting


def test_a_key_in_the_environment_is_not_taken_for_a_wrong_setting() -> None:
    """Every command said that KVCHAT_API_KEY is no setting and is ignored."""
    keys = {"KVCHAT_API_KEY": "a", "KVCHAT_ENDPOINT_KEY": "b"}

    assert unknown_variables(keys) == []
    [sentence] = unknown_variables({**keys, "KVCHAT_ENDPONT": "c"})
    assert sentence.endswith("Is KVCHAT_ENDPOINT meant?")


def test_config_set_keeps_the_named_servers(direct: DirectShell) -> None:
    """It refused to change a file with such a table."""
    path = direct.home / ".config" / "kvchat" / "config.toml"
    path.parent.mkdir(parents=True)
    odd = '[endpoints."odd name"]\nurl = "http://localhost:2"\n'
    path.write_text(CONFIG + odd)

    assert direct.run("config", "set", "endpoint", "work").returncode == 0
    assert direct.run("config", "set", "temperature", "0.5").returncode == 0

    content = tomllib.loads(path.read_text())
    assert content["endpoint"] == "work"
    assert content["temperature"] == 0.5
    assert content["endpoints"] == tomllib.loads(CONFIG + odd)["endpoints"]


def test_an_address_is_no_name(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCHAT_ENDPOINT_KEY", "own")
    address = endpoint_address("localhost:8080", "", config)

    assert (address.url, address.key) == ("http://localhost:8080", "own")


@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        (CONFIG, "wrok", "has no endpoint 'wrok'. It has work, home"),
        (CONFIG, "work", "WORK_KEY is not set"),
        ("endpoints = 3", "work", "must be a table of tables"),
        ("[endpoints]\nwork = 3", "work", "must be a table of texts"),
        ("[endpoints.work]\nmodel = 'x'", "work", "no url"),
        ("[endpoints.work]\nurl = 'x'\nkey = 'secret'", "work", "sets 'key'"),
    ],
)
def test_a_bad_entry_is_one_sentence(config: Path, text: str, name: str, sentence: str) -> None:
    config.write_text(text)

    with pytest.raises(UsageError) as caught:
        endpoint_address(name, "", config)
    assert sentence in str(caught.value)


def settings(**flags: object) -> Settings:
    return resolve(flags, {}, Path("/nonexistent/config.toml"))


def test_a_chat_finds_a_server_with_its_settings_only(tmp_path: Path) -> None:
    with announced(settings(), tmp_path, Announcement("http://127.0.0.1:5", "key")):
        found = running_server(settings(), tmp_path)
        assert found is not None
        assert (found.address.url, found.address.key) == ("http://127.0.0.1:5", "key")
        assert running_server(settings(temperature=0.0, system="x"), tmp_path) is not None
        assert running_server(settings(weights="int8"), tmp_path) is None
        assert running_server(settings(kv_dtype="int8"), tmp_path) is None
        assert running_server(settings(model="other"), tmp_path) is None
        assert {path.stat().st_mode & 0o77 for path in tmp_path.iterdir()} == {0}
    assert running_server(settings(), tmp_path) is None
    assert not list((tmp_path / "servers").iterdir())


@pytest.mark.parametrize("name", ["model", "adapter", "draft", "cache_dir"])
def test_a_relative_path_names_what_is_in_its_own_directory(name, tmp_path, monkeypatch):
    """A chat with `--adapter lora` in one project was answered with the `lora` of another one."""
    for project in ("one", "other"):
        (tmp_path / project / "lora").mkdir(parents=True)
    state, named = tmp_path / "state", settings(**{name: "lora"})
    monkeypatch.chdir(tmp_path / "one")
    with announced(named, state, Announcement("http://127.0.0.1:5", None)):
        assert running_server(named, state) is not None
        assert running_server(settings(**{name: str(tmp_path / "one/lora")}), state) is not None
        assert running_server(settings(**{name: "l" * 5000}), state) is None
        monkeypatch.chdir(tmp_path / "other")
        assert running_server(named, state) is None


def test_a_server_that_was_started_later_keeps_its_file(tmp_path: Path) -> None:
    with announced(settings(), tmp_path, Announcement("http://127.0.0.1:5", None)):
        with announced(settings(), tmp_path, Announcement("http://127.0.0.1:6", None)):
            pass
        assert running_server(settings(), tmp_path) is None
        with announced(settings(), tmp_path, Announcement("http://127.0.0.1:7", None)) as _:
            newest = running_server(settings(), tmp_path)
    assert newest is not None
    assert newest.address.url == "http://127.0.0.1:7"


def test_a_file_of_a_server_that_was_killed_is_of_no_use(tmp_path: Path) -> None:
    with announced(settings(), tmp_path, Announcement("http://127.0.0.1:5", None)):
        path = next((tmp_path / "servers").iterdir())
        content = json.loads(path.read_text())
        content["server"]["pid"] = 2**22 + 1  # beyond what a system numbers
        path.write_text(json.dumps(content))

        assert running_server(settings(), tmp_path) is None


def test_nothing_is_left_of_an_incognito_server(tmp_path: Path) -> None:
    with announced(settings(incognito=True), tmp_path, Announcement("http://127.0.0.1:5", None)):
        assert not list(tmp_path.iterdir())


def test_a_script_is_answered_by_another_server(shell: Shell) -> None:
    with fake_server(lambda path, body: chunks("Hel", "lo \x1b[31m🙂")) as fake:
        done = shell.run("--endpoint", fake.url, "-p", "Hi", "--stats")
        again = shell.run("--endpoint", fake.url, "-c", "--last", "-p", "And?", "--json")

    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == "Hello ␛[31m🙂\n"
    answer = json.loads(again.stdout)
    assert answer["model"]["dtype"] is None
    assert len(fake.bodies[-1]["messages"]) == 3


def test_a_server_that_says_nothing_is_waited_for_up_to_the_limit(shell: Shell) -> None:
    """The limit began when the server had said what it is: kvchat ended after 10 s, with code 3."""
    is_over = threading.Event()

    def nothing_at_all() -> Iterator[bytes]:
        is_over.wait(60.0)
        yield b""

    with raw_server(nothing_at_all) as url:
        done = shell.run("--endpoint", url, "--timeout", "0.3", "-p", "Hi")
        is_over.set()

    assert done.returncode == 124
    assert b"did not answer within 0.3 s" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_no_server_is_a_model_error_without_a_wait(shell: Shell) -> None:
    with fake_server(lambda path, body: chunks("Hi")) as fake:
        gone = fake.url
    done = shell.run("--endpoint", gone, "-p", "Hi")

    assert done.returncode == 3
    assert done.stderr.startswith(b"kvchat: No server answers at 127.0.0.1")
    assert done.stderr.count(b"\n") == 1


def test_a_key_is_in_no_file_and_in_no_message(shell: Shell) -> None:
    key = "sk-very-secret"
    with fake_server(lambda path, body: ["no json"]) as fake:
        done = shell.run("--endpoint", fake.url, "-p", "Hi", "--debug", KVCHAT_ENDPOINT_KEY=key)

    assert done.returncode == 1
    assert fake.asked[-1].headers["Authorization"] == f"Bearer {key}"
    assert key.encode() not in done.stderr + done.stdout
    files = [path for path in shell.home.rglob("*") if path.is_file()]
    assert files
    assert not any(key.encode() in path.read_bytes() for path in files)


def test_json_says_nothing_that_the_server_does_not_tell(shell: Shell) -> None:
    """It was 0 of each tier for a server that tells no count, and a dtype of "in messages"."""
    with fake_server(lambda path, body: chunks("Hello", " there.")) as fake:
        done = shell.run("--endpoint", fake.url, "--output-format", "json", "-p", "hi")

    told = json.loads(done.stdout)
    assert (told["model"]["dtype"], told["model"]["kv_dtype"]) == (None, None)
    usage = told["usage"]
    assert usage["cached_tokens"] is None
    assert usage["prefilled_tokens"] is None
    assert usage["prompt_tokens"] > 0


@contextmanager
def screen_on(fake: FakeServer, fork_server: ForkServer, home: Path) -> Iterator[PtyScreen]:
    """Yield a chat with the server, whose first question is answered."""
    command = ("kvchat", ["--endpoint", fake.url])
    chat = PtyScreen(fork_server, *command, columns=100, environment={"HOME": str(home)})
    with closing(chat):
        chat.wait_for("another program runs; try:").enter("hi").wait_for("Hello there.")
        yield chat


def test_tokens_that_are_counted_by_their_text_are_said_to_be_about_so_many(tmp_path, fork_server):
    """/context, the toolbar and /file gave four characters a token as a count."""
    (tmp_path / "note.txt").write_text("word " * 40)
    listed = {"/v1/models": models("m", "someone", context_length=4096)}
    with (
        fake_server(lambda path, body: chunks("Hello", " there."), listed) as fake,
        screen_on(fake, fork_server, tmp_path) as chat,
    ):
        chat.wait_for("context about ").enter("/context")
        chat.wait_for(lambda text: bool(re.search(r"\babout \d+ tokens: \d+ asked", text)))
        chat.wait_for(lambda text: bool(re.search(r"about \d+% of 4k", text)))
        chat.enter(f"/file {tmp_path / 'note.txt'}").wait_for("Attached note.txt, about 5")
        assert chat.enter("/exit").finish() == 0


def test_the_screen_says_nothing_that_the_server_does_not_tell(tmp_path, fork_server):
    """A chat with such a server showed "cached 0/31" and "context 43/1024k", and called it a model
    on this machine.
    """
    with (
        fake_server(lambda path, body: chunks("Hello", " there.")) as fake,
        screen_on(fake, fork_server, tmp_path) as chat,
    ):
        chat.wait_for("first token").enter("/context").wait_for("asked, ")
        chat.wait_for(lambda text: bool(re.search(r"\nabout \d+ tokens: \d+ asked", text)))
        chat.enter("/model").wait_for("context    the server does not tell")
        chat.enter("/exit")
        assert chat.finish() == 0

    assert "cached" not in chat.text
    assert "1024k" not in chat.text
    assert "% of" not in chat.text

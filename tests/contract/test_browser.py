"""Exported conversations and the server's page in a browser: `make test-clients` installs one."""

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from kvchat.chat.conversation import Conversation, Role
from kvchat.chat.html_document import to_html
from kvchat.core.types import FinishReason
from support.commands import Shell
from support.server_process import served
from support.turns import branching_conversation, turn

HERE = Path(__file__).resolve()
PACKAGES = HERE.parents[2] / ".clients" / "browser"
KEY = "a-key-of-the-test"
HOSTILE = "<script>document.title = 1</script> <img src=http://evil.example/x onerror=alert(1)>"


def browse(*steps: tuple[object, ...]) -> Any:
    """Do the steps in a browser; return what was read, what failed, and what was loaded."""
    node = shutil.which("node")
    if node is None or not (PACKAGES / "node_modules").is_dir():
        pytest.skip("no browser is installed: `make test-clients` installs one, with node")
    done = subprocess.run(
        [node, str(HERE.with_name("browser.mjs")), str(PACKAGES), json.dumps(steps)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_exported_conversation_folds_branches_and_follows_the_systems_colours(tmp_path):
    conversation = branching_conversation()
    conversation.add(turn(7, 3, Role.ASSISTANT, "```python\nx = 1  # one\n```"))
    page = tmp_path / "chat.html"
    page.write_text(to_html(conversation), errors="replace")

    got = browse(
        ("size", 360, 640),
        ("open", page.as_uri()),
        ("read", "main > article"),
        ("read", "details.branch:not([open]) article"),
        ("style", "body", "backgroundColor"),
        ("scheme", "dark"),
        ("style", "body", "backgroundColor"),
        ("style", ".comment", "fontStyle"),
        ("click", "details.branch summary"),
        ("wait", "details.branch article"),
        ("wide",),
    )

    path, folded, light, dark, comment, width = got["read"]
    assert len(path) == 4
    assert folded == ["", "", ""]
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(20, 22, 26)")
    assert comment == "italic"
    assert width <= 360
    assert got["errors"] == []
    assert got["loaded"] == [page.as_uri()]


def test_a_hostile_conversation_runs_and_loads_nothing(tmp_path: Path) -> None:
    conversation = Conversation("id", time.time(), HOSTILE)
    conversation.add(turn(1, text=HOSTILE, system=HOSTILE))
    answer = f"{HOSTILE}\n\n![x](http://evil.example/x.png)\n\n| a |\n|--:|\n| b |"
    conversation.add(turn(2, 1, Role.ASSISTANT, answer, finish=FinishReason.STOP))
    page = tmp_path / "chat.html"
    page.write_text(to_html(conversation))

    got = browse(("open", page.as_uri()), ("style", "td", "textAlign"), ("read", "script, img"))

    assert got["read"] == ["right", []]
    assert got["errors"] == []
    assert got["loaded"] == [page.as_uri()]


def test_a_phone_chats_reads_what_was_saved_and_leaves(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    shell.run("-p", "My dog is called Rex.")
    with served(shell, "-m", "demo", "--api-key", KEY, "--web") as server:
        got = browse(
            ("size", 360, 640),
            ("open", server.url),
            ("wait", "#login"),
            ("type", "#key", "wrong"),
            ("click", "#login button"),
            ("wait", "#facts.error"),
            ("type", "#key", KEY),
            ("click", "#login button"),
            ("wait", "#ask"),
            ("type", "#words", "My cat is called Tom."),
            ("click", "#send"),
            ("wait", "article.assistant .note"),
            ("read", "article"),
            ("hold", "/kvchat/render"),
            ("type", "#words", "Count to ten."),
            ("click", "#send"),
            ("wait", "article:nth-of-type(4) p:not(:empty)"),
            ("click", "#to-chat"),
            ("gone", "article"),
            ("release",),
            ("type", "#words", "Hello."),
            ("click", "#send"),
            ("wait", "article.assistant .note"),
            ("click", "#places a"),
            ("wait", "ul.conversations a"),
            ("read", "ul.conversations a"),
            ("click", "ul.conversations a"),
            ("wait", "article"),
            ("wide",),
            ("click", "#content > button"),
            ("wait", "#ask"),
            ("type", "#words", "What is my dog called?"),
            ("click", "#send"),
            ("wait", "article.assistant:last-child .note"),
            ("read", "article.assistant:last-child"),
            ("click", "#places a:last-child"),
            ("wait", "#login"),
            ("read", "article, ul"),
            ("address",),
        )

    chat, listed, width, answer, left, address = got["read"]
    assert [text.split("\n")[0] for text in chat] == ["You", "Assistant"]
    assert "tokens from the cache" in chat[1]
    # A chat that is begun while an answer is written has nothing of the one before.
    assert [message["content"] for message in got["sent"][2]["messages"]] == ["Hello."]
    assert listed == ["My dog is called Rex."]
    assert width <= 360
    assert "Rex" in answer[0]
    assert left == []
    assert KEY not in address
    assert all("401" in error for error in got["errors"]), got["errors"]

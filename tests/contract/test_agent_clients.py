"""Coding agents as `kvchat launch` starts them, above a scripted engine.

Each runs a tool, hears its result, and begins a second session warm. `make test-clients` installs
them.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvchat.chat.answer_memory import ResponseMemory
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.stabiliser import Stabiliser
from kvchat.cli.agents import CLIENTS
from kvchat.cli.background import ServerFacts
from support.scripted_engine import Author, Script, ScriptedEngine
from unit.remote.test_kvchat_server import served

PROGRAMS = Path(__file__).resolve().parents[2] / ".clients" / "agents" / "node_modules" / ".bin"
# Of a client's bytes, for the scripted model has no other tokens.
CONTEXT = 400_000
TIMEOUT_S = 180
# What a later session may read of its first prompt of 27,000 to 77,000 bytes: the question, and
# notes with the directory and the date.
MOST_READ = 400
MAKE = "echo made > made.txt && echo finished"


@dataclass(frozen=True)
class Agent:
    """The tool that runs a command, its arguments, and the flags that let it run unasked."""

    tool: str
    arguments: dict[str, Any]
    flags: tuple[str, ...] = ()


AGENTS = {
    "claude": Agent("Bash", {"command": MAKE, "description": "x"}, ("--allowedTools", "Bash")),
    "codex": Agent("exec_command", {"cmd": MAKE}, ("--dangerously-bypass-approvals-and-sandbox",)),
    "opencode": Agent("bash", {"command": MAKE, "description": "x"}),
    "qwen": Agent("run_shell_command", {"command": MAKE, "is_background": False}, ("--yolo",)),
}


def run(name: str, url: str, home: Path, question: str) -> "subprocess.CompletedProcess[str]":
    """Let an agent answer one question in a session of its own."""
    client, agent = CLIENTS[name], AGENTS[name]
    how = client.launch(ServerFacts(url, "", "scripted", CONTEXT), home / "client")
    for file, text in (how.files or {}).items():
        (home / "client").mkdir(exist_ok=True)
        (home / "client" / file).write_text(text)
    project = home / "project"
    project.mkdir(exist_ok=True)
    return subprocess.run(
        [client.program, *how.arguments, *client.asking, *agent.flags, question]
        if name != "claude"
        else [client.program, *client.asking, question, *agent.flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=project,
        env={
            "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
            "HOME": str(home),
            "LANG": "C.UTF-8",
            **how.variables,
        },
        timeout=TIMEOUT_S,
    )


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_runs_a_tool_and_its_next_session_begins_warm(
    name: str, tool_model: ChatModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which(CLIENTS[name].program, path=f"{PROGRAMS}:{os.environ['PATH']}") is None:
        pytest.skip(f"{CLIENTS[name].title} is not installed: `make test-clients`")
    prompts: list[list[int]] = []
    submit = ScriptedEngine.submit

    def noted(self: ScriptedEngine, spec: Any, *others: Any) -> int:
        prompts.append(list(spec.prompt_ids))
        return submit(self, spec, *others)

    monkeypatch.setattr(ScriptedEngine, "submit", noted)
    call = {"name": AGENTS[name].tool, "arguments": AGENTS[name].arguments}

    def author(question: str, sample: int) -> Script:
        if "finished" in question or "title" in question.lower():
            return Script("All is done.", tokens_per_step=64)
        return Script(f"<tool_call>\n{json.dumps(call)}\n</tool_call>", tokens_per_step=64)

    for questions in (("Make the file now.", "Once more, please."), ("After a restart.",)):
        with stable_server(tool_model, author, tmp_path / "answers.db") as url:
            for question in questions:
                before = list(prompts)
                done = run(name, url, tmp_path, question)
                assert done.returncode == 0, done.stdout + done.stderr
                assert "All is done." in done.stdout
                assert (tmp_path / "project" / "made.txt").read_text() == "made\n"
                assert not before or num_new(prompts[len(before) :], before) <= MOST_READ


@contextmanager
def stable_server(model: ChatModel, author: Author, path: Path) -> Iterator[str]:
    """Yield the address of a server that keeps in a file what changes in prompts."""
    records = ResponseMemory(path, model.tokenizer, table="stabilised")
    with served(model, author, CONTEXT, Stabiliser(records, is_for_all=False)) as url:
        yield url
    records.close()


def num_new(prompts: list[list[int]], earlier: list[list[int]]) -> int:
    """Return how much the first prompt of a session has that no earlier one begins with.

    Beside the conversation an agent asks for a title, and the like: that is not looked at.
    """
    longest = max(prompts, key=len)
    first = next(ids for ids in prompts if common(ids, longest) > 0.9 * len(ids))
    return len(first) - max(common(ids, first) for ids in earlier)


def common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))

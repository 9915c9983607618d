"""Tools in scripts: allowed by name or refused, because there is no user to ask."""

import io
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.controller import ChatController
from kvchat.chat.host import ChatHost
from kvchat.chat.json_requests import JsonRequest, parse_request
from kvchat.chat.store import SessionStore
from kvchat.cli.batch import Batch
from kvchat.cli.output import JsonWriter, Notices, TextWriter
from kvchat.cli.script import Script, ScriptSetup
from kvchat.cli.streams import Interruption
from kvchat.terminal.command_runner import build_registry
from kvchat.terminal.paint import Painter
from kvchat.terminal.script_commands import ScriptCommands, ScriptPage
from kvchat.terminal.status import StatsLevel
from kvchat.terminal.theme import Look
from kvchat.tools.local_tools import local_tools
from kvchat.tools.toolbox import Tool, Toolbox
from support.scripted_engine import Script as Answer
from support.scripted_engine import scripted_build

READ = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.txt"}}\n</tool_call>'
READ_FILE = {"type": "function", "function": {"name": "read_file"}}
WAIT = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
Answered = Callable[..., tuple[str, str]]


class Wait:
    """A tool that waits until it is stopped."""

    name, description, is_allowed_by_call = "wait", "Wait.", False
    parameters: Mapping[str, Any] = {"type": "object", "properties": {}}

    def run(self, arguments: Mapping[str, Any], stop: threading.Event) -> str:
        assert stop.wait(60), "the time of the answer is soon over"
        return "stopped"


def _author(question: str, sample: int) -> Answer:
    if question in ("again and again", "count"):
        return Answer(READ)
    if question == "twice":
        return Answer(READ + READ)
    if question == "wait":
        return Answer(WAIT + WAIT)
    if question.startswith("<tool_response>"):
        told = question.removeprefix("<tool_response>").removesuffix("</tool_response>").strip()
        # Where even the first answer took all of the time, no call was begun.
        if told.startswith(("stopped", "Error: it was not called")):
            return Answer("Too late. " * 50, step_s=0.05)  # a fast one ends before its time is up
        return Answer(f"It says: {told}" if "again" not in told else READ)
    return Answer(f"I read it. \n{READ}")


@pytest.fixture
def answered(tmp_path: Path, tool_model: ChatModel) -> Iterator[Answered]:
    """Return a function that answers a prompt, and returns stdout and stderr."""
    (tmp_path / "a.txt").write_text("alpha")
    controllers: list[ChatController] = []

    def answer(
        *allowed: str,
        prompt: str = "read it",
        is_json: bool = False,
        timeout_s: float | None = None,
        code: int = 0,
        more: Callable[[], Tool] = Wait,
        batch: tuple[JsonRequest, ...] = (),
        aside: str = "",
    ) -> tuple[str, str]:
        toolbox = Toolbox([*local_tools(tmp_path), more()], allowed)
        build = scripted_build(tool_model, _author)
        host = ChatHost(tool_model, build, SessionStore(tmp_path / "sessions"))
        controller = ChatController(
            host, lambda *_: host, None, AskOptions(), tools=toolbox.definitions
        )
        controllers.append(controller)
        stdout, stderr = io.StringIO(), io.StringIO()
        writer: Any = TextWriter(stdout, is_raw=False)
        if is_json:
            writer = JsonWriter(stdout, lambda: host.ready)
        setup = ScriptSetup(controller, writer, Notices(False, stderr), timeout_s, toolbox=toolbox)
        with Interruption() as interruption:
            if batch:
                assert Batch(setup, interruption).answer(iter(batch)) == code
                return stdout.getvalue(), stderr.getvalue()
            script = Script(setup, interruption)
            script.answer(prompt)
            if aside:
                page = ScriptPage(stderr.write, Painter(Look(is_plain=True)), 80)
                commands = ScriptCommands(controller, page, build_registry(), StatsLevel.OFF)
                script.answer_lines(commands, [(1, f"/btw {aside}")])
        assert script.exit_code == code
        return stdout.getvalue(), stderr.getvalue()

    yield answer
    for controller in controllers:
        controller.close_session()
        controller.host.close()


def test_an_allowed_tool_runs_and_the_last_answer_follows(answered: Answered) -> None:
    stdout, stderr = answered("read_file")

    assert stdout == "I read it.\nIt says: alpha\n"
    assert 'read_file(path="a.txt")' in stderr


def test_a_tool_that_is_not_allowed_is_refused_with_the_flag_that_allows_it(answered):
    stdout, stderr = answered()

    assert "the user does not allow this call" in stdout
    assert "--allow-tool read_file allows it" in stderr


def test_a_refusal_is_told_once(answered: Answered) -> None:
    """A small model asks again and again: seventeen lines said the same."""
    _, stderr = answered(prompt="twice")

    assert stderr.count("--allow-tool read_file allows it") == 1


def test_json_has_the_calls_of_each_answer(answered: Answered) -> None:
    stdout, _ = answered("read_file", is_json=True)

    first, last = (json.loads(line) for line in stdout.splitlines())
    assert first["calls"] == [{"name": "read_file", "arguments": {"path": "a.txt"}}]
    assert first["text"] == "I read it."
    assert "calls" not in last


def test_a_model_that_repeats_a_call_is_ended(answered: Answered, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("again")

    stdout, stderr = answered("read_file", prompt="again and again", code=1)

    assert stderr.count("read_file(") == 3
    assert "makes the same call again and again" in stderr
    assert stdout.strip() == ""


class Counter:
    """A tool under the name of another, whose result is new each time."""

    name, description, is_allowed_by_call = "read_file", "Count.", False
    parameters: Mapping[str, Any] = {"type": "object", "properties": {}}
    num_calls = 0

    def run(self, arguments: Mapping[str, Any], stop: threading.Event) -> str:
        self.num_calls += 1
        return f"again {self.num_calls}"


def test_a_model_that_never_stops_calling_is_ended(answered: Answered) -> None:
    counter = Counter()

    _, stderr = answered("read_file", prompt="count", more=lambda: counter, code=1)

    assert counter.num_calls == 50
    assert "has called tools 50 times" in stderr


def test_the_time_of_an_answer_ends_the_tools_of_it_too(answered: Answered) -> None:
    stdout, stderr = answered("wait", prompt="wait", is_json=True, timeout_s=6.5, code=124)

    assert stderr.count("wait()") <= 1, "the second call is not begun"
    assert "took longer than 6.5 s" in stderr
    assert [json.loads(line)["finish_reason"] for line in stdout.splitlines()] == [
        "stop",
        "timeout",
    ]


def test_the_calls_of_a_batch_are_run_and_each_result_goes_to_its_request(answered, tmp_path):
    """A batch offered no tools, and at first did not say so."""
    requests = (
        parse_request({"id": 1, "prompt": "read it"}, 1),
        parse_request({"id": 2, "prompt": "read it", "tools": [READ_FILE]}, 2),
        parse_request({"id": 3, "prompt": "again and again"}, 3),
    )
    (tmp_path / "a.txt").write_text("again")

    stdout, stderr = answered("read_file", batch=requests, is_json=True, code=1)

    told: dict[int, list[Any]] = {1: [], 2: [], 3: []}
    for line in map(json.loads, stdout.splitlines()):
        told[line["id"]].append(line.get("error", {}).get("message") or len(line.get("calls", ())))
    endless = "The model makes the same call again and again, to the same result."
    # The sender of tools runs the calls of them.
    assert told == {1: [1, 1, 1, endless], 2: [1], 3: [1, 1, 1, endless]}
    assert stderr.count("read_file(") == 6


def test_a_batch_answers_the_results_in_its_requests_time(answered: Answered) -> None:
    requests = tuple(
        parse_request({"id": n, "prompt": text}, n) for n, text in ((1, "wait"), (2, "read it"))
    )

    stdout, stderr = answered(
        "wait", "read_file", batch=requests, is_json=True, timeout_s=6.5, code=124
    )

    reasons: dict[int, list[str]] = {1: [], 2: []}
    for line in map(json.loads, stdout.splitlines()):
        reasons[line["id"]].append(line["finish_reason"])
    assert reasons[1][-1] == "timeout"
    assert reasons[2]
    assert stderr.count("wait()") <= 1, "the second call is not begun"


def test_a_question_aside_runs_no_tools(answered: Answered) -> None:
    """Their results joined the conversation, in which nothing had called them."""
    _, stderr = answered(prompt="<tool_response>x</tool_response>", aside="read it")

    assert "read_file" not in stderr


def test_a_model_whose_template_takes_no_tools_is_refused_where_the_flag_asks(shell):
    ran = shell.run("--tools", "-p", "hi")

    assert ran.returncode == 2
    assert b"has no place for tools" in ran.stderr

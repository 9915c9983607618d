"""Slash commands in scripts, and the statistics line: a scripted engine below the real floors."""

import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.controller import ChatController
from kvchat.chat.host import ChatHost
from kvchat.chat.store import SessionStore
from kvchat.cli.output import JsonWriter, Notices, TextWriter
from kvchat.cli.script import Script, ScriptSetup
from kvchat.cli.streams import Interrupted, Interruption
from kvchat.core.errors import ModelError
from kvchat.core.events import LoadProgress
from kvchat.engine.thread import EngineThread
from kvchat.terminal.command_runner import build_registry
from kvchat.terminal.paint import Painter
from kvchat.terminal.script_commands import ScriptCommands, ScriptPage
from kvchat.terminal.status import StatsLevel
from kvchat.terminal.theme import Look
from support.commands import Shell
from support.pty_screen import PtyScreen
from support.scripted_engine import Script as Answer
from support.scripted_engine import scripted_build
from support.stored_packs import stored_packs


@dataclass(frozen=True)
class Ran:
    """What came of a script."""

    code: int
    stdout: str
    stderr: str
    store: SessionStore

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stdout.splitlines()]


RunLines = Callable[..., Ran]


def _author(question: str, sample: int) -> Answer:
    if question.startswith("trouble "):
        return Answer("All the same.", trouble=question.removeprefix("trouble "))
    if "Summarise our conversation" in question:
        is_refused = question.endswith("a refusal")
        return Answer("" if is_refused else "Rex is a dog. " * 40, tokens_per_step=64)
    if question.startswith("fill"):
        return Answer("Rex is a dog. " * 1000, tokens_per_step=64)
    return Answer(f"You said {question!r} ({sample}).", tokens_per_step=64)


@pytest.fixture
def interrupted_s() -> list[float]:
    """When each endless load was interrupted."""
    return []


@pytest.fixture
def run_lines(model: ChatModel, tmp_path: Path, interrupted_s: list[float]) -> Iterator[RunLines]:
    """Run lines as `--input-format lines` does, with the streams in memory."""
    controllers: list[ChatController] = []

    def interrupted_while_loading(progress: Callable[[LoadProgress], None]) -> Any:
        """Stand for a model that takes a minute to load, at a user who does not wait for it."""
        interrupted_s.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(60)

    def run(
        *lines: str,
        is_json: bool = False,
        stats: bool = False,
        quiet: bool = False,
        last: str = "",
        kept: StoreAdmin | None = None,
        max_context: int = 32768,
        here: str = "",
    ) -> Ran:
        store = SessionStore(tmp_path / "sessions")

        def new_host(name: str, hear: Any, saved: Any = None) -> ChatHost:
            if name == "missing":
                raise ModelError("There is no model missing.")
            if name == "broken":
                failure = ModelError("It is broken.")
                return ChatHost(model, scripted_build(model, _author, failure=failure), store, hear)
            if name == "endless":
                return ChatHost(model, interrupted_while_loading, store, hear)
            named = model if name == "scripted" else replace(model, name=name)
            build = scripted_build(named, _author, max_context=max_context)
            return ChatHost(named, build, store, hear)  # type: ignore[arg-type]

        controller = ChatController(
            new_host(here or "scripted", None),
            new_host,
            None,
            AskOptions(),
            kept=kept,
            keeps_model=bool(here),
        )
        controllers.append(controller)
        stdout, stderr = io.StringIO(), io.StringIO()
        notices = Notices(quiet, stderr)
        writer = JsonWriter(stdout, lambda: controller.host.ready) if is_json else None
        page = ScriptPage(notices.show, Painter(Look(has_colour=False, is_plain=True)), 80)
        setup = ScriptSetup(
            controller, writer or TextWriter(stdout, is_raw=False), notices, shows_stats=stats
        )
        commands = ScriptCommands(controller, page, build_registry(), StatsLevel(stats))
        with Interruption() as interruption:
            script = Script(setup, interruption)
            script.answer_lines(commands, enumerate(lines, start=1), last or None)
        controller.close_session()
        return Ran(script.exit_code, stdout.getvalue(), stderr.getvalue(), store)

    yield run
    for controller in controllers:
        controller.close_session()
        controller.host.close()


def test_answers_go_to_stdout_and_what_commands_say_to_stderr(run_lines: RunLines) -> None:
    ran = run_lines("one", "/retry", "/tree", "/help undo", "/context")

    assert ran.code == 0
    assert ran.stdout == "You said 'one' (0).\n" * 2
    for said in ("1 you: one", "1.2 model: You said", "step back before", "tokens:"):
        assert said in ran.stderr
    assert "\x1b" not in ran.stderr


def test_a_changed_system_prompt_is_why_all_of_it_is_read(run_lines: RunLines) -> None:
    ran = run_lines("ships " * 20, "/system Be brief.", "And then?", is_json=True, stats=True)

    first, second = (json.loads(line) for line in ran.stdout.splitlines())
    assert "read_again" not in first
    assert second["read_again"] == "system prompt changed"
    told = [line for line in ran.stderr.splitlines() if line.startswith("prefill")]
    assert ["read again: system prompt changed" in line for line in told] == [False, True]


@pytest.mark.parametrize("first", ["fill", "one"])
def test_a_full_context_is_compacted_and_goes_on(run_lines: RunLines, first: str) -> None:
    """/compact, which was advised, needed more room than there was; so did a summary cut off."""
    ran = run_lines(first, "fill", "x" * 900, "/compact", "Rex?", max_context=1500)

    assert ran.code == 4, "the long message did not fit"
    assert "end of the context. /compact makes room" in ran.stderr
    assert "holds 1500. /compact makes room, /new begins" in ran.stderr
    assert "Compacted: 1,500 tokens became " in ran.stderr
    assert ran.stdout.endswith("You said 'Rex?' (0).\n")


@pytest.mark.parametrize("max_context", [1500, 320])
def test_without_a_summary_the_oldest_messages_are_left_out_and_it_is_said(run_lines, max_context):
    ran = run_lines("one", "fill", "/compact a refusal", "Rex?", max_context=max_context)

    why = "wrote no summary" if max_context == 1500 else "no room for a summary"
    assert why in ran.stderr
    assert f"Left out the oldest 2 messages: {max_context:,} tokens became " in ran.stderr
    assert ran.stdout.endswith("You said 'Rex?' (0).\n")
    assert ran.code == 0


def test_a_conversation_that_can_go_on_is_not_cut_for_want_of_a_summary(run_lines):
    ran = run_lines("one", "/compact a refusal", "Rex?")

    assert ran.code == 2
    assert "wrote no summary, so nothing is compacted" in ran.stderr
    assert "left out" not in ran.stderr


@pytest.mark.parametrize("policy", ["drop", "compact"])
def test_a_script_whose_policy_makes_room_goes_on(run_lines: RunLines, policy: str) -> None:
    lines = [f"{number} {'fog ' * 60}" for number in range(8)]

    ran = run_lines(f"/set context-policy {policy}", *lines, max_context=1500)

    assert ran.code == 0
    assert ran.stdout.count("You said") == len(lines)
    done = "left out the oldest" if policy == "drop" else "a summary takes the place of"
    assert f"kvchat: the context is full: {done} " in ran.stderr
    assert "/compact makes room" not in ran.stderr
    assert "Rex is a dog" not in ran.stdout, "the summary is no answer"


def test_a_nearly_full_context_is_said_while_a_summary_still_fits(run_lines: RunLines) -> None:
    ran = run_lines("ships " * 100, max_context=1500)

    assert "the context is 82% full. /compact makes room" in ran.stderr


def test_drafts_are_switched_and_told_of(run_lines: RunLines) -> None:
    ran = run_lines("/spec", "/spec on", "/spec", "/spec ngram", "one", "/spec off", "/stats")

    assert ran.code == 0
    told = [line for line in ran.stderr.splitlines() if "drafts:" in line or "Drafts are" in line]
    assert told == [
        "drafts: off; there is ngram",
        "Drafts are on: auto.",
        "drafts: auto, from ngram",
        "Drafts are on: ngram.",
        "Drafts are off.",
        "drafts: off; there is ngram",
    ]


@pytest.mark.parametrize(
    ("lines", "path", "others"),
    [
        (
            "one|two|/undo|three|/edit 1|four|/switch 2|five",
            ["one", "two", "five"],
            {"three", "four"},
        ),
        ("one|two|/edit 1 three words|four", ["three words", "four"], {"one", "two"}),
    ],
)
def test_commands_move_about_as_they_do_for_a_person(run_lines, lines, path, others):
    """A script has no prompt to edit in: "1 three" was taken as the number of a message."""
    ran = run_lines(*lines.split("|"))

    conversation = ran.store.read(ran.store.latest()).conversation
    assert ran.code == 0
    assert [turn.text for turn in conversation.path()][::2] == path
    assert {turn.text for turn in conversation.turns()} >= others


def test_answers_of_commands_are_objects_like_others(run_lines: RunLines) -> None:
    ran = run_lines("one", "/set max-tokens 4", "/retry -n 2", "/continue", is_json=True)

    first, *samples, rest = ran.objects
    assert [answer["sample"] for answer in samples] == [0, 1]
    assert [answer["text"] for answer in samples] == ["You ", "You "]
    assert rest["text"] == "said"
    assert "sample" not in rest
    assert len({answer["session"] for answer in ran.objects}) == 1
    assert first["usage"]["cached_tokens"]["total"] == 0


def test_another_conversation_has_another_id(run_lines: RunLines) -> None:
    ran = run_lines("one", "/new Second", "two", "/resume one", "three", is_json=True)

    ids = [answer["session"] for answer in ran.objects]
    assert ids[0] == ids[2] != ids[1]
    assert {summary.title for summary in ran.store.summaries()} == {"one", "Second"}


@pytest.mark.parametrize("text", ["//x", "/a/b", " /help", "/etc/hosts is a file", "exit"])
def test_what_only_looks_like_a_command_is_a_message(run_lines: RunLines, text: str) -> None:
    ran = run_lines(text)

    assert ran.code == 0
    assert ran.stdout == f"You said {text!r} (0).\n"


def test_an_unknown_command_is_answered_with_the_closest_and_the_rest_goes_on(run_lines):
    ran = run_lines("/hepl", "one")

    assert ran.code == 2
    assert "There is no command /hepl. Did you mean /help?" in ran.stderr
    assert ran.stdout == "You said 'one' (0).\n"


def test_a_worse_failure_decides_the_code(run_lines: RunLines) -> None:
    assert run_lines("/hepl", "one", "/model missing", "/hepl").code == 3
    assert run_lines("/resume nowhere", "/hepl").code == 5


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/editor", "An editor needs a terminal."),
        ("/copy", "A script has no clipboard."),
        ("/switch", "“Go on from” needs a terminal."),
        ("/rewind", "“Go back before” needs a terminal."),
        ("/delete", "It has to be confirmed at a terminal."),
        ("/retry -n x", "-n x is no number of answers."),
        ("/continue", "The last answer is complete."),
        ("/spec draft", "The draft model is not loaded. Start kvchat with --draft NAME."),
        ("/spec banana", "banana is unknown here."),
    ],
)
def test_what_a_script_cannot_have_is_said_in_a_sentence(run_lines, line, sentence):
    ran = run_lines("one", line)

    assert ran.code == 2
    assert ran.stderr.startswith("kvchat: ")
    assert sentence in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert len(ran.store.ids()) == 1
    assert ran.stdout == "You said 'one' (0).\n"


def test_exit_ends_the_run_and_the_prompt_of_the_command_line_is_a_message(run_lines):
    assert run_lines("/exit", "never", last="neither").stdout == ""
    assert run_lines("one", last="/exit").stdout.endswith("You said '/exit' (0).\n")


def test_another_model_takes_over_between_two_turns(run_lines: RunLines) -> None:
    ran = run_lines("one", "/model other", "two", is_json=True)

    assert ran.code == 0
    assert "Now with scripted, cpu, float32." in ran.stderr
    assert [answer["model"]["name"] for answer in ran.objects] == ["scripted"] * 2
    assert ran.objects[1]["usage"]["cached_tokens"]["total"] == 0


def test_a_signal_ends_a_command_without_waiting_for_what_it_loads(
    run_lines: RunLines, interrupted_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine was joined first, for as long as a join is given: five seconds, here 60."""
    monkeypatch.setattr(EngineThread.close, "__defaults__", (60.0,))
    with pytest.raises(Interrupted) as interrupted:
        run_lines("one", "/model endless", "two")

    assert interrupted.value.code == 130
    assert time.monotonic() - interrupted_s[-1] < 40.0


def test_statistics_follow_every_answer_unless_quiet(run_lines: RunLines) -> None:
    told = run_lines("one", "/retry -n 2", stats=True)
    assert told.stderr.count(" | first token ") == 3
    assert told.stderr.isascii()
    assert "token" not in told.stdout

    switched = run_lines("one", "/stats on", "two", "/stats off", "three")
    assert switched.stderr.count("first token") == 1
    assert run_lines("one", "/help", stats=True, quiet=True).stderr == ""


def test_trouble_with_the_disk_is_told_once_on_stderr_unless_quiet(run_lines: RunLines) -> None:
    lines = ("trouble the disk cache failed: No space left.", "one", "trouble the disk is full.")

    told = run_lines(*lines, "/retry")
    assert told.stderr == (
        "kvchat: the disk cache failed: No space left; the chat goes on without it.\n"
        "kvchat: the disk cache: the disk is full; the chat goes on.\n"
    )
    assert told.code == 0
    assert run_lines(*lines, quiet=True).stderr == ""


def test_a_script_looks_after_the_store_as_a_person_does(run_lines, tmp_path):
    kept = StoreAdmin(stored_packs(tmp_path / "kv").directory)

    deeds = ("/cache", "/cache verify", "/cache gc", "/cache path", "/cache clear")

    ran = run_lines(*deeds, kept=kept)
    assert ran.code == 2
    for said in (
        "5 packs, 22 tokens",
        "5 packs read, none is damaged.",
        "nothing to free.",
        "confirmed at",
    ):
        assert said in ran.stderr
    assert kept.status().num_packs == 5

    assert "KiB deleted." in run_lines("/cache clear --yes", kept=kept).stderr
    assert kept.status().num_packs == 0
    assert run_lines("/cache").code == 2


def test_commands_and_statistics_in_a_whole_process(shell: Shell, tiny: str) -> None:
    done = shell.run(
        *("-m", tiny, "--temperature", "0", "--max-tokens", "4", "--stats"),
        *("--input-format", "lines", "--json"),
        stdin=b"one\n\n/retry\n/nosuchthing\n/exit\nnever\n",
    )

    assert done.returncode == 2
    assert len(done.stdout.splitlines()) == 2
    assert done.stderr.count(b" | first token ") == 2
    # Nothing said in which of a thousand lines.
    assert b"kvchat: Line 4 of the input: There is no command /nosuchthing." in done.stderr


def test_a_terminal_is_not_waited_for_where_the_prompt_is_given(shell, tiny, fork_server):
    asked = ("-m", tiny, "--max-tokens", "4", "--input-format", "lines", "-p", "one", "--stats")
    with closing(PtyScreen(fork_server, "kvchat", asked, environment=shell.environment)) as chat:
        chat.wait_for("first token")
        assert chat.finish() == 0


def test_statistics_of_a_single_prompt(shell: Shell, tiny: str) -> None:
    asked = ("-m", tiny, "--temperature", "0", "--max-tokens", "4", "-p", "one", "--stats")

    assert b"first token" in shell.run(*asked).stderr
    assert shell.run(*asked, "-q").stderr == b""


def test_what_commands_say_into_a_file_is_not_broken(shell: Shell) -> None:
    """Lines for a pipe were broken at 80 columns, as if it were a screen."""
    asked = b"/set\n/help retry\n/help\n"
    done = shell.run("--input-format", "lines", "--incognito", stdin=asked)
    wide = b"A line that begins with a space, // or a path like /usr/bin is a message."

    assert done.returncode == 0, done.stderr
    assert any(line.endswith(wide) and len(line) > 100 for line in done.stderr.splitlines())


def test_a_conversation_is_resumed_with_the_model_that_it_had(run_lines: RunLines) -> None:
    """/resume handed a chat of one model to the model that was loaded."""
    first = run_lines("one", here="/models/coder.gguf")
    ran = run_lines("two", f"/resume {first.store.latest()}", "three")

    assert "Now with scripted, cpu" in ran.stderr
    assert ran.store.read(first.store.latest()).model == "/models/coder.gguf"


def test_a_conversation_goes_on_with_the_model_here_where_its_own_fails(run_lines):
    first = run_lines("one", here="missing-later")
    session_id = first.store.latest()
    path = first.store.directory / f"{session_id}.jsonl"
    path.write_text(path.read_text().replace("missing-later", "missing"))
    ran = run_lines("two", f"/resume {session_id}", "three")

    assert "There is no model missing." in ran.stderr
    assert ran.stdout.endswith("You said 'three' (0).\n")
    assert ran.store.read(session_id).model.endswith("scripted")


def test_a_model_that_a_flag_named_stays(run_lines: RunLines) -> None:
    session_id = run_lines("one").store.latest()
    ran = run_lines(f"/resume {session_id}", "two", here="/models/coder.gguf")

    assert "Now with" not in ran.stderr
    assert ran.store.read(session_id).model == "/models/coder.gguf"


def test_what_no_model_was_there_to_read_is_not_saved(run_lines: RunLines) -> None:
    """A conversation with a question alone stayed for each try."""
    ran = run_lines("Hello", "And now?", here="broken")

    assert ran.code == 3
    assert ran.store.ids() == []

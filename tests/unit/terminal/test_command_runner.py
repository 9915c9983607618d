"""CommandRunner: the order of commands, their lines, what stops them, and what they fail with."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import pytest

from kvchat.core.errors import KvchatError, UsageError
from kvchat.terminal.command_runner import CommandRunner
from kvchat.terminal.commands import Command, CommandContext, Group, Invocation, Registry
from kvchat.terminal.paint import Painter
from kvchat.terminal.script_commands import ScriptCommands, ScriptPage
from kvchat.terminal.status import StatsLevel
from kvchat.terminal.theme import Look
from kvchat.terminal.view import Page, View

T = TypeVar("T")
Run = Callable[[CommandContext, str], Any]


class Lines(ScriptPage):
    """Keeps all that is shown, typed lines too."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        look = Look(has_colour=False, is_plain=True)
        super().__init__(lambda text: self.shown.append(text.rstrip("\n")), Painter(look), 80)

    def write_turn(self, text: str, is_said_now: bool = True) -> None:
        self.shown.append(f"> {text}")


class Context(ScriptCommands):
    """What a runner runs commands for; it keeps what the runner tells it."""

    def __init__(self) -> None:
        self.lines = Lines()
        super().__init__(cast(Any, None), self.lines, Registry([]), StatsLevel.OFF)
        self.stages: list[str] = []
        self.failures: list[tuple[str, str]] = []
        self.num_ended = 0
        self.runner = CommandRunner(self, cast(View, self.lines), self._failed, self._ended)

    def _failed(self, line: str, error: KvchatError) -> None:
        self.failures.append((line, error.message))

    def _ended(self) -> None:
        self.num_ended += 1

    @property
    def page(self) -> Page:
        return self.runner.page

    def show_stage(self, stage: str) -> None:
        self.stages.append(stage)

    async def stoppable(self, work: Awaitable[T], stage: str, if_stopped: str) -> T:
        return await self.runner.stoppable(work, stage, if_stopped)

    async def until_idle(self) -> None:
        while self.runner.is_running:
            await asyncio.sleep(0)


def command(name: str, run: Run, takes_turn: bool = True) -> Invocation:
    run.__name__ = name
    made = Command(run, Group.ENGINE, takes_turn=takes_turn)
    return Invocation(made, "")


def says(text: str) -> Run:
    async def run(context: CommandContext, arguments: str) -> None:
        context.say(text)

    return run


def waits_for(event: asyncio.Event, text: str) -> Run:
    async def run(context: CommandContext, arguments: str) -> None:
        await event.wait()
        context.say(text)

    return run


def fails(error: Exception, says_before: str = "") -> Run:
    async def run(context: CommandContext, arguments: str) -> None:
        if says_before:
            context.say(says_before)
        raise error

    return run


def test_commands_that_must_not_meet_run_in_the_order_of_their_lines() -> None:
    async def scene() -> list[str]:
        context, may_end = Context(), asyncio.Event()
        context.runner.begin(command("first", waits_for(may_end, "one")), "/first")
        context.runner.begin(command("second", says("two")), "/second")
        context.runner.begin(command("free", says("meanwhile"), takes_turn=False), "/free")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert context.runner.name == "first"
        assert context.runner.waiting == ("/second",)
        may_end.set()
        await context.until_idle()
        assert (context.runner.name, context.runner.waiting) == ("", ())
        assert context.num_ended == 3
        return context.lines.shown

    shown = asyncio.run(scene())
    assert shown == ["> /free", "meanwhile", "> /first", "one", "> /second", "two"]


def test_a_command_waits_for_an_answer_that_holds_the_lock() -> None:
    async def scene() -> None:
        context = Context()
        async with context.runner.turn_lock:
            context.runner.begin(command("late", says("late")), "/late")
            await asyncio.sleep(0)
            assert context.runner.waiting == ("/late",)
            assert context.runner.name == ""
            assert context.lines.shown == []
        await context.until_idle()
        assert context.lines.shown == ["> /late", "late"]

    asyncio.run(scene())


def test_the_line_of_a_command_that_says_nothing_is_shown_at_its_end() -> None:
    async def scene() -> list[str]:
        context, may_end = Context(), asyncio.Event()

        async def nothing(of: CommandContext, arguments: str) -> None:
            await may_end.wait()

        context.runner.begin(command("quiet", nothing), "/quiet")
        context.runner.begin(command("key", nothing))
        await asyncio.sleep(0)
        assert context.lines.shown == []
        may_end.set()
        await context.until_idle()
        return context.lines.shown

    assert asyncio.run(scene()) == ["> /quiet"]


@pytest.mark.parametrize(("said", "line"), [("", "/bad"), ("half of it", "")])
def test_an_error_comes_with_the_line_unless_that_is_shown(said: str, line: str) -> None:
    async def scene() -> Context:
        context = Context()
        context.runner.begin(command("bad", fails(UsageError("No."), said)), "/bad")
        context.runner.begin(command("next", says("goes on")), "/next")
        await context.until_idle()
        return context

    context = asyncio.run(scene())
    assert context.failures == [(line, "No.")]
    assert context.num_ended == 2
    assert context.lines.shown[-2:] == ["> /next", "goes on"]


def test_an_unexpected_error_is_one_sentence_and_the_next_command_runs(caplog):
    async def scene() -> list[str]:
        context = Context()
        context.runner.begin(command("broken", fails(ZeroDivisionError("secret text"))), "/broken")
        context.runner.begin(command("next", says("goes on")), "/next")
        await context.until_idle()
        await asyncio.sleep(0)
        return context.lines.shown

    with caplog.at_level(logging.ERROR):
        shown = asyncio.run(scene())
    told = next(text for text in shown if "wrong" in text)
    assert told.replace("\n", " ").startswith(
        "Something went wrong inside kvchat (ZeroDivisionError). The conversation is kept."
    )
    assert "secret text" not in "".join(shown)
    assert "goes on" in shown
    assert shown[0] == "> /broken", "the line was not shown at all"
    assert "unexpected error" in caplog.text


def test_stopping_ends_the_part_that_can_be_stopped_and_says_what_that_leaves() -> None:
    async def scene() -> Context:
        context, never = Context(), asyncio.Event()

        async def run(of: CommandContext, arguments: str) -> None:
            await of.stoppable(never.wait(), "reading", "nothing is pinned.")

        context.runner.stop()  # nothing to stop is no error
        context.runner.begin(command("pin", run), "/pin")
        while not context.runner.is_stoppable:
            await asyncio.sleep(0)
        assert context.runner.name == "pin"
        context.runner.stop()
        await context.until_idle()
        assert not context.runner.is_stoppable
        return context

    context = asyncio.run(scene())
    assert context.lines.shown == ["> /pin", "Stopped: nothing is pinned."]
    assert context.stages == ["reading", ""]
    assert context.failures == []


def test_leaving_cancels_what_waits_and_not_what_leaves() -> None:
    """Leaving cancels a running command. The dialogue then began a task, and no code awaited it:
    asyncio wrote "Task was destroyed but it is pending" at the end of the loop.
    """

    async def scene() -> Context:
        context, never = Context(), asyncio.Event()

        async def leave() -> None:
            context.runner.cancel_all()
            await asyncio.sleep(0)
            context.say("left")

        context.runner.begin(command("first", waits_for(never, "one")), "/first")
        context.runner.begin(command("second", says("two")), "/second")
        await asyncio.sleep(0)
        await context.runner.spawn(leave())
        assert not context.runner.is_running
        return context

    context = asyncio.run(scene())
    assert context.lines.shown == ["left"]
    assert context.failures == []
    assert context.num_ended == 0

"""The interactive chat: creates its parts, runs them on one event loop, and ends cleanly.

Errors become exit codes only here and in `cli/main.py`. SIGTERM and SIGHUP end the chat as keys do:
the answer in progress is stopped and saved, and the terminal is restored.
"""

import asyncio
import logging
import os
import shutil
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.cells import cell_len
from rich.text import Text

from kvchat.chat.answer_settings import doubts
from kvchat.chat.controller import ChatController
from kvchat.chat.surroundings import TO_A_REAL_MODEL
from kvchat.chat.template import Strategy
from kvchat.chat.turn_loop import LoadRelay
from kvchat.core.errors import ExitCode, GenerationError, StoreError
from kvchat.core.text import model_label, one_line, sanitize
from kvchat.terminal.command_runner import build_registry
from kvchat.terminal.commands_input import ASK, present_system
from kvchat.terminal.dialogue import Dialogue
from kvchat.terminal.history_view import show_where_it_stands
from kvchat.terminal.paint import Painter
from kvchat.terminal.status import StatsLevel, plural
from kvchat.terminal.theme import Look, Role
from kvchat.terminal.view import View, tell
from kvchat.terminal.wrap import told_rows
from kvchat.tools.toolbox import Toolbox

if TYPE_CHECKING:
    from kvchat.terminal.prompt import Terminal


@dataclass(frozen=True, slots=True)
class ReplSetup:
    """The inputs of an interactive chat.

    controller     its model may still be loading; the chat owns it from now on
    relay          passes on the load events of the controller's host
    history_path   the file of the input history; None keeps no history
    shows_stats    whether a line of figures follows every answer; None: unless output is spoken
    editor         the command line of the user's editor
    picks_session  whether the chat begins with the picker of saved conversations
    toolbox        the tools that are offered to the model, None for none
    kv_dtype       the dtype of the KV as the settings spell it; the first line names all but "auto"
    terminal       where the prompt reads and draws; None for the terminal of the standard streams
    """

    controller: ChatController
    relay: LoadRelay
    history_path: Path | None = None
    look: Look = field(default_factory=Look)
    shows_stats: bool | None = None
    editor: str = "vi"
    picks_session: bool = False
    toolbox: Toolbox | None = None
    kv_dtype: str = "auto"
    terminal: "Terminal | None" = None


def run(setup: ReplSetup) -> int:
    """Chat until the user leaves; return the exit code."""
    with terminal_guard(writes_sequences=not setup.look.is_plain):
        try:
            return asyncio.run(run_repl(setup))
        except KeyboardInterrupt:
            return ExitCode.INTERRUPT


async def run_repl(setup: ReplSetup) -> int:
    """Chat until the user leaves; return the exit code. Closes the host and the session."""
    controller = setup.controller
    registry = build_registry()
    view = _new_view(setup)
    # Spoken output has no figures after answers, unless the user turns them on: /stats on.
    shows_stats = not setup.look.is_spoken if setup.shows_stats is None else setup.shows_stats
    level = StatsLevel(shows_stats)
    dialogue = Dialogue(controller, view, registry, level, setup.toolbox)
    try:
        with _signals(dialogue), error_hooks(dialogue.report):
            _greet(controller, view, setup.kv_dtype)
            dialogue.open_unsent()
            dialogue.refresh()
            setup.relay.attach(asyncio.get_running_loop(), dialogue.hear)
            dialogue.expect_tools()
            if setup.picks_session:
                dialogue.run_by_name("resume")
            elif controller.session is None and controller.surroundings.project.is_new():
                dialogue.run_by_name("project", ASK)
            await _run_until_left(dialogue, view)
        has_been_used, is_unanswered = dialogue.has_been_used, controller.is_unanswered
        problem = controller.close_session()
        _take_leave(dialogue, has_been_used, is_unanswered, problem, view.keeps_history)
        is_lost = problem is not None and dialogue.exit_code is ExitCode.OK
        return ExitCode.STORE if is_lost else dialogue.exit_code
    finally:
        controller.close_session()
        await asyncio.to_thread(controller.host.close)


async def _run_until_left(dialogue: Dialogue, view: View) -> None:
    worker = asyncio.get_running_loop().create_task(dialogue.work())
    try:
        await view.run(dialogue)
    finally:
        await dialogue.settle()
        worker.cancel()
        with suppress(asyncio.CancelledError):
            await worker


def _new_view(setup: ReplSetup) -> View:
    painter = Painter(setup.look)
    if setup.look.is_plain:
        from kvchat.terminal.line_view import LineView

        columns = shutil.get_terminal_size().columns
        return LineView(sys.stdin, sys.stdout, painter, max(20, columns), setup.editor)
    from kvchat.terminal.prompt import new_live_prompt, own_terminal

    terminal = setup.terminal or own_terminal()
    return new_live_prompt(terminal, painter, setup.controller, setup.history_path, setup.editor)


def _greet(controller: ChatController, view: View, kv_dtype: str) -> None:
    """Show one line about kvchat and its model, and the state of an opened conversation."""
    from kvchat import __version__

    parts = [f"kvchat {__version__}", model_label(controller.host.model.name)]
    if kv_dtype != "auto":
        parts.append(f"KV in {kv_dtype}")
    parts.append("/help for help")
    if controller.host.store is None:
        parts.append("nothing is saved")
    lines = _in_lines(parts, view.render_context.width, view.painter.look.glyphs.separator)
    view.write([view.painter.text(line, Role.DIM) for line in lines])
    if controller.session is None and not view.painter.look.is_spoken:
        view.write([view.painter.text(_what_to_try(controller, view), Role.DIM), Text(end="")])
        if _is_first_start(controller) and controller.surroundings.has_demo_only:
            tell(view, TO_A_REAL_MODEL)
    if view.painter.look.is_plain and controller.host.ready is None:
        tell(view, "The model is loading. What you type waits for it.")
    if controller.host.model.format.strategy is Strategy.NO_TEMPLATE:
        tell(view, "The model has no chat template; it completes the text as it stands.")
    for doubt in doubts(controller.options):
        tell(view, doubt, Role.WARNING)
    if controller.attached:
        names = ", ".join(one_line(file.name) for file in controller.attached)
        notes = [file.note for file in controller.attached if file.note]
        tell(view, "\n".join([f"Attached {names}: it goes with your first message.", *notes]))
    _tell_project(controller, view)
    if controller.session is not None:
        for note in controller.session.notes:
            view.write(view.painter.wrapped(note, view.render_context.width, Role.WARNING))
        show_where_it_stands(controller.session.conversation, view)
        if controller.tools is not None and controller.has_other_tools:
            tell(view, "This conversation began without these tools: /tools here offers them.")


def _is_first_start(controller: ChatController) -> bool:
    """Whether the demo runs and no conversation was ever saved."""
    store = controller.host.store
    if controller.host.model.name != "demo" or store is None:
        return False
    try:
        return not store.ids()
    except StoreError:
        return False


def _tell_project(controller: ChatController, view: View) -> None:
    """Say that the project's file is used."""
    project = controller.surroundings.project
    if project.is_used and project.is_in(present_system(controller)):
        assert project.path is not None
        name = project.path.name
        tell(view, f"{name} of this directory is in the system prompt; /project off leaves it out.")


def _in_lines(parts: Sequence[str], width: int, separator: str) -> list[str]:
    """Return the parts joined to as few lines as have room for them; no part is divided."""
    lines = [parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]}{separator}{part}"
        lines[-1:] = [longer] if cell_len(longer) <= width else [lines[-1], part]
    return lines


def _what_to_try(controller: ChatController, view: View) -> str:
    """Return one line on what the model is, and as many things to try as the width has room for."""
    natures = ["a model on this machine", "a local model"]
    tries = ["a question", "/file PATH", "/help keys"]
    if controller.host.model.format.strategy is Strategy.MESSAGES:
        natures = ["a model that another program runs", "another program's model"]
    elif controller.host.model.name == "demo":
        natures = ["a toy model: it errs, /help does not", "a toy model"]
        tries = ["My name is Ada.", "How do I attach a file?", "/model"]
    width, separator = view.render_context.width, view.painter.look.glyphs.separator
    lines = [
        f"{nature}; try: {separator.join(tries[:count])}"
        for nature in natures
        for count in range(len(tries), 0, -1)
    ]
    return next((line for line in lines if cell_len(line) <= width), natures[-1])


@contextmanager
def _signals(dialogue: Dialogue) -> Iterator[None]:
    """Leave at SIGTERM and SIGHUP as at /exit, with their own exit codes."""
    loop = asyncio.get_running_loop()
    codes = {signal.SIGTERM: ExitCode.TERMINATED, signal.SIGHUP: ExitCode.HANGUP}
    for number, code in codes.items():
        loop.add_signal_handler(number, dialogue.quit, code)
    try:
        yield
    finally:
        for number in codes:
            loop.remove_signal_handler(number)


def _take_leave(
    dialogue: Dialogue,
    has_been_used: bool,
    is_unanswered: bool,
    problem: str | None,
    has_history: bool,
) -> None:
    """Print to stderr why the chat ended, what is not saved or sent, or how to resume it."""
    is_kept = dialogue.num_kept >= dialogue.num_unsent and problem is None
    unsent = _unsent(dialogue.num_unsent, is_kept, has_history)
    reasons = (dialogue.failure, problem, unsent)
    lines = [f"kvchat: {reason}" for reason in reasons if reason is not None]
    is_left_well = dialogue.exit_code in (ExitCode.OK, ExitCode.INTERRUPT)
    is_left_well |= isinstance(dialogue.failure, GenerationError)  # the model was loaded
    if problem is None and has_been_used and is_unanswered:
        lines.append("Your last message is kept: kvchat -c opens it, and /continue answers it.")
    elif problem is None and is_left_well and has_been_used:
        lines.append("This conversation is kept: kvchat -c goes on with it.")
    with suppress(OSError, ValueError):
        sys.stderr.write("".join(f"{told_rows(sanitize(line), sys.stderr)}\n" for line in lines))
        sys.stderr.flush()


def _unsent(count: int, is_kept: bool, has_history: bool) -> str | None:
    """Return a sentence on messages that were waiting and are not sent; None if there are none.

    `is_kept` if all of them are saved with the conversation.
    """
    if not count:
        return None
    was, them = ("was", "it") if count == 1 else ("were", "them")
    if is_kept:
        return f"{plural(count, 'message')} {was} not sent. kvchat -c offers {them} again."
    kept = f" In the next chat, Up brings {them} back." if has_history else ""
    return f"{plural(count, 'message')} {was} not sent.{kept}"


# Attributes reset, cursor shown, wrapping on, bracketed paste and synchronised output off.
_RESET = b"\x1b[0m\x1b[?25h\x1b[?7h\x1b[?2004l\x1b[?2026l"


@contextmanager
def terminal_guard(writes_sequences: bool) -> Iterator[None]:
    """Restore the terminal of the standard streams at the end of the block.

    With `writes_sequences` false it writes no escape sequence, not even to reset modes.
    """
    descriptor = sys.stdin.fileno()
    try:
        before = termios.tcgetattr(descriptor)
    except termios.error:
        yield
        return
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            _forget_if_lost(stream)
        if writes_sequences:
            with suppress(OSError, ValueError):
                os.write(sys.stdout.fileno(), _RESET)
        with suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _forget_if_lost(stream: TextIO) -> None:
    """Redirect a stream whose terminal is gone to /dev/null; else Python reports it at exit."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


_log = logging.getLogger(__name__)


@contextmanager
def error_hooks(tell: Callable[[BaseException], None]) -> Iterator[None]:
    """Pass unhandled errors to `tell`, on the event loop, until the end of the block.

    The logging configuration stays; without one, nothing is printed to stderr.
    """
    loop = asyncio.get_running_loop()

    def tell_soon(error: BaseException | None) -> None:
        if isinstance(error, Exception):
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(tell, error)

    def in_callback(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        tell_soon(context.get("exception"))
        # Without its message: that shows a callback's arguments, which may be conversation text.
        _log.error("in a callback of the event loop", exc_info=context.get("exception"))

    def in_thread(arguments: threading.ExceptHookArgs) -> None:
        tell_soon(arguments.exc_value)

    def in_finalizer(unraisable: Any) -> None:
        _log.error("in a finalizer", exc_info=unraisable.exc_value)

    silence = logging.NullHandler()
    logging.getLogger().addHandler(silence)
    hooks = threading.excepthook, sys.unraisablehook
    threading.excepthook, sys.unraisablehook = in_thread, in_finalizer
    loop.set_exception_handler(in_callback)
    try:
        yield
    finally:
        loop.set_exception_handler(None)
        threading.excepthook, sys.unraisablehook = hooks
        logging.getLogger().removeHandler(silence)

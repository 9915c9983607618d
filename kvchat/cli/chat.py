"""`kvchat`: chooses between the interactive chat and the script modes, and starts one of them.

`kvchat/terminal` implements the interactive chat, `script.py` the script modes.
"""

import importlib
import logging
import os
import sys
import threading
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvchat.cli.build import (
    ask_options,
    has_endpoint,
    history_path,
    may_attach,
    open_host,
    open_toolbox,
    saved_places,
    session_store,
    settings_of,
    store_admin,
    user_paths,
    with_model_of,
)
from kvchat.cli.log_file import close_log
from kvchat.cli.model_names import surroundings_of, whole_name
from kvchat.cli.running_server import running_server
from kvchat.cli.settings import Settings
from kvchat.core.errors import KvchatError, UnreadableFile, UsageError
from kvchat.core.parameters import OF_ANSWERS
from kvchat.core.paths import require_working_directory
from kvchat.core.text import one_line
from kvchat.model.checkpoint.source import DEMO
from kvchat.model.hf.lean_import import load_library

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvchat.cache.disk.admin import StoreAdmin
    from kvchat.chat.controller import ChatController
    from kvchat.chat.host import ChatHost
    from kvchat.chat.project_file import ProjectFile
    from kvchat.chat.session import ChatSession
    from kvchat.chat.template_process import RenderingChild
    from kvchat.cli.output import Notices, Writer
    from kvchat.cli.script import ScriptSetup
    from kvchat.cli.streams import Interruption
    from kvchat.core.events import LoadEvent
    from kvchat.terminal.script_commands import ScriptCommands
    from kvchat.terminal.theme import Look
    from kvchat.tools.toolbox import Toolbox


_log = logging.getLogger(__name__)
# How long the model of a prompt stays loaded where the user does not say.
_MINUTES = 10.0


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """The command line's arguments that are not settings.

    `resume` is what names the conversation to resume, "" to let the user pick one.
    """

    prompt: str | None = None
    files: tuple[Path, ...] = ()
    is_continued: bool = False
    takes_one_shots: bool = False
    resume: str | None = None
    is_forked: bool = False
    title: str = ""
    output_format: str = "text"
    input_format: str = "text"
    is_raw: bool = False
    num_samples: int = 1

    def __post_init__(self) -> None:
        if self.is_continued and self.resume is not None:
            raise UsageError("--continue and --resume exclude each other.")
        if self.takes_one_shots and not self.is_continued:
            raise UsageError("--last needs --continue.")
        if self.is_forked and not self.resumes:
            raise UsageError("--fork needs --continue or --resume.")
        if self.is_forked and self.picks:
            raise UsageError("--fork needs the conversation.", "Name it: --resume TITLE --fork")
        if self.input_format == "jsonl" and (self.resumes or self.prompt is not None):
            raise UsageError("--input-format jsonl takes its prompts from the input alone.")
        if self.input_format == "jsonl" and (self.files or self.title):
            raise UsageError("--input-format jsonl takes no --file and no --title.")

    @property
    def resumes(self) -> bool:
        return self.is_continued or self.resume is not None

    @property
    def picks(self) -> bool:
        """Whether the user picks the conversation to resume."""
        return self.resume == ""


def run_chat(flags: dict[str, Any], request: ChatRequest) -> int:
    """Run the interactive chat or a script mode; return the exit code."""
    require_working_directory()
    settings = settings_of(flags)
    settings = settings.with_model(whole_name(settings, settings["model"]))
    if settings["incognito"]:
        close_log()
    child = None
    is_attached = may_attach(settings) and running_server(settings, user_paths().state) is not None
    if not has_endpoint(settings) and not is_attached:
        from kvchat.chat.template_process import RenderingChild

        threading.Thread(target=_load_library, name="kvchat-library", daemon=True).start()
        child = RenderingChild()  # starts while the rest is imported
    is_interactive = _is_interactive(request)
    if not is_interactive:
        _require_script(request)
    if is_interactive:
        return _chat_interactively(settings, request, child)
    return _answer_script(settings, request, child)


def _is_interactive(request: ChatRequest) -> bool:
    is_text = request.input_format == request.output_format == "text"
    is_asked = request.prompt is None and _is_terminal(sys.stdin) and _is_terminal(sys.stdout)
    return is_text and is_asked


def _require_script(request: ChatRequest) -> None:
    """Raise UsageError where a script mode has no input, or would have to ask the user."""
    if request.prompt is None and _is_terminal(sys.stdin):
        raise UsageError("There is nothing to answer.", "Give a prompt, or pipe one in.")
    if request.picks:
        raise UsageError(
            "--resume needs a terminal to let you choose.",
            "Name one: `kvchat sessions` lists them.",
        )


def _load_library() -> None:
    """Load torch's library beside the imports of a chat.

    The system loads one library at a time: the import of a module in C would wait, and with it
    every thread. So those that a chat imports are imported before.
    """
    importlib.import_module("asyncio")
    importlib.import_module("mmap")
    load_library()


def _is_terminal(stream: Any) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def _session_id(settings: Settings, request: ChatRequest) -> str | None:
    """Return the id of the conversation to resume; None for a new one."""
    if not request.resumes or request.picks:
        return None
    store = session_store(settings)
    if request.resume is None:
        return store.latest(request.takes_one_shots)
    return store.find(request.resume, anywhere=True)


def _settings_of(settings: Settings, session_id: str | None) -> Settings:
    """Return the settings with which a conversation goes on.

    One that cannot be read, which opening it says, has those of this process.
    """
    if session_id is None:
        return settings
    try:
        read = session_store(settings).read(session_id)
    except KvchatError:
        return settings
    return with_model_of(settings, read.model, read.conversation.settings)


def _open_session(
    host: "ChatHost", settings: Settings, request: ChatRequest, session_id: str | None
) -> "ChatSession | None":
    """Open a saved conversation, or a copy of it with --fork or if nothing is saved."""
    if session_id is None:
        return None
    if request.is_forked or host.store is None:
        return host.fork_session(session_store(settings).read(session_id).conversation)
    return host.open_session(session_id)


def _open_controller(
    settings: Settings,
    request: ChatRequest,
    on_load: "Callable[[LoadEvent], None]",
    tell: "Callable[[str], None]",
    child: "RenderingChild | None",
    is_script: bool = False,
) -> "tuple[ChatController, Toolbox | None, Settings]":
    """Read attached files, start loading the model, and open the conversation, if one is named.

    `tell` is told which pinned files have changed. Errors are raised in this order, the cheapest
    check first. `child` renders the chat template. A conversation that a script begins counts as
    one-shot: it will probably not be continued. The settings that are returned are those of the
    conversation.
    """
    from kvchat.chat.attachment import PinFiles
    from kvchat.chat.controller import ChatController

    pins = PinFiles(user_paths().state / "pins.json")
    found = [pins.attachments(path) for path in request.files]
    attached = tuple(file for files, _ in found for file in files)
    for note in (note for _, note in found if note):
        tell(note)
    session_id = _session_id(settings, request)
    own, settings = settings, _settings_of(settings, session_id)
    host = open_host(settings, on_load, child=child)
    toolbox = _toolbox_for(host, settings)
    if toolbox is not None and is_script:
        toolbox.complete()
    session = _open_session(host, settings, request, session_id)
    surroundings = surroundings_of(own)
    given = {p.name: settings[p.name] for p in OF_ANSWERS if settings.is_flag(p.name)}
    options = ask_options(settings, request.num_samples, leaves_out=given)
    controller = ChatController(
        host,
        partial(_new_host, own),
        session,
        replace(options, is_one_shot=is_script, max_calls=None if toolbox is not None else 0),
        _with_project(surroundings.project, settings.system, tell),
        request.title,
        attached,
        _kept_kv(settings, host),
        toolbox.definitions if toolbox is not None else None,
        pins,
        saved_places(settings),
        given,
        own.names_model,
        surroundings,
    )
    if request.is_forked:
        controller.place.copied_from = session_id
    return controller, toolbox, settings


def _with_project(
    project: "ProjectFile", system: str | None, tell: "Callable[[str], None]"
) -> str | None:
    """Return a system prompt with the project's file, where the user wants that."""
    try:
        return project.joined(system)
    except UnreadableFile as error:
        tell(f"{error.message} The chat begins without it.")
        return system


def _new_host(
    settings: Settings,
    name: str,
    hear: "Callable[[LoadEvent], None]",
    saved: "Mapping[str, Any] | None",
) -> "ChatHost":
    """Start loading another model, as a conversation with it was `saved` if that is given."""
    if saved is None:
        return open_host(settings, hear, whole_name(settings, name))
    return open_host(with_model_of(settings, name, saved), hear)


def _kept_kv(settings: Settings, host: "ChatHost") -> "StoreAdmin | None":
    """Return the administration of the KV on disk; None if this chat keeps none."""
    is_kept = host.store is not None and settings["cache"] and not has_endpoint(settings)
    return store_admin(settings) if is_kept else None


def _toolbox_for(host: "ChatHost", settings: Settings) -> "Toolbox | None":
    """Return the tools to offer; UsageError for a model that takes none if the flag is given."""
    if not settings["tools"]:
        return None
    if host.model.format.tools is None:
        if settings.origins.get("tools") != "--tools":
            return None
        raise UsageError(
            f"The chat template of {host.model.name} has no place for tools.",
            "Leave out --tools, or choose another model.",
        )
    return open_toolbox(settings)


# Scripts


def _answer_script(settings: Settings, request: ChatRequest, child: "RenderingChild | None") -> int:
    from kvchat.cli.output import Notices
    from kvchat.cli.script_input import read_text, with_prompt
    from kvchat.cli.streams import Interruption

    notices = Notices(settings["quiet"])
    text = None
    if request.input_format == "text":
        piped = "" if _is_terminal(sys.stdin) else read_text(sys.stdin.buffer, notices)
        text = with_prompt(piped, request.prompt)
        if not text.strip() and not request.files:
            raise UsageError("The input is empty.", "Give a prompt, or pipe one in.")
    with Interruption() as interruption:
        return _run_script(settings, request, notices, interruption, text, child)


def _run_script(
    settings: Settings,
    request: ChatRequest,
    notices: "Notices",
    interruption: "Interruption",
    text: str | None,
    child: "RenderingChild | None",
) -> int:
    from kvchat.chat.answer_settings import doubts
    from kvchat.cli.output import LoadingLine
    from kvchat.cli.script import ScriptSetup

    _keep_alive(settings, request, notices)
    loading = LoadingLine(sys.stderr, settings["quiet"])
    controller, toolbox, settings = _open_controller(
        settings, request, loading.show, notices.tell, child, is_script=True
    )
    look = _stderr_look()
    setup = ScriptSetup(
        controller=controller,
        writer=_writer(request, controller),
        notices=notices,
        timeout_s=settings["timeout"],
        shows_stats=bool(settings["stats"]),
        glyphs=look.glyphs,
        toolbox=toolbox,
    )
    try:
        if (problem := controller.think_problem) is not None:
            notices.tell(problem)
        for doubt in doubts(controller.options):
            notices.tell(doubt)
        for problem in toolbox.problems if toolbox is not None else ():
            notices.tell(problem)
        if request.input_format == "jsonl":
            return _answer_batch(setup, interruption)
        _tell_about(controller, notices)
        return _answer_turns(setup, interruption, look, text, request.prompt)
    finally:
        _let_go(controller)
        if toolbox is not None:
            toolbox.close()


def _keep_alive(settings: Settings, request: ChatRequest, notices: "Notices") -> None:
    """Start the server that `--keep-alive` asks for; a prompt is answered without one too."""
    if settings["keep_alive"] == 0.0 or not (settings["keep_alive"] or _is_for_user(request)):
        return
    settings = _settings_of(settings, _session_id(settings, request))
    is_default = settings["keep_alive"] is None
    minutes = _MINUTES if is_default else settings["keep_alive"]
    if not minutes or not may_attach(settings):
        return
    if is_default and (settings["model"] == DEMO or settings["timeout"] is not None):
        return  # the demo loads at once; a time limit is for one process
    from kvchat.cli.background import started

    try:
        started(settings, minutes, notices.tell)
    except KvchatError as error:
        if is_default:  # by default it is tried only: this process loads the model instead
            _log.info("no server was started: %s", type(error).__name__)
        else:
            notices.tell(one_line(str(error), 300))


def _is_for_user(request: ChatRequest) -> bool:
    """Whether a user at a terminal asks one prompt, and may soon ask another.

    Programs and scheduled jobs leave nothing behind.
    """
    return request.input_format == "text" and _is_terminal(sys.stderr)


def _answer_batch(setup: "ScriptSetup", interruption: "Interruption") -> int:
    """Answer JSON requests. Their conversations have no files."""
    from kvchat.cli.batch import Batch, read_requests

    return Batch(setup, interruption).answer(read_requests(sys.stdin.buffer))


def _answer_turns(
    setup: "ScriptSetup",
    interruption: "Interruption",
    look: "Look",
    text: str | None,
    prompt: str | None,
) -> int:
    """Answer one message `text`, or a turn a line of the input, and `prompt` after them."""
    from kvchat.cli.script import Script
    from kvchat.cli.script_input import read_lines

    script = Script(setup, interruption)
    if text is not None:
        script.answer(text)
    else:
        stdin = sys.stdin.buffer
        lines = iter(()) if _is_terminal(sys.stdin) else read_lines(stdin, setup.notices)
        script.answer_lines(_script_commands(setup, look), lines, prompt)
    return script.end()


def _let_go(controller: "ChatController") -> None:
    """Close the session and the engine, which may be writing KV."""
    controller.close_session()
    controller.host.close()


def _stderr_look() -> "Look":
    """Return the look for stderr: plain lines, in ASCII unless the terminal supports Unicode."""
    from kvchat.terminal.theme import Look, is_utf8

    has_unicode = _is_terminal(sys.stderr) and is_utf8(sys.stderr.encoding)
    return Look(has_colour=False, is_plain=True, has_unicode=has_unicode)


# A file or a pipe takes lines of any length: only rows that fill a line need a width at all.
_UNWRAPPED_COLUMNS = 1 << 16


def _stderr_columns() -> int:
    """Return how wide the rows on stderr may be: as its terminal, or so that none is broken."""
    if not _is_terminal(sys.stderr):
        return _UNWRAPPED_COLUMNS
    return max(20, os.get_terminal_size(sys.stderr.fileno()).columns or 80)


def _script_commands(setup: "ScriptSetup", look: "Look") -> "ScriptCommands":
    from kvchat.terminal.command_runner import build_registry
    from kvchat.terminal.paint import Painter
    from kvchat.terminal.script_commands import ScriptCommands, ScriptPage
    from kvchat.terminal.status import StatsLevel

    page = ScriptPage(setup.notices.show, Painter(look), _stderr_columns())
    level = StatsLevel(setup.shows_stats)
    return ScriptCommands(setup.controller, page, build_registry(), level, setup.toolbox)


def _tell_about(controller: "ChatController", notices: "Notices") -> None:
    from kvchat.chat.template import Strategy

    for note in controller.session.notes if controller.session is not None else ():
        notices.tell(note)
    if controller.host.model.format.strategy is Strategy.NO_TEMPLATE:
        notices.tell("the model has no chat template; it completes the text as it stands.")


def _writer(request: ChatRequest, controller: "ChatController") -> "Writer":
    from kvchat.cli.output import JsonWriter, StreamJsonWriter, TextWriter

    if request.output_format == "stream-json":
        return StreamJsonWriter(sys.stdout, lambda: controller.host.ready)
    if request.output_format == "json" or request.input_format == "jsonl":
        return JsonWriter(sys.stdout, lambda: controller.host.ready)
    return TextWriter(sys.stdout, request.is_raw)


# The interactive chat


def _chat_interactively(
    settings: Settings, request: ChatRequest, child: "RenderingChild | None"
) -> int:
    from kvchat.chat.turn_loop import LoadRelay
    from kvchat.cli.output import Notices
    from kvchat.terminal.repl import ReplSetup, run
    from kvchat.terminal.theme import Look

    relay, notices = LoadRelay(), Notices(settings["quiet"])
    controller, toolbox, settings = _open_controller(
        settings, request, relay.hear, notices.tell, child
    )
    setup = ReplSetup(
        controller=controller,
        toolbox=toolbox,
        relay=relay,
        history_path=None if settings["incognito"] else history_path(),
        look=Look.choose(
            settings["color"], settings["accessible"], os.environ, sys.stdout.encoding
        ),
        shows_stats=settings["stats"],
        picks_session=request.picks,
        kv_dtype="auto" if has_endpoint(settings) else settings["kv_dtype"],
        editor=os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi",
    )
    try:
        return run(setup)
    finally:
        if toolbox is not None:
            toolbox.close()

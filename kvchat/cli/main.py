"""`kvchat`'s entry point: runs the application, and turns errors into a sentence and an exit code.

Only this module and the interactive loop turn errors into text.
"""

import errno
import logging
import os
import re
import sys
import threading
import traceback
from typing import NoReturn

from kvchat.cli.streams import forget_stdout, forget_streams, prepare_streams
from kvchat.core.errors import ExitCode, KvchatError, UsageError
from kvchat.core.library_environment import set_for_libraries
from kvchat.core.paths import close_to_others, settle_home
from kvchat.core.text import one_line, sanitize

_log = logging.getLogger(__name__)

# OSErrors of writing. Our own files raise StoreError, so these come from stdout.
_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
# With these exit codes the reader of the output has gone, or kvchat does not wait for it.
_NOT_WAITED_FOR = (ExitCode.BROKEN_PIPE, ExitCode.HANGUP, ExitCode.INTERRUPT, ExitCode.TERMINATED)
_MAX_FAULT_CHARS = 200


def run() -> NoReturn:
    """Run the command line and exit with its code."""
    try:
        prepare_streams()
        _finish(_run())
    except KeyboardInterrupt:  # Ctrl-C again, or while stdout waits for its reader
        os._exit(ExitCode.INTERRUPT)


def _finish(code: int) -> NoReturn:
    """Write what is buffered, and end the process."""
    if code in _NOT_WAITED_FOR:
        forget_streams()
    try:
        sys.stderr.flush()
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):
        code = ExitCode.BROKEN_PIPE
        forget_stdout()
    except OSError as error:
        code = code or _refused(error)
        forget_stdout()
    _end(code)


def _end(code: int) -> NoReturn:
    """End the process at once: without Python's own shutdown if that could take long.

    With torch loaded it frees modules and joins threads for one to seven seconds. Nothing is left
    for it to do: conversations and KV are saved when they are closed, output is flushed, and a
    forward pass or import that still runs has nothing to save.
    """
    if code in _NOT_WAITED_FOR or "torch" in sys.modules or _is_importing():
        logging.shutdown()
        os._exit(code)
    sys.exit(code)


def _is_importing() -> bool:
    """Whether the engine's thread, or that which loads torch's library, still runs."""
    names = {thread.name for thread in threading.enumerate()}
    return not names.isdisjoint(("kvchat-engine", "kvchat-library"))


def _run() -> int:
    from kvchat.cli.build import user_paths
    from kvchat.cli.log_file import open_log

    set_library_environment()
    settle_home(os.environ)
    paths = user_paths()
    for directory in (paths.config.parent, paths.sessions.parent, paths.state, paths.cache):
        close_to_others(directory)
    arguments = _without_debug(sys.argv[1:])
    is_debug = len(arguments) < len(sys.argv) - 1
    open_log(paths.state, is_debug)
    try:
        return _run_command(arguments)
    except BaseException as error:
        if is_debug and isinstance(error, Exception):
            traceback.print_exc()
        return _told(error)


def _without_debug(arguments: list[str]) -> list[str]:
    """Return the arguments without `--debug`, which every command takes, before or after its name.

    What follows `--` is text.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [part for part in arguments[:end] if part != "--debug"] + arguments[end:]


def _run_command(arguments: list[str]) -> int:
    """Parse and run the command line; return the exit code."""
    from kvchat.cli.app import UsageFault, app

    try:
        code = app(arguments, standalone_mode=False, prog_name="kvchat")
    except UsageFault as error:
        place = error.ctx.command_path if error.ctx is not None else "kvchat"
        said = one_line(_plain_fault(error.format_message()), _MAX_FAULT_CHARS).rstrip(".")
        raise UsageError(f"{said}.", f"See `{place} --help`.") from error
    return code if isinstance(code, int) else ExitCode.OK


# The parser of the command line speaks of inputs that it is "unable to parse".
_NO_NUMBER = re.compile(r"Invalid value for '(.+?)': .*valid (integer|number)")


def _plain_fault(said: str) -> str:
    """Return what the parser says of an option, of one that is no number in our own words."""
    match = _NO_NUMBER.match(said)
    if match is None:
        return said
    names = match[1].replace("'", "")  # -n and its long name, each in quotation marks
    return f"{names} must be a {'whole number' if match[2] == 'integer' else 'number'}"


def _told(error: BaseException) -> int:
    """Print one sentence on the error that ended the command; return its exit code."""
    from kvchat.cli.streams import Interrupted

    if isinstance(error, KvchatError):
        return _said(str(error), error.exit_code)
    if isinstance(error, SystemExit):
        # typer turns a closed pipe into exit code 1.
        is_pipe = isinstance(error.__context__, BrokenPipeError)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return ExitCode.BROKEN_PIPE if is_pipe else code
    if isinstance(error, Interrupted):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPT
    if isinstance(error, BrokenPipeError):
        return ExitCode.BROKEN_PIPE
    if isinstance(error, OSError):
        return _refused(error)
    if isinstance(error, MemoryError):
        return _said("There is not enough memory for that.", ExitCode.GENERATION)
    kind = type(error).__name__
    _log.error("unexpected error", exc_info=error)
    sentence = f"unexpected {kind}: {one_line(str(error), _MAX_FAULT_CHARS)}."
    return _said(f"{sentence} This is a bug; --debug shows where.", ExitCode.GENERATION)


def _refused(error: OSError) -> int:
    """Report an OSError: output could not be written, or a file could not be used."""
    if error.filename is None and error.errno in _UNWRITTEN:
        forget_stdout()
        return _said(f"Cannot write: {error.strerror}.", ExitCode.GENERATION)
    name = f"{one_line(os.fsdecode(error.filename))} cannot be used: " if error.filename else ""
    return _said(f"{name}{error.strerror or error}.", ExitCode.STORE)


def _said(sentence: str, code: int) -> int:
    told = f"kvchat: {sanitize(sentence)}"
    if sys.stderr is not None and sys.stderr.isatty():
        from kvchat.terminal.wrap import told_rows

        told = told_rows(told, sys.stderr)
    print(told, file=sys.stderr)  # noqa: T201
    return code


# By default OpenMP spins at every barrier for milliseconds. Beside one other busy process this
# costs a factor of 3 to 20, until the engine changes to one thread, and during all of a prefill.
# Too short a spin is slow too, because a thread that sleeps between two products must be woken for
# each. Two threads on two quiet cores, 135m model: 28 tokens/s with a spin count of 1,000, 38 with
# 3,000, 42 with 40,000; beside a busy process 26, 18 and 4.
_SPIN_COUNT = "3000"


def set_library_environment() -> None:
    """Set the environment variables that OpenMP and tokenizers read, if the user has not."""
    if "OMP_WAIT_POLICY" not in os.environ:
        set_for_libraries("GOMP_SPINCOUNT", _SPIN_COUNT)
    set_for_libraries("TOKENIZERS_PARALLELISM", "false")

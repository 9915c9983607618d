"""`kvchat`'s entry: runs the application and turns what went wrong into a sentence and a code.

The one place, beside the interactive loop, where errors become text.
"""

import errno
import logging
import os
import sys
import threading
import traceback
from typing import NoReturn

from kvchat.cli.streams import ensure_open, forget_stdout, forgive_encoding
from kvchat.core.errors import ExitCode, KvchatError
from kvchat.terminal.sanitize import sanitize

# What writing fails with. Our own files have errors of their own: what is left is stdout.
_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def run() -> NoReturn:
    """Run the command line and leave with its exit code."""
    ensure_open()
    forgive_encoding()
    code = _run()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (BrokenPipeError, ValueError):
        code = ExitCode.BROKEN_PIPE
        forget_stdout()
    except OSError as error:
        code = code or _refused(error)
        forget_stdout()
    if code == ExitCode.BROKEN_PIPE:
        forget_stdout()
    if any(thread.name == "kvchat-engine" for thread in threading.enumerate()):
        # The engine may be inside a long forward pass or still importing torch; neither has
        # anything to save, and waiting for it would keep the shell's prompt from coming back.
        os._exit(code)
    sys.exit(code)


def _run() -> int:
    from kvchat.cli.app import app
    from kvchat.cli.interruption import Interrupted
    from kvchat.cli.surroundings import prepare

    prepare()
    is_debug = "--debug" in sys.argv
    if not is_debug:
        # Nobody configures logging here, and Python would print our warnings with their tracebacks.
        logging.getLogger("kvchat").addHandler(logging.NullHandler())
    try:
        app(standalone_mode=True, prog_name="kvchat")
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # of which typer makes an ordinary 1
            forget_stdout()
            return ExitCode.BROKEN_PIPE
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except KvchatError as error:
        if is_debug:
            traceback.print_exc()
        print(f"kvchat: {sanitize(str(error))}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except BrokenPipeError:
        forget_stdout()
        return ExitCode.BROKEN_PIPE
    except Interrupted as interrupted:
        return interrupted.code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPT
    except BaseException as error:  # a panic of a Rust library is no Exception
        if is_debug:
            raise
        if isinstance(error, OSError) and error.filename is None and error.errno in _UNWRITTEN:
            forget_stdout()
            return _refused(error)
        print(  # noqa: T201
            f"kvchat: unexpected {type(error).__name__}: {error}. "
            "This is a bug; --debug shows where.",
            file=sys.stderr,
        )
        return ExitCode.GENERATION
    return ExitCode.OK


def _refused(error: OSError) -> int:
    """Say that what was printed could not be written."""
    print(f"kvchat: Cannot write: {error.strerror}.", file=sys.stderr)  # noqa: T201
    return ExitCode.GENERATION

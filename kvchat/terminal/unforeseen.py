"""Errors nobody foresaw become a sentence on the screen, whichever way Python would report them.

Callbacks of the event loop, other threads, finalizers: each has a hook of its own that prints a
traceback. Knows the hooks; what is said is the caller's business.
"""

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_log = logging.getLogger(__name__)


@contextmanager
def unforeseen_errors_told(tell: Callable[[BaseException], None]) -> Iterator[None]:
    """Give errors to `tell`, on the event loop, until the end of the block.

    Logging stays as it is configured; where it is not, nothing is printed in its stead.
    """
    loop = asyncio.get_running_loop()

    def tell_soon(error: BaseException | None) -> None:
        if isinstance(error, Exception):
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(tell, error)

    def in_callback(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        tell_soon(context.get("exception"))
        # Its message is left out: it names a callback with its arguments, which may be text.
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

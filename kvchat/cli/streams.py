"""Standard streams as they should be found: open, whatever the caller did to them.

Knows file descriptors 0 to 2; knows nothing of what is written.
"""

import io
import os
import sys


def ensure_open() -> None:
    """Put the null device where a standard stream is closed, as it is under many a daemon.

    Otherwise the next file opened would get its number, and what is printed would go there.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def forgive_encoding() -> None:
    """Have stdout print a question mark for what its encoding lacks, as stderr has its own way."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def forget_stdout() -> None:
    """Point stdout nowhere, so that flushing it at exit does not complain about it once more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)

"""The process that forks for chat templates; it imports no more than their processes do."""

import json
import os
import select
import socket
from contextlib import suppress

from kvchat.chat.template_child import main

_MOST_BYTES = 1 << 16


def serve(number: int) -> None:
    """Fork as the socket of this number asks; tell the process's number, and later its exit code.

    Ends when nothing asks any more.
    """
    asking = socket.socket(fileno=number)
    news: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for ready in select.select([asking.fileno(), *news], [], [])[0]:
            if ready in news:
                _tell_end(ready, *news.pop(ready))
                continue
            limits, ends, _, _ = socket.recv_fds(asking, _MOST_BYTES, 3)
            if not limits:
                return
            child = os.fork()
            if child == 0:
                _become(ends[0], ends[1], json.loads(limits))
            told = socket.socket(fileno=ends[2])
            told.send(str(child).encode())
            news[os.pidfd_open(child)] = child, told
            for end in ends[:2]:
                os.close(end)


def _tell_end(process: int, child: int, told: socket.socket) -> None:
    _, status = os.waitpid(child, 0)
    os.close(process)
    with told, suppress(OSError):  # who asked may be gone
        told.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(stdin: int, stdout: int, limits: list[float]) -> None:
    """Render templates until the input ends; does not return."""
    os.setsid()
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.closerange(3, 1 << 12)
    try:
        main(*limits)
    finally:
        os._exit(0)

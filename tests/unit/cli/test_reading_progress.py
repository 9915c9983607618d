"""What a script shows while a model loads."""

import io

from kvchat.cli.output import LoadingLine
from kvchat.core.events import LoadProgress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_only_a_terminal_sees_a_line_that_erases_itself() -> None:
    pipe, terminal = io.StringIO(), _Terminal()
    for stderr in (pipe, terminal):
        loading = LoadingLine(stderr, is_quiet=False, can_write=lambda stream: True)
        loading.show(LoadProgress("loading weights", 0.5))

    assert pipe.getvalue() == ""
    assert terminal.getvalue() == "\r\x1b[Kloading weights 50% ..."


def test_the_engine_does_not_wait_for_a_terminal_that_takes_nothing() -> None:
    stderr = _Terminal()
    loading = LoadingLine(stderr, is_quiet=False, can_write=lambda stream: False)

    loading.show(LoadProgress("loading weights", 0.5))

    assert stderr.getvalue() == ""

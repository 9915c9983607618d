"""DirectShell: kvchat's command line in this process, for what loads no model.

Arguments, variables, files, output and exit codes are those of a process; its signals, descriptors
and encodings are not.
"""

import io
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from kvchat.cli.log_file import close_log
from kvchat.cli.main import _run
from support.commands import Shell


@dataclass(frozen=True)
class DirectShell(Shell):
    """A shell whose kvchats are calls."""

    def run(
        self, *arguments: str, stdin: bytes | None = None, **variables: str
    ) -> "subprocess.CompletedProcess[bytes]":
        given, out, error = io.BytesIO(stdin or b""), io.BytesIO(), io.BytesIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "environ", {**self.environment, **variables})
            patch.chdir(self.home)
            patch.setattr(sys, "argv", ["kvchat", *arguments])
            for name, stream in (("stdin", given), ("stdout", out), ("stderr", error)):
                patch.setattr(sys, name, io.TextIOWrapper(stream, "utf-8", write_through=True))
            try:
                code = _run()
            finally:
                close_log()
            for stream in (sys.stdin, sys.stdout, sys.stderr):
                stream.detach()
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), error.getvalue())

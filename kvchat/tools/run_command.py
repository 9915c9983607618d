"""RunCommand: the tool that runs a shell command in the working directory."""

import os
import re
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvchat.tools.command_environment import secret_names
from kvchat.tools.pipe_reader import PipeReader
from kvchat.tools.process_scope import end_all, start_shell
from kvchat.tools.toolbox import MOST_RESULT_CHARS, ToolFailed, schema_of

if TYPE_CHECKING:
    import subprocess

_COMMAND_S = 120.0
_MOST_OUTPUT_BYTES = 4 * MOST_RESULT_CHARS
_LOOK_S = 0.05


class RunCommand:
    name = "run_command"
    is_allowed_by_call = True
    description = "Run a shell command in the working directory; its output and exit code return."
    parameters = schema_of(("command",), command=("string", "the command, as for sh -c"))

    def __init__(self, root: Path, allowed_secrets: Collection[str] = ()) -> None:
        self._root = root
        self._allowed_secrets = allowed_secrets

    def run(self, arguments: Mapping[str, Any], stop: threading.Event) -> str:
        command = arguments["command"]
        if not isinstance(command, str) or not command.strip() or "\0" in command:
            raise ToolFailed("the command must be a text.")
        secrets = secret_names(os.environ, self._allowed_secrets)
        seen = {name: value for name, value in os.environ.items() if name not in secrets}
        process = start_shell(command, self._root, seen)
        assert process.stdout is not None
        output = PipeReader(os.dup(process.stdout.fileno()), *(_MOST_OUTPUT_BYTES // 2,) * 2)
        process.stdout.close()
        ending = _wait(process, stop)
        text = output.text()
        missing = [name for name in secrets if re.search(rf"\b{re.escape(name)}\b", command)]
        notes = [f"[{name} is a secret, and not given to commands]" for name in missing]
        lines = [text.removesuffix("\n")] if text else []
        return "\n".join([*lines, *notes, f"[{ending}]"])


def _wait(process: "subprocess.Popen[bytes]", stop: threading.Event) -> str:
    """Wait for a process, at most its time; return how it ended, in words."""
    deadline_s = time.monotonic() + _COMMAND_S
    while process.poll() is None:
        if stop.wait(_LOOK_S) or time.monotonic() > deadline_s:
            num_alive = end_all(process)
            alive = f"; {num_alive} of its processes could not be ended" if num_alive else ""
            how = "stopped by the user" if stop.is_set() else f"stopped after {_COMMAND_S:g} s"
            return how + alive
    return f"exit code {process.returncode}"

"""Runs command lines of kvchat, each in a child of one process that has imported everything once.

Usage: python -m support.forked_commands. It reads a JSON object a line: `arguments`, `variables`,
`stdin` (a path), `stdout` and `stderr` (paths to write) and `directory`; it answers each with the
exit code a line, or -9 where the child had to be ended. A child may use so much address space and
no more; so no input can take the machine's memory.
"""

import json
import os
import resource
import signal
import sys
import time

_ADDRESS_SPACE_BYTES = 12 << 30
_DEADLINE_S = 90.0


def _become(case: dict[str, object]) -> None:
    """Turn this process into the command; does not return."""
    for number, name, flags in (
        (0, "stdin", os.O_RDONLY),
        (1, "stdout", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        os.dup2(os.open(str(case[name]), flags, 0o600), number)
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_BYTES, _ADDRESS_SPACE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.clear()
    os.environ.update(case["variables"])  # type: ignore[call-overload]
    os.chdir(str(case["directory"]))
    sys.argv = ["kvchat", *case["arguments"]]  # type: ignore[misc]
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    from kvchat.cli.main import run

    run()


def _run(case: dict[str, object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            _become(case)
        except SystemExit as leaving:
            os._exit(leaving.code if isinstance(leaving.code, int) else 1)
        except BaseException as error:
            sys.stderr.write(f"Traceback: {error!r} left the program\n")
            sys.stderr.flush()
            os._exit(99)
    end_s = time.monotonic() + _DEADLINE_S
    while time.monotonic() < end_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -9


def main() -> None:
    # What every child would import; none of it starts a thread.
    import kvchat.cli.app
    import kvchat.cli.batch
    import kvchat.cli.chat
    import kvchat.cli.script
    import kvchat.cli.sessions
    import kvchat.engine.assembly
    import kvchat.terminal.script_commands  # noqa: F401

    for line in sys.stdin:
        print(_run(json.loads(line)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

"""Processes of kvchat that cost a fork: one process imports everything, and forks for every life.

All workers of a run share the server: importing takes seconds, and half a gigabyte. The first who
needs it starts it, and it ends with the last.

A life has pipes, or a terminal of its own. It is a process of its own, with its own memory, files
and locks; SIGKILL ends it as it ends any other. What it does not do again is import torch, which
takes most of a short life. The server itself computes nothing, and has no thread that could hold a
lock while it forks.

`python -m support.fork_server PATH` serves the socket at that path, its standard input.
"""

import atexit
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import resource
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import termios
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NoReturn

import pytest

import kvchat
import kvchat_kernels.cpu
from kvchat.cli.main import run, set_library_environment
from support.commands import PATIENT, TIMEOUT_S, Shell
from support.failing_files import Faults
from support.patient_kvchat import be_patient
from support.scripted_repl import main as run_scripted
from support.slow_kvchat import never_load
from support.template_forks import TemplateForks

# Beside kvchat's own modules: what a life imports only once it reads its flags or loads a model.
_IMPORTED = (
    *("torch", "platformdirs.unix", "typer._adapters", "numpy.ctypeslib"),
    *("transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto"),
)
_OWN = (kvchat, kvchat_kernels.cpu)
_SCRIPTED, _SLOW = "support.scripted_repl", "support.slow_kvchat"
_LEFT_OUT = ("kvchat.bench", "kvchat.demo", "kvchat.__main__", "kvchat.cli.bench")
_MOST_BYTES = 1 << 20
Streams = Mapping[int, int | None]
PIPES: Streams = MappingProxyType({})
_READ_BY_IMPORTS = ("HF_", "TRANSFORMERS_", "TORCH_", "OMP_", "PYTHON")


class Life:
    """A process of the server: its signals and its end, as `subprocess.Popen` shows them."""

    def __init__(self, pid: int, server: "ForkServer") -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._process = os.pidfd_open(pid)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:  # until it is waited for, no other process has its number
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Return what `wait` returns, or None while it runs."""
        with suppress(TimeoutError):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; -9 where a signal 9 ended it, as `Popen` says. Raises TimeoutError."""
        if self.returncode is None:
            self._wait_for_end(timeout)
            self.returncode = self._server.exit_code(self.pid)
            os.close(self._process)
        return self.returncode

    def _wait_for_end(self, timeout_s: float | None) -> None:
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        if not poll.poll(None if timeout_s is None else 1000 * timeout_s):
            raise TimeoutError


class ForkedLife(Life):
    """A kvchat that runs with pipes at all three ends.

    Nothing comes through the pipe of a stream that has another descriptor, or none.
    """

    def __init__(self, pid: int, pipes: Sequence[int], server: "ForkServer") -> None:
        super().__init__(pid, server)
        self.stdin: IO[bytes] = open(pipes[0], "wb")  # noqa: SIM115
        self.stdout: IO[bytes] = open(pipes[1], "rb")  # noqa: SIM115
        self.stderr: IO[bytes] = open(pipes[2], "rb")  # noqa: SIM115

    def __enter__(self) -> "ForkedLife":
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()
        self.wait()

    def communicate(self, given: bytes = b"", timeout: float | None = None) -> tuple[bytes, bytes]:
        """Write its standard input, wait for its end, and return what it wrote to the others."""
        with ThreadPoolExecutor(3) as pool:
            pool.submit(self._give, given)
            told = [pool.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except TimeoutError:
                self.kill()
                raise
            output = [reading.result() for reading in told]
        self._close()
        return output[0], output[1]

    def _give(self, given: bytes) -> None:
        with suppress(BrokenPipeError), self.stdin:
            self.stdin.write(given)

    def _close(self) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            stream.close()


class ForkServer:
    """A connection to the server of a directory; lives are forked from it by `start`."""

    def __init__(self, directory: Path) -> None:
        path = directory / "fork-server"
        self._socket = _new_socket()
        with open(directory / "fork-server.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                self._socket.connect(str(path))
            except OSError:  # there is none, or it was killed
                path.unlink(missing_ok=True)
                _start_server(path)
                self._socket.connect(str(path))

    def start(
        self,
        shell: Shell,
        *arguments: str,
        kill_at: int | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
        streams: Streams = PIPES,
        most_file_bytes: int | None = None,
        most_address_bytes: int | None = None,
    ) -> ForkedLife:
        """Fork a kvchat, as `ForkedShell.start` says; `variables` are added to its environment.

        No file may grow beyond `most_file_bytes`, which fails as a full disk does; the life may
        use `most_address_bytes` of address space.
        """
        (stdin, ours_in), (ours_out, stdout), (ours_err, stderr) = os.pipe(), os.pipe(), os.pipe()
        pipes = (stdin, stdout, stderr)
        ends = {number: streams.get(number, pipe) for number, pipe in enumerate(pipes)}
        given = {number: end for number, end in ends.items() if end is not None}
        asked = {
            "module": shell.module,
            "arguments": arguments,
            "environment": {**shell.environment, **variables},
            "directory": str(shell.home),
            "kill_at": kill_at,
            "most_file_bytes": most_file_bytes,
            "most_address_bytes": most_address_bytes,
            "streams": list(given),
        }
        pid = self._fork(asked, list(given.values()))
        for pipe in pipes:
            os.close(pipe)
        return ForkedLife(pid, [ours_in, ours_out, ours_err], self)

    def start_in_terminal(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], terminal: int
    ) -> Life:
        """Fork `python -m module arguments`, in this directory and on a terminal of its own."""
        asked = {
            "module": module,
            "arguments": arguments,
            "environment": dict(environment),
            "directory": os.getcwd(),
            "is_terminal": True,
            "streams": [0, 1, 2],
        }
        return Life(self._fork(asked, [terminal] * 3), self)

    def _fork(self, asked: Mapping[str, object], ends: Sequence[int]) -> int:
        assert asked["module"] in _MODULES, "a fork has the modules that its server has"
        socket.send_fds(self._socket, [json.dumps(asked).encode()], ends)
        return self._answer()

    def exit_code(self, pid: int) -> int:
        """Return the exit code of a life that has ended, once."""
        self._socket.send(json.dumps({"ended": pid}).encode())
        return self._answer()

    def _answer(self) -> int:
        answer = self._socket.recv(_MOST_BYTES)
        assert answer, "the fork server is gone"
        return int(answer)

    def close(self) -> None:
        self._socket.close()


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _start_server(path: Path) -> None:
    with _new_socket() as listening:
        listening.bind(str(path))
        listening.listen()
        command = [sys.executable, "-m", "support.fork_server", str(path)]
        environment = Shell(path.parent).environment
        subprocess.Popen(command, stdin=listening, env=environment, cwd=path.parent)


@dataclass(frozen=True)
class ForkedShell(Shell):
    """A shell whose kvchats are forks; the commands of others begin with Python itself.

    `streams` are descriptors in the place of pipes, by the number of the stream (0, 1 or 2), and
    None for a stream that is closed. They stay the caller's.
    """

    server: ForkServer | None = None

    def run(
        self,
        *arguments: str,
        stdin: bytes | None = None,
        streams: Streams = PIPES,
        **variables: str,
    ) -> "subprocess.CompletedProcess[bytes]":
        """Run kvchat to its end in a fork, or afresh for variables that imported modules read."""
        if any(name.startswith(_READ_BY_IMPORTS) for name in variables):
            assert not streams
            return super().run(*arguments, stdin=stdin, **variables)
        assert self.server is not None
        life = self.server.start(self, *arguments, variables=variables, streams=streams)
        stdout, stderr = life.communicate(stdin or b"", TIMEOUT_S)
        assert life.returncode is not None
        return subprocess.CompletedProcess(arguments, life.returncode, stdout, stderr)

    def run_on_full_disk(
        self, num_blocks: int, *arguments: str, stdin: bytes = b""
    ) -> "subprocess.CompletedProcess[bytes]":
        """Run kvchat in a fork where no file may grow beyond so many KiB."""
        assert self.server is not None
        life = self.server.start(self, *arguments, most_file_bytes=num_blocks << 10)
        stdout, stderr = life.communicate(stdin, TIMEOUT_S)
        assert life.returncode is not None
        return subprocess.CompletedProcess(arguments, life.returncode, stdout, stderr)

    def start(  # type: ignore[override]
        self, *arguments: str, kill_at: int | None = None, streams: Streams = PIPES
    ) -> ForkedLife:
        """Start kvchat; it kills itself where it does operation `kill_at` on files or tables."""
        assert self.server is not None
        return self.server.start(self, *arguments, kill_at=kill_at, streams=streams)


class Deaths(Faults):
    """Ends this process by SIGKILL where a call is to fail, half of a write done."""

    def os_error(self) -> OSError:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def table_error(self) -> sqlite3.OperationalError:
        raise self.os_error()


def _run_patient() -> None:
    be_patient(pytest.MonkeyPatch())
    run()


def _run_scripted() -> None:
    sys.exit(run_scripted())


def _run_slow() -> None:
    never_load(pytest.MonkeyPatch())
    run()


_MODULES: Mapping[str, Callable[[], None]] = MappingProxyType(
    {"kvchat": run, PATIENT: _run_patient, _SLOW: _run_slow, _SCRIPTED: _run_scripted}
)


def _live(asked: dict[str, Any], ends: Sequence[int]) -> None:
    """Become the program that was asked for; most leave by SystemExit."""
    _take_streams(dict(zip(asked["streams"], ends, strict=True)))
    if asked.get("is_terminal"):
        _own_terminal()
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["directory"])
    sys.argv = [asked["module"], *asked["arguments"]]
    if (most := asked.get("most_file_bytes")) is not None:
        sys.dont_write_bytecode = True
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    if (most := asked.get("most_address_bytes")) is not None:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    main = _MODULES[asked["module"]]
    if (kill_at := asked.get("kill_at")) is None:
        main()
        return
    deaths = Deaths(chats_too=True)
    deaths.install(pytest.MonkeyPatch())
    with deaths.armed(kill_at):
        main()


def _end(left: BaseException | None) -> NoReturn:
    """End as Python does, but take no modules apart.

    That writes to all memory which a fork shares, and took longer than the life itself.
    """
    code = 0
    if isinstance(left, SystemExit) and (left.code is None or isinstance(left.code, int)):
        code = left.code or 0
    elif left is not None:
        traceback.print_exception(left)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:
            code = 120
    os._exit(code)


def _own_terminal() -> None:
    """Make standard input the terminal of a session of its own, and open the streams afresh."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` has it ignored
    form = {"encoding": "utf-8", "closefd": False}
    sys.stdin = sys.__stdin__ = open(0, errors="surrogateescape", **form)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", 1, errors="surrogateescape", **form)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", **form)  # noqa: SIM115


def _take_streams(given: Mapping[int, int]) -> None:
    """Make descriptors the standard streams; the others are closed, as Python finds them then."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if number in given:
            os.dup2(given[number], number)
            os.close(given[number])
        else:
            os.close(number)
            setattr(sys, name, None)


def _import_everything() -> None:
    own = [
        module.name
        for package in _OWN
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", _ignore)
    ]
    for name in (*_IMPORTED, *own):
        if not name.startswith(_LEFT_OUT):
            importlib.import_module(name)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")  # compiles a thousand regular expressions, once
    gc.collect()
    gc.freeze()  # collecting in a fork would write to all of this, and so copy it


def _ignore(name: str) -> None:
    raise ImportError(name)


def serve(path: Path) -> None:
    """Fork and wait as those who are connected ask, until the last of them has gone."""
    set_library_environment()
    forks = TemplateForks()
    forks.start()
    forks.use()
    listening = socket.socket(fileno=os.dup(0))
    listening.setblocking(False)
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)  # takes number 0
    _import_everything()
    from support import known_models, no_races  # import torch

    no_races.use()
    known_models.use()
    clients: list[socket.socket] = []
    select.select([listening], [], [])
    while _accept(listening, clients) or clients or _is_last_call(path, listening, clients):
        for client in select.select([listening, *clients], [], [])[0]:
            if client is not listening and not _answer(client, [listening, *clients]):
                clients.remove(client)
                client.close()


def _is_last_call(path: Path, listening: socket.socket, clients: list[socket.socket]) -> bool:
    """Close the server to new clients; return whether one has just connected."""
    path.unlink(missing_ok=True)
    return _accept(listening, clients)


def _accept(listening: socket.socket, clients: list[socket.socket]) -> bool:
    try:
        clients.append(listening.accept()[0])
    except BlockingIOError:
        return False
    return True


def _answer(client: socket.socket, open_sockets: Sequence[socket.socket]) -> bool:
    """Do what a client asks for; false where it has gone."""
    message, ends, _, _ = socket.recv_fds(client, _MOST_BYTES, 3)
    if not message:
        return False
    asked = json.loads(message)
    if "ended" in asked:
        _, status = os.waitpid(asked["ended"], 0)
        client.send(str(os.waitstatus_to_exitcode(status)).encode())
        return True
    pid = os.fork()
    if not pid:
        for each in open_sockets:
            each.close()
        try:
            _live(asked, ends)
        except BaseException as left:
            _end(left)
        _end(None)
    for end in ends:
        os.close(end)
    client.send(str(pid).encode())
    return True


if __name__ == "__main__":
    serve(Path(sys.argv[1]))

"""Makes machine code of LLVM's text: in this process, or in several side by side.

llvmlite lets one thread of a process into LLVM at a time. A model of quantised blocks needs up to
40 kernels, of which some take seconds, so that large ones are compiled by processes of their own.
These import no more than LLVM, and end after some time without work.
"""

import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import IO, Any

import llvmlite.binding as llvm

from kvchat_kernels.cpu.object_cache import object_cache

_log = logging.getLogger(__name__)

# Texts up to this length are compiled sooner than a process starts.
_SHORT = 100_000
# Each process takes some 100 MB while it compiles.
_MOST_PROCESSES = 8
_IDLE_S = 5.0
_LENGTH_BYTES = 8
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from kvchat_kernels.cpu.compiler import serve; serve(*sys.argv[2:])"
)


@dataclass(frozen=True, slots=True)
class Target:
    """The processor that code is for, and features beside those it has, by LLVM's names."""

    processor: str
    flags: str

    def machine(self) -> llvm.TargetMachine:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        return llvm.Target.from_default_triple().create_target_machine(
            cpu=self.processor, features=self.flags, opt=2, jit=True
        )


class Function:
    """A function `run` of machine code, which lives with this object. Thread-safe.

    It is read from the disk if it was compiled before. If not, it is being compiled until its
    address is wanted, and saved then.
    """

    def __init__(self, file: str, target: Target, write: Callable[[], str]) -> None:
        """`write` returns LLVM's text of what `file` is the name of in the cache."""
        self._file = file
        self._target = target
        self._lock = threading.Lock()
        self._engine: Any = None
        saved = object_cache().load(file)
        self._code = begin(write(), target) if saved is None else saved

    @property
    def address(self) -> int:
        """Waits until the function is compiled. Raises RuntimeError."""
        with self._lock:
            if self._engine is None:
                self._engine = self._link()
            address: int = self._engine.get_function_address("run")
            return address

    def _link(self) -> Any:
        code = self._code
        if not isinstance(code, bytes):
            code = code.result()
            object_cache().save(self._file, code)
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), self._target.machine())
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        self._code = b""
        return engine


def machine_code(text: str, target: Target) -> bytes:
    """Return the object code of LLVM's text. Raises RuntimeError."""
    machine, parsed = target.machine(), llvm.parse_assembly(text)
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(2)
    options.loop_unrolling = False  # loops are as long as they should be
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    code: bytes = machine.emit_object(parsed)
    return code


def begin(text: str, target: Target) -> "Future[bytes]":
    """Begin to compile; return what becomes the object code, or raises what `machine_code` does."""
    if len(text) <= _SHORT or not sys.executable:
        code: Future[bytes] = Future()
        _compile_here(code, text, target)
        return code
    return _processes(target, os.getpid()).begin(text)


def _compile_here(code: "Future[bytes]", text: str, target: Target) -> None:
    try:
        code.set_result(machine_code(text, target))
    except Exception as error:
        code.set_exception(error)


@cache
def _processes(target: Target, owner: int) -> "Processes":
    """Return the processes of this process, whose id is `owner`: a fork has none of its parent."""
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return Processes(target, min(num_cores, _MOST_PROCESSES))


class Processes:
    """Up to `most` processes that compile for a target. Thread-safe.

    Each has a thread that gives it one text after another. What a process that ended, fails or
    cannot be started has left is compiled in this one.
    """

    def __init__(self, target: Target, most: int) -> None:
        self._target = target
        self._most = most
        self._waiting: queue.SimpleQueue[tuple[Future[bytes], str]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0

    def begin(self, text: str) -> "Future[bytes]":
        """Begin to compile, as `begin` of this module."""
        code: Future[bytes] = Future()
        with self._lock:
            self._waiting.put((code, text))
            if self._num_threads < self._most:
                threading.Thread(target=self._compile_all, name="compile", daemon=True).start()
                self._num_threads += 1
        return code

    def _compile_all(self) -> None:
        """Compile what is waiting, until nothing has come for some time."""
        process = None
        while True:
            try:
                code, text = self._waiting.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if not self._waiting.empty():
                        continue
                    self._num_threads -= 1
                break
            try:
                process = process or _Process(self._target)
                code.set_result(process.compile(text))
            except Exception as error:  # the process may be no Python, and say anything
                _log.info("a process that compiles failed: %r", error)
                _compile_here(code, text, self._target)
        if process is not None:
            process.end()


class _Process:
    """A process that compiles; it ends with this one."""

    def __init__(self, target: Target) -> None:
        """Raises OSError."""
        own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        # Last, because a directory of packages may have modules of the same names as Python's own.
        path = json.dumps([*map(str, sys.path), own])
        self._process = subprocess.Popen(
            [sys.executable, "-BIS", "-c", _PROGRAM, path, target.processor, target.flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C reaches its parent only
        )

    def compile(self, text: str) -> bytes:
        """Return the object code of LLVM's text.

        Raises OSError if the process has ended, anything if it does not do what it should.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        _send(self._process.stdin, text.encode())
        return _receive(self._process.stdout)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def serve(processor: str, flags: str) -> None:
    """Compile what comes, as a process of its own: lengths, each with a text or object code."""
    with suppress(BrokenPipeError):
        while True:
            text = _receive(sys.stdin.buffer).decode()
            _send(sys.stdout.buffer, machine_code(text, Target(processor, flags)))


def _send(pipe: IO[bytes], content: bytes) -> None:
    pipe.write(len(content).to_bytes(_LENGTH_BYTES, "little"))
    pipe.write(content)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes:
    """Return what `_send` sent; raises BrokenPipeError at the pipe's end."""
    length = int.from_bytes(_read(pipe, _LENGTH_BYTES), "little")
    return _read(pipe, length)


def _read(pipe: IO[bytes], length: int) -> bytes:
    content = pipe.read(length)
    if len(content) < length:
        raise BrokenPipeError
    return content

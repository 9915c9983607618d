"""Runs kvchat as a separate process in a temporary home directory, and times it from outside."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kvchat.core.text import Size
from kvchat_kernels.cpu.object_cache import KERNEL_CACHE_VARIABLE, object_cache

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    # A process of `in_a_process` imports this module, and not torch because of it.
    from kvchat.bench.setup import BenchSetup
    from kvchat.model.checkpoint.source import ModelSource

T = TypeVar("T")
COMMAND = (sys.executable, "-m", "kvchat")
_DEADLINE_S = 1800.0


class ProcessFailed(Exception):
    """A process did not answer; the message gives the reason in one sentence."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A process's report on its answer to one message.

    first_s          seconds from the process's start to the first text of the answer
    ttft_s           its own seconds from the request to the first token, with the model loaded
    disk_tokens      prompt tokens whose KV came from the disk
    prefilled_tokens prompt tokens that were computed
    """

    first_s: float
    ttft_s: float
    text: str
    prompt_tokens: int
    disk_tokens: int
    prefilled_tokens: int
    device: str
    dtype: str


@contextmanager
def private_home() -> Iterator[dict[str, str]]:
    """Yield an environment with new, empty directories and without KVCHAT_* settings.

    Compiled kernels stay: they are compiled once on a machine. So do Python's compiled modules, as
    with any user: where they may not be written, each start takes half a second more.
    """
    with tempfile.TemporaryDirectory(prefix="kvchat-bench-") as home:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("KVCHAT_")}
        kept.pop("PYTHONDONTWRITEBYTECODE", None)
        kinds = ("CONFIG", "DATA", "STATE", "CACHE")
        directories = {f"XDG_{kind}_HOME": str(Path(home, kind.lower())) for kind in kinds}
        kernels = {KERNEL_CACHE_VARIABLE: str(object_cache().directory)}
        yield {**kept, "HOME": home, **directories, **kernels}


def in_a_process(function: Callable[..., T], *arguments: object) -> T:
    """Return what a function of a module returns in a new process, which ends with this call.

    Raises ProcessFailed. An interrupt is this process's: the other one is killed. A pool would
    leave its semaphores where the interrupted process ends at once.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(theirs, function, arguments))
    resource_tracker.ensure_running()  # it would unblock what is blocked next
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))  # the new process inherits it
    try:
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
        theirs.close()
        is_result, result = ours.recv()
    except EOFError as error:
        raise ProcessFailed("A measured process ended without a result.") from error
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
        ours.close()
    if not is_result:
        raise ProcessFailed(result)
    return cast("T", result)


def _send_result(
    connection: "Connection", function: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    try:
        connection.send((True, function(*arguments)))
    except Exception as error:
        connection.send((False, f"A measured process failed: {error!r}."))


def engine_flags(setup: "BenchSetup", source: "ModelSource") -> list[str]:
    """Return arguments by which a process in another home directory builds the same engine."""
    model, cache = setup.model, setup.cache
    path = source.gguf.paths[0] if source.gguf is not None else source.directory
    flags = ["--model", str(path.absolute()), "--block-size", str(cache.block_size)]
    flags += ["--device", model.device, "--dtype", model.dtype, "--weights", model.weights]
    flags += ["--kv-dtype", cache.kv_dtype]
    if model.threads is not None:
        flags += ["--threads", str(model.threads)]
    if cache.device_bytes is not None:
        flags += ["--device-cache", _size(cache.device_bytes)]
    return flags


def _size(size: Size) -> str:
    return str(size.num_bytes) if size.num_bytes is not None else f"{100 * (size.share or 0)}%"


def answer(arguments: Sequence[str], environment: Mapping[str, str], message: str) -> Answered:
    """Start a process, send it `message` on standard input and return its answer.

    Raises ProcessFailed if it fails or does not answer within half an hour.
    """
    command = [*COMMAND, *arguments, "--output-format", "stream-json"]
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
        given.write(message.encode())
        given.seek(0)
        start_s = time.perf_counter()
        process = subprocess.Popen(
            command, env=dict(environment), stdin=given, stdout=subprocess.PIPE, stderr=errors
        )
        timer = Timer(_DEADLINE_S, process.kill)
        timer.start()
        try:
            first_s, end = _followed(process, start_s)
        finally:
            timer.cancel()
            process.kill()  # no effect if it has ended
            process.wait()
        if end is None or process.returncode:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines() or [""]
            raise ProcessFailed(f"kvchat ended with {process.returncode}: {lines[-1]}")
    return _answered(first_s, end)


def _followed(
    process: "subprocess.Popen[bytes]", start_s: float
) -> tuple[float, dict[str, Any] | None]:
    """Read a process's events to the end; return the seconds to the first text, and the `end`."""
    assert process.stdout is not None
    first_s, end = 0.0, None
    with process.stdout:
        for line in process.stdout:
            now_s = time.perf_counter()
            event: dict[str, Any] = {}
            with suppress(ValueError):
                event = json.loads(line)
            if event.get("event") in ("delta", "end"):
                first_s = first_s or now_s - start_s
            if event.get("event") == "end":
                end = event
    process.wait()
    return first_s, end


def _answered(first_s: float, end: Mapping[str, Any]) -> Answered:
    usage = end["usage"]
    return Answered(
        first_s=first_s,
        ttft_s=end["timing"]["ttft_s"],
        text=end["text"],
        prompt_tokens=usage["prompt_tokens"],
        disk_tokens=usage["cached_tokens"]["disk"],
        prefilled_tokens=usage["prefilled_tokens"],
        device=end["model"]["device"],
        dtype=end["model"]["dtype"],
    )

"""Breaks checkpoints at random, and tries each in a process of bounded time and memory.

The process is forked from one that has imported everything, so that a try takes a fraction of a
second. It answers with one line: `loaded`, the sentence of a ModelError, or what went wrong.
"""

import json
import os
import random
import resource
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvchat.core.types import NO_MEMORY

NASTY: tuple[Any, ...] = (
    None, True, -1, 0, 1, 3, 7.5, 10**6, 10**9, 2**63, 10**30, -(10**18), 1e400, float("nan"),
    "", "x", "../x", "/dev/zero", "\ud800", "a\0b", "load", [], [[]], [1, "x"], {}, {"a": {}},
)  # fmt: skip
# Of computing, and of waiting: a busy machine may let a try wait for long.
_CPU_SECONDS, _SECONDS, _MORE_BYTES = 60, 600, 3 << 30
Draw = random.Random


def break_one(directory: Path, draw: Draw) -> str:
    """Change one file of a checkpoint; return what was done, for the report."""
    paths = sorted(path for path in directory.iterdir() if _is_small(path))
    path = draw.choice(paths)
    changes = [_flip, _truncate, _insert, _replace]
    if path.suffix == ".json":
        changes += [_change_json] * 6
    if path.suffix == ".safetensors":
        changes += [_change_header] * 4
    change = draw.choice(changes)
    try:
        return f"{path.name}: {change.__name__} {change(path, draw)}"
    except (ValueError, TypeError, AttributeError):  # another change made it no JSON, or too large
        return f"{path.name}: {change.__name__} not possible any more"


def _is_small(path: Path) -> bool:
    return path.is_file() and path.stat().st_size < 1 << 30


def _flip(path: Path, draw: Draw) -> str:
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 3, 30))):
        if data:
            end = min(len(data), draw.choice((100, 3000, len(data))))
            data[draw.randrange(end)] = draw.randrange(256)
    path.write_bytes(data)
    return ""


def _truncate(path: Path, draw: Draw) -> str:
    size = draw.choice((0, 1, 8, draw.randrange(path.stat().st_size + 1), 1 << 40))
    os.truncate(path, size)
    return str(size)


def _insert(path: Path, draw: Draw) -> str:
    data = path.read_bytes()
    place = draw.randrange(len(data) + 1)
    pieces = (b"[" * 10**5, b"\xff\xfe", b"9" * 5000, b'"a":1,"a":2,', b"\0" * 100, data)
    piece = draw.choice(pieces)
    path.write_bytes(data[:place] + piece + data[place:])
    return f"{piece[:10]!r} at {place}"


def _replace(path: Path, draw: Draw) -> str:
    kind = draw.choice(("pipe", "directory", "nothing", "loop", "/dev/zero", "/proc/kmsg"))
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind != "nothing":
        path.symlink_to(kind)
    return kind


def _change_json(path: Path, draw: Draw) -> str:
    content = json.loads(path.read_text())
    done = _change_value(content, draw)
    path.write_text(json.dumps(content))
    return done


def _change_header(path: Path, draw: Draw) -> str:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    done = _change_value(header, draw)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return done


def _change_value(content: Any, draw: Draw) -> str:
    """Change, drop or add one value somewhere in `content`."""
    place: list[object] = []
    while True:
        keys = list(content) if isinstance(content, dict) else list(range(len(content)))
        if not keys:
            return "nothing"
        key = draw.choice(keys)
        place.append(key)
        inner = content[key]
        if isinstance(inner, dict | list) and inner and draw.random() < 0.8:
            content = inner
            continue
        if isinstance(content, dict) and draw.random() < 0.15:
            del content[key]
            return f"{place} dropped"
        content[key] = draw.choice(NASTY)
        return f"{place} = {content[key]!r}"


@dataclass(slots=True)
class Outcome:
    """How many tries loaded and were refused, and what each that did neither says."""

    loaded: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)


def try_all(
    originals: list[Path], work: Path, seeds: range, load: Callable[[Path], str]
) -> Outcome:
    """Break a copy once a seed and load it, in a process of its own.

    `load` returns "loaded" or "refused"; anything else that comes of it is wrong.
    """
    outcome = Outcome()
    for seed in seeds:
        draw = random.Random(seed)
        copy = Path(shutil.copytree(draw.choice(originals), work / "m"))
        done = [break_one(copy, draw) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
        answer = _forked(partial(load, copy), work)
        if answer in ("loaded", "refused"):
            setattr(outcome, answer, getattr(outcome, answer) + 1)
        else:
            outcome.wrong.append(f"seed {seed}, {'; '.join(done)[:300]}: {answer}")
        shutil.rmtree(copy)
    return outcome


def _forked(work: Callable[[], str], directory: Path) -> str:
    """Do `work` in a child; return what it returned, or what went wrong."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _limit()
        _watch(writing, directory)
        try:
            answer = work()
        except BaseException:
            answer = traceback.format_exc()[-1500:]
        os.write(writing, answer.encode(errors="replace"))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name} {told}"
    return told


def _limit() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MORE_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_SECONDS)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)


def _watch(writing: int, directory: Path) -> None:
    """End the process at once where it unpickles, or writes anywhere but below `directory`."""

    allowed = (str(directory), os.devnull)

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            is_written = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
            if not is_written or isinstance(path, int) or os.fspath(path).startswith(allowed):
                return
        elif event == "subprocess.Popen" and "template_child" in str(arguments[1]):
            return  # our own process for the checkpoint's template
        elif event not in ("pickle.find_class", "os.system", "subprocess.Popen", "socket.connect"):
            return
        os.write(writing, f"{event} {arguments!r}".encode(errors="replace"))
        os._exit(0)

    sys.addaudithook(see)


def main() -> None:
    """`broken_checkpoints.py WORK FIRST LAST ORIGINAL...`: print what went wrong, as JSON."""
    work, first, last, *originals = sys.argv[1:]
    import torch

    from kvchat.chat.chat_model import read_chat_model
    from kvchat.core.config import ModelConfig
    from kvchat.core.errors import ExitCode, KvchatError
    from kvchat.engine.assembly import load_trusted
    from kvchat.model.checkpoint.identity import content_digest
    from kvchat.model.checkpoint.source import find_model

    torch.set_num_threads(1)
    os.environ["TMPDIR"] = work

    def load(directory: Path) -> str:
        try:
            source = find_model(str(directory))
            read_chat_model(source)
            loaded = load_trusted(
                source, ModelConfig(device="cpu"), None, NO_MEMORY, lambda _: None
            )
            content_digest(loaded.source, NO_MEMORY)
            return "loaded"
        except KvchatError as error:
            is_clear = error.exit_code is ExitCode.MODEL and "\n" not in str(error)
            return "refused" if is_clear else repr(error)

    for original in originals:  # what is imported on first use is imported before the forks
        assert load(Path(original)) == "loaded"
    assert threading.active_count() == 1
    paths = [Path(original) for original in originals]
    outcome = try_all(paths, Path(work), range(int(first), int(last)), load)
    print(json.dumps(asdict(outcome)))  # noqa: T201


if __name__ == "__main__":
    main()

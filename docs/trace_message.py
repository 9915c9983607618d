"""How many files one short message enters, and how often a call goes from one file to another.

Run it from the repository's root: `.venv/bin/python docs/trace_message.py [--list] [--spec]`.

It chats with the demo model through a pipe, as a script would, with drafts off unless `--spec` is
given. The first message warms up; calls are counted from the moment the second message is read to
the moment the next line is. A *hop* is a call whose nearest caller of ours is in another file.
"""

import contextlib
import os
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OURS = (str(ROOT / "kvchat") + os.sep, str(ROOT / "kernels") + os.sep)
MESSAGE = "Hello, my name is Ada."
LAST_LINE = "/quit"


class Trace:
    """Counts calls into our files, on every thread, between two lines of input."""

    def __init__(self) -> None:
        self.is_counting = False
        self.calls: Counter[tuple[str, str]] = Counter()  # (file, function)
        self.hops: Counter[tuple[str, str]] = Counter()  # (from file, to file)
        self.threads: dict[str, set[str]] = {}

    def watch(self, frame: FrameType, event: str, _: Any) -> None:
        """Be told of a call or a return (a `sys.setprofile` function)."""
        if event != "call" or not frame.f_code.co_filename.startswith(OURS):
            return
        self._begin_or_end(frame)
        if self.is_counting:
            self._count(frame)

    def _begin_or_end(self, frame: FrameType) -> None:
        code = frame.f_code
        for name in code.co_varnames[: code.co_argcount]:
            value = frame.f_locals.get(name)
            if isinstance(value, str) and value.strip() in (MESSAGE, LAST_LINE):
                self.is_counting = value.strip() == MESSAGE

    def _count(self, frame: FrameType) -> None:
        file = frame.f_code.co_filename
        self.calls[file, frame.f_code.co_qualname] += 1
        self.threads.setdefault(threading.current_thread().name, set()).add(file)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(OURS):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != file:
            self.hops[caller.f_code.co_filename, file] += 1

    def report(self, with_list: bool) -> str:
        """Return the two figures, and with `with_list` what each file contributes."""
        files = Counter[str]()
        for (file, _), count in self.calls.items():
            files[file] += count
        lines = [
            f"files entered: {len(files)}",
            f"hops between files: {sum(self.hops.values())}",
            f"functions entered: {len(self.calls)}",
        ]
        if with_list:
            lines += [f"  {name}: {len(entered)} files" for name, entered in self.threads.items()]
            lines += [f"{n:6} calls  {_short(file)}" for file, n in files.most_common()]
            top = self.hops.most_common(40)
            lines += [f"{n:6} hops   {_short(a)} -> {_short(b)}" for (a, b), n in top]
        return "\n".join(lines)


def _short(file: str) -> str:
    return str(Path(file).relative_to(ROOT))


def chat(arguments: list[str]) -> None:
    """Run `kvchat` in this process over three lines of input, with its output thrown away."""
    kept = os.dup(1)
    with tempfile.TemporaryFile("w+") as lines, Path(os.devnull).open("w") as nowhere:
        lines.write(f"Hi there.\n{MESSAGE}\n{LAST_LINE}\n")
        lines.seek(0)
        os.dup2(lines.fileno(), 0)
        os.dup2(nowhere.fileno(), 1)
        sys.argv = ["kvchat", *arguments]
        from kvchat.cli.main import run

        end_process, os._exit = os._exit, sys.exit  # kvchat ends its process at once otherwise
        with contextlib.suppress(SystemExit):
            run()
        os._exit = end_process
    os.dup2(kept, 1)


def main() -> None:
    """Trace one message and print the figures."""
    options = sys.argv[1:]
    trace = Trace()
    with tempfile.TemporaryDirectory() as directory:
        for kind in ("DATA", "CACHE", "CONFIG", "STATE"):
            os.environ[f"XDG_{kind}_HOME"] = f"{directory}/{kind.lower()}"
        threading.setprofile(trace.watch)
        sys.setprofile(trace.watch)
        chat(["--input-format", "lines", "--spec" if "--spec" in options else "--no-spec"])
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    if not trace.calls:
        sys.exit("The message was never read: see whether kvchat starts at all.")
    sys.stdout.write(trace.report("--list" in options) + "\n")


if __name__ == "__main__":
    main()

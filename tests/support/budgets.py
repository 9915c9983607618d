"""Seconds of processors that each directory of tests may take, its processes included.

`make test` fails where a directory takes more. The budgets are two to three times what two cores of
a Xeon took, so growth passes them, or a processor half as fast. A machine with much other work
takes more for the same tests: there the seconds are told, and nothing fails.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

BUDGETS_S = {
    "contract": 150,
    "matrix": 420,
    "pty": 60,
    "soak": 80,
    "unit/bench": 80,
    "unit/cache": 120,
    "unit/chat": 140,
    "unit/cli": 160,
    "unit/core": 10,
    "unit/engine": 200,
    "unit/kernels": 250,
    "unit/model": 200,
    "unit/remote": 50,
    "unit/server": 80,
    "unit/terminal": 150,
    "unit/tools": 30,
}
_NAME = "processor seconds"
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


class Budgets:
    """Counts a run's seconds, file by file in each worker, and their sums where reports arrive."""

    def __init__(self) -> None:
        self._before_s: float | None = None
        self.taken_s: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[None]:
        if self._before_s is None:
            self._before_s = _processor_s()
        self._is_last = nextitem is None or nextitem.path != item.path
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: "pytest.CallInfo[None]") -> None:
        if call.when == "teardown" and self._is_last:
            now_s = _processor_s()
            item.user_properties.append((_NAME, now_s - (self._before_s or 0.0)))
            self._before_s = now_s

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            directory = Path(report.nodeid.partition("::")[0]).parent.relative_to("tests")
            taken = (value for name, value in report.user_properties if name == _NAME)
            self.taken_s[str(directory)] += sum(taken)  # type: ignore[assignment]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        pairs = (f"{name} {s:.0f}" for name, s in self.taken_s.most_common())
        terminalreporter.write_line(f"seconds of processors: {', '.join(pairs)}")
        for sentence in over_budget(self.taken_s):
            terminalreporter.write_line(sentence)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == 0 and over_budget(self.taken_s) and not _is_busy():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def over_budget(taken_s: Counter[str]) -> list[str]:
    """Return a sentence for each directory that took more than its budget."""
    return [
        f"tests/{name} took {taken_s[name]:.0f} s of processors, and has {budget} "
        "(tests/support/budgets.py)."
        for name, budget in BUDGETS_S.items()
        if taken_s[name] > budget
    ]


def _is_busy() -> bool:
    """Return whether others wait for the processors beside a run's three workers."""
    return os.getloadavg()[2] > 3 + (os.cpu_count() or 1)


def _processor_s() -> float:
    """Return the seconds that this process and all it started have taken."""
    own = os.times()
    taken_s = own.user + own.system + own.children_user + own.children_system
    waiting = _children(os.getpid())
    while waiting:
        process = waiting.pop()
        waiting += _children(process)
        taken_s += _ticks(process) / _TICKS_A_SECOND
    return taken_s


def _children(process: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):  # the process may have ended meanwhile
        for path in Path(f"/proc/{process}/task").glob("*/children"):
            found += map(int, _read(path).split())
    return found


def _ticks(process: int) -> int:
    """Return the ticks of a process and of the children that it waited for."""
    fields = _read(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))


def _read(path: Path) -> str:
    """Return a file's text; none of a process that has ended meanwhile."""
    try:
        return path.read_text()
    except OSError:
        return ""

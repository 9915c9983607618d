"""Settings of the whole test run."""

import gc
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.budgets import Budgets
from support.fact_memory import FactMemory
from support.matrix import SHARES, outside_of_share, share_of

if TYPE_CHECKING:
    from kvchat.chat.chat_model import ChatModel
    from support.fork_server import ForkServer
    from support.interpreter import Interpreter
    from support.specimens import Specimen

# Collecting makes a million objects and hardly any garbage: looking for it was a third of the time.
gc.disable()
# A shell starts background jobs with Ctrl-C ignored, and what tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# As `kvchat` itself does: barriers that spin make a shared machine many times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: a second thread only waits
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
# Here kernels are compiled; where they are interpreted, it is in a process of their own.
os.environ.pop("TRITON_INTERPRET", None)
# Kernels are compiled once, and not once for every private home of a test.
_KERNELS = Path(tempfile.gettempdir(), f"kvchat-test-kernels-{os.getuid()}")
os.environ.setdefault("KVCHAT_KERNEL_CACHE", str(_KERNELS))


# What all processes of a run share, those that xdist starts too.
_IS_FIRST = "DIRECTORY_OF_TEST_RUN" not in os.environ
if _IS_FIRST:
    os.environ["DIRECTORY_OF_TEST_RUN"] = tempfile.mkdtemp(prefix="kvchat-tests-")
    Path(os.environ["DIRECTORY_OF_TEST_RUN"], "known").mkdir()
    # What a test keeps without a home of its own is the run's, not the user's.
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    os.environ["HOME"] = str(Path(os.environ["DIRECTORY_OF_TEST_RUN"], "home"))
    Path.home().mkdir()


def pytest_unconfigure() -> None:
    if _IS_FIRST:
        shutil.rmtree(os.environ["DIRECTORY_OF_TEST_RUN"], ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budgets", action="store_true", help="fail where a directory takes too long")
    parser.addoption(
        "--matrix-of",
        metavar="NAME",
        help="of the tests marked matrix, run the share of this name (a commit); otherwise all",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--budgets"):
        config.pluginmanager.register(Budgets())


def pytest_report_header(config: pytest.Config) -> str | None:
    name = config.getoption("--matrix-of")
    if name is None:
        return None
    return f"matrix: share {share_of(name)} of {SHARES}; --matrix-of {name} runs the same again"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    name = config.getoption("--matrix-of")
    if name is not None and (left_out := outside_of_share(items, share_of(name))):
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


def pytest_collection_finish() -> None:
    """Look for garbage among what tests make, not among a million objects of imports each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _own_log_levels() -> Iterator[None]:
    """A program that a test ran in this process leaves no level behind, which hides records."""
    loggers = [logging.getLogger(name) for name in ("kvchat", "kvchat_kernels")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
def memory() -> FactMemory:
    """A memory of facts, which all of a test shares."""
    return FactMemory()


@pytest.fixture(scope="session", autouse=True)
def _cheap_starts() -> Iterator[None]:
    """Fork the processes of chat templates, compile one form of a kernel, test a model once."""
    from support import known_models, no_races
    from support.template_forks import TemplateForks

    forks = TemplateForks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvchat.chat.template_process.subprocess", forks)
        patch.setattr("kvchat_kernels.cpu.races._race", no_races.choose)
        patch.setattr("kvchat.model.loader.probe_meta", known_models.find_or_probe)
        patch.setattr("kvchat.engine.assembly.ensure_trusted", known_models.trust_or_test)
        yield
    forks.close()


@pytest.fixture(scope="session")
def fork_server() -> Iterator["ForkServer"]:
    from support.fork_server import ForkServer

    server = ForkServer(Path(os.environ["DIRECTORY_OF_TEST_RUN"]))
    yield server
    server.close()


@pytest.fixture(scope="session")
def interpreter() -> Iterator["Interpreter"]:
    """Calls functions where kernels run on CPU tensors."""
    from support.interpreter import Interpreter

    interpreter = Interpreter()
    yield interpreter
    interpreter.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> "ChatModel":
    """The text side of a model that a scripted engine speaks for."""
    from support.scripted_engine import text_model, write_text_checkpoint

    return text_model(write_text_checkpoint(tmp_path_factory.mktemp("model") / "scripted"))


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> "ChatModel":
    """The text side of a model whose template takes tools."""
    from support.scripted_engine import text_model, write_tool_checkpoint

    return text_model(write_tool_checkpoint(tmp_path_factory.mktemp("tools") / "tools"))


@pytest.fixture(scope="session")
def specimen(tmp_path_factory: pytest.TempPathFactory) -> "Callable[[str], Specimen]":
    """Return the specimen of a name in `architectures.SUPPORTED`, made on first use."""
    from support.specimens import make_specimen

    made: dict[str, Specimen] = {}

    def get(name: str) -> "Specimen":
        if name not in made:
            made[name] = make_specimen(name, tmp_path_factory.mktemp("specimen"))
        return made[name]

    return get

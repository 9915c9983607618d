"""The soak tests' shared fixtures, and their totals, printed at the end."""

from collections import Counter
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from support.checkpoints import never_stopping, save_checkpoint, tiny_model
from support.fork_server import ForkedShell, ForkServer
from support.outside import Outside

CONTEXT = 8192
_TOTALS = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TOTALS] = Counter()


@pytest.fixture
def totals(request: pytest.FixtureRequest) -> Counter[str]:
    """Counts of the whole session, by what is counted: "kills: decode", "faults: ENOSPC"."""
    return request.config.stash[_TOTALS]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the totals by kind, and how many tests that looked for damage failed."""
    totals = config.stash.get(_TOTALS, Counter())
    if not totals:
        return
    terminalreporter.section("what the soak tests amount to")
    for kind in sorted({name.partition(":")[0] for name in totals}):
        parts = {n: c for n, c in totals.items() if n.partition(":")[0] == kind}
        told = ", ".join(
            f"{n.partition(': ')[2]} {c:,}" for n, c in sorted(parts.items()) if ":" in n
        )
        terminalreporter.line(f"{kind}: {sum(parts.values()):,}{f' ({told})' if told else ''}")
    num_failed = len(terminalreporter.stats.get("failed", ()))
    found = "nothing" if not num_failed else f"see the {num_failed} failures above"
    terminalreporter.line(
        f"wrong answers, wrong KV, lost words, bytes over the limit, files touched outside: {found}"
    )


@pytest.fixture
def shell(tmp_path: Path, fork_server: ForkServer) -> ForkedShell:
    return ForkedShell(tmp_path, server=fork_server)


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    return Outside(tmp_path)


@pytest.fixture(scope="session")
def reference() -> PreTrainedModel:
    """A model whose KV takes 4 KiB a token, so that packs are files."""
    sizes = {"num_key_value_heads": 4, "head_dim": 64}
    return never_stopping(tiny_model("llama", max_position_embeddings=CONTEXT, **sizes))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, reference: PreTrainedModel) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), reference)

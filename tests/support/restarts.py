"""Lives of the program on a remembering model: device tiers that die, beside a tier that lasts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from kvchat.cache import chain
from kvchat.cache.chain import KvChain
from kvchat.cache.disk import tier as disk_tier
from kvchat.cache.tier import Tier, TierOpener
from kvchat.core.events import SampleFinished
from kvchat.core.types import SamplingParams
from kvchat.engine.request import RequestSpec
from support.chains import be_patient
from support.engine_harness import EngineHarness
from support.memory_tier import MemoryTier
from support.remembering_model import complete_without_cache

GREEDY = SamplingParams(temperature=0.0)
HISTORY = tuple(i % 31 + 1 for i in range(50))


def spec(ids: tuple[int, ...], max_tokens: int = 6) -> RequestSpec:
    return RequestSpec(ids, GREEDY, max_tokens=max_tokens)


def alone(request: RequestSpec) -> list[int]:
    """What the request's answer has to be."""
    return complete_without_cache(request, 0, 120)


@dataclass
class Process:
    """One life of the program: an engine with an empty device tier, beside a tier that lasts."""

    harness: EngineHarness
    chain: KvChain

    def answer(self, request: RequestSpec) -> tuple[list[int], SampleFinished]:
        number = self.harness.submit(request)
        self.harness.run()
        return self.harness.generated(number), self.harness.ending(number)

    def answer_rightly(self, request: RequestSpec) -> SampleFinished:
        """Answer a request as a model without a cache does; return how the answer ended."""
        tokens, ending = self.answer(request)
        assert tokens == alone(request)
        return ending

    def end(self) -> None:
        self.harness.engine.close()


class Processes:
    """Starts processes one after another; `open_tier` gives each of them the tier."""

    def __init__(
        self, open_tier: Callable[[], Tier] | None, behind: Sequence[TierOpener] = (), **limits: int
    ) -> None:
        self._open_tier = open_tier
        self._behind = behind
        self._limits = limits
        self.started: list[Process] = []

    def start(self, num_blocks: int = 200) -> Process:
        harness = EngineHarness(
            num_blocks, open_tier=self._open_tier, behind=self._behind, **self._limits
        )
        be_patient(harness.engine.chain)
        process = Process(harness, harness.engine.chain)
        self.started.append(process)
        return process

    def after(self, request: RequestSpec) -> Process:
        """Start a process after another one has answered a request, and ended."""
        self.end_one(request)
        return self.start()

    def end_one(self, request: RequestSpec) -> None:
        """Let a process answer a request, and end."""
        process = self.start()
        process.answer(request)
        process.end()


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier(block_size=4, image_bytes=4 * 8)


@pytest.fixture
def processes(tier: MemoryTier) -> Iterator[Processes]:
    made = Processes(lambda: tier)
    yield made
    for process in made.started:
        process.end()


@pytest.fixture(autouse=True)
def patience_with_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine keeps as it closes is waited for, and so is who holds the store's lock."""
    monkeypatch.setattr(chain, "_CLOSE_PATIENCE_S", 60.0)
    monkeypatch.setattr(disk_tier, "_PATIENCE_S", 30.0)

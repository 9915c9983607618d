"""A process that answers for a long time uses no more resources than after its warm-up.

Counts memory, descriptors, threads and Python's objects, over a long chat of short turns and over
independent requests of mixed lengths, with a disk tier, in bfloat16 and in float32.
"""

import gc
import multiprocessing
import os
import random
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path

import pytest

from kvchat.bench.engines import complete_requests
from kvchat.core.config import CacheConfig
from kvchat.core.text import Size
from kvchat.core.types import SamplingParams
from kvchat.engine.engine import Engine
from kvchat.engine.request import RequestSpec
from support.assembled import assemble
from support.checkpoints import VOCAB_SIZE, save_checkpoint, tiny_model

LONGEST = 400
MORE = 1.05


@dataclass(frozen=True)
class Level:
    """What a process holds."""

    megabytes: float
    num_descriptors: int
    num_threads: int
    num_objects: int

    @classmethod
    def now(cls) -> "Level":
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            len(gc.get_objects()),
        )


class Chats:
    """An engine and what it is asked; the same at every run."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._chance = random.Random(5)
        self._context: list[int] = []

    def warm_up(self) -> None:
        """Answer something of every length there is a size for, and fill all tiers."""
        for length in range(1, LONGEST, 12):
            self._answer([self._ids(length)])
        self.hold_turns(30)
        self.answer_requests(30)

    def hold_turns(self, count: int) -> None:
        """Go on with one chat, which begins anew when it has become long."""
        for _ in range(count):
            if len(self._context) > 2 * LONGEST:
                self._context = []
            self._context += self._ids(self._chance.randint(1, 60))
            self._context += self._answer([self._context])[0]

    def answer_requests(self, count: int) -> None:
        """Answer requests that have nothing to do with each other, up to four at once."""
        while count > 0:
            together = min(count, self._chance.randint(1, 4))
            lengths = [self._chance.randint(1, LONGEST) for _ in range(together)]
            self._answer([self._ids(length) for length in lengths])
            count -= together

    def _ids(self, count: int) -> list[int]:
        return [self._chance.randrange(256) for _ in range(count)]

    def _answer(self, prompts: list[list[int]]) -> list[tuple[int, ...]]:
        specs = [
            RequestSpec(
                tuple(prompt),
                SamplingParams(temperature=self._chance.choice([0.0, 0.8])),
                max_tokens=self._chance.randint(1, 5),
                stop_token_ids=frozenset([VOCAB_SIZE - 1]),
            )
            for prompt in prompts
        ]
        return [done.token_ids for done in complete_requests(self._engine, specs)]


def _hold(
    model: Path, cache: Path, dtype: str, size: tuple[int, int], levels: "Queue[list[Level]]"
) -> None:
    num_turns, num_requests = size
    kept = CacheConfig(
        device_bytes=Size(num_bytes=1 << 20), disk_bytes=Size(num_bytes=8 << 20), directory=cache
    )
    engine = assemble(model, dtype, kept, threads=1).engine
    chats = Chats(engine)
    chats.warm_up()
    found = [Level.now()]
    chats.hold_turns(num_turns)
    found.append(Level.now())
    chats.answer_requests(num_requests)
    found.append(Level.now())
    engine.close()
    levels.put(found)  # at the end, for it begins a thread


# The dtypes leave the same behind, so the short run takes one; few commits' operations are enough.
RUNS = [
    pytest.param("float32", (30, 30), id="float32-short", marks=pytest.mark.matrix),
    pytest.param("float32", (1500, 2000), id="float32-long", marks=pytest.mark.soak),
    pytest.param("bfloat16", (1500, 2000), id="bfloat16-long", marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("dtype", "size"), RUNS)
def test_a_long_chat_and_many_requests_take_no_more_than_the_first_of_them(dtype, size, tmp_path):
    model = save_checkpoint(tmp_path / "model", tiny_model("llama", max_position_embeddings=2048))
    # In a process of its own, where nothing else has left anything.
    context = multiprocessing.get_context("spawn")
    levels: Queue[list[Level]] = context.Queue()
    process = context.Process(target=_hold, args=(model, tmp_path / "kv", dtype, size, levels))
    process.start()
    process.join()
    assert process.exitcode == 0
    warm, *later = levels.get(timeout=60)
    for level in later:
        assert level.megabytes <= MORE * warm.megabytes
        assert level.num_objects <= MORE * warm.num_objects
        assert level.num_descriptors <= warm.num_descriptors + 2
        assert level.num_threads <= warm.num_threads

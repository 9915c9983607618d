"""Host memory under an engine: the same answers, fewer tokens computed, and true counts of both."""

import random
from collections.abc import Iterator

import pytest

from kvchat.cache import arrivals
from kvchat.cache.arrivals import Arrival
from kvchat.cache.planner import Planner
from kvchat.core.types import CachedTokens
from kvchat.engine.request import RequestSpec
from support.chains import be_patient
from support.engine_harness import EngineHarness
from support.memory_tier import MemoryTier
from support.remembering_model import GREEDY, VOCAB_SIZE
from support.restarts import HISTORY, alone, spec
from support.soak_sizes import short_and_long

OTHER = tuple((i * 7 + 3) % VOCAB_SIZE for i in range(50))
# Room for one conversation of fifty tokens and its answer, in blocks of four.
SMALL = 17


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without end: what a test sees must not hang on when the copying thread has its turn."""
    monkeypatch.setattr(arrivals, "_NEWS_PATIENCE_S", 20.0)
    monkeypatch.setattr(Planner, "quick_patience_s", lambda self, num_tokens: 60.0)


@pytest.fixture
def engines() -> Iterator[list[EngineHarness]]:
    made: list[EngineHarness] = []
    yield made
    for engine in made:
        engine.engine.close()


def cached(engine: EngineHarness, request: RequestSpec) -> CachedTokens:
    """Run a request, hold its answer against the oracle, and return what it had not to compute."""
    number = engine.submit(request)
    engine.run()
    engine.assert_complete(number)
    usage = engine.ending(number).usage
    assert usage.cached.total + usage.prefilled_tokens == usage.prompt_tokens
    return usage.cached


def test_a_conversation_that_was_pushed_out_comes_back(engines: list[EngineHarness]) -> None:
    engine = EngineHarness(num_blocks=SMALL, num_host_blocks=40)
    engines.append(engine)
    answer = alone(spec(HISTORY))
    cached(engine, spec(HISTORY))
    cached(engine, spec(OTHER))

    again = cached(engine, spec((*HISTORY, *answer, 5)))

    assert again.host > 0
    assert again.device + again.host == 52, "all but the last partial block"
    status = engine.engine.status().tier("host")
    assert status is not None
    assert status.bytes_read > 0


def test_what_a_context_would_cost_counts_host_memory(engines: list[EngineHarness]) -> None:
    """A price once said that all of a conversation would be read again that had only been
    demoted.
    """
    engine = EngineHarness(num_blocks=SMALL, num_host_blocks=40)
    engines.append(engine)
    cached(engine, spec(HISTORY))
    engine.cache.evict_cold(5)
    assert engine.engine.chain.flush(60.0)

    held = engine.engine.cached_tokens(HISTORY)

    assert held.total == 48
    assert held.host > 0
    assert engine.engine.cached_tokens((9, *HISTORY)).total == 0


def test_without_room_on_the_host_it_is_computed_again(engines: list[EngineHarness]) -> None:
    engine = EngineHarness(num_blocks=SMALL, num_host_blocks=1)
    engines.append(engine)
    cached(engine, spec(HISTORY))
    cached(engine, spec(OTHER))

    assert cached(engine, spec(HISTORY)).host <= 4


def test_a_preempted_request_comes_back_from_host_memory(engines: list[EngineHarness]) -> None:
    """What gave way was once computed again from where others had pushed it out."""
    computed = {}
    for num_host_blocks in (0, 60):
        engine = EngineHarness(num_blocks=19, max_context=60, num_host_blocks=num_host_blocks)
        engines.append(engine)
        old = engine.submit(spec(HISTORY[:17], max_tokens=40))
        for _ in range(3):
            engine.step()
        young = engine.submit(spec(OTHER[:17], max_tokens=40))
        engine.run()

        assert engine.engine.status().num_preempted > 0
        engine.assert_complete(old)
        engine.assert_complete(young)
        computed[num_host_blocks] = engine.engine.status().num_tokens_computed
    assert computed[60] < computed[0]
    host = engine.engine.status().tier("host")
    assert host is not None
    assert host.bytes_read > 0


def test_who_gives_way_comes_back_from_host_memory_each_time(engines, monkeypatch):
    engine = EngineHarness(num_blocks=19, max_context=60, num_host_blocks=60)
    engines.append(engine)
    own = engine.engine.chain.arrivals
    cached(engine, spec(OTHER[:17], max_tokens=40))
    cached(engine, spec(HISTORY[:17], max_tokens=40))
    promoted: list[int] = []
    begin = own._begin

    def counted(arrival: Arrival) -> Arrival:
        begin(arrival)
        if not arrival.is_over and list(arrival.ids[:17]) == list(OTHER[:17]):
            promoted.append(len(arrival.ids))
        return arrival

    monkeypatch.setattr(own, "_begin", counted)
    numbers = [engine.submit(spec(ids[:17], max_tokens=40)) for ids in (HISTORY, OTHER)]
    while own.live:  # both begin together
        own.wait_for_news()
        own.settle()
    engine.run()

    assert promoted[0] == 17, "as a prompt"
    assert max(promoted) > 17, "and again after it had given way"
    for number in numbers:
        engine.assert_complete(number)


def test_where_computing_is_quicker_nothing_is_swapped(engines: list[EngineHarness]) -> None:
    engine = EngineHarness(num_blocks=SMALL, num_host_blocks=40)
    engines.append(engine)
    planner = engine.engine.chain.planner
    planner.prefill.of_long = 1e15
    planner.rates = {"to host": 1.0, "from host": 1.0}
    cached(engine, spec(HISTORY))
    cached(engine, spec(OTHER))

    assert cached(engine, spec(HISTORY)).host == 0
    host = engine.engine.status().tier("host")
    assert host is not None
    assert host.bytes_written == 0


def test_a_context_comes_up_from_host_memory_before_anybody_asks(engines):
    engine = EngineHarness(num_blocks=SMALL, num_host_blocks=40)
    engines.append(engine)
    cached(engine, spec(HISTORY))
    cached(engine, spec(OTHER))

    engine.engine.prefetch(HISTORY[:40])
    engine.run()
    again = cached(engine, spec(HISTORY[:45]))

    assert again.device + again.host == 44, "what it foresaw, and the rest at the start"
    assert again.host > 0


def test_a_request_goes_on_with_the_promotion_that_foresaw_it(engines):
    engine = EngineHarness(num_blocks=SMALL, num_host_blocks=40)
    engines.append(engine)
    cached(engine, spec(HISTORY))
    cached(engine, spec(OTHER))

    engine.engine.prefetch(HISTORY[:40])
    assert cached(engine, spec(HISTORY[:45])).total == 44
    engine.engine.prefetch(OTHER[:40])
    assert cached(engine, spec(HISTORY[:45])).total >= 44


# With a disk below


def with_disk(tier: MemoryTier, num_blocks: int = SMALL, num_host: int = 40) -> EngineHarness:
    engine = EngineHarness(num_blocks=num_blocks, open_tier=lambda: tier, num_host_blocks=num_host)
    be_patient(engine.engine.chain)
    return engine


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier(block_size=4, image_bytes=4 * 8)


def test_the_disk_gives_what_lies_behind_what_host_memory_has(engines, tier):
    first = with_disk(tier)
    cached(first, spec(HISTORY))
    first.engine.close()
    second = with_disk(tier)
    engines.append(second)
    cached(second, spec(HISTORY[:21]))
    cached(second, spec(OTHER))

    again = cached(second, spec(HISTORY))

    assert again.host > 0
    assert again.disk > 0
    assert again.total >= 48


def test_a_growing_prompt_is_written_before_its_answer_is_over(engines, tier):
    """A kill in the first answer to a long document once lost all of the document's KV."""
    engine = with_disk(tier, num_blocks=200)
    engines.append(engine)
    chain = engine.engine.chain
    chain.slow[0].writer._blocks_a_pack = 3
    chain.pack_tokens = 3 * engine.engine.cache.block_size
    document = tuple(i % VOCAB_SIZE for i in range(100))
    number = engine.submit(spec(document, max_tokens=15))
    while not engine.generated(number):
        engine.step()
    assert chain.flush(60.0)

    assert len(tier.blocks) == 24, "whole packs of what has been computed: 100 tokens are 25 blocks"
    engine.run()
    assert chain.flush(60.0)
    assert tier.num_written == len(tier.blocks) == 28
    engine.assert_complete(number)


def test_closing_keeps_what_is_unfinished_although_a_thread_is_shared(tier: MemoryTier) -> None:
    """Host memory was once let go of first, and with it the thread that was still to write."""
    engine = with_disk(tier)
    number = engine.submit(spec(HISTORY[:40], max_tokens=20))
    while not engine.generated(number):
        engine.step()

    engine.engine.close()

    assert len(tier.blocks) == 10


def test_an_engine_goes_on_writing_when_all_answers_are_given(engines, tier):
    engine = with_disk(tier, num_blocks=200)
    engines.append(engine)
    chain = engine.engine.chain
    chain.slow[0].writer._blocks_a_pack = 2
    chain.pack_tokens = 2 * engine.engine.cache.block_size
    chain.slow[0].thread._max_pending_bytes = 3 * tier._image_bytes
    number = engine.submit(spec(HISTORY))

    engine.run()

    assert chain.flush(60.0)
    assert len(tier.blocks) == (len(HISTORY) + 5) // 4
    engine.assert_complete(number)


class Callers:
    """Callers of a small engine over a small host and, some of them, a disk that outlives it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.tier = MemoryTier(4, 4 * 8)
        trunk = [rng.randrange(VOCAB_SIZE) for _ in range(44)]
        self.stories = [
            (*trunk[:cut], *(rng.randrange(VOCAB_SIZE) for _ in range(44 - cut)))
            for cut in (0, 10, 23, 44)
        ]
        self.num_host = 0
        self.num_disk = 0

    def live(self, has_disk: bool, num_acts: int) -> int:
        """Act on one engine until all are served; return how many tokens it had to compute."""
        rng = self.rng
        num_blocks, num_host = rng.choice([14, 18, 30]), rng.choice([3, 12, 60])
        if has_disk:
            engine = with_disk(self.tier, num_blocks, num_host)
        else:
            engine = EngineHarness(num_blocks, max_context=56, num_host_blocks=num_host)
        for _ in range(num_acts):
            self.act(engine)
        engine.run()
        for number in engine.specs:
            engine.assert_complete(number)
            usage = engine.ending(number).usage
            self.num_host += usage.cached.host
            self.num_disk += usage.cached.disk
            assert usage.cached.total < usage.prompt_tokens
        host = engine.engine.status().tier("host")
        assert host is not None
        assert host.num_bytes <= host.limit_bytes
        engine.engine.close()
        return engine.engine.status().num_tokens_computed

    def act(self, engine: EngineHarness) -> None:
        rng = self.rng
        action = rng.random()
        story = rng.choice(self.stories)
        if action < 0.2 and len(engine.live()) < 5:
            length = min(rng.randint(1, 44), engine.engine.max_context - 8)
            engine.submit(
                RequestSpec(
                    story[:length],
                    GREEDY,
                    max_tokens=rng.choice([1, 4, 8]),
                    num_samples=rng.choice([1, 1, 2]),
                )
            )
        elif action < 0.25:
            engine.engine.prefetch(story[: rng.randint(1, 40)])
        elif action < 0.3:
            engine.cache.evict_cold(rng.randint(1, 6))
        else:
            engine.step()
        engine.check()


@pytest.mark.parametrize("has_disk", [False, True], ids=["host", "host and disk"])
@short_and_long(2, 150)
def test_whoever_calls_gets_what_a_model_without_a_cache_says(size: int, has_disk: bool) -> None:
    num_host = num_disk = 0
    for seed in range(size):
        callers = Callers(random.Random(seed))
        for _ in range(2):
            callers.live(has_disk, num_acts=120)
        num_host += callers.num_host
        num_disk += callers.num_disk
    assert num_host > 0
    assert (num_disk > 0) == has_disk

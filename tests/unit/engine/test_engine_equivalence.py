"""Whatever the engine shares, chunks, mixes or preempts, the tokens are those of the plain oracle.

The model below answers from what it reads back out of its KV, so equality proves the KV right.
"""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.block_pool import BlockPool
from kvchat.cache.radix_tree import Node, RadixTree
from kvchat.core.types import FinishReason, SamplingParams
from kvchat.engine.request import RequestSpec
from support.engine_harness import EngineHarness
from support.matrix import spread
from support.remembering_model import GREEDY, VOCAB_SIZE, WatchFor, complete_without_cache
from support.soak_sizes import short_and_long

SAMPLED = SamplingParams(temperature=0.9, top_k=30, top_p=0.95, repetition_penalty=1.2, seed=11)


def conversations(count: int = 6) -> list[RequestSpec]:
    """Prompts that share beginnings of many lengths, with all manner of limits."""
    rng = random.Random(5)
    base = [rng.randrange(VOCAB_SIZE) for _ in range(50)]
    specs = []
    for number in range(count):
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))]
        specs.append(
            RequestSpec(
                prompt_ids=(*base[: rng.randint(0, 50)], *own),
                sampling=GREEDY if number % 2 else replace(SAMPLED, seed=number),
                max_tokens=rng.randint(1, 25),
                stop_token_ids=frozenset({7}),
            )
        )
    return specs


@pytest.mark.parametrize("reuse", [True, False], ids=["cache on", "cache off"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("max_step_tokens", [1, 7, 64])
def test_every_shape_of_step_gives_the_same_tokens(max_step_tokens, block_size, reuse):
    engine = EngineHarness(
        num_blocks=2 + 800 // block_size,
        block_size=block_size,
        reuse=reuse,
        max_step_tokens=max_step_tokens,
    )
    ids = [engine.submit(spec) for spec in conversations()]

    engine.run()

    for request_id in ids:
        engine.assert_complete(request_id)


def test_a_pool_too_small_for_all_preempts_and_changes_nothing() -> None:
    engine = EngineHarness(num_blocks=22, max_context=80, max_running=6)
    ids = [engine.submit(spec) for spec in conversations(10)]

    engine.run()

    assert engine.engine.status().num_preempted > 0
    assert engine.engine.status().num_evicted > 0
    for request_id in ids:
        engine.assert_complete(request_id)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_samples_are_those_of_separate_requests_with_their_seeds(sampling: SamplingParams) -> None:
    from kvchat.engine.sampler import sample_seed

    prompt = tuple(range(18))
    together = EngineHarness()
    request_id = together.submit(RequestSpec(prompt, sampling, max_tokens=12, num_samples=4))
    together.run()

    for number in range(4):
        alone = replace(sampling, seed=sample_seed(sampling.seed, number))
        expected = EngineHarness(reuse=False).complete(RequestSpec(prompt, alone, max_tokens=12))
        assert together.generated(request_id, number) == expected[0]
    assert together.ending(request_id, 0).usage.prefilled_tokens == 18
    assert together.ending(request_id, 3).usage.prefilled_tokens == 0


def test_different_samples_differ() -> None:
    engine = EngineHarness()
    request_id = engine.submit(RequestSpec((1, 2, 3), SAMPLED, max_tokens=12, num_samples=4))
    engine.run()

    assert len({tuple(engine.generated(request_id, number)) for number in range(4)}) == 4


def test_the_same_seed_gives_the_same_text_whatever_runs_beside_it() -> None:
    spec = RequestSpec((5, 6, 7, 8, 9), SAMPLED, max_tokens=30)
    [alone] = EngineHarness().complete(spec)

    crowded = EngineHarness(num_blocks=30, max_step_tokens=9)
    crowded.submit(conversations()[0])
    request_id = crowded.submit(spec)
    for stranger in conversations()[1:]:
        crowded.submit(stranger)
    crowded.run()

    assert crowded.generated(request_id) == alone
    assert len(alone) == 30


def test_the_next_turn_computes_only_what_is_new() -> None:
    engine = EngineHarness()
    first = RequestSpec(tuple(range(21)), GREEDY, max_tokens=6)
    [answer] = engine.complete(first)
    before = engine.engine.status().num_tokens_computed

    context = (*first.prompt_ids, *answer, 1, 2, 3)
    request_id = engine.submit(RequestSpec(context, GREEDY, max_tokens=1))
    engine.run()

    # The answer's last token was drawn but never computed.
    assert engine.engine.status().num_tokens_computed - before == 4
    assert engine.ending(request_id).usage.cached.device == len(context) - 4
    engine.assert_complete(request_id)


ENDLESS = RequestSpec(tuple(range(14)), replace(SAMPLED, seed=2), max_tokens=200)
TENTH = complete_without_cache(ENDLESS, 0, 60)[9]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_tokens": 1}, FinishReason.LENGTH),
        ({"max_tokens": 9}, FinishReason.LENGTH),
        ({"max_tokens": None}, FinishReason.LENGTH),
        ({"stop_token_ids": frozenset({TENTH})}, FinishReason.STOP),
        ({"stop_token_ids": frozenset(range(VOCAB_SIZE))}, FinishReason.STOP),
        ({"new_stop_watcher": lambda: WatchFor(TENTH, 1)}, FinishReason.STOP),
    ],
    ids=["one token", "nine", "context's end", "stop token", "at once", "stop string"],
)
def test_every_way_to_end_ends_where_the_oracle_does(change, reason):
    spec = replace(ENDLESS, **change)  # type: ignore[arg-type]
    engine = EngineHarness(max_context=60)
    request_id = engine.submit(spec)

    engine.run()

    engine.assert_complete(request_id)
    ending, generated = engine.ending(request_id), engine.generated(request_id)
    assert ending.reason is reason
    assert (ending.stop_token is not None) == ("stop_token_ids" in change)
    assert ending.usage.completion_tokens == len(generated) + (ending.stop_token is not None)


def test_a_stop_token_in_the_prompt_stops_nothing() -> None:
    spec = RequestSpec((7, 7, 7), GREEDY, max_tokens=5, stop_token_ids=frozenset({7}))
    expected = complete_without_cache(spec, 0, 120)

    assert EngineHarness().complete(spec) == [expected]
    assert expected


def test_times_are_in_order() -> None:
    engine = EngineHarness(max_step_tokens=4)
    request_id = engine.submit(RequestSpec(tuple(range(20)), GREEDY, max_tokens=5))
    engine.run()

    timing = engine.ending(request_id).timing
    assert 0 < timing.prefill_s <= timing.ttft_s < timing.total_s
    assert timing.ttft_s + timing.decode_s <= timing.total_s


def test_progress_never_goes_back_and_ends_with_the_whole_prompt() -> None:
    engine = EngineHarness(max_step_tokens=8)
    for spec in conversations():
        engine.submit(spec)
    engine.run()

    for request_id, spec in engine.specs.items():
        done = [p.done for p in engine.progress(request_id)]
        assert done[-1] == len(spec.prompt_ids)
        assert all(one < other for one, other in pairwise(done))


class Crowd:
    """Random callers: they submit, cancel, and now and then the model fails under them."""

    def __init__(self, seed: int, **limits: int) -> None:
        self.rng = random.Random(seed)
        self.failure: Exception | None = None
        self.fails_on = False
        self.engine = EngineHarness(fails=self._fail, **limits)
        self.cancelled: set[int] = set()
        self.stories: list[list[int]] = [[]]

    def _fail(self) -> None:
        if self.failure is not None:
            failure = self.failure
            self.failure = failure if self.fails_on else None
            raise failure

    def submit(self) -> None:
        rng = self.rng
        story = rng.choice(self.stories)
        prompt = story[: rng.randint(0, len(story))]
        prompt = [*prompt, *(rng.randrange(4) for _ in range(rng.randint(1, 12)))]
        prompt = prompt[: self.engine.engine.max_context - 1]
        self.stories.append(prompt)
        self.engine.submit(
            RequestSpec(
                tuple(prompt),
                GREEDY if rng.random() < 0.5 else replace(SAMPLED, seed=rng.randrange(3)),
                max_tokens=rng.choice([1, 5, 20, None]),
                stop_token_ids=frozenset(rng.sample(range(VOCAB_SIZE), 2)),
                new_stop_watcher=rng.choice([None, lambda: WatchFor(3, 2)]),
                num_samples=rng.choice([1, 1, 1, 2, 5]),
            )
        )

    def act(self) -> None:
        action = self.rng.random()
        if action < 0.3:
            self.submit()
        elif action < 0.35 and self.engine.live():
            request_id = self.rng.choice(self.engine.live()).request_id
            self.cancelled.add(request_id)
            self.engine.engine.cancel(request_id)
        elif action < 0.37:
            self.failure = self.rng.choice([RuntimeError(""), MemoryError(), IndexError("far")])
            self.fails_on = self.rng.random() < 0.3
        else:
            self.engine.step()
            self.failure = None

    def run_to_the_end(self, num_acts: int) -> None:
        for _ in range(num_acts):
            self.act()
        self.failure = None
        self.engine.run()
        self.assert_everyone_was_served()

    def assert_everyone_was_served(self) -> None:
        num_complete = 0
        for request_id, spec in self.engine.specs.items():
            if failures := self.engine.failures(request_id):
                assert "no room" not in failures[0].error.message
                continue
            for sample in range(spec.num_samples):
                expected = complete_without_cache(spec, sample, self.engine.engine.max_context)
                generated = self.engine.generated(request_id, sample)
                if self.engine.ending(request_id, sample).reason is FinishReason.CANCELLED:
                    assert request_id in self.cancelled
                    assert generated == expected[: len(generated)]
                else:
                    assert generated == expected
                    num_complete += 1
        assert num_complete > 20


LIMITS = {
    "roomy": {"num_blocks": 40, "block_size": 4, "max_context": 60},
    "tight": {"num_blocks": 12, "block_size": 4, "max_context": 44, "max_running": 3},
    "small steps": {"num_blocks": 30, "block_size": 2, "max_step_tokens": 3},
    "six blocks": {"num_blocks": 7, "block_size": 8, "max_context": 48, "max_step_tokens": 64},
    "one-token blocks": {"num_blocks": 80, "block_size": 1, "max_context": 70},
}


@pytest.mark.parametrize("limits", spread(LIMITS, always=["tight", "small steps"]))
@short_and_long(1, 30)
def test_random_callers_get_exactly_their_tokens(size: int, limits: str) -> None:
    for seed in range(size):
        Crowd(seed, **LIMITS[limits]).run_to_the_end(num_acts=400)


# Controls: faults planted in the cache, with its own checks switched off, must show in the tokens.


def skip_copying(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheManager, "_copy_on_write", lambda self, table, index: None)


def match_a_token_too_many(patch: pytest.MonkeyPatch) -> None:
    best_head = RadixTree._best_head

    def longer(self: RadixTree, node: Node, rest: bytes) -> tuple[int | None, int]:
        head, length = best_head(self, node, rest)
        return head, min(length + 1, self.block_size - 1) if head is not None else 0

    patch.setattr(RadixTree, "_best_head", longer)


def give_a_block_out_twice(patch: pytest.MonkeyPatch) -> None:
    allocate = BlockPool.allocate
    scratched: list[int] = []

    def careless(self: BlockPool, count: int, after: int | None = None) -> list[int]:
        blocks = allocate(self, count, after)
        if len(scratched) < 30 and len(blocks) > 1:
            scratched.append(blocks[0])
            self.release(blocks[:1])
            self.acquire(blocks[1:2])
            return [blocks[1], *blocks[1:]]
        return blocks

    patch.setattr(BlockPool, "allocate", careless)


def commit_the_wrong_tokens(patch: pytest.MonkeyPatch) -> None:
    commit = CacheManager.commit
    patch.setattr(
        CacheManager,
        "commit",
        lambda self, table, ids, count: commit(self, table, [1, *ids[:-1]], count),
    )


@pytest.mark.parametrize(
    "plant", [skip_copying, match_a_token_too_many, give_a_block_out_twice, commit_the_wrong_tokens]
)
def test_a_fault_in_the_cache_shows(plant, monkeypatch):
    plant(monkeypatch)
    monkeypatch.setattr(CacheManager, "check", lambda self, tables=None: None)
    crowd = Crowd(0, num_blocks=40, block_size=4, max_context=60)

    with pytest.raises(AssertionError):
        crowd.run_to_the_end(num_acts=600)

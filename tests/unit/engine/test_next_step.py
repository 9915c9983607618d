"""A decode step that is queued before the tokens of the one before are read changes no answer.

Its plain twin reads them first. Both run here over recorded steps (tests/support/graph_recorder.py)
whose tokens come late (tests/support/late_runner.py), beside an engine without graphs.
"""

import random
from pathlib import Path

import pytest

from kvchat.cache.block_pool import SCRATCH_BLOCK
from kvchat.core.types import FinishReason, SamplingParams
from kvchat.engine.engine import Engine
from kvchat.engine.ngram import NgramDrafter
from kvchat.engine.request import RequestSpec
from kvchat.engine.runner import Runner
from kvchat.engine.speculation import Mode, Speculation
from kvchat.model.gpu.graphs import GraphRunner
from kvchat.model.loader import LoadedModel
from support.graph_recorder import Recorder
from support.late_runner import LateRunner
from support.paged_engines import BLOCK_SIZE, GREEDY, SAMPLED, conversations, engine_over, paged
from support.paged_scene import MAX_CONTEXT, load_tiny
from support.said import Said, run, said_by
from support.specimens import random_ids

PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.3)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny("qwen3", Path(tmp_path_factory.mktemp("model")))


def plain(loaded: LoadedModel, num_blocks: int = 300) -> Engine:
    model, cache = paged(loaded, num_blocks)
    return engine_over(Runner(model, BLOCK_SIZE), cache, loaded)


def late(
    loaded: LoadedModel, num_blocks: int = 300, **settings: object
) -> tuple[Engine, LateRunner]:
    model, cache = paged(loaded, num_blocks)
    graphs = GraphRunner(model, BLOCK_SIZE, MAX_CONTEXT, SCRATCH_BLOCK, Recorder())
    runner = LateRunner(model, BLOCK_SIZE, graphs)
    return engine_over(runner, cache, loaded, **settings), runner


def num_ahead(log: list[tuple[str, int]]) -> int:
    """Return how many steps were queued before the tokens of the step before were read."""
    places = {entry: place for place, entry in enumerate(log)}
    steps = [number for word, number in log if word == "queue" and number > 1]
    return sum(places["queue", n] < places.get(("read", n - 1), -1) for n in steps)


def test_answers_are_those_of_an_engine_that_reads_first(loaded: LoadedModel) -> None:
    expected = run(plain(loaded), conversations())
    engine, runner = late(loaded)
    assert run(engine, conversations()) == expected

    twin, read_first = late(loaded, queues_next=False)
    assert run(twin, conversations()) == expected

    assert num_ahead(runner.log) > 20
    assert num_ahead(read_first.log) == 0


def test_all_but_the_first_and_the_last_step_of_an_answer_are_queued_early(loaded):
    engine, runner = late(loaded)
    spec = RequestSpec((5, 6, 7), SAMPLED, max_tokens=60)
    run(engine, [spec])  # captures the graph
    runner.log.clear()
    before = engine.status().num_steps

    said = said_by(engine, spec)

    assert engine.status().num_steps - before == 60
    queued = [entry for entry in runner.log if entry[0] == "queue"]
    assert num_ahead(runner.log) == len(queued) - 1
    assert len(queued) == 60, "no step is computed in vain where the end is known"
    assert said == said_by(plain(loaded), spec)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_stop_token_is_read_one_step_late_and_leaves_nothing(loaded, sampling):
    """The slot of the step in vain is given back; a longer conversation overwrites its KV."""
    prompt = (5, 6, 7, 8)
    free = RequestSpec(prompt, sampling, max_tokens=60)
    [answer] = said_by(plain(loaded), free)
    stop = answer[29]
    num_before = answer.index(stop)
    stopping = RequestSpec(prompt, sampling, max_tokens=60, stop_token_ids=frozenset({stop}))
    engine, runner = late(loaded)
    run(engine, [RequestSpec((1, 2, 3), sampling, max_tokens=20)])

    said, ends = run(engine, [stopping])

    assert list(said.values()) == [answer[:num_before]]
    assert list(ends.values()) == [FinishReason.STOP]
    numbers = [number for word, number in runner.log if word == "queue"]
    assert ("read", numbers[-1]) not in runner.log, "the last step was in vain"
    status = engine.cache.status()
    assert status.num_free + status.num_cached == status.num_blocks

    longer = RequestSpec((*prompt, *answer[:num_before], 9, 9, 9), GREEDY, max_tokens=40)
    assert said_by(engine, longer) == said_by(plain(loaded), longer)


def test_the_others_keep_their_tokens_when_one_of_them_stops(loaded: LoadedModel) -> None:
    prompts = [tuple(random_ids(5, seed=seed)) for seed in range(4)]
    free = [RequestSpec(prompt, SAMPLED, max_tokens=40) for prompt in prompts]
    answers = said_by(plain(loaded), *free)
    stop = frozenset({answers[1][17]})
    specs = [
        RequestSpec(prompt, SAMPLED, max_tokens=40, stop_token_ids=stop if index == 1 else {})
        for index, prompt in enumerate(prompts)
    ]
    expected = run(plain(loaded), specs)
    engine, runner = late(loaded)
    for count in (1, 2, 3, 4):  # so that a graph of each size is there
        run(engine, [RequestSpec((9, 9, seed), GREEDY, max_tokens=12) for seed in range(count)])
    runner.log.clear()

    said, ends = run(engine, specs)

    assert list(said.values()) == list(expected[0].values())
    assert list(ends.values()) == list(expected[1].values())
    runs = [entry for entry in runner.log if entry[0] == "run"]
    assert len(runs) <= 2, "the queued step counts for those that go on"


def test_requests_that_come_and_go_change_no_answer(loaded: LoadedModel) -> None:
    """Random arrivals and cancellations, in a cache so small that requests are preempted."""
    for seed in range(3):
        chance = random.Random(seed)
        kinds = (GREEDY, SAMPLED, SAMPLED, PENALISED)
        specs = [
            RequestSpec(
                tuple(random_ids(chance.choice((3, 17, 40)), seed=10 * seed + number)),
                chance.choice(kinds),
                max_tokens=chance.randrange(1, 40),
                stop_token_ids=frozenset(random_ids(12, seed=number)),
            )
            for number in range(10)
        ]
        expected = [said_by(plain(loaded), spec) for spec in specs]
        engine, runner = late(loaded, num_blocks=18)
        coming = list(specs)
        cancelled: set[int] = set()

        def between(
            said: Said,
            chance: random.Random = chance,
            coming: list[RequestSpec] = coming,
            engine: Engine = engine,
            cancelled: set[int] = cancelled,
        ) -> None:
            if coming and chance.random() < 0.15:
                engine.submit(coming.pop(0))
            if chance.random() < 0.01 and (running := engine.running()):
                engine.cancel(running[0].request_id)
                cancelled.add(running[0].request_id)

        said: Said = {}
        while coming:
            more, _ = run(engine, [coming.pop(0)], between)
            said |= more
        for (request_id, _), tokens in said.items():
            [whole] = expected[request_id - 1] or [[]]
            is_whole = request_id not in cancelled
            assert tokens == (whole if is_whole else whole[: len(tokens)]), (seed, request_id)
        assert num_ahead(runner.log) > 5


def test_a_step_that_failed_is_not_followed_by_the_one_queued_after_it(loaded):
    """The tokens could not be read: the request is computed again, and says the same."""
    spec = RequestSpec((5, 6, 7), SAMPLED, max_tokens=30)
    expected = said_by(plain(loaded), spec, spec)

    class Failing(LateRunner):
        num_left = 12

        def queue(self, *arguments: object) -> object:  # type: ignore[override]
            step = super().queue(*arguments)  # type: ignore[arg-type]
            self.num_left -= 1
            if step is None or self.num_left:
                return step

            def read() -> list[int]:
                raise RuntimeError("an illegal memory access was encountered")

            return type(step)(step.tokens, read)

    model, cache = paged(loaded)
    graphs = GraphRunner(model, BLOCK_SIZE, MAX_CONTEXT, SCRATCH_BLOCK, Recorder())
    engine = engine_over(Failing(model, BLOCK_SIZE, graphs), cache, loaded)

    assert said_by(engine, spec, spec) == expected


def test_drafts_and_changed_logits_take_the_plain_way(loaded: LoadedModel) -> None:
    for spec, speculation in (
        (RequestSpec((5, 6, 7), PENALISED, max_tokens=30), None),
        (RequestSpec((5, 6, 7), GREEDY, max_tokens=30, num_top_logprobs=2), None),
        (RequestSpec((5, 6, 7), GREEDY, max_tokens=30), Speculation([NgramDrafter()], Mode.AUTO)),
    ):
        expected = said_by(plain(loaded), spec)
        engine, runner = late(loaded, speculation=speculation)

        assert said_by(engine, spec) == expected

        assert not [entry for entry in runner.log if entry[0] == "queue"]


def test_speculation_that_is_switched_on_in_an_answer_drops_the_queued_step(loaded):
    spec = RequestSpec((5, 6, 7) * 5, GREEDY, max_tokens=60)
    expected, _ = run(plain(loaded), [spec])
    engine, runner = late(loaded, speculation=Speculation([NgramDrafter()], Mode.OFF))

    def between(said: Said) -> None:
        count = sum(map(len, said.values()))
        if count in (20, 40):
            engine.speculation.switch(Mode.AUTO if count == 20 else Mode.OFF)

    said, _ = run(engine, [spec], between)

    assert said == expected
    assert num_ahead(runner.log) > 10

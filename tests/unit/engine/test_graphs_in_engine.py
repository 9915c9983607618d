"""An engine whose small steps run as graphs says what one without says, drafts and all.

The graphs are recorders: see tests/support/graph_recorder.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvchat.cache.block_pool import SCRATCH_BLOCK
from kvchat.core.config import EngineConfig
from kvchat.core.stats import GraphStatus
from kvchat.core.types import SamplingParams
from kvchat.engine.assembly import new_graphs
from kvchat.engine.draft_model import ModelDrafter
from kvchat.engine.drafters import Drafter
from kvchat.engine.engine import Engine
from kvchat.engine.ngram import NgramDrafter
from kvchat.engine.request import RequestSpec
from kvchat.engine.runner import Runner, draw
from kvchat.engine.speculation import Speculation
from kvchat.model.gpu.graphs import Capturing, GraphRunner
from kvchat.model.loader import LoadedModel
from kvchat.model.paged_model import PagedModel
from kvchat.terminal.status import graph_lines
from support.fixed_drafts import FixedDraftPolicy
from support.graph_recorder import Broken, Recorder
from support.paged_engines import BLOCK_SIZE, GREEDY, SAMPLED, conversations, engine_over, paged
from support.paged_scene import MAX_CONTEXT, load_tiny
from support.said import said_by
from support.specimens import random_ids


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny("qwen3", Path(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny("qwen3", Path(tmp_path_factory.mktemp("draft")))


def graphs_of(model: PagedModel, capturing: Capturing | None) -> GraphRunner | None:
    if capturing is None:
        return None
    return GraphRunner(model, BLOCK_SIZE, MAX_CONTEXT, SCRATCH_BLOCK, capturing)


def build(
    loaded: LoadedModel, capturing: Capturing | None, speculation: Speculation | None = None
) -> Engine:
    model, cache = paged(loaded)
    runner = Runner(model, BLOCK_SIZE, graphs_of(model, capturing))
    return engine_over(runner, cache, loaded, speculation=speculation)


def status_of(engine: Engine) -> GraphStatus:
    status = engine.status().graphs
    assert status is not None
    return status


def test_answers_are_the_same_with_graphs_and_without(loaded: LoadedModel) -> None:
    expected = said_by(build(loaded, None), *conversations())
    engine = build(loaded, Recorder())

    assert said_by(engine, *conversations()) == expected
    assert said_by(build(loaded, Recorder()), *conversations()) == expected

    status = status_of(engine)
    assert status.num_captured >= 2, "several counts of rows were decoded"
    assert status.num_replayed > 2 * status.num_eager
    assert not status.trouble
    assert build(loaded, None).status().graphs is None


def test_tokens_are_drawn_in_the_graph_where_nothing_else_is_asked_of_the_logits(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repetition penalty changes logits by the text so far."""
    num_by_host = 0

    def counting(*args: Any) -> Any:
        nonlocal num_by_host
        num_by_host += 1
        return draw(*args)

    monkeypatch.setattr("kvchat.engine.engine.draw", counting)
    for sampling in (GREEDY, SAMPLED):
        specs = [RequestSpec((5, 6, 7), sampling, max_tokens=60)]
        expected = said_by(build(loaded, None), *specs)
        num_by_host = 0
        engine = build(loaded, Recorder())

        assert said_by(engine, *specs) == expected
        assert num_by_host == status_of(engine).num_eager <= 4
        assert status_of(engine).num_replayed >= 56

    penalised = SamplingParams(temperature=0.0, repetition_penalty=1.3)
    specs = [RequestSpec((5, 6, 7), penalised, max_tokens=60)]
    expected = said_by(build(loaded, None), *specs)
    num_by_host = 0
    engine = build(loaded, Recorder())

    assert said_by(engine, *specs) == expected
    assert num_by_host == 60
    assert status_of(engine).num_replayed >= 56


def test_samples_that_begin_in_a_graph_draw_each_its_own_first_token(loaded: LoadedModel) -> None:
    """They share a row of logits, and a graph draws one token from it."""
    decode = [RequestSpec((5, 6, 7), GREEDY, max_tokens=20)]
    # One token to compute, as where all else of a prompt is cached; and no step but that.
    siblings = [RequestSpec((9,), SAMPLED, max_tokens=1, num_samples=5)]
    expected = said_by(build(loaded, None), *siblings)
    engine = build(loaded, Recorder())
    said_by(engine, *decode)
    num_replayed = status_of(engine).num_replayed

    said = said_by(engine, *siblings)

    assert status_of(engine).num_replayed == num_replayed + 1
    assert said == expected
    assert len(set(map(tuple, said))) > 1


def test_drafts_are_verified_by_graphs_and_the_text_stays(loaded, draft):
    """A draft model that is the target's copy: most of its drafts are right."""
    pair = [
        RequestSpec((5, 6, 7) * 9, GREEDY, max_tokens=120),
        RequestSpec(tuple(random_ids(70, seed=1)), SAMPLED, max_tokens=90),
    ]
    expected = said_by(build(loaded, None), *pair)

    def drafting(capturing: Capturing | None) -> Drafter:
        model, cache = paged(draft)
        runner = Runner(model, cache.block_size, graphs_of(model, capturing))
        return ModelDrafter(runner, cache, draft.spec.vocab_size, MAX_CONTEXT)

    drafters: dict[str, Callable[[], tuple[Drafter, Recorder]]] = {
        "ngram": lambda: (NgramDrafter(), Recorder()),
        "model": lambda: (drafting(recorder := Recorder()), recorder),
    }
    for make in drafters.values():
        drafter, recorder = make()
        engine = build(loaded, Recorder(), Speculation([drafter], policy=FixedDraftPolicy(4)))

        assert said_by(engine, *pair) == expected

        assert engine.speculation.total.use().num_drafted > 10
        assert status_of(engine).num_replayed > 10
        assert isinstance(drafter, NgramDrafter) or recorder.num_replayed > 40


@pytest.mark.parametrize("how", ["raises", "same numbers for ever", "later"])
def test_broken_graphs_are_never_a_broken_chat(how: str, loaded: LoadedModel) -> None:
    expected = said_by(build(loaded, None), *conversations())
    engine = build(loaded, Broken(how))

    assert said_by(engine, *conversations()) == expected

    lines = graph_lines(status_of(engine))
    assert len(lines) == 2
    assert "RuntimeError" in lines[1]


def test_nothing_is_captured_while_somebody_waits_for_a_first_token(loaded: LoadedModel) -> None:
    engine = build(loaded, recorder := Recorder())
    engine.submit(RequestSpec((1, 2, 3), GREEDY, max_tokens=60))
    for _ in range(3):
        engine.step()
    assert status_of(engine).num_eager >= 2
    engine.submit(RequestSpec(tuple(random_ids(300, seed=9)), GREEDY, max_tokens=3))

    while any(not request.is_decoding for request in engine._scheduler.requests()):
        assert recorder.num_captured == 0
        engine.step()
    for _ in range(4):
        engine.step()

    assert recorder.num_captured > 0


def test_only_a_cuda_device_is_asked_for_graphs(loaded: LoadedModel) -> None:
    model, cache = paged(loaded)

    assert new_graphs(model, cache, EngineConfig(graphs=True)) is None

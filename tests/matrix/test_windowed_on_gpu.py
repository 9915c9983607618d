"""Windows on a GPU, for which a CPU stands in: fused layers, captured steps, queued steps.

The plain twin keeps everything. Recorders take the place of graphs
(tests/support/graph_recorder.py), and tokens come late, as from a GPU
(tests/support/late_runner.py). Each chat passes its window of 8 tokens ten times.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvchat_kernels.paged_attention as paged_attention_package
from kvchat.cache.windowed_pool import WindowedKvPool
from kvchat.core.types import SamplingParams
from kvchat.engine.draft_model import ModelDrafter
from kvchat.engine.drafters import DraftOrder
from kvchat.engine.engine import Engine
from kvchat.engine.request import RequestSpec
from kvchat.engine.speculation import Speculation
from kvchat.model.gpu import step_buffers
from kvchat.model.hf.module_adapter import KvBinding
from kvchat.model.loader import LoadedModel
from kvchat_kernels.paged_attention import Implementation
from support.fixed_drafts import FixedDraftPolicy
from support.fused_models import load_fused
from support.graph_recorder import Recorder
from support.interpreter import Interpreter
from support.late_runner import LateRunner
from support.matrix import spread
from support.memory_tier import MemoryTier
from support.said import Said, run, said_by
from support.specimens import cache_and_runner, engine_on, random_ids
from support.watched_logits import watched_logits

FAMILIES = ["gemma3, mixed windows", "mistral, window", "gpt_oss, sinks", "gemma3n, shared KV"]
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.2, top_p=0.95, seed=4)
CHUNKS = {"block_size": 4, "max_step_tokens": 7, "num_blocks": 120}


@pytest.fixture(scope="module", params=spread(FAMILIES, FAMILIES[:1]))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_fused(tmp_path_factory.mktemp("model"), request.param, "float32")


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> list[list[int]]:
    """The answers of the chat where layers keep everything."""
    return chat(engine(loaded))


def engine(loaded: LoadedModel, num_window_blocks: int = 0, **settings: Any) -> Engine:
    """Return an engine as on a GPU; without window blocks its layers keep everything."""
    both = CHUNKS | settings
    return engine_on(loaded, **both, num_window_blocks=num_window_blocks, capturing=Recorder())


def chat(made: Engine, between: Callable[[], Engine] | None = None) -> list[list[int]]:
    """Return all answers of a chat: a turn beside two others, one of which forks, then turns and
    undone turns; each by the engine that `between` returns.
    """
    prompt = tuple(random_ids(60, 1))
    beside = [
        RequestSpec(tuple(random_ids(33, 2)), SAMPLED, max_tokens=30, num_samples=2),
        RequestSpec((*prompt[:20], 3, 4), GREEDY, max_tokens=25),
    ]
    said = said_by(made, RequestSpec(prompt, GREEDY, max_tokens=24), *beside)
    context = (*prompt, *said[0])
    for turn in range(3):
        made = between() if between is not None else made
        [answer] = said_by(made, RequestSpec((*context, turn, 5, 6), SAMPLED, max_tokens=9))
        said += [answer, *said_by(made, RequestSpec((*context[:-7], 9), GREEDY, max_tokens=9))]
        context = (*context, turn, 5, 6, *answer)[:110]
    return said


def test_answers_are_those_of_layers_that_keep_everything(loaded, expected):
    made = engine(loaded, 40)

    assert chat(made) == expected

    status = made.status().graphs
    assert status is not None
    assert not status.trouble
    assert status.num_captured >= 4, "several counts of rows were decoded"
    assert status.num_replayed > 2 * status.num_eager
    assert num_ahead(made) > 20
    assert isinstance(made.cache.kv_pool, WindowedKvPool)


def num_ahead(made: Engine) -> int:
    """Return how many steps were queued before the tokens of the step before were read."""
    assert isinstance(made._runner, LateRunner)
    log = {entry: place for place, entry in enumerate(made._runner.log)}
    queued = [number for word, number in log if word == "queue" and number > 1]
    return sum(log["queue", n] < log.get(("read", n - 1), -1) for n in queued)


def logits_of(made: Engine) -> list[torch.Tensor]:
    """Return the logits of every step of a chat that asks for them."""
    rows = watched_logits(made)
    prompt = tuple(random_ids(60, 1))
    forked = RequestSpec(prompt, GREEDY, max_tokens=20, num_samples=2, num_top_logprobs=1)
    [answer, _] = said_by(made, forked)
    said_by(made, replace(forked, prompt_ids=(*prompt, *answer, 5, 6, 7), num_samples=1))
    return rows


def test_logits_are_equal_to_the_bit_where_all_is_kept(loaded: LoadedModel) -> None:
    whole = logits_of(engine(loaded))
    made = engine(loaded, 14)

    windowed = logits_of(made)

    assert len(windowed) == len(whole) > 40
    assert all(torch.equal(one, other) for one, other in zip(windowed, whole, strict=True))
    assert made.status().graphs.num_replayed > 30  # type: ignore[union-attr]


@pytest.mark.parametrize("num_window_blocks", [12, 24])
def test_answers_stay_where_windows_have_little_room(loaded, expected, num_window_blocks):
    assert chat(engine(loaded, num_window_blocks)) == expected


def test_what_was_pushed_out_to_host_memory_comes_back(loaded, expected):
    made = engine(loaded, 40, num_host_blocks=200)

    def push_out() -> Engine:
        made.cache.evict_cold(1 << 20)
        assert made.chain.flush(60.0)
        return made

    assert chat(made, push_out) == expected
    host = made.status().tier("host")
    assert host is not None
    assert host.bytes_read > 0
    made.close()


def test_restarts_go_on_at_every_turn(loaded: LoadedModel, expected: list[list[int]]) -> None:
    pool = engine(loaded).cache.kv_pool
    tier = MemoryTier(CHUNKS["block_size"], pool.geometry.block_bytes)
    made = [engine(loaded, 40, open_tier=lambda: tier)]

    def restarted() -> Engine:
        made[-1].close()
        made.append(engine(loaded, 40, open_tier=lambda: tier))
        return made[-1]

    assert chat(made[0], restarted) == expected
    made[-1].close()
    assert tier.num_read > 0
    assert tier.num_quarantined == 0


class Mistaken(ModelDrafter):
    """Proposes another token in place of the second of every third draft."""

    num_proposed = 0

    def propose(self, wanted: Sequence[DraftOrder]) -> list[Sequence[int]]:
        drafts = []
        for draft in super().propose(wanted):
            self.num_proposed += 1
            is_spoilt = not self.num_proposed % 3 and len(draft) > 1
            drafts.append([draft[0], draft[1] ^ 1, *draft[2:]] if is_spoilt else draft)
        return drafts


def test_drafts_change_no_answer(request, tmp_path, loaded, expected):
    """The draft model is the target's copy, with windows and graphs of its own."""
    draft = load_fused(tmp_path, request.node.callspec.params["loaded"], "float32")
    cache, runner = cache_and_runner(draft, 4, 120, 40, capturing=(recorder := Recorder()))
    drafter = Mistaken(runner, cache, draft.spec.vocab_size, draft.max_context)
    speculation = Speculation([drafter], policy=FixedDraftPolicy(3))
    made = engine(loaded, 40, speculation=speculation)

    assert chat(made) == expected

    use = speculation.total.use()
    assert 0.6 * use.num_drafted < use.num_accepted < 0.95 * use.num_drafted
    assert use.num_drafted > 60
    assert recorder.num_replayed > 40
    assert made.status().graphs.num_replayed > 20  # type: ignore[union-attr]


def random_specs(chance: random.Random, seed: int) -> list[RequestSpec]:
    """Return requests of which some begin alike."""
    common = random_ids(40, seed=100 + seed)
    return [
        RequestSpec(
            (*common[: chance.choice((0, 12, 40))], *random_ids(chance.choice((3, 17)), number)),
            chance.choice((GREEDY, SAMPLED)),
            max_tokens=chance.randrange(1, 40),
            stop_token_ids=frozenset(random_ids(6, seed=number)),
        )
        for number in range(10)
    ]


@pytest.mark.parametrize(
    ("num_host_blocks", "seed"),
    spread([(room, seed) for room in (0, 60) for seed in range(2)], [(0, 0), (60, 1)]),
)
def test_requests_that_come_and_go_change_no_answer(num_host_blocks, seed, loaded):
    """Random arrivals and cancellations, in so few blocks that requests are preempted."""
    chance = random.Random(seed)
    coming = random_specs(chance, seed)
    expected = [(said_by(engine(loaded), spec) or [[]])[0] for spec in coming]
    made = engine(loaded, 17, num_blocks=40, num_host_blocks=num_host_blocks)
    cancelled: set[int] = set()

    def between(_: Said) -> None:
        if coming and chance.random() < 0.15:
            made.submit(coming.pop(0))
        if chance.random() < 0.01 and (running := made.running()):
            made.cancel(running[0].request_id)
            cancelled.add(running[0].request_id)

    said: Said = {}
    while coming:
        said |= run(made, [coming.pop(0)], between)[0]
    for (request_id, _), tokens in said.items():
        whole = expected[request_id - 1]
        is_whole = request_id not in cancelled
        assert tokens == (whole if is_whole else whole[: len(tokens)]), request_id
    assert num_ahead(made) > 5
    assert made.cache.status().num_evicted > 20
    made.close()


# Controls: what a GPU's path may get wrong, planted, must show.


def read_the_table_of_all_layers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvBinding, "slots_of", lambda self, batch: batch)


def leave_tables_of_windows_as_they_were_captured(patch: pytest.MonkeyPatch) -> None:
    fill = step_buffers._Tables.fill
    of_row: dict[tuple[int, int], int] = {}

    def once_per_length(self: Any, row: int, blocks: list[int]) -> None:
        if of_row.setdefault((id(self), row), 0) < len(blocks):
            of_row[id(self), row] = len(blocks)
            fill(self, row, blocks)

    patch.setattr(step_buffers._Tables, "fill", once_per_length)


def write_to_slots_of_all_layers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step_buffers, "slots_in_windows", lambda slots, *_: list(slots))


@pytest.mark.parametrize(
    "plant",
    [
        read_the_table_of_all_layers,
        leave_tables_of_windows_as_they_were_captured,
        write_to_slots_of_all_layers,
    ],
)
def test_a_fault_in_windows_shows(plant, monkeypatch, tmp_path):
    made = load_fused(tmp_path, "mistral, window", "float32")
    expected = chat(engine(made))
    plant(monkeypatch)
    try:
        found = chat(engine(made, 40))
    except AssertionError:
        return
    assert found != expected


# The kernels


def logits_on_kernels(name: str, directory: Path) -> tuple[float, int]:
    """Return the largest difference of logits over windows and over pools that keep everything, and
    how many layers' attention ran on kernels; all memory but what is written is NaN.
    """
    layers: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            paged_attention_package,
            "implementation_for",
            lambda *layer: layers.append(layer) or Implementation("triton"),
        )
        loaded = load_fused(directory, name, "float32")
        found = [logits_of(poisoned(engine(loaded, count))) for count in (0, 14)]
    return largest_difference(*found), len(layers)


def poisoned(made: Engine) -> Engine:
    for layer in made.cache.kv_pool.layers:
        for tensor in layer.tensors:
            tensor.fill_(torch.nan)
    return made


def largest_difference(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    pairs = zip(some, others, strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs if len(one))


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", ["gpt_oss, sinks"])
def test_logits_on_kernels_are_equal(name: str, interpreter: Interpreter, tmp_path: Path) -> None:
    difference, num_layers = interpreter(logits_on_kernels, name, tmp_path)

    assert difference == 0
    assert num_layers > 100

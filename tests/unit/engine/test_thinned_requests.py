"""Requests that go on without some of their KV: what stays is what the question, or the answer so
far, attends to most, and the answer is that of transformers over a cache that lost the same tokens.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvchat.cache.thinned_kv import ThinnedBeginning, has_thinned
from kvchat.core.errors import UsageError
from kvchat.core.events import SampleFinished, TokensGenerated
from kvchat.core.stats import KvPlaces
from kvchat.core.text import Size
from kvchat.core.types import KeptPositions, SamplingParams, Usage, digest_of_ids
from kvchat.engine.engine import Engine
from kvchat.engine.request import Request, RequestSpec, Thinning
from kvchat.engine.speculation import Speculation
from kvchat.model.spec import Gathered
from support.fixed_drafts import FixedDraftPolicy
from support.private_tables import greedy_over, thinned_cache
from support.said import Said, run, said_by
from support.specimens import Specimen, engine_on, random_ids
from support.trial_drafters import GarbageDrafter

READ = random_ids(100, 1)
NUM_LEADING, NUM_LAST = 6, 18
GREEDY = SamplingParams(temperature=0.0)


class Answered:
    """What requests together gave, and the positions of their tables at each of their tokens."""

    def __init__(self, engine: Engine, *specs: RequestSpec) -> None:
        self.tokens: dict[int, list[int]] = {engine.submit(spec): [] for spec in specs}
        self.usage: dict[int, Usage] = {}
        self.drops: dict[int, list[tuple[int, tuple[int, ...]]]] = {i: [] for i in self.tokens}
        while len(self.usage) < len(specs):
            for event in engine.step():
                if isinstance(event, TokensGenerated):
                    self.tokens[event.request_id].extend(event.token_ids)
                elif isinstance(event, SampleFinished):
                    self.usage[event.request_id] = event.usage
            for request in engine.running():
                self._note(request)
            engine.cache.check([r.table for r in engine.running() if r.table])

    def _note(self, request: Request) -> None:
        assert request.table is not None
        own = request.table.positions
        drops = self.drops[request.request_id]
        if own is not None and (not drops or drops[-1][1] != own.first):
            drops.append((own.next_position, own.first))

    @property
    def first(self) -> list[int]:
        return self.tokens[min(self.tokens)]

    @property
    def first_usage(self) -> Usage:
        return self.usage[min(self.usage)]

    @property
    def first_drops(self) -> list[tuple[int, tuple[int, ...]]]:
        return self.drops[min(self.drops)]


def within(budget: Size, prompt: list[int] = READ, num_tokens: int = 12) -> RequestSpec:
    thinning = Thinning(budget=budget, num_leading=NUM_LEADING, num_last=NUM_LAST)
    return RequestSpec(tuple(prompt), GREEDY, max_tokens=num_tokens, thinning=thinning)


@torch.inference_mode()
def answer_without(
    made: Specimen, prompt: list[int], drops: list[tuple[int, tuple[int, ...]]], num_tokens: int
) -> list[int]:
    """The greedy answer of transformers' own cache, from which the same tokens are dropped when so
    many positions have been read.
    """
    model, cached, dropping = made.reference, DynamicCache(), dict(drops)
    held = list(range(len(prompt)))
    logits = model(torch.tensor([prompt]), past_key_values=cached).logits
    tokens = [int(logits[0, -1].argmax())]
    while len(tokens) < num_tokens:
        position = len(prompt) + len(tokens) - 1
        if position in dropping:
            left = torch.tensor([held.index(each) for each in dropping[position]])
            for layer in cached.layers:
                layer.keys, layer.values = layer.keys[:, :, left], layer.values[:, :, left]
            held = list(dropping[position])
        held.append(position)
        logits = model(
            torch.tensor([tokens[-1:]]),
            position_ids=torch.tensor([[position]]),
            past_key_values=cached,
        ).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def attention_of(made: Specimen, prompt: list[int], num_rows: int) -> torch.Tensor:
    """How much the last rows attend to each position: transformers' own weights, added over rows,
    the mean over heads and layers and then over five neighbours.
    """
    made.reference.set_attn_implementation("eager")
    with torch.inference_mode():
        out = made.reference(torch.tensor([prompt]), output_attentions=True)
    weights = torch.stack([each[0, :, -num_rows:].sum(dim=1) for each in out.attentions])
    by_position = weights.mean(dim=(0, 1)).tolist()
    return torch.tensor(
        [
            sum(near := by_position[max(0, i - 2) : i + 3]) / len(near)
            for i in range(len(by_position))
        ]
    )


def test_a_question_keeps_what_it_attends_to(specimen: Any) -> None:
    """Beside the first tokens, the question and the last 64; the answer goes on over these."""
    made = specimen("llama")
    answered = Answered(engine_on(made.loaded), within(Size(share=0.9)))

    [(at, positions)] = answered.first_drops
    scores = attention_of(made, READ, NUM_LAST)
    scores[:NUM_LEADING], scores[-22:] = torch.inf, torch.inf
    # A quarter of the budget stays for the latest tokens, another is for those to come.
    assert at == len(READ)
    assert set(positions) == set(scores.topk(90 - 22).indices.tolist())
    assert answered.first == answer_without(made, READ, answered.first_drops, 12)
    dropped = answered.first_usage.dropped
    assert dropped is not None
    assert (dropped.method, dropped.num_tokens) == ("SnapKV", 100)


@pytest.mark.parametrize("name", ["llama", "gemma3, mixed windows", "gpt_oss, sinks"])
def test_a_growing_answer_drops_what_is_attended_to_least(specimen: Any, name: str) -> None:
    """Again and again, at intervals; the budget holds at every token."""
    made = specimen(name)
    made.reference.set_attn_implementation("eager")
    token_bytes = engine_on(made.loaded).cache.kv_pool.geometry.token_bytes
    budget = Size(num_bytes=84 * token_bytes)
    answered = Answered(engine_on(made.loaded), within(budget, READ[:70], 50))

    assert len(answered.first_drops) == 2
    for _, positions in answered.first_drops:
        assert set(range(NUM_LEADING)) | set(range(70 - NUM_LAST, 70)) <= set(positions)
        assert len(positions) <= 84
    if name == "llama":
        drops = answered.first_drops
        assert answered.first == answer_without(made, READ[:70], drops, 50)
    dropped = answered.first_usage.dropped
    assert dropped is not None
    assert dropped.method == "H2O"


def test_a_second_question_reads_the_document_as_a_whole(specimen: Any) -> None:
    """All of its KV is still there: nothing of the first answer's choice is found."""
    made = specimen("llama")
    engine = engine_on(made.loaded)
    first = Answered(engine, within(Size(share=0.5))).first
    prompt = [*READ, *first, *random_ids(20, 9)][: 128 - 12 - 1]
    exact = Answered(engine, RequestSpec(tuple(prompt), GREEDY, max_tokens=12))
    assert exact.first == made.generate(prompt)[:12]
    assert exact.first_usage.cached.total == len(READ)


def test_requests_with_and_without_a_budget_run_side_by_side(specimen: Any) -> None:
    made = specimen("llama")
    alone = Answered(engine_on(made.loaded), within(Size(share=0.8))).first
    spec = RequestSpec(tuple(READ), GREEDY, max_tokens=12)
    both = Answered(engine_on(made.loaded), within(Size(share=0.8)), spec)
    assert list(both.tokens.values()) == [alone, made.generate(READ)[:12]]


def beginning(num_kept: int = 40) -> ThinnedBeginning:
    positions = sorted({*range(4), *random.Random(1).sample(range(4, 90), num_kept - 4)})
    return ThinnedBeginning.of(READ[:90], positions, "KVzip")


def after(thinned: ThinnedBeginning, more: list[int], **settings: Any) -> RequestSpec:
    thinning = Thinning(beginning=thinned)
    prompt = (*READ[:90], *more)
    return RequestSpec(prompt, GREEDY, max_tokens=10, thinning=thinning, **settings)


@torch.inference_mode()
def answer_after(made: Specimen, thinned: ThinnedBeginning, more: list[int]) -> list[int]:
    """Transformers' greedy answer to what follows a beginning of which only some is left."""
    cached = thinned_cache(made.reference, list(thinned.positions), READ[:90])
    return greedy_over(made.reference, cached, more, 90, 10)


@pytest.mark.parametrize("num_blocks", [None, 32])
def test_chats_begin_with_a_thinned_beginning(specimen: Any, num_blocks: int | None) -> None:
    """The first reads it as a whole; the others, and later turns, begin with what is left of it."""
    made, thinned = specimen("llama"), beginning()
    engine = engine_on(made.loaded, num_blocks=num_blocks)
    one, other = random_ids(7, 3), random_ids(9, 4)

    first = Answered(engine, after(thinned, one))
    assert first.first == answer_after(made, thinned, one)
    assert first.first_usage.cached.total == 0
    second = Answered(engine, after(thinned, other))
    assert second.first == answer_after(made, thinned, other)
    assert second.first_usage.cached.total == 90

    turn = [*one, *first.first, 5, 6]
    third = Answered(engine, after(thinned, turn))
    assert third.first == answer_after(made, thinned, turn)
    assert third.first_usage.cached.total == 90 + len(one) + 9
    plain = RequestSpec((*READ[:90], *one), GREEDY, max_tokens=10)
    assert Answered(engine, plain).first == made.generate([*READ[:90], *one])[:10]


def test_samples_and_requests_share_a_thinned_beginning(specimen: Any) -> None:
    made, thinned = specimen("llama"), beginning()
    engine = engine_on(made.loaded)
    one, other = random_ids(7, 3), random_ids(9, 4)
    answers = said_by(engine, after(thinned, one), after(thinned, other, num_samples=2))
    expected = answer_after(made, thinned, other)
    assert answers == [answer_after(made, thinned, one), expected, expected]


def test_a_request_sent_back_begins_with_the_thinned_beginning_again(specimen: Any) -> None:
    """Its answer so far is part of what is found."""
    made, thinned = specimen("llama"), beginning()
    engine = engine_on(made.loaded)
    engine.submit(after(thinned, [1, 2, 3]))
    tokens: list[int] = []
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokensGenerated):
                tokens += event.token_ids
        [running] = engine.running() or [None]
        if len(tokens) in (1, 6) and running is not None:
            engine._scheduler._send_back(running)
    assert tokens == answer_after(made, thinned, [1, 2, 3])
    engine.cache.check([])


def test_forgetting_any_context_forgets_thinned_beginnings(specimen: Any) -> None:
    """The next request reads it as a whole, and thins it again."""
    made, thinned = specimen("llama"), beginning()
    engine = engine_on(made.loaded)
    Answered(engine, after(thinned, [1, 2]))
    assert has_thinned(engine.cache, thinned, READ)
    engine.forget([(READ[:20], 0)], lambda: None)
    assert not has_thinned(engine.cache, thinned, READ)
    assert Answered(engine, after(thinned, [1, 2])).first == answer_after(made, thinned, [1, 2])


@pytest.mark.parametrize("num_window_blocks", [0, 60])
def test_layers_with_a_window_see_what_is_left_of_it(specimen: Any, num_window_blocks: int) -> None:
    """The same whether they keep everything or a window; the window reaches back over the drop."""
    made, thinned = specimen("gemma3, mixed windows"), beginning(80)
    engine = engine_on(made.loaded, num_window_blocks=num_window_blocks)
    whole = engine_on(made.loaded)
    specs = [after(thinned, random_ids(7, seed)) for seed in (3, 3, 4)]
    expected = [Answered(whole, spec).first for spec in specs]
    engine = engine_on(made.loaded, num_window_blocks=num_window_blocks)
    found = [Answered(engine, spec) for spec in specs]
    assert [each.first for each in found] == expected
    # Window blocks are kept at the end of the beginning, and at those of contexts.
    again = 90 if num_window_blocks else len(specs[0].prompt_ids) - 1
    assert [each.first_usage.cached.total for each in found][1:] == [again, 90]
    budget = within(Size(share=0.8), num_tokens=20)
    assert len(Answered(engine, budget).first_drops) >= 1
    engine.cache.check([])


@pytest.mark.parametrize("name", ["gemma3, mixed windows", "gpt_oss, sinks"])
def test_a_budget_is_the_same_where_layers_keep_a_window(specimen: Any, name: str) -> None:
    """The rows that are computed again see whole windows. These were gone: such rows had no window
    block, and nothing was dropped, or longer windows were read where they no longer were.
    """
    made = specimen(name)
    token_bytes = engine_on(made.loaded).cache.kv_pool.geometry.token_bytes
    spec = within(Size(num_bytes=84 * token_bytes), READ[:70], 50)
    whole = Answered(engine_on(made.loaded), spec)
    engine = engine_on(made.loaded, num_window_blocks=60)

    found = Answered(engine, spec)

    assert found.first_drops == whole.first_drops
    assert len(found.first_drops) == 2
    assert found.first == whole.first
    engine.cache.check([])


def test_what_is_held_behind_a_window_is_let_go_for_lack_of_room(specimen: Any) -> None:
    """Then fewer rows are scored; the budget holds all the same."""
    made = specimen("gemma3, mixed windows")
    engine = engine_on(made.loaded, max_step_tokens=8, num_window_blocks=7)
    token_bytes = engine.cache.kv_pool.geometry.token_bytes

    found = Answered(engine, within(Size(num_bytes=84 * token_bytes), READ[:70], 50))

    assert all(len(positions) <= 84 for _, positions in found.first_drops)
    assert len(found.first_drops) == 2
    engine.cache.check([])


def test_repeating_tells_what_each_position_is_needed_for(specimen: Any) -> None:
    """The largest of transformers' own weights, of all rows and neighbours, the mean over heads."""
    made = specimen("llama")
    engine = engine_on(made.loaded)
    read, part = READ[:70], [7, 8, *READ[:40]]
    assert engine.repeat_scores(read, part) is None, "its KV is not there"
    Answered(engine, RequestSpec(tuple(read), max_tokens=0))

    scores = engine.repeat_scores(read, part)

    assert scores is not None
    made.reference.set_attn_implementation("eager")
    with torch.inference_mode():
        out = made.reference(torch.tensor([[*read, *part]]), output_attentions=True)
    weights = torch.stack([each[0, :, 70:, :70] for each in out.attentions])
    by_group = weights.unflatten(1, (2, -1)).amax(dim=(2, 3)).mean(dim=(0, 1)).tolist()
    expected = [max(by_group[max(0, i - 2) : i + 3]) for i in range(70)]
    assert torch.allclose(torch.tensor(scores), torch.tensor(expected), atol=1e-5)
    engine.cache.check([])


def test_a_context_that_begins_as_a_thinned_one_is_answered_over_it(specimen: Any) -> None:
    """Each client gets the thinned KV of a beginning, until all of that KV is to stay again."""
    made, thinned = specimen("llama"), beginning()
    engine = engine_on(made.loaded)
    kept = KeptPositions(digest_of_ids(READ[:90]), 90, thinned.positions, "KVzip")
    more = random_ids(7, 3)
    plain = RequestSpec((*READ[:90], *more), GREEDY, max_tokens=10)
    engine.thin_beginnings([kept])
    for _ in range(2):
        assert Answered(engine, plain).first == answer_after(made, thinned, more)
    assert engine.cached_tokens(READ).total == 88
    [place] = located(engine, [*READ[:90], *more])
    assert place.cached.device == 90
    engine.thin_beginnings([])
    assert Answered(engine, plain).first == made.generate([*READ[:90], *more])[:10]


def located(engine: Engine, *contexts: list[int]) -> list[KvPlaces]:
    found: list[KvPlaces] = []
    engine.locate(contexts, found.extend)
    return found


def test_drafts_change_no_answer_over_less_kv(specimen: Any) -> None:
    """Over a beginning, where they are verified; with a budget there are none."""
    made, thinned = specimen("llama"), beginning()
    more = random_ids(7, 3)
    budget = within(Size(share=0.8))
    plain = Answered(engine_on(made.loaded), budget).first
    drafter = GarbageDrafter()
    speculation = Speculation([drafter], policy=FixedDraftPolicy(4))
    engine = engine_on(made.loaded, speculation=speculation)
    found = Answered(engine, after(thinned, more))
    assert found.first == answer_after(made, thinned, more)
    assert found.first_usage.drafts.num_drafted > 0
    found = Answered(engine, budget)
    assert (found.first, found.first_usage.drafts.num_drafted) == (plain, 0)


@pytest.mark.parametrize("change", ["gathered", "state"])
def test_a_model_whose_attention_is_not_seen_refuses_a_budget(specimen: Any, change: str) -> None:
    """In one sentence, before anything is read."""
    made = specimen("llama")
    spec = made.loaded.spec
    changes: dict[str, Any] = {"gathered": Gathered("is so", (), 0), "state": ("a state",)}
    engine = engine_on(made.loaded)
    engine._runner._model.loaded = replace(
        made.loaded, spec=replace(spec, **{change: changes[change]})
    )
    with pytest.raises(UsageError, match="No KV of this model can be dropped"):
        engine.submit(within(Size(share=0.5)))
    with pytest.raises(UsageError, match="No KV of this model can be dropped"):
        engine.repeat_scores(READ, [1])


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_on_a_small_cache_answer_as_alone(specimen: Any, seed: int) -> None:
    """With and without budgets and beginnings, sent back, forgotten and evicted meanwhile."""
    made, draw = specimen("llama"), random.Random(seed)
    engine = engine_on(made.loaded, num_blocks=40)
    choices = []
    for number in range(4):
        more, thinned = random_ids(5 + number, number), beginning(40 + 8 * (number % 2))
        choices.append((after(thinned, more), answer_after(made, thinned, more)))
    plain = RequestSpec(tuple(READ), GREEDY, max_tokens=12)
    choices.append((plain, made.generate(READ)[:12]))
    alone = Answered(engine_on(made.loaded), within(Size(share=0.8))).first
    engine = engine_on(made.loaded, num_blocks=40)
    choices.append((within(Size(share=0.8)), alone))
    asked = [draw.choice(choices) for _ in range(12)]

    def between(_: Said) -> None:
        if draw.random() < 0.1:
            engine.forget([(READ, draw.choice((0, 32)))], lambda: None)

    said, _ = run(engine, [spec for spec, _ in asked], between)
    assert [tokens for _, tokens in sorted(said.items())] == [answer for _, answer in asked]
    engine.cache.check([])

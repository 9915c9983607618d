"""Draft models with recurrent layers: a twin of the target guesses all, if its state is right.

Chats go on, branch off, draw, run beside each other and restart; answers are those without drafts.
"""

import random
from pathlib import Path

import pytest

from kvchat.core.events import TokensGenerated
from kvchat.core.types import SamplingParams
from kvchat.engine.draft_model import StatefulDrafter
from kvchat.engine.engine import Engine
from kvchat.engine.request import RequestSpec
from kvchat.engine.speculation import Mode
from support.checkpoints import save_checkpoint, tiny_model
from support.engines_with_drafts import answer, answers_at_once, build
from support.fixed_drafts import FixedDraftPolicy
from support.matrix import spread
from support.stateful_models import STATEFUL, words

MODELS = ("qwen3_5, compiled", "granitemoehybrid", "mamba, no attention", "lfm2", "rwkv")


@pytest.fixture(scope="module", params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_type, settings = STATEFUL[request.param]
    return save_checkpoint(tmp_path_factory.mktemp("m"), tiny_model(model_type, **settings))


def engine_of(target: Path, draft: Path, kv: Path | None = None, kv_dtype: str = "auto") -> Engine:
    assembled = build(target, draft, kv, kv_dtype=kv_dtype)
    assert not [note for note in assembled.ready.notes if "without the draft" in note]
    engine = assembled.engine
    engine.speculation._policy = FixedDraftPolicy(3)
    assert engine.speculation.drafter(StatefulDrafter) is not None
    return engine


def check(engine: Engine) -> None:
    drafter = engine.speculation.drafter(StatefulDrafter)
    assert drafter is not None, engine.speculation.failures
    drafter.cache.check([state.table for state in drafter._states.values()])


@pytest.mark.parametrize("seed", spread(range(3), [0]))
def test_a_twin_guesses_all_tokens_of_chats(directory: Path, seed: int, tmp_path: Path) -> None:
    rng, ends = random.Random(seed), [[]]
    engine = engine_of(directory, directory, tmp_path)
    for turn in range(6):
        context = rng.choice(ends)[: rng.choice((400, 30))]
        prompt = [*context[:200], *words(rng.randint(1, 40), 9 * seed + turn)]
        length, heat = rng.randint(2, 24), rng.choice((0.0, 0.9))
        num_samples = rng.choice((1, 1, 2))
        engine.speculation.switch(Mode.OFF)
        plain = answer(engine, prompt, length, heat, num_samples)
        engine.speculation.switch(Mode.DRAFT)
        assert answer(engine, prompt, length, heat, num_samples) == plain
        check(engine)
        ends += [[*prompt, *ids] for ids in plain]
        total = engine.speculation.status().total
        assert total.num_accepted == total.num_drafted, "a state has read a wrong guess"
        if rng.random() < 0.5:
            engine.close()
            engine = engine_of(directory, directory, tmp_path)
    engine.close()


def test_a_next_turn_begins_at_a_snapshot(directory: Path) -> None:
    engine = engine_of(directory, directory)
    engine.speculation.switch(Mode.DRAFT)
    prompt = words(70, 3)
    [given] = answer(engine, prompt, 40)
    drafter = engine.speculation.drafter(StatefulDrafter)
    assert drafter is not None
    context = [*prompt, *given]
    assert drafter.cache.num_reusable_tokens(context) >= 64
    drafted = engine.speculation.status().total.num_drafted
    [given] = answer(engine, [*context, 1, 2, 3], 20)
    assert drafter.cache.num_reusable_tokens([*context, 1, 2, 3, *given]) >= 112
    total = engine.speculation.status().total
    assert total.num_accepted == total.num_drafted > drafted
    engine.close()


def test_a_target_over_few_bits_has_its_draft_models_guesses(tmp_path: Path) -> None:
    """The draft model's own KV keeps its bits."""
    model_type, settings = STATEFUL["qwen3_5, compiled"]
    directory = save_checkpoint(tmp_path / "m", tiny_model(model_type, **settings))
    engine = engine_of(directory, directory, kv_dtype="int8")
    drafter = engine.speculation.drafter(StatefulDrafter)
    assert drafter is not None
    formats = [cache.kv_pool.geometry.format for cache in (engine.cache, drafter.cache)]
    assert [each.setting for each in formats] == ["int8", ""]
    context: list[int] = []
    for turn in range(3):
        prompt = [*context, *words(30, turn)]
        engine.speculation.switch(Mode.OFF)
        plain = answer(engine, prompt, 20)
        engine.speculation.switch(Mode.DRAFT)
        assert answer(engine, prompt, 20) == plain
        check(engine)
        context = [*prompt, *plain[0]]
    total = engine.speculation.status().total
    assert total.num_accepted > total.num_drafted / 2
    engine.close()


def test_another_model_changes_no_answer(directory: Path, tmp_path: Path) -> None:
    """Nearly all its guesses are wrong; three requests at once, one of which is cancelled."""
    model_type, settings = STATEFUL["qwen3_5, compiled"]
    other = save_checkpoint(tmp_path / "other", tiny_model(model_type, seed=5, **settings))
    engine = engine_of(directory, other)
    prompts = [tuple(words(20 + 7 * index, index)) for index in range(3)]
    engine.speculation.switch(Mode.OFF)
    plain = [answer(engine, prompt, 16)[0] for prompt in prompts]
    engine.speculation.switch(Mode.DRAFT)
    cancelled = engine.submit(RequestSpec(tuple(words(9, 8)), SamplingParams(), max_tokens=50))
    said = 0
    while said < 5:
        said += sum(isinstance(event, TokensGenerated) for event in engine.step())
    engine.cancel(cancelled)
    assert answers_at_once(engine, prompts, 16) == plain
    total = engine.speculation.status().total
    assert total.num_accepted < total.num_drafted
    check(engine)
    engine.close()


def test_a_step_that_fails_behind_its_drafts_is_run_again(directory, monkeypatch):
    """The draft model's state has read all tokens by then, and cannot take one back."""
    engine = engine_of(directory, directory)
    engine.speculation.switch(Mode.OFF)
    prompt = words(40, 1)
    plain = answer(engine, prompt, 12)
    engine.speculation.switch(Mode.DRAFT)
    drafter = engine.speculation.drafter(StatefulDrafter)
    assert drafter is not None
    propose, rounds = drafter.propose, []

    def twice(wanted):  # type: ignore[no-untyped-def]
        rounds.append(propose(wanted))
        for want in wanted:
            assert drafter.offer(want.request, want.num_tokens) is not None
        drafter.catch_up(wanted)
        assert propose(wanted) == rounds[-1]
        return rounds[-1]

    monkeypatch.setattr(drafter, "propose", twice)
    assert answer(engine, prompt, 12) == plain
    assert any(rounds)
    total = engine.speculation.status().total
    assert total.num_accepted == total.num_drafted
    check(engine)
    engine.close()

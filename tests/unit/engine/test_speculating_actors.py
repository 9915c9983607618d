"""Random callers over every drafter at once, preempted, cancelled and switched; sampled chances."""

import random
from collections import Counter

import pytest
import torch

from kvchat.cache.block_manager import CacheManager
from kvchat.core.events import TokensGenerated
from kvchat.core.types import FinishReason, SamplingParams
from kvchat.engine.draft_model import ModelDrafter
from kvchat.engine.draft_policy import DraftPolicy
from kvchat.engine.drafters import Drafter
from kvchat.engine.engine import Engine
from kvchat.engine.ngram import NgramDrafter
from kvchat.engine.request import RequestSpec
from kvchat.engine.runner import Runner
from kvchat.engine.speculation import Mode, Speculation
from kvchat.model.batch import ForwardBatch
from support.engine_harness import EngineHarness
from support.fixed_drafts import FixedDraftPolicy
from support.remembering_model import (
    VOCAB_SIZE,
    RememberingModel,
    WatchFor,
    complete_without_cache,
    new_cache,
    new_windowed_cache,
    runner_over,
)
from support.soak_sizes import short_and_long
from support.trial_drafters import FickleDrafter, GarbageDrafter

MAX_CONTEXT = 60
WINDOW = 9


class Crowd:
    """Callers who submit, cancel and switch at random; every step is checked by the harness."""

    def __init__(
        self, seed: int, policy: DraftPolicy, draft_windows: int = 0, **limits: int
    ) -> None:
        self.rng = random.Random(seed)
        size = limits["block_size"]
        num_blocks = self.rng.choice((80, 400)) // size
        self.draft_cache = new_cache(num_blocks, size)
        if draft_windows:
            self.draft_cache = new_windowed_cache(num_blocks, draft_windows, WINDOW, size)
        self.draft_model = RememberingModel(self.draft_cache)
        self.drafter = ModelDrafter(
            runner_over(self.draft_model, self.draft_cache),
            self.draft_cache,
            VOCAB_SIZE,
            MAX_CONTEXT,
        )
        fickle = FickleDrafter(seed=seed, max_context=MAX_CONTEXT)
        drafters: list[Drafter] = [NgramDrafter(), fickle, self.drafter, GarbageDrafter(seed=seed)]
        self.rng.shuffle(drafters)
        self.speculation = Speculation(drafters, policy=policy)
        self.engine = EngineHarness(
            speculation=self.speculation,
            max_context=MAX_CONTEXT,
            **limits,  # type: ignore[arg-type]
        )
        self.cancelled: set[int] = set()

    def act(self) -> None:
        dice = self.rng.random()
        if dice < 0.12 and len(self.engine.live()) < 10:
            self.engine.submit(self._spec())
        elif dice < 0.14 and self.engine.live():
            request_id = self.rng.choice(self.engine.live()).request_id
            self.cancelled.add(request_id)
            self.engine.engine.cancel(request_id)
        elif dice < 0.16:
            self.speculation.switch(self.rng.choice((Mode.OFF, Mode.AUTO, Mode.NGRAM, Mode.DRAFT)))
        else:
            self.engine.step()
            assert not self.draft_model.broken_promises, self.draft_model.broken_promises
            self.draft_cache.check([state.table for state in self.drafter._states.values()])

    def _spec(self) -> RequestSpec:
        rng = self.rng
        base = [5, 6, 7, 8] * 8
        length = rng.randrange(1, 28)
        prompt = base[:length] if rng.random() < 0.5 else [rng.randrange(40) for _ in range(length)]
        watched, times = rng.randrange(40), rng.randrange(1, 3)
        return RequestSpec(
            tuple(prompt),
            SamplingParams(
                temperature=rng.choice((0.0, 0.8, 1.5)),
                top_k=rng.choice((0, 5)),
                repetition_penalty=rng.choice((1.0, 1.3)),
                seed=rng.randrange(4),
            ),
            max_tokens=rng.choice((1, 5, 30, None)),
            stop_token_ids=frozenset(rng.sample(range(40), rng.choice((0, 1)))),
            new_stop_watcher=(lambda: WatchFor(watched, times)) if rng.random() < 0.3 else None,
            num_samples=rng.choice((1, 1, 3)),
        )

    def run(self, num_acts: int) -> int:
        """Act, finish, and hold everything against the oracle; return how much was drafted."""
        for _ in range(num_acts):
            self.act()
        self.engine.run()
        num_drafted = 0
        for request_id, spec in self.engine.specs.items():
            assert not self.engine.failures(request_id)
            for sample in range(spec.num_samples):
                expected = complete_without_cache(spec, sample, self.engine.engine.max_context)
                generated = self.engine.generated(request_id, sample)
                ending = self.engine.ending(request_id, sample)
                if ending.reason is FinishReason.CANCELLED:
                    assert request_id in self.cancelled
                    expected = expected[: len(generated)]
                assert generated == expected
                assert ending.usage.accepted_tokens <= ending.usage.completion_tokens
                num_drafted += ending.usage.drafted_tokens
        assert not self.drafter._states
        assert not self.speculation.failures
        return num_drafted


@pytest.mark.parametrize(
    "limits",
    [
        {"num_blocks": 80, "block_size": 4},
        {"num_blocks": 22, "block_size": 4, "max_running": 4},
        {"num_blocks": 40, "block_size": 2, "max_step_tokens": 5},
        {"num_blocks": 80, "block_size": 1},
        {"num_blocks": 12, "block_size": 8, "max_step_tokens": 64},
        {"num_blocks": 80, "block_size": 4, "draft_windows": 40},
        {"num_blocks": 80, "block_size": 4, "draft_windows": 14, "max_step_tokens": 7},
        {"num_blocks": 80, "block_size": 4, "draft_windows": 40}
        | {"window": WINDOW, "num_window_blocks": 14},
    ],
    ids=[
        *("roomy", "tight", "small steps", "one-token blocks", "few blocks"),
        *("draft's windows", "few of draft's windows", "windows of both"),
    ],
)
@pytest.mark.parametrize(
    "policy", [lambda: FixedDraftPolicy(3), DraftPolicy], ids=["fixed", "adaptive"]
)
@short_and_long(1, 40)
def test_random_callers_get_exactly_their_tokens(size: int, policy, limits: dict[str, int]) -> None:  # type: ignore[no-untyped-def]
    num_drafted = [Crowd(seed, policy(), **limits).run(num_acts=120) for seed in range(size)]
    assert sum(num_drafted) > 10 * size


class TenTokens(RememberingModel):
    """Expects the same of every context: `logits`, [10] float32."""

    def __init__(self, cache: CacheManager, logits: torch.Tensor) -> None:
        super().__init__(cache)
        self._logits = logits

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self._logits.repeat(len(batch.logit_rows), 1)


def test_tokens_are_drawn_from_the_targets_distribution() -> None:
    """Chi-square over ten tokens, with a draft model that prefers others and is often right.

    The bound is the 0.999 quantile for nine degrees of freedom; the seeds are fixed.
    """
    logits = torch.linspace(0.0, 2.0, 10)
    cache, draft_cache = new_cache(60), new_cache(60)
    draft = TenTokens(draft_cache, logits.flip(0))
    draft_runner = Runner(draft, draft_cache.block_size)  # type: ignore[arg-type]
    drafter = ModelDrafter(draft_runner, draft_cache, 10, 150)
    runner = Runner(TenTokens(cache, logits), cache.block_size)  # type: ignore[arg-type]
    speculation = Speculation([drafter], policy=FixedDraftPolicy(4))
    engine = Engine(runner, cache, 150, 32, 8, 10, speculation=speculation)
    for seed in range(40):
        engine.submit(RequestSpec((1,), SamplingParams(temperature=1.0, seed=seed), max_tokens=80))
    counts: Counter[int] = Counter()
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokensGenerated):
                counts.update(event.token_ids)

    expected = (torch.softmax(logits, 0) * 40 * 80).tolist()
    assert sum(counts.values()) == 40 * 80
    assert speculation.status().total.num_accepted > 300
    chi_square = sum((counts[token] - e) ** 2 / e for token, e in enumerate(expected))
    assert chi_square < 27.9, dict(counts)

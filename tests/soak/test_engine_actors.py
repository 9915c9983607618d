"""Random callers of a whole engine on real architectures: every token is transformers' own.

Prompts share prefixes and continue finished answers; callers cancel, stop strings match, pools are
much too small, and sometimes the model fails. A finished sample is compared with one pass of
transformers' eager model over all its tokens, without blocks, chunks, batches or caches.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from kvchat.chat.decoding import AnswerParts, AnswerWatcher
from kvchat.chat.detokenizer import TokenStream
from kvchat.core.events import SampleFinished
from kvchat.core.types import FinishReason, SamplingParams
from kvchat.engine.engine import Engine
from kvchat.engine.request import RequestSpec
from kvchat.engine.sampler import sample_seed
from kvchat_kernels.host_sampler import gumbel_noise, row_key
from support.engine_harness import SteppedEngine
from support.soak_sizes import short_and_long
from support.specimens import Specimen, engine_on, make_specimen
from support.tokenizer_zoo import byte_tokenizer

LETTERS = list(range(64, 90))
# Batches and chunks round differently in the last place: a tie may fall either way, and only a tie.
TIE = 1e-3


@dataclass(frozen=True)
class Size:
    """How many engines live, and how many things are done to each."""

    num_lives: int
    num_acts: int


@pytest.fixture(scope="module", params=["llama", "gemma3, mixed windows"])
def specimen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Specimen:
    directory: Path = tmp_path_factory.mktemp("model")
    return make_specimen(request.param, directory)


class Sabotage:
    """Makes forward passes fail: the next one, or every one until it is called off."""

    def __init__(self, engine: Engine) -> None:
        self._run = engine._runner.run
        self.num_failures = 0
        engine._runner.run = self._fail_or_run  # type: ignore[method-assign]

    def _fail_or_run(self, plan, *others):  # type: ignore[no-untyped-def]
        logits = self._run(plan, *others)
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("boom")  # with the pass behind it: its KV is written and worthless
        return logits


class Life:
    """One engine with limits drawn at random, and those who use it."""

    def __init__(self, rng: random.Random, specimen: Specimen) -> None:
        self.rng, self.specimen = rng, specimen
        block_size = rng.choice([1, 2, 8, 16])
        max_step_tokens = rng.choice([5, 16, 64])
        num_tokens = rng.choice([96, 160, 400])
        engine = engine_on(
            specimen.loaded,
            block_size=block_size,
            max_step_tokens=max_step_tokens,
            reuse=rng.random() < 0.85,
            num_blocks=1 + num_tokens // block_size,
            num_host_blocks=rng.choice([0, 4, 400]) // block_size,
        )
        self.sabotage = Sabotage(engine)
        self.engine = SteppedEngine(engine, max_step_tokens, max_running=8)
        self.cancelled: set[int] = set()
        self.stories: list[list[int]] = [[]]

    def submit(self) -> None:
        rng = self.rng
        story = rng.choice(self.stories[-12:])
        own = [rng.randrange(256) for _ in range(rng.randint(1, 12))]
        prompt = [*story[: rng.choice([len(story), rng.randint(0, len(story))])], *own]
        prompt = prompt[: self.engine.engine.max_context - 1]
        stop = "".join(chr(letter) for letter in rng.sample(LETTERS, 1))
        temperature = rng.choice([0.0, 0.0, 0.7, 1.3])
        spec = RequestSpec(
            tuple(prompt),
            SamplingParams(temperature=temperature, seed=rng.randrange(1 << 62)),
            max_tokens=rng.choice([1, 6, 25, 60, None]),
            stop_token_ids=frozenset(rng.sample(range(256), rng.choice([0, 0, 8]))),
            new_stop_watcher=rng.choice([None, None, lambda: new_watcher(prompt, stop)]),
            num_samples=rng.choice([1, 1, 1, 2, 4]),
        )
        self.engine.submit(spec)
        self.stories.append(prompt)

    def act(self) -> None:
        action = self.rng.random()
        if action < 0.12:
            self.submit()
        elif action < 0.15 and self.engine.live():
            request_id = self.rng.choice(self.engine.live()).request_id
            self.cancelled.add(request_id)
            self.engine.engine.cancel(request_id)
        elif action < 0.17:
            self.sabotage.num_failures = self.rng.choice([1, 1, 99])
        else:
            self.step()

    def step(self) -> None:
        for event in self.engine.step():
            if isinstance(event, SampleFinished):
                prompt = self.engine.specs[event.request_id].prompt_ids
                answer = self.engine.generated(event.request_id, event.sample)
                self.stories.append([*prompt, *answer])
        self.sabotage.num_failures = 0

    def live(self, num_acts: int) -> None:
        for _ in range(num_acts):
            self.act()
        self.sabotage.num_failures = 0
        self.engine.run()

    def assert_everyone_was_served(self) -> int:
        """Hold every sample against the model itself; return how many were complete."""
        num_complete = 0
        for request_id, spec in self.engine.specs.items():
            if failures := self.engine.failures(request_id):
                assert [f.error.message for f in failures] == ["The forward pass failed: boom."]
                continue
            for sample in range(spec.num_samples):
                self.assert_ended_as_it_should(request_id, sample)
                self.assert_every_token_is_the_models(request_id, sample)
                num_complete += request_id not in self.cancelled
        return num_complete

    def assert_every_token_is_the_models(self, request_id: int, sample: int) -> None:
        spec, ending = self.engine.specs[request_id], self.engine.ending(request_id, sample)
        stop = [] if ending.stop_token is None else [ending.stop_token]
        drawn = [*self.engine.generated(request_id, sample), *stop]
        scores = scores_of(self.specimen, spec, sample, drawn)
        chosen = scores.gather(1, torch.tensor(drawn).view(-1, 1))[:, 0]
        behind = scores.amax(dim=1) - chosen if drawn else scores.new_zeros(0)
        assert (behind < TIE).all(), f"token {int((behind >= TIE).nonzero()[0])} is another"

    def assert_ended_as_it_should(self, request_id: int, sample: int) -> None:
        spec, ending = self.engine.specs[request_id], self.engine.ending(request_id, sample)
        answer = self.engine.generated(request_id, sample)
        assert spec.stop_token_ids.isdisjoint(answer)
        watcher = spec.new_stop_watcher() if spec.new_stop_watcher is not None else None
        struck = [watcher is not None and watcher.feed(token) for token in answer]
        assert not any(struck[:-1])
        if ending.reason is FinishReason.CANCELLED:
            assert request_id in self.cancelled
        elif ending.reason is FinishReason.LENGTH:
            limit = self.engine.engine.max_context - len(spec.prompt_ids)
            assert len(answer) == min(spec.max_tokens or limit, limit)
        else:
            assert ending.stop_token in spec.stop_token_ids or struck[-1]
        assert ending.usage.completion_tokens == len(answer) + (ending.stop_token is not None)


def new_watcher(prompt: list[int], stop: str) -> AnswerWatcher:
    stream = TokenStream(byte_tokenizer(), prompt, frozenset())
    return AnswerWatcher(stream, AnswerParts([stop], False), {})


@torch.inference_mode()
def scores_of(specimen: Specimen, spec: RequestSpec, sample: int, drawn: list[int]) -> torch.Tensor:
    """Return what each drawn token was chosen by, in one piece: [num_drawn, vocab_size]."""
    context = torch.tensor([[*spec.prompt_ids, *drawn]])
    start = len(spec.prompt_ids)
    logits = specimen.reference(input_ids=context, use_cache=False).logits[0, start - 1 : -1]
    if spec.sampling.temperature == 0.0:
        return logits
    positions = list(range(start, start + len(drawn)))
    seed, tokens = sample_seed(spec.sampling.seed, sample), np.arange(logits.shape[-1])
    noise = [gumbel_noise(*row_key(seed, position), tokens) for position in positions]
    return logits / spec.sampling.temperature + torch.from_numpy(np.array(noise)).view_as(logits)


@short_and_long(Size(num_lives=2, num_acts=100), Size(num_lives=12, num_acts=1000))
def test_random_callers_get_what_the_model_itself_says(specimen: Specimen, size: Size) -> None:
    num_complete, num_preempted, num_hit, num_promoted = 0, 0, 0, 0
    for seed in range(size.num_lives):
        life = Life(random.Random(seed), specimen)
        life.live(size.num_acts)
        num_complete += life.assert_everyone_was_served()
        num_preempted += life.engine.engine.status().num_preempted
        cached = [
            event.usage.cached
            for events in life.engine.events.values()
            for event in events
            if isinstance(event, SampleFinished)
        ]
        num_hit += sum(tokens.device for tokens in cached)
        num_promoted += sum(tokens.host for tokens in cached)
        life.engine.cache.clear()
        status = life.engine.engine.status()
        assert status.num_free == status.num_blocks, "blocks were lost"
    assert num_complete > 5 * size.num_lives
    assert num_preempted > 0
    assert num_hit > 0
    assert num_promoted > 0 or size.num_lives < 8

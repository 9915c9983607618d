"""Engines stepped by hand, with every promise checked: on any model, and on a remembering one.

After each step the cache's reference counts are re-derived from the requests that are alive, the
step is held to its budgets, and the events of each request are kept.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count

from kvchat.cache.tier import Tier, TierOpener
from kvchat.core.events import (
    PrefillProgress,
    RequestEvent,
    RequestFailed,
    SampleFinished,
    TokensGenerated,
)
from kvchat.core.types import FinishReason
from kvchat.engine.engine import Engine
from kvchat.engine.request import Request, RequestSpec, State
from kvchat.engine.runner import Runner
from kvchat.engine.scheduler import ScheduledRequest
from kvchat.engine.speculation import Speculation
from kvchat.model.batch import SequencePiece
from support.chains import new_chain
from support.remembering_model import (
    VOCAB_SIZE,
    RememberingModel,
    complete_without_cache,
    new_cache,
    new_windowed_cache,
    runner_over,
)


class SteppedEngine:
    """Drives one engine; `steps[i]` holds the (request id, rows) pairs of forward pass i."""

    def __init__(self, engine: Engine, max_step_tokens: int, max_running: int) -> None:
        self.engine = engine
        self.cache = engine.cache
        self.max_step_tokens = max_step_tokens
        self.max_running = max_running
        self.steps: list[list[tuple[int, int]]] = []
        self.specs: dict[int, RequestSpec] = {}
        self.events: dict[int, list[RequestEvent]] = defaultdict(list)
        self._watch_plans(engine._runner)

    def _watch_plans(self, runner: Runner) -> None:
        run = runner.run

        def watched(  # type: ignore[no-untyped-def]
            plan: Sequence[ScheduledRequest], checks: Sequence[SequencePiece] = (), *stop
        ):
            if plan:
                self.steps.append(
                    [(scheduled.request.request_id, scheduled.num_rows) for scheduled in plan]
                )
            return run(plan, checks, *stop)

        runner.run = watched  # type: ignore[method-assign]

    def submit(self, spec: RequestSpec) -> int:
        request_id = self.engine.submit(spec)
        self.specs[request_id] = spec
        return request_id

    def live(self) -> list[Request]:
        return self.engine._scheduler.requests()

    def step(self) -> list[RequestEvent]:
        num_before = len(self.steps)
        decoding = [r for r in self.live() if r.is_decoding and r.state is State.RUNNING]
        events = self.engine.step()
        for event in events:
            self.events[event.request_id].append(event)
        self.check()
        if len(self.steps) > num_before:  # more than one where a batch failed
            self._check_step(self.steps[num_before], decoding)
        return events

    def _check_step(self, plan: list[tuple[int, int]], decoding: list[Request]) -> None:
        num_tokens = sum(tokens for _, tokens in plan)
        most = max(self.max_step_tokens, len(decoding) + max(1, self.max_step_tokens // 2))
        assert 0 < num_tokens <= most, f"{num_tokens} tokens in one step"
        planned = [request_id for request_id, _ in plan]
        for request in decoding:
            gave_way = request.state is State.WAITING or request.cancelled_for is not None
            assert gave_way or request.request_id in planned, "a decoding request was passed over"

    def check(self) -> None:
        tables = [r.table for r in self.live() if r.table is not None]
        self.engine.chain.check()
        tables += self.engine.chain.tables()
        # A step that ends with news for the user leaves checks for the next one.
        checks = self.engine._kv_verifier._open
        tables += [row.table for check in checks for row in check.rows]
        self.cache.check(tables)
        running = [r for r in self.live() if r.state is State.RUNNING]
        assert len(running) <= self.max_running
        assert all((r.table is not None) == (r.state is State.RUNNING) for r in self.live())

    def run(self, max_steps: int = 5000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"still working after {max_steps} steps")

    def generated(self, request_id: int, sample: int = 0) -> list[int]:
        return [
            token
            for event in self.events[request_id]
            if isinstance(event, TokensGenerated) and event.sample == sample
            for token in event.token_ids
        ]

    def ending(self, request_id: int, sample: int = 0) -> SampleFinished:
        [ending] = [
            event
            for event in self.events[request_id]
            if isinstance(event, SampleFinished) and event.sample == sample
        ]
        return ending

    def failures(self, request_id: int) -> list[RequestFailed]:
        return [e for e in self.events[request_id] if isinstance(e, RequestFailed)]

    def progress(self, request_id: int) -> list[PrefillProgress]:
        return [e for e in self.events[request_id] if isinstance(e, PrefillProgress)]


class EngineHarness(SteppedEngine):
    """Drives an engine on a remembering model, whose completions an oracle knows."""

    def __init__(
        self,
        num_blocks: int = 200,
        block_size: int = 4,
        reuse: bool = True,
        max_context: int = 120,
        max_step_tokens: int = 16,
        max_running: int = 8,
        max_prefill_tokens: int = 0,
        max_pairs: int = 0,
        fails: Callable[[], None] = lambda: None,
        open_tier: Callable[[], Tier] | None = None,
        behind: Sequence[TierOpener] = (),
        speculation: Speculation | None = None,
        num_host_blocks: int = 0,
        clock: Callable[[], float] | None = None,
        window: int = 0,
        num_window_blocks: int = 0,
    ) -> None:
        cache = new_cache(num_blocks, block_size, reuse)
        if window:
            most = max(max_prefill_tokens, max_step_tokens)
            cache = new_windowed_cache(
                num_blocks, num_window_blocks, window, block_size, reuse, most
            )
        self.model = RememberingModel(cache, fails)
        ticks = count()
        engine = Engine(
            runner_over(self.model, cache),
            cache,
            max_context,
            max_step_tokens,
            max_running,
            VOCAB_SIZE,
            clock=clock if clock is not None else lambda: float(next(ticks)),
            chain=new_chain(
                cache, open_tier, num_host_blocks, None, clock or time.perf_counter, behind
            ),
            speculation=speculation,
            max_prefill_tokens=max_prefill_tokens,
            max_pairs=max_pairs,
        )
        super().__init__(engine, max(max_prefill_tokens, max_step_tokens), max_running)

    def check(self) -> None:
        assert not self.model.broken_promises, self.model.broken_promises
        super().check()

    def complete(self, *specs: RequestSpec) -> list[list[int]]:
        """Run specs together; return the ids of each one's first sample."""
        request_ids = [self.submit(spec) for spec in specs]
        self.run()
        return [self.generated(request_id) for request_id in request_ids]

    def assert_complete(self, request_id: int) -> None:
        """Hold every sample of a request that ran to its end against the oracle."""
        spec = self.specs[request_id]
        for sample in range(spec.num_samples):
            expected = complete_without_cache(spec, sample, self.engine.max_context)
            assert self.generated(request_id, sample) == expected, f"sample {sample}"
            assert self.ending(request_id, sample).reason in (
                FinishReason.STOP,
                FinishReason.LENGTH,
            )

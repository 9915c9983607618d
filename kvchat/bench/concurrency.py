"""Scenario `concurrency`: eight requests of mixed lengths, together and one after another.

All run in one engine of this process, without HTTP; `clients` measures servers. Together, a step
has a row or more of each request: the weights are read once for all of them. Each round has prompts
of its own, so that none is in the cache.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvchat.bench.engines import GREEDY, complete_requests, model_facts, new_engine, random_ids
from kvchat.bench.measure import Sample, alternated
from kvchat.bench.report import Result, compared
from kvchat.bench.setup import BenchSetup
from kvchat.engine.assembly import AssembledEngine
from kvchat.engine.request import RequestSpec

_NUM_REQUESTS = 8
_SHORTEST, _LONGEST = 32, 512
_FEWEST_TOKENS, _MOST_TOKENS = 16, 96
_ALONE = "one after another"


def run(setup: BenchSetup) -> Result:
    """Measure the tokens a second of both orders, in turns."""
    assembled = new_engine(setup.source, setup.model, setup.cache)
    rounds = _Rounds(setup, assembled)
    together, alone = alternated(rounds.together, rounds.one_by_one, setup.repeats)
    settings = {
        **model_facts(setup.source, assembled.loaded),
        "requests": _NUM_REQUESTS,
        "prompts": f"{_SHORTEST}-{setup.scaled(_LONGEST)}",
        "answers": f"{_FEWEST_TOKENS}-{_MOST_TOKENS}",
    }
    figures = (
        compared("generated", together, alone, "tokens/s", _ALONE, must="2 on a GPU"),
        # The first call of each is the warm-up.
        compared(
            "last answer ends after",
            Sample(tuple(rounds.together_s[1:])),
            Sample(tuple(rounds.one_by_one_s[1:])),
            "s",
            _ALONE,
        ),
    )
    return Result("concurrency", settings, figures)


@dataclass(slots=True)
class _Rounds:
    """Runs rounds of requests. Both orders have requests of the same lengths in every round."""

    setup: BenchSetup
    assembled: AssembledEngine
    together_s: list[float] = field(default_factory=list)
    one_by_one_s: list[float] = field(default_factory=list)

    def together(self) -> float:
        """Run the next round at once; return generated tokens a second."""
        specs = self._specs(2 * len(self.together_s))
        return self._timed([specs], self.together_s)

    def one_by_one(self) -> float:
        """Run the next round's requests one after another; return generated tokens a second."""
        specs = self._specs(2 * len(self.one_by_one_s) + 1)
        return self._timed([[spec] for spec in specs], self.one_by_one_s)

    def _timed(self, groups: Sequence[Sequence[RequestSpec]], spent_s: list[float]) -> float:
        start_s = time.perf_counter()
        done = [
            completion
            for group in groups
            for completion in complete_requests(self.assembled.engine, group)
        ]
        spent_s.append(time.perf_counter() - start_s)
        return sum(len(completion.token_ids) for completion in done) / spent_s[-1]

    def _specs(self, seed: int) -> list[RequestSpec]:
        """Return requests whose lengths are always the same, and whose tokens follow the seed."""
        lengths = random.Random(0)
        vocab_size = self.assembled.loaded.spec.vocab_size
        longest = self.setup.scaled(_LONGEST)
        return [
            RequestSpec(
                tuple(
                    random_ids(
                        lengths.randint(_SHORTEST, longest), vocab_size, seed * _NUM_REQUESTS + i
                    )
                ),
                GREEDY,
                max_tokens=lengths.randint(_FEWEST_TOKENS, _MOST_TOKENS),
            )
            for i in range(_NUM_REQUESTS)
        ]

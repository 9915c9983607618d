"""A request whose table becomes private goes on as a plain cache does that lost the same tokens."""

from pathlib import Path

import torch

from kvchat.core.events import TokensGenerated
from kvchat.core.types import SamplingParams
from kvchat.engine.request import RequestSpec
from support.private_tables import (
    KEPT,
    KEPT_BLOCKS,
    KEPT_SLOTS,
    NUM_READ,
    READ,
    greedy_over,
    thinned_cache,
)
from support.specimens import Specimen, complete, engine_on, make_specimen

NUM_TOKENS = 14


@torch.inference_mode()
def greedy_after(made: Specimen, first_token: int) -> list[int]:
    """What transformers generates after all of READ gave a token and then some of it was lost."""
    cache = thinned_cache(made.reference, KEPT)
    rest = greedy_over(made.reference, cache, [first_token], NUM_READ, NUM_TOKENS - 1)
    return [first_token, *rest]


def test_an_answer_goes_on_over_what_its_table_kept(tmp_path: Path) -> None:
    """Beside the same prompt over the shared table, whose blocks it shares in part."""
    made = make_specimen("llama", tmp_path)
    whole = made.generate(READ)[:NUM_TOKENS]
    engine = engine_on(made.loaded)
    spec = RequestSpec(tuple(READ), SamplingParams(temperature=0.0), max_tokens=NUM_TOKENS)
    answers: dict[int, list[int]] = {engine.submit(spec): [] for _ in range(2)}
    thinned = min(answers)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokensGenerated):
                answers[event.request_id].extend(event.token_ids)
        running = {request.request_id: request for request in engine.running()}
        if len(answers[thinned]) == 1 and running[thinned].table.positions is None:
            engine.cache.make_private(running[thinned].table, KEPT_BLOCKS, KEPT_SLOTS)
        engine.cache.check([request.table for request in running.values()])

    assert answers[thinned] == greedy_after(made, whole[0]) != whole
    assert answers[thinned + 1] == whole

    # What it computed is not in the tree: the prompt gets the answer of the whole text.
    common = next(i for i in range(NUM_TOKENS) if answers[thinned][i] != whole[i])
    assert common < 6, "both answers fill the same block"
    assert engine.cache.num_cached_tokens([*READ, *answers[thinned]]) == NUM_READ // 8 * 8
    engine.cache.check([])
    assert complete(engine, [READ]) == [made.generate(READ)]

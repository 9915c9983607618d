"""Ids that a repetition penalty looks up: always the whole context, and never sent twice."""

import random
from collections.abc import Sequence

import pytest
import torch

from kvchat.engine import sampler
from kvchat.engine.sampler import DeviceTokenIds
from kvchat_kernels.launch import on_device

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_drafted_the_context_is_whole(seed: int) -> None:
    rng = random.Random(seed)
    sent = DeviceTokenIds(CPU)
    ids = [rng.randrange(1000) for _ in range(rng.choice((1, 300)))]
    for _ in range(200):
        drafts = [rng.randrange(1000) for _ in range(rng.randrange(6))]
        rows = [sent.of(ids, drafts[:count]) for count in range(len(drafts) + 1)]

        for count, row in enumerate(rows):
            assert row.tolist() == [*ids, *drafts[:count]]
        ids += [*drafts[: rng.randrange(len(drafts) + 1)], rng.randrange(1000)]


def test_a_step_sends_what_is_new_and_not_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long context was sent anew for every token: as many numbers as it had, at every step."""
    num_sent = 0

    def counted(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        nonlocal num_sent
        num_sent += len(numbers)
        return on_device(numbers, dtype, device)

    monkeypatch.setattr(sampler, "on_device", counted)
    ids, sent = list(range(5000)), DeviceTokenIds(CPU)
    for token in range(100):
        ids.append(token)
        sent.of(ids, [1, 2])

    assert num_sent == len(ids) + 2 * 100

"""SentIds: a context's token ids on a device, where a repetition penalty looks them up.

A context grows by a few tokens a step, and only those are sent. Knows ids; no request, no logits.
"""

from collections.abc import Sequence

import torch

from kvchat_kernels.sending import on_device

_SMALLEST = 256


class SentIds:
    """The ids of one context, which only ever grows, and of drafts that may follow it."""

    def __init__(self, device: torch.device) -> None:
        self._ids = torch.empty(0, dtype=torch.int64, device=device)
        self._num_settled = 0

    def of(self, ids: Sequence[int], drafts: Sequence[int]) -> torch.Tensor:
        """Return [len(ids) + len(drafts)] int64, good until other drafts are asked for.

        ids   the whole context, with what it was before at its beginning
        """
        assert len(ids) >= self._num_settled
        end = len(ids) + len(drafts)
        self._make_room_for(end)
        news = [*ids[self._num_settled :], *drafts]
        if news:
            place = self._ids[self._num_settled : end]
            place.copy_(on_device(news, torch.int64, self._ids.device))
        self._num_settled = len(ids)
        return self._ids[:end]

    def _make_room_for(self, count: int) -> None:
        if count <= len(self._ids):
            return
        larger = self._ids.new_empty(max(_SMALLEST, 2 * count))
        larger[: self._num_settled] = self._ids[: self._num_settled]
        self._ids = larger

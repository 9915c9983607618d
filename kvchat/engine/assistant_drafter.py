"""AssistantDrafter: drafts with a drafter of Gemma 4, which reads the KV of the model itself.

It keeps one hidden state of each request, that of the newest token with KV. It draws with the
target's noise, as ModelDrafter does.
"""

from collections.abc import Sequence

import torch

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.windowed_pool import WindowedKvPool
from kvchat.core.errors import ModelError
from kvchat.engine.drafters import DraftOrder, HiddenReader, Offer
from kvchat.engine.request import Request, State
from kvchat.engine.runner import sampling_row
from kvchat.engine.sampler import sample
from kvchat.model.assistant import Assistant
from kvchat.model.batch import SequencePiece
from kvchat.model.cpu.step_program import CompiledKv

_MOST_DRAFTED = 7


class AssistantDrafter(HiddenReader):
    """Drafts with `model`, once `read_from` says where the KV is."""

    name = "draft"

    def __init__(self, model: Assistant) -> None:
        self._model = model
        # The last hidden state of each request, [1, hidden], and the position after its token.
        self._newest: dict[Request, tuple[torch.Tensor, int]] = {}

    def read_from(self, cache: CacheManager) -> None:
        """Read the KV of this cache; raises ModelError, or what CompiledStep raises."""
        pool = cache.kv_pool
        layers = [layer for layer in pool.layers if isinstance(layer, CompiledKv)]
        if len(layers) < len(pool.layers):
            raise ModelError("No compiled step reads this KV.")
        if isinstance(pool, WindowedKvPool):
            windowed, blocks = pool.windows.layers, pool.blocks.of_block
            self._model.read_from(layers, cache.block_size, windowed, blocks)
        else:
            self._model.read_from(layers, cache.block_size)

    def read_hidden(self, request: Request, rows: torch.Tensor) -> None:
        if len(rows):
            self._newest[request] = rows[-1:].clone(), request.num_computed + len(rows)

    def offer(self, request: Request, most: int) -> Offer | None:
        _, end = self._newest.get(request, (None, 0))
        table, most = request.table, min(most, _MOST_DRAFTED)
        if table is None or table.positions is not None or most < 1 or not end:
            return None
        return Offer("head", most, is_free=False) if end == len(request.ids) - 1 else None

    def propose(self, wanted: Sequence[DraftOrder]) -> list[Sequence[int]]:
        drafts: dict[Request, list[int]] = {want.request: [] for want in wanted}
        hidden = {want.request: self._newest[want.request][0] for want in wanted}
        for length in range(max(want.num_tokens for want in wanted)):
            due = [want.request for want in wanted if want.num_tokens > length]
            newest = [(drafts[request] or request.ids)[-1] for request in due]
            pieces = [_last_with_kv(request) for request in due]
            given = torch.cat([hidden[request] for request in due])
            logits, states = self._model.guess(newest, pieces, given)
            rows = [sampling_row(request, drafts[request], logits.device) for request in due]
            for request, token, state in zip(due, sample(logits, rows), states, strict=True):
                drafts[request].append(token)
                hidden[request] = state[None]
        return [drafts[want.request] for want in wanted]

    def update(self, requests: Sequence[Request], seconds: float) -> None:
        running = {request for request in requests if request.state is State.RUNNING}
        self._newest = {r: newest for r, newest in self._newest.items() if r in running}

    def forget(self, contexts: Sequence[tuple[Sequence[int], int]]) -> None:
        """Does nothing: the KV is the model's."""

    def close(self) -> None:
        self._newest.clear()


def _last_with_kv(request: Request) -> SequencePiece:
    assert request.table is not None
    last = len(request.ids) - 2
    return SequencePiece([request.ids[last]], last, request.table.blocks, num_logit_rows=0)

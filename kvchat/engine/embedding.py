"""Embedding: the meaning of a text as one vector, from the hidden states of the loaded model."""

from collections.abc import Sequence

import torch

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.keys import NO_TOKEN
from kvchat.core.errors import ContextTooLong, GenerationError, UsageError
from kvchat.core.types import Pooling
from kvchat.engine.runner import Runner, explained
from kvchat.model.batch import SequencePiece

# So many rows at once, about what a prompt's step has beside answers: requests wait for the end of
# a step. A fixed number, for a text's vector does not depend on the time.
_STEP_ROWS = 256
_CPU_STEP_ROWS = 64


class Embedding:
    """The embedding of one text, computed a step at a time between the engine's own steps.

    `vector` has `width` numbers, and length 1, once `step` has returned true. All of the text is
    computed: KV in the cache has no hidden states. Its own KV is let go of at the end, for the
    modules' rounding is not that of compiled steps. Close it, finished or not.
    """

    def __init__(
        self, cache: CacheManager, runner: Runner, token_ids: Sequence[int], pooling: Pooling
    ) -> None:
        self.vector: list[float] = []
        self._cache = cache
        self._runner = runner
        self._token_ids = token_ids
        self._pooling = pooling
        self._sum: torch.Tensor | None = None
        self._start = 0
        self._table = cache.match((NO_TOKEN,))

    def step(self) -> bool:
        """Compute the next rows; return whether all are computed.

        Raises GenerationError if there is no room, and DeviceLost.
        """
        try:
            return self._computes_all()
        except Exception as error:  # a model's own code can fail with anything
            raise explained(error, self._runner.device) from error

    def _computes_all(self) -> bool:
        num_rows = _CPU_STEP_ROWS if self._runner.is_on_cpu else _STEP_ROWS
        end = min(self._start + num_rows, len(self._token_ids))
        if not self._cache.reserve(self._table, self._start, end):
            raise GenerationError("The cache has no room for this text now.", "Try again later.")
        rows = self._token_ids[self._start : end]
        hidden = self._runner.hidden(
            SequencePiece(rows, self._start, self._table.blocks, len(rows))
        )
        if self._pooling is Pooling.LAST:
            self._sum = hidden[-1]
        else:
            self._sum = hidden.sum(0) + (0.0 if self._sum is None else self._sum)
        self._start = end
        if end < len(self._token_ids):
            return False
        self.vector = torch.nn.functional.normalize(self._sum, dim=0).tolist()
        return True

    def close(self) -> None:
        """Let go of the KV. Idempotent."""
        if not self._table.is_released:
            self._cache.release(self._table, [])


def begin_embedding(
    cache: CacheManager,
    runner: Runner,
    token_ids: Sequence[int],
    pooling: Pooling,
    limit: int,
    vocab_size: int,
) -> Embedding:
    """Return an embedding to compute.

    Raises UsageError for a model that has none, and for ids that are not below `vocab_size`: a GPU
    would compute nothing more after such a one. Raises ContextTooLong for more than `limit` tokens.
    """
    if not runner.can_embed:
        raise UsageError("Models with recurrent layers have no embeddings here.")
    if (largest := max(token_ids)) >= vocab_size:
        raise UsageError(f"The text has token {largest}, and the model has {vocab_size:,} tokens.")
    if len(token_ids) > limit:
        sentence = f"The text has {len(token_ids):,} tokens, and the context holds {limit:,}."
        raise ContextTooLong(sentence, "", len(token_ids), limit)
    return Embedding(cache, runner, token_ids, pooling)

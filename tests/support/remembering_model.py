"""RememberingModel: a model whose logits depend on every token it can read back from its KV.

It stores token ids and positions in the pools, slot by slot, where a real model stores keys and
values. A step gathers each sequence's block table and answers from what it finds there, so a block
that is lost, shared wrongly or written late gives other logits than the oracle below, which keeps
no cache at all.
"""

import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.kv_pool import KvGeometry, KvPool, LayerGeometry
from kvchat.cache.windowed_manager import WindowedCacheManager
from kvchat.cache.windowed_pool import WindowedKvPool, Windows
from kvchat.core.types import SamplingParams
from kvchat.engine.request import RequestSpec
from kvchat.engine.runner import Runner
from kvchat.engine.sampler import SamplingRow, sample, sample_seed
from kvchat.model.batch import ForwardBatch
from kvchat.model.hf.module_adapter import StepContext

CPU = torch.device("cpu")
VOCAB_SIZE = 40


def new_cache(num_blocks: int, block_size: int = 4, reuse: bool = True) -> CacheManager:
    """Return a manager whose pool has room for a token id and a position per slot."""
    geometry = KvGeometry((LayerGeometry(1, 1, 1),), torch.float32, block_size)
    return CacheManager(KvPool(geometry, num_blocks, CPU), reuse)


def new_windowed_cache(
    num_blocks: int,
    num_window_blocks: int,
    window: int,
    block_size: int = 4,
    reuse: bool = True,
    max_step_tokens: int = 16,
) -> WindowedCacheManager:
    """Return a manager as `new_cache`, of a layer without a window and one with."""
    geometry = KvGeometry((LayerGeometry(1, 1, 1),) * 2, torch.float32, block_size)
    windows = Windows(frozenset({1}), window)
    kv_pool = WindowedKvPool(geometry, windows, num_blocks, num_window_blocks, CPU)
    return WindowedCacheManager(kv_pool, max_step_tokens, reuse)


def runner_over(model: "RememberingModel", cache: CacheManager) -> Runner:
    """Return a runner over the pools of a cache, with its window blocks if it has some."""
    is_windowed = isinstance(cache.kv_pool, WindowedKvPool)
    numbers = cache.kv_pool.blocks.of_block if is_windowed else None
    return Runner(model, cache.block_size, window_blocks=numbers)  # type: ignore[arg-type]


def logits_of(token_ids: Sequence[int], flatness: float = 1.0) -> torch.Tensor:
    """Return [VOCAB_SIZE] float32 logits that change with any token id or its place."""
    seed = zlib.crc32(bytes(token_ids))
    generator = torch.Generator().manual_seed(seed)
    return 3.0 / flatness * torch.randn(VOCAB_SIZE, generator=generator)


class RememberingModel:
    """Stands in for a PagedModel. `fails` is asked before each step and may raise."""

    device = CPU
    dtype = torch.float32
    hidden = None

    def __init__(self, cache: CacheManager, fails: Callable[[], None] = lambda: None) -> None:
        (token_pool, position_pool), *windowed = cache.kv_pool.layers
        self._tokens = token_pool.view(-1)
        self._positions = position_pool.view(-1)
        self._windowed = [pool.view(-1) for layer in windowed for pool in layer]
        self._window = cache.kv_pool.windows.num_tokens if windowed else 0
        self._fails = fails
        self._step = StepContext()
        self.broken_promises: list[AssertionError] = []

    def stopping(self, is_unwanted: Callable[[], bool]) -> AbstractContextManager[None]:
        return self._step.stopping(is_unwanted)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        try:
            return self._forward(batch)
        except AssertionError as error:
            self.broken_promises.append(error)  # an engine takes it for a failed forward pass
            raise

    @torch.inference_mode()  # as a PagedModel: the logits may not be changed outside
    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        slots = batch.slot_mapping
        assert len(set(slots.tolist())) == len(slots), "two tokens share a slot"
        assert slots.min() >= batch.sequences.block_size, "a token is written to the scratch block"
        self._tokens[slots] = batch.token_ids.float()
        self._step.check()
        self._fails()  # half way through: what was written so far is worthless
        self._positions[slots] = batch.positions.float()
        self._write_window(batch)
        logits = torch.full((len(batch.token_ids), VOCAB_SIZE), float("nan"))
        start = 0
        for index, query_len in enumerate(batch.sequences.query_lens):
            context = self._read_back(batch, index)
            new = batch.token_ids[start : start + query_len].tolist()
            assert context[len(context) - query_len :] == new, "the step's tokens are elsewhere"
            self._check_window(batch, index, context)
            for row in range(query_len):
                end = len(context) - query_len + row + 1
                if start + row in batch.logit_rows.tolist():
                    logits[start + row] = logits_of(context[:end])
            start += query_len
        return logits[batch.logit_rows]

    def _write_window(self, batch: ForwardBatch) -> None:
        if self._window:
            slots = batch.windowed.slot_mapping
            assert len(set(slots.tolist())) == len(slots), "two tokens share a slot of a window"
            for pool, numbers in zip(
                self._windowed, (batch.token_ids, batch.positions), strict=True
            ):
                pool[slots] = numbers.float()

    def _check_window(self, batch: ForwardBatch, index: int, context: list[int]) -> None:
        """Check what a layer with a window sees of a context from its first new token on."""
        if self._window:
            sequences = batch.windowed.sequences
            size, table = sequences.block_size, sequences.block_tables[index].tolist()
            first = max(0, len(context) - sequences.query_lens[index] - self._window + 1)
            visible = range(first, len(context))
            slots = torch.tensor([table[p // size] * size + p % size for p in visible])
            tokens, positions = (pool[slots].tolist() for pool in self._windowed)
            assert positions == [*visible], "a window is out of place"
            assert tokens == context[first:], "a window has other tokens"

    def _read_back(self, batch: ForwardBatch, index: int) -> list[int]:
        size = batch.sequences.block_size
        length = batch.sequences.context_lens[index]
        table = batch.sequences.block_tables[index].tolist()
        slots = torch.tensor([table[p // size] * size + p % size for p in range(length)])
        assert torch.equal(self._positions[slots], torch.arange(float(length))), "KV out of place"
        return [int(token) for token in self._tokens[slots].tolist()]


def complete_without_cache(spec: RequestSpec, number: int, max_context: int) -> list[int]:
    """Return what sample `number` of a spec generates, computed from nothing at every token."""
    ids = list(spec.prompt_ids)
    watcher = spec.new_stop_watcher() if spec.new_stop_watcher is not None else None
    constraint = spec.new_constraint() if spec.new_constraint is not None else None
    while len(ids) < max_context and spec.max_tokens != 0:
        row = SamplingRow(
            spec.sampling,
            sample_seed(spec.sampling.seed, number),
            len(ids),
            torch.tensor(ids) if spec.sampling.penalises else None,
            len(spec.prompt_ids),
            constraint.allowed() if constraint is not None else None,
        )
        [token] = sample(logits_of(ids)[None].clone(), [row])
        if token in spec.stop_token_ids:
            break
        ids.append(token)
        if watcher is not None and watcher.feed(token):
            break
        if constraint is not None and constraint.accept(token):
            break
        if spec.max_tokens is not None and len(ids) - len(spec.prompt_ids) >= spec.max_tokens:
            break
    return ids[len(spec.prompt_ids) :]


class RisingTokens:
    """A constraint: each token is above the one before, and of the same remainder by 3."""

    def __init__(self) -> None:
        self._last = -3

    def allowed(self) -> bytes:
        bits = sum(1 << token for token in range(self._last + 3, VOCAB_SIZE, 3))
        return bits.to_bytes(VOCAB_SIZE // 8, "little")

    def accept(self, token_id: int) -> bool:
        assert token_id > self._last
        assert (token_id - self._last) % 3 == 0
        self._last = token_id
        return token_id + 3 >= VOCAB_SIZE


class WatchFor:
    """A stop watcher that ends a completion at the n-th token of a kind."""

    def __init__(self, token_id: int, times: int) -> None:
        self._token_id, self._left = token_id, times

    def feed(self, token_id: int) -> bool:
        self._left -= token_id == self._token_id
        return self._left == 0


GREEDY = SamplingParams(temperature=0.0)

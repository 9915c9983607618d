"""Paged attention as something to be measured: decodes, verifications, prefills, and their peers.

Beside SDPA on contiguous KV, and FlashInfer on the same blocks where it is installed. Measures
nothing.
"""

import importlib
import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from kvchat.bench.kernel_case import KernelCase, KernelShape, Peer, Place
from kvchat_kernels.paged_attention import PagedSequences, paged_attention

BLOCK_SIZE = 16
_CHUNK = 512  # new tokens on a context that is known
_BATCH = 8  # sequences that decode together
_WORKSPACE_BYTES = 128 << 20  # as FlashInfer recommends


def attention_cases(shape: KernelShape, place: Place, context: int) -> Iterator[KernelCase]:
    """Yield the cases of one context one by one; each is given up before the next."""
    for num_rows in (1, 5):
        yield _attention(
            _AttentionStep(shape, place, context, num_rows), few_rows(context, num_rows)
        )
    batch = _AttentionStep(shape, place, context, 1, _BATCH)
    yield _attention(batch, f"attention, {_BATCH} sequences of {context:,} tokens")
    del batch
    yield _prefill(shape, place, context, context)
    if context > _CHUNK:
        yield _prefill(shape, place, context, _CHUNK)


def few_rows(context: int, num_rows: int) -> str:
    """Return the name of the case of a decode, or of a verification of several rows."""
    return f"attention, {num_rows} rows on {context:,} tokens"


def _attention(step: "_AttentionStep", name: str) -> KernelCase:
    return KernelCase(
        name,
        step.num_bytes,
        True,
        len(step.pools),
        step.attend,
        lambda: step.attend(0, "reference"),
        (
            Peer("SDPA, contiguous KV, no mask", step.contiguous, is_same=step.num_rows == 1),
            *_flashinfer(step),
        ),
    )


def _prefill(shape: KernelShape, place: Place, context: int, num_rows: int) -> KernelCase:
    step = _AttentionStep(shape, place, context, num_rows)
    pairs = num_rows * context - num_rows * (num_rows - 1) // 2
    case = partial(
        KernelCase,
        f"prefill attention, {num_rows:,} new of {context:,} tokens",
        step.num_bytes,
        True,
        len(step.pools),
        step.attend,
        num_flops=4 * pairs * shape.num_heads * shape.head_dim,
    )
    if num_rows < context:
        return case(lambda: step.attend(0, "reference"), tuple(_flashinfer(step)))
    # The reference would hold all scores at once.
    whole = partial(step.contiguous, is_causal=True)
    peers = (Peer("SDPA, contiguous KV, causal", whole), *_flashinfer(step))
    return case(lambda: whole(0), peers)


class _AttentionStep:
    """New tokens of sequences of one length, and their KV, paged and contiguous, in as many sets
    as it takes."""

    def __init__(
        self, shape: KernelShape, place: Place, context: int, num_rows: int, num_sequences: int = 1
    ) -> None:
        self.shape, self.context = shape, context
        self.num_rows, self.num_sequences = num_rows, num_sequences
        blocks = -(-context // BLOCK_SIZE)
        size = (num_sequences * blocks + 1, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        tokens = num_sequences * context
        self.num_bytes = 2 * tokens * shape.num_kv_heads * shape.head_dim * place.dtype.itemsize
        copies = place.copies(self.num_bytes)
        self.pools = [(place.random(*size), place.random(*size)) for _ in range(copies)]
        self.query = place.random(num_sequences * num_rows, shape.num_heads, shape.head_dim)
        order = torch.randperm(num_sequences * blocks, dtype=torch.int32, device=place.device) + 1
        self.tables = order.view(num_sequences, blocks)
        lengths = (num_rows,) * num_sequences, (context,) * num_sequences
        self._sequences = PagedSequences(*lengths, self.tables, BLOCK_SIZE)
        self.scale = shape.head_dim**-0.5
        self._contiguous = [_gathered(pair, self.tables, context) for pair in self.pools]

    def attend(self, index: int, impl: str = "auto") -> torch.Tensor:
        pools = self.pools[index]
        return paged_attention(self.query, *pools, self._sequences, scale=self.scale, impl=impl)

    def contiguous(self, index: int, is_causal: bool = False) -> torch.Tensor:
        """Return what SDPA makes of the same, [num_sequences * num_rows, num_heads, dim]."""
        key, value = self._contiguous[index]
        rows = self.query.unflatten(0, (self.num_sequences, self.num_rows)).transpose(1, 2)
        out = functional.scaled_dot_product_attention(
            rows, key, value, is_causal=is_causal, scale=self.scale, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)


def _gathered(
    pools: tuple[torch.Tensor, torch.Tensor], tables: torch.Tensor, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values as [num_sequences, num_kv_heads, context, dim], contiguous."""
    key, value = (
        pool[tables.long()].flatten(1, 2)[:, :context].transpose(1, 2).contiguous()
        for pool in pools
    )
    return key, value


def has_flashinfer() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def _flashinfer(step: _AttentionStep) -> Iterator[Peer]:
    """Yield FlashInfer's kernel for few or many rows on the same blocks, where it is installed."""
    if not has_flashinfer():
        return
    device, blocks = step.query.device, step.tables.shape[1]
    flashinfer: Any = importlib.import_module("flashinfer")
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    counts = torch.arange(step.num_sequences + 1, dtype=torch.int32, device=device)
    last = (step.context - 1) % BLOCK_SIZE + 1
    wrapper.plan(
        counts * step.num_rows,
        counts * blocks,
        step.tables.flatten(),
        torch.full((step.num_sequences,), last, dtype=torch.int32, device=device),
        step.shape.num_heads,
        step.shape.num_kv_heads,
        step.shape.head_dim,
        BLOCK_SIZE,
        causal=True,
        sm_scale=step.scale,
        q_data_type=step.query.dtype,
        kv_data_type=step.query.dtype,
    )
    yield Peer("FlashInfer", lambda i: wrapper.run(step.query, step.pools[i]))

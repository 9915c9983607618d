"""Attention by FlashInfer's kernels over our pools and block tables, as they lie in memory.

Its NHD layout is ours: [pages, page size, KV heads, dim], keys and values in tensors of their own,
and a page is a block. So no KV is copied.

- A decode is `xqa_batch_decode_with_kv_cache`: it takes block tables and lengths on the device and
  plans nothing on the host, so its launches can be captured in a graph. GPUs of compute capability
  9, 10 and 12 have it.
- A prefill is `BatchPrefillWithPagedKVCacheWrapper`. Its host planning is done once a step for all
  layers alike, so it is for steps whose lengths the host knows, which are never captured. The list
  of a step's blocks is a view of the block table for one sequence, and a small copy for several.

FlashInfer computes no chunks and, here, no sinks. Written from its signatures in version 0.7.2; it
has never run on a GPU beside kvchat. FlashInfer: Ye et al., 2025.
"""

import threading
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from kvchat_kernels.paged_attention.adopted import LayerRule, StepKind
from kvchat_kernels.paged_attention.sequences import (
    AttentionFunction,
    AttentionSpan,
    PagedSequences,
    Scoring,
    Sequences,
)

# The sizes that its kernels are made for. It may accept others; they are not tested.
_HEAD_DIMS = (64, 128, 256)
_DECODE_BLOCK_SIZES = (16, 32, 64, 128)
_DECODE_CAPABILITIES = (9, 10, 12)
# What its documentation recommends for each; unchecked by its decode kernel, so not less.
_WORKSPACE_BYTES = 128 << 20
_NO_WINDOW = -1


def installed_version() -> str | None:
    """Return FlashInfer's version; None if it is not installed. Does not import it."""
    if find_spec("flashinfer") is None:
        return None
    try:
        return version("flashinfer-python")
    except PackageNotFoundError:
        return "of unknown version"


def refusal(
    step: StepKind, rule: LayerRule, block_size: int, capability: tuple[int, int]
) -> str | None:
    """Return why FlashInfer is not tried for a layer, as the end of a sentence; None if it is."""
    shape = rule.shape
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return f"its kernels are not for {str(shape.dtype).removeprefix('torch.')}"
    if shape.key_dim != shape.value_dim or shape.key_dim not in _HEAD_DIMS:
        return f"its kernels are not for heads of {shape.key_dim} and {shape.value_dim}"
    if rule.span.chunk is not None:
        return "it has no chunked attention"
    if capability < (8, 0):
        return "the GPU is older than Ampere"
    if step is StepKind.PREFILL:
        return None
    if rule.has_softcap:
        return "its decode kernel has no softcap"
    if block_size not in _DECODE_BLOCK_SIZES:
        return f"its decode kernel does not take blocks of {block_size} tokens"
    if capability[0] not in _DECODE_CAPABILITIES:
        return f"its decode kernel is not for compute capability {capability[0]}.{capability[1]}"
    return None


class FlashInfer:
    """FlashInfer's kernels on one device, for all models there.

    Two threads may prefill: /model loads and races one model while another reads ahead.

    package   the module `flashinfer`; a fake in tests
    """

    def __init__(self, package: Any, device: torch.device) -> None:
        self._package = package
        self._device = device
        self._decode_workspace: torch.Tensor | None = None
        self._prefill_workspace: torch.Tensor | None = None
        self._plans: dict[_PlanKey, _Plan] = {}
        self._planning = threading.Lock()  # held from a plan until what runs by it is launched

    def function(self, step: StepKind) -> AttentionFunction:
        """Return the function that attends in steps of this kind."""
        return self.decode if step is StepKind.DECODE else self.prefill

    def release(self, step: StepKind) -> None:
        """Give back the memory of steps of a kind, which no captured step may use."""
        if step is StepKind.DECODE:
            self._decode_workspace = None
        else:
            self._prefill_workspace = None
            self._plans.clear()

    def decode(
        self,
        query: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        sequences: Sequences,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Attend one token of every sequence; arguments as of `paged_attention`."""
        assert scoring.softcap is None
        tables = sequences.block_tables
        if not tables.is_contiguous():
            raise ValueError("the rows of the block tables are not adjacent")
        if self._decode_workspace is None:
            # Zeros, because its semaphores are in there.
            self._decode_workspace = self._zeros(_WORKSPACE_BYTES)
        lengths = (
            sequences.context_lens_device
            if isinstance(sequences, PagedSequences)
            else sequences.context_lens
        )
        out = query.new_empty(query.shape)
        self._package.decode.xqa_batch_decode_with_kv_cache(
            query=query.contiguous(),
            kv_cache=(key_pool, value_pool),
            workspace_buffer=self._decode_workspace,
            block_tables=tables,
            seq_lens=lengths.view(torch.uint32),
            max_seq_len=tables.shape[1] * sequences.block_size,
            bmm1_scale=scoring.scale,
            bmm2_scale=1.0,
            window_left=_window_left(scoring.span),
            out=out,
            kv_layout="NHD",
        )
        return out

    def prefill(
        self,
        query: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        sequences: Sequences,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Attend sequences of any numbers of tokens; arguments as of `paged_attention`."""
        assert isinstance(sequences, PagedSequences)
        if query.stride(-1) != 1:
            query = query.contiguous()
        key = _PlanKey(query.shape[1], key_pool.shape[2], query.shape[2], query.dtype, scoring)
        out = query.new_empty(query.shape)
        with self._planning:
            plan = self._plans.get(key)
            if plan is None:
                plan = self._plans[key] = self._new_plan()
            plan.prepare(key, sequences)
            plan.wrapper.run(query, (key_pool, value_pool), out=out)
        return out

    def _new_plan(self) -> "_Plan":
        if self._prefill_workspace is None:
            self._prefill_workspace = self._zeros(_WORKSPACE_BYTES)
        wrapper = self._package.BatchPrefillWithPagedKVCacheWrapper(self._prefill_workspace, "NHD")
        return _Plan(wrapper)

    def _zeros(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)


@dataclass(frozen=True, slots=True)
class _PlanKey:
    """What a plan depends on beside the sequences: layers alike share it."""

    num_heads: int
    num_kv_heads: int
    dim: int
    dtype: torch.dtype
    scoring: Scoring


class _Plan:
    """A wrapper of FlashInfer's, and the sequences that it was last planned for."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self._sequences: PagedSequences | None = None
        self._copied: Any = None

    def prepare(self, key: _PlanKey, sequences: PagedSequences) -> None:
        """Plan for `sequences`, unless a layer before has done so."""
        if self._sequences is sequences:
            return
        self._sequences = None  # if planning fails, nothing is planned
        if self._copied is not None:
            # The last plan may still be on its way out of the pinned memory that this one fills.
            self._copied.synchronize()
        ends = [-(-length // sequences.block_size) for length in sequences.context_lens]
        last = [
            length - (end - 1) * sequences.block_size
            for length, end in zip(sequences.context_lens, ends, strict=True)
        ]
        self.wrapper.plan(
            qo_indptr=_starts(sequences.query_lens),
            paged_kv_indptr=_starts(ends),
            paged_kv_indices=_block_list(sequences, ends),
            paged_kv_last_page_len=torch.tensor(last, dtype=torch.int32),
            num_qo_heads=key.num_heads,
            num_kv_heads=key.num_kv_heads,
            head_dim_qk=key.dim,
            page_size=sequences.block_size,
            causal=True,
            sm_scale=key.scoring.scale,
            window_left=_window_left(key.scoring.span),
            logits_soft_cap=key.scoring.softcap,
            q_data_type=key.dtype,
            kv_data_type=key.dtype,
        )
        device = sequences.block_tables.device
        if device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))
        self._sequences = sequences


def _starts(counts: Any) -> torch.Tensor:
    """Return where each count begins in their sum, and the sum: int32 on the host."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return torch.tensor(starts, dtype=torch.int32)


def _block_list(sequences: PagedSequences, ends: list[int]) -> torch.Tensor:
    """Return the ids of the blocks of all sequences, one sequence after another, on the device."""
    tables = [sequences.block_tables[index, :end] for index, end in enumerate(ends)]
    return tables[0] if len(tables) == 1 else torch.cat(tables)


def _window_left(span: AttentionSpan) -> int:
    """Return how many tokens before its own a token sees; -1 for all."""
    return _NO_WINDOW if span.window is None else span.window - 1


@cache
def flashinfer_on(device: torch.device) -> FlashInfer:
    """Import FlashInfer and return its kernels on `device`; raises what the import raises.

    The import takes seconds. It compiles each kernel where it is first used, with nvcc, unless the
    package of compiled kernels is installed too.
    """
    import flashinfer

    return FlashInfer(flashinfer, device)

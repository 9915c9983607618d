"""The attention kernels, compiled for Hopper in every variant that `tiles.py` names.

What the interpreter cannot show: that nothing spills, that shared memory suffices, that products
run on the tensor cores, and that keys and values are loaded ahead of their use.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from sm90 import MAX_SHARED_BYTES, HopperCode, compile_for_hopper

from kvchat_kernels.launch import Launch
from kvchat_kernels.paged_attention import (
    FULL,
    AttentionSpan,
    DeviceSequences,
    PagedSequences,
)
from kvchat_kernels.paged_attention.tiles import prefill_tile, split_tile
from kvchat_kernels.paged_attention.triton_gpu import AttentionCall, plan_launches

PROCESSORS = 132
GROUP, KV_HEADS, BLOCK_SIZE, CONTEXT = 4, 8, 16, 4096
# New tokens: 16, 32 and 64 rows of a KV head in a tile, and a prefill.
QUERIES = (1, 8, 16, 2048)
# Head dims and new tokens that between them need every tile, and the narrowest heads.
VARIANTS = [
    *(((dim, dim), query_len) for dim in (128, 256) for query_len in QUERIES),
    *(((64, 64), query_len) for query_len in (1, 8, 16)),
    *(((32, 32), query_len) for query_len in (1, 2048)),
]
OTHER_DIMS = [(16, 16), (20, 20), (32, 32), (80, 80), (96, 96), (128, 256), (192, 128)]


def attention_call(
    dims: tuple[int, int], query_len: int, dtype: torch.dtype, has_everything: bool
) -> AttentionCall:
    """A layer of a model with these head dims; with a window, a softcap and sinks, or without."""

    def meta(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    tables = meta(1, CONTEXT // BLOCK_SIZE, dtype=torch.int32)
    heads = GROUP * KV_HEADS
    return AttentionCall(
        query=meta(query_len, heads, dims[0]),
        key_pool=meta(512, BLOCK_SIZE, KV_HEADS, dims[0]),
        value_pool=meta(512, BLOCK_SIZE, KV_HEADS, dims[1]),
        sequences=PagedSequences((query_len,), (CONTEXT,), tables, BLOCK_SIZE),
        span=AttentionSpan(window=1000) if has_everything else FULL,
        scale=0.1,
        softcap=30.0 if has_everything else None,
        sinks=meta(heads) if has_everything else None,
        out=meta(query_len, heads, dims[1]),
    )


def compiled(launch: Launch, num_stages: int | None = None) -> HopperCode:
    """Compile a launch and hold it to what every variant must keep."""
    stages = launch.num_stages if num_stages is None else num_stages
    code = compile_for_hopper(
        launch.kernel, launch.values, num_warps=launch.num_warps, num_stages=stages
    )
    assert code.stack_bytes == code.spills == 0, "registers were spilled"
    assert code.shared_bytes <= MAX_SHARED_BYTES
    return code


def launches(call: AttentionCall) -> Iterator[Launch]:
    return plan_launches(call, PROCESSORS)


@pytest.mark.parametrize(("dims", "query_len"), VARIANTS, ids=str)
def test_with_every_rule_nothing_spills_and_loads_are_wide(
    dims: tuple[int, int], query_len: int
) -> None:
    attend, *merge = launches(attention_call(dims, query_len, torch.bfloat16, True))

    code = compiled(attend)

    assert code.ptx_count("cp.async.cg") > 0, "keys and values are not copied 16 bytes at a time"
    assert code.ptx_count("cp.async.ca") == 0
    cores = "wgmma.mma_async" if query_len >= 16 else "mma.sync"
    assert code.ptx_count(cores) > 0
    assert len(merge) == (query_len != 2048)
    for launch in merge:
        compiled(launch)


@pytest.mark.parametrize("query_len", QUERIES)
def test_each_stage_buffers_another_pair_of_key_and_value_tiles(query_len: int) -> None:
    """Block ids were once loaded in the iteration that needs them. The pipeline spent its stages
    on them, and three stages held no more keys and values than two."""
    launch = next(launches(attention_call((128, 128), query_len, torch.bfloat16, True)))
    pair = 2 * 128 * launch.values["BLOCK_N"] * 2

    shared = [compiled(launch, stages).shared_bytes for stages in (2, launch.num_stages)]

    assert shared[1] - shared[0] >= (launch.num_stages - 2) * pair > 0


@pytest.mark.parametrize("has_everything", [False, True], ids=["plain", "everything"])
@pytest.mark.parametrize("query_len", [1, 2048])
def test_float32_stays_whole(query_len: int, has_everything: bool) -> None:
    """Of these a decode without window, softcap and sinks spilled, compiled by Triton 3.6."""
    call = attention_call((128, 128), query_len, torch.float32, has_everything)
    code = compiled(next(launches(call)))

    assert code.ptx_count("mma") == code.ptx_count("wgmma") == 0, "TF32 keeps 10 of 23 bits"


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_two_decode_programs_fit_on_a_multiprocessor(dim: int) -> None:
    launch = next(launches(attention_call((dim, dim), 1, torch.bfloat16, True)))
    code = compiled(launch)

    assert 2 * (code.shared_bytes + 1024) <= 228 * 1024
    assert 2 * code.registers * 32 * launch.num_warps <= 65536


@pytest.mark.parametrize(("num_sequences", "most"), [(32, 2), (2, 17)])
def test_what_a_captured_step_launches_is_compiled(num_sequences: int, most: int) -> None:
    """More sequences than a step has rows, and more new tokens than other steps split keys for."""
    num_tokens = num_sequences * most // 2
    call = attention_call((128, 128), num_tokens, torch.bfloat16, True)

    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.int32, device="meta")

    sequences = DeviceSequences(
        num_tokens, most, meta(num_sequences + 1), meta(num_sequences), meta(num_sequences, 9), 16
    )
    split, merge = launches(replace(call, sequences=sequences))

    compiled(split)
    compiled(merge)
    assert split.values["BLOCK_B"] == max(16, num_sequences)
    assert split.values["max_query_len"] == most


@pytest.mark.soak
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("has_everything", [False, True], ids=["plain", "everything"])
@pytest.mark.parametrize("query_len", QUERIES)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), *OTHER_DIMS])
def test_no_variant_spills(
    dims: tuple[int, int], query_len: int, has_everything: bool, dtype: torch.dtype
) -> None:
    for launch in launches(attention_call(dims, query_len, dtype, has_everything)):
        compiled(launch)


def test_every_tile_that_can_be_chosen_is_compiled_above() -> None:
    half, single = torch.bfloat16, torch.float32
    sizes = [(key, value) for key in range(8, 257, 8) for value in range(8, 257, 8)]
    chosen = {split_tile(*size, t, r) for size in sizes for t in (half, single) for r in range(99)}
    chosen |= {prefill_tile(*size, t) for size in sizes for t in (half, single)}

    compiled = {split_tile(*dims, half, GROUP * query_len) for dims, query_len in VARIANTS}
    compiled |= {split_tile(128, 128, single, GROUP)}
    compiled |= {prefill_tile(dim, dim, t) for dim in (128, 256) for t in (half, single)}

    assert chosen == compiled

"""The attention kernels, compiled for the GPUs that people have, with the tiles of `tiles.py`.

What the interpreter cannot show: that nothing spills, that shared memory suffices, that products
run on the tensor cores, and that keys and values are loaded ahead of their use.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvchat_kernels.kv_code import CODES, INT8, KvCode, group_size
from kvchat_kernels.launch import Launch
from kvchat_kernels.paged_attention import AttentionSpan, DeviceSequences, PagedSequences, Scoring
from kvchat_kernels.paged_attention.tiles import Card, LayerShape, tiles_of, unsupported
from kvchat_kernels.paged_attention.triton_gpu import AttentionCall, plan_launches
from support.compiling import (
    AMPERE,
    BLACKWELL,
    GPUS,
    HOPPER,
    RTX_30,
    RTX_40,
    RTX_50,
    Gpu,
    GpuCode,
    compile_for,
)
from support.matrix import spread

PROCESSORS = 132
LARGE, SMALL = (Card(PROCESSORS, gpu.shared_bytes) for gpu in (HOPPER, RTX_40))
GROUP, KV_HEADS, BLOCK_SIZE, CONTEXT = 4, 8, 16, 4096
# New tokens: 16, 32 and 64 rows of a KV head in a tile, and a prefill.
QUERIES = (1, 8, 16, 2048)
# Head dims and new tokens that between them need every tile, and the narrowest heads.
VARIANTS = [
    *(((dim, dim), query_len) for dim in (128, 256) for query_len in QUERIES),
    *(((64, 64), query_len) for query_len in QUERIES),
    *(((32, 32), query_len) for query_len in (1, 2048)),
    *(((512, 512), query_len) for query_len in (1, 8, 2048)),
]
# The same for a GPU with less shared memory, and what most models need of the others.
SMALL_VARIANTS = [
    *((RTX_40, (dim, dim), query_len) for dim in (64, 128, 256) for query_len in QUERIES),
    *((RTX_40, (512, 512), query_len) for query_len in (1, 8, 2048)),
    *((gpu, (128, 128), n) for gpu in (AMPERE, RTX_30, RTX_50) for n in (1, 2048)),
]
# What most models need is compiled in every run, a share of the others: compiling takes a second.
_COMMON = [(gpu, (128, 128), n) for gpu in (HOPPER, RTX_40) for n in (1, 2048)]
# Over KV in int8 the tiles of most models, over other codes a few; long runs compile every tile for
# every kind of GPU.
_CODED_TILES = [
    *((gpu, (128, 128), n) for gpu in (HOPPER, RTX_40) for n in QUERIES),
    *((gpu, (64, 64), n) for gpu in (HOPPER, RTX_40) for n in (1, 2048)),
    *((gpu, (128, 128), n) for gpu in (AMPERE, RTX_30, RTX_50) for n in (1, 2048)),
    (BLACKWELL, (128, 128), 1),
]
_OTHER_CODED_TILES = [
    *((BLACKWELL, (128, 128), n) for n in (8, 16, 2048)),
    *((BLACKWELL, (dim, dim), n) for dim in (64, 256, 512) for n in QUERIES),
    *((gpu, (64, 64), n) for gpu in (HOPPER, RTX_40) for n in (8, 16)),
    *((gpu, (dim, dim), n) for gpu in (HOPPER, RTX_40) for dim in (256, 512) for n in QUERIES),
    *((gpu, (dim, dim), n) for gpu in (AMPERE, RTX_50) for dim in (64, 256) for n in QUERIES),
    *((gpu, (128, 128), n) for gpu in (AMPERE, RTX_30, RTX_50) for n in (8, 16)),
]
_FEW_TILES = [(HOPPER, (128, 128), 8), (RTX_40, (128, 128), 2048), (RTX_40, (64, 64), 1)]
CODED_VARIANTS = [
    pytest.param(
        *variant,
        code,
        id="-".join(map(str, (*variant, code.name))),
        marks=()
        if code is INT8 and variant in _COMMON
        else pytest.mark.matrix(number)
        if variant in (_CODED_TILES if code is INT8 else _FEW_TILES)
        else pytest.mark.soak,
    )
    for code in CODES.values()
    for number, variant in enumerate(_CODED_TILES + _OTHER_CODED_TILES)
]
OTHER_DIMS = [(16, 16), (20, 20), (32, 32), (80, 80), (96, 96), (128, 256), (192, 128)]
DIMS = [*((dim, dim) for dim in (64, 128, 256, 512)), *OTHER_DIMS]


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
        scoring=Scoring(0.1, AttentionSpan(window=1000), 30.0, meta(heads))
        if has_everything
        else Scoring(0.1),
        out=meta(query_len, heads, dims[1]),
    )


def plain_call(dims: tuple[int, int], query_len: int, dtype: torch.dtype) -> AttentionCall:
    """The layer with a window, a softcap and sinks."""
    return attention_call(dims, query_len, dtype, True)


def coded_call(
    dims: tuple[int, int], query_len: int, dtype: torch.dtype, code: KvCode = INT8
) -> AttentionCall:
    """The same layer, with a window, a softcap and sinks, over KV in few bits."""
    call = attention_call(dims, query_len, dtype, True)

    def meta(pool: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*pool.shape[:3], width, dtype=dtype, device="meta")

    sides = ((call.key_pool, dims[0], code.keys), (call.value_pool, dims[1], code.values))
    keys, values = (meta(pool, of.width(dim), of.dtype) for pool, dim, of in sides)
    scales = [meta(pool, dim // group_size(dim), torch.bfloat16) for pool, dim, _ in sides]
    return replace(
        call,
        key_pool=keys,
        value_pool=values,
        key_scales=scales[0],
        value_scales=scales[1],
        code=code,
    )


# Of private tables what most models need; long runs compile every tile for every kind of GPU.
PRIVATE_VARIANTS = [
    pytest.param(
        gpu,
        (dim, dim),
        query_len,
        make,
        id=f"{gpu}-{dim}-{query_len}-{make.__name__}",
        marks=()
        if make is plain_call and (gpu, (dim, dim), query_len) in _COMMON
        else pytest.mark.matrix(number)
        if dim == 128 and make is plain_call and query_len in (1, 2048) and gpu is not BLACKWELL
        else pytest.mark.soak,
    )
    for number, gpu in enumerate(GPUS)
    for dim in (64, 128, 256, 512)
    for query_len in QUERIES
    for make in (plain_call, coded_call)
    # Four registers are spilled there, which tiles.py tells.
    if not (gpu is BLACKWELL and dim == 512 and make is coded_call and query_len < 2048)
]


def card_of(gpu: Gpu) -> Card:
    return Card(PROCESSORS, gpu.shared_bytes, gpu.capability)


def compiled(launch: Launch, num_stages: int | None = None, gpu: Gpu = HOPPER) -> GpuCode:
    """Compile a launch and hold it to what every variant must keep."""
    stages = launch.num_stages if num_stages is None else num_stages
    code = compile_for(
        gpu, launch.kernel, launch.values, num_warps=launch.num_warps, num_stages=stages
    )
    assert code.stack_bytes == 0, "registers were spilled"
    assert code.shared_bytes <= gpu.shared_bytes
    return code


def launches(call: AttentionCall, gpu: Gpu = HOPPER) -> Iterator[Launch]:
    return plan_launches(call, card_of(gpu))


@pytest.mark.parametrize(
    ("dims", "query_len"),
    spread(VARIANTS, [*(((128, 128), n) for n in QUERIES), ((256, 256), 2048), ((512, 512), 8)]),
    ids=str,
)
def test_with_every_rule_nothing_spills_and_loads_are_wide(dims, query_len):
    attend, *merge = launches(attention_call(dims, query_len, torch.bfloat16, True))

    code = compiled(attend)

    assert code.ptx_count("cp.async.cg") > 0, "keys and values are not copied 16 bytes at a time"
    assert code.ptx_count("cp.async.ca") == 0
    cores = "wgmma.mma_async" if query_len >= 16 and dims[0] <= 256 else "mma.sync"
    assert code.ptx_count(cores) > 0
    assert len(merge) == (query_len != 2048)
    for launch in merge:
        compiled(launch)


@pytest.mark.parametrize(
    ("gpu", "dims", "query_len"),
    spread(SMALL_VARIANTS, [*_COMMON[2:], (RTX_40, (256, 256), 8), (RTX_40, (512, 512), 1)]),
    ids=str,
)
def test_tiles_fit_gpus_with_less_shared_memory(gpu, dims, query_len):
    """A decode's tile once took 104,448 bytes, of which consumer GPUs have 101,376: no model of 16
    bits started there."""
    code = compiled(
        next(launches(attention_call(dims, query_len, torch.bfloat16, True), gpu)), gpu=gpu
    )

    assert code.ptx_count("cp.async.cg") > 0
    assert code.ptx_count("mma.sync") > 0


@pytest.mark.parametrize(("gpu", "dims", "query_len", "code"), CODED_VARIANTS)
def test_over_kv_in_few_bits_nothing_spills(gpu, dims, query_len, code):
    """Numbers are copied to shared memory as they are, and multiplied by tensor cores."""
    launch = next(launches(coded_call(dims, query_len, torch.bfloat16, code), gpu))

    made = compiled(launch, gpu=gpu)

    assert launch.num_stages == 1 or made.ptx_count("cp.async") > 0
    cores = ("wgmma.mma_async", "tcgen05.mma", "mma.sync")
    assert any(made.ptx_count(name) for name in cores)


def with_private_table(call: AttentionCall) -> AttentionCall:
    positions = torch.empty(1, CONTEXT, dtype=torch.int32, device="meta")
    return replace(call, sequences=replace(call.sequences, positions=positions))


@pytest.mark.parametrize(("gpu", "dims", "query_len", "make"), PRIVATE_VARIANTS)
def test_over_private_tables_nothing_spills(gpu, dims, query_len, make):
    """Positions are loaded as block ids are, and leave the pipeline of a decode its stages."""
    call = make(dims, query_len, torch.bfloat16)
    private = compiled(next(launches(with_private_table(call), gpu)), gpu=gpu)

    assert private.ptx_count("cp.async") > 0
    if query_len == 1:
        shared = compiled(next(launches(call, gpu)), gpu=gpu)
        assert private.shared_bytes == shared.shared_bytes


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
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_no_variant_spills(dims, query_len, has_everything, dtype):
    for launch in launches(attention_call(dims, query_len, dtype, has_everything)):
        compiled(launch)


@pytest.mark.soak
@pytest.mark.parametrize("query_len", QUERIES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS if gpu is not HOPPER], ids=str)
def test_no_variant_spills_elsewhere(gpu: Gpu, dims: tuple[int, int], query_len: int) -> None:
    for launch in launches(attention_call(dims, query_len, torch.bfloat16, True), gpu):
        compiled(launch, gpu=gpu)


@pytest.mark.parametrize("card", [LARGE, SMALL], ids=["large", "small"])
def test_every_tile_that_can_be_chosen_is_compiled_above(card: Card) -> None:
    half = torch.bfloat16
    sizes = [(key, value) for key in range(8, 513, 8) for value in range(8, 513, 8)]
    chosen = {tile for size in sizes for tile in tiles_of(*size, half, card)}

    variants = (
        VARIANTS
        if card is LARGE
        else [(dims, query_len) for gpu, dims, query_len in SMALL_VARIANTS if gpu is RTX_40]
    )
    compiled = {tiles_of(*dims, half, card)[QUERIES.index(n)] for dims, n in variants}

    assert chosen == compiled


@pytest.mark.parametrize("code", CODES.values(), ids=list(CODES))
@pytest.mark.parametrize("gpu", [HOPPER, BLACKWELL, RTX_40], ids=str)
def test_every_tile_over_kv_in_few_bits_is_compiled_above(gpu: Gpu, code: KvCode) -> None:
    card, half = card_of(gpu), torch.bfloat16
    sizes = [(key, value) for key in range(8, 513, 8) for value in range(8, 513, 8)]
    chosen = {tile for size in sizes for tile in tiles_of(*size, half, card, code)}

    variants = [(dims, n) for own, dims, n in _CODED_TILES + _OTHER_CODED_TILES if own is gpu]
    assert chosen == {tiles_of(*dims, half, card, code)[QUERIES.index(n)] for dims, n in variants}


@pytest.mark.soak
@pytest.mark.parametrize("query_len", [1, 2048])
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_float32_over_kv_of_8_bits_stays_whole(dim: int, query_len: int) -> None:
    code = compiled(next(launches(coded_call((dim, dim), query_len, torch.float32))))

    assert code.ptx_count("mma") == code.ptx_count("wgmma") == 0


def test_a_gpu_with_too_little_shared_memory_is_refused_in_words() -> None:
    shape = LayerShape(32, 8, 128, 128, torch.bfloat16)

    assert unsupported(shape, SMALL) is None
    assert unsupported(shape, Card(68, 64 << 10)) == (
        "a program may take 64 KiB of this GPU's shared memory, "
        "less than the 99 KiB that the kernels need"
    )

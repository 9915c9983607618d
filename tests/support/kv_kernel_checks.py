"""What the kernels that write, rotate and copy KV must do, on any device that runs them.

Called where Triton interprets, with tensors on the CPU, and on a CUDA device. Each check makes its
own data from a seed and raises AssertionError.
"""

from dataclasses import dataclass

import torch

from kvchat_kernels.block_copy import PoolTensors, copy_blocks, gather_blocks, scatter_blocks
from kvchat_kernels.kv_write import HeadNorms, Rotation, StepKv, kv_write, rope_kv_write
from support.rounding import assert_as_exact, assert_same_bits, poisoned_memory, sparse_memory

BLOCK_SIZE = 4
NUM_BLOCKS = 9


@dataclass(frozen=True)
class KvCase:
    """One step's KV: odd sizes unless told otherwise."""

    num_tokens: int = 7
    num_heads: int = 6
    num_kv_heads: int = 3
    key_dim: int = 20
    value_dim: int = 12
    rotary_dim: int = 20
    is_interleaved: bool = False
    has_norms: bool = False
    offset: float = 0.0
    is_transposed: bool = False
    is_dense: bool = True
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype = torch.float32


def nan_pool(case: KvCase, dim: int, device: str) -> torch.Tensor:
    shape = (NUM_BLOCKS, BLOCK_SIZE, case.num_kv_heads, dim)
    return torch.full(shape, float("nan"), dtype=case.pool_dtype, device=device)


def some_slots(num_tokens: int, device: str) -> torch.Tensor:
    """Distinct slots after the scratch block; every fifth is skipped, every seventh padding."""
    slots = BLOCK_SIZE + torch.randperm((NUM_BLOCKS - 1) * BLOCK_SIZE)[:num_tokens]
    slots[3::5] = -1
    slots[6::7] = 0
    return slots.to(device)


def projections(case: KvCase, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as views of one merged projection, or head-major as from models."""
    heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads)
    dims = (case.key_dim, case.key_dim, case.value_dim)
    widths = [count * dim for count, dim in zip(heads, dims, strict=True)]
    merged = torch.randn(case.num_tokens, sum(widths)).to(case.dtype).to(device)
    query, key, value = (
        part.view(case.num_tokens, count, dim)
        for part, count, dim in zip(merged.split(widths, dim=1), heads, dims, strict=True)
    )
    if not case.is_dense:
        return tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value))
    if case.is_transposed:
        return tuple(t.transpose(0, 1).contiguous().transpose(0, 1) for t in (query, key, value))
    return query, key, value


def check_kv_write(case: KvCase, device: str = "cpu") -> None:
    """The kernel leaves the pools as the twin does, byte for byte, outside of the scratch block."""
    torch.manual_seed(case.num_tokens)
    _, key, value = projections(case, device)
    slots = some_slots(case.num_tokens, device)
    pools = [nan_pool(case, dim, device) for dim in (case.key_dim, case.value_dim)]
    expected = [pool.clone() for pool in pools]

    kv_write(key, value, *pools, slots, impl="triton")
    kv_write(key, value, *expected, slots, impl="reference")

    for name, pool, twin in zip(("keys", "values"), pools, expected, strict=True):
        assert_same_bits(pool[1:], twin[1:], name)


def check_rope_kv_write(case: KvCase, device: str = "cpu") -> None:
    """Queries and the pools hold what the formula says; skipped slots hold what they held."""
    torch.manual_seed(case.num_tokens)
    query, key, value = projections(case, device)
    slots = some_slots(case.num_tokens, device)
    angles = torch.rand(case.num_tokens, case.rotary_dim // 2, device=device) * 6.3
    rotation = Rotation(angles.cos(), angles.sin(), case.is_interleaved)
    norms = _some_norms(case, device) if case.has_norms else None
    results = {}
    for impl in ("triton", "reference"):
        pools = [nan_pool(case, dim, device) for dim in (case.key_dim, case.value_dim)]
        destination = StepKv(pools[0], pools[1], slots)
        with poisoned_memory():
            rotated = rope_kv_write(query, key, value, rotation, destination, norms, impl=impl)
        results[impl] = rotated, *pools

    rotated, keys, values = results["triton"]
    plain, plain_keys, plain_values = results["reference"]
    assert_as_exact(rotated, plain, _by_formula(query, angles, case, norms, is_query=True))
    assert_same_bits(values[1:], plain_values[1:], "values")
    untouched = plain_keys[1:].isnan()
    assert torch.equal(keys[1:].isnan(), untouched), "keys went elsewhere"
    written = slots > 0
    by_slot, plain_by_slot = keys.flatten(0, 1), plain_keys.flatten(0, 1)
    oracle = _by_formula(key, angles, case, norms, is_query=False)[written]
    assert_as_exact(by_slot[slots[written]], plain_by_slot[slots[written]], oracle)


def _some_norms(case: KvCase, device: str) -> HeadNorms:
    weights = [(torch.rand(case.key_dim) + 0.5).to(case.dtype).to(device) for _ in range(2)]
    return HeadNorms(weights[0], weights[1], 1e-5, case.offset)


def _by_formula(
    heads: torch.Tensor,
    angles: torch.Tensor,
    case: KvCase,
    norms: HeadNorms | None,
    *,
    is_query: bool,
) -> torch.Tensor:
    """Norm and rotate in float64, pair by pair."""
    heads = heads.double()
    if norms is not None:
        weight = (norms.query_weight if is_query else norms.key_weight).double() + norms.offset
        heads = heads / (heads.square().mean(-1, keepdim=True) + norms.eps).sqrt() * weight
    out = heads.clone()
    num_pairs = case.rotary_dim // 2
    # The angles' cosines are given in float32; those of float64 would be another rotation.
    cos, sin = angles.cos().double(), angles.sin().double()
    for pair in range(num_pairs):
        left, right = (2 * pair, 2 * pair + 1) if case.is_interleaved else (pair, pair + num_pairs)
        turn, lift = cos[:, pair, None], sin[:, pair, None]
        out[..., left] = heads[..., left] * turn - heads[..., right] * lift
        out[..., right] = heads[..., right] * turn + heads[..., left] * lift
    return out


def check_block_copies(shapes: tuple[tuple[int, ...], ...], device: str = "cpu") -> None:
    """Images, blocks filled from images, and copied blocks are the twin's, byte for byte."""
    torch.manual_seed(len(shapes))
    tensors = [torch.randn(11, *shape).half().to(device) for shape in shapes]
    own = [tensor.clone() for tensor in tensors]
    pools, twin = PoolTensors(tensors), PoolTensors(own)
    check_copies_equal(pools, twin, device)
    # Every second tensor, as a part of the images of all.
    starts = [start for _, start, _ in pools.columns()][1::2]
    if starts:
        parts = [
            PoolTensors(each, starts, pools.image_bytes) for each in (tensors[1::2], own[1::2])
        ]
        check_copies_equal(*parts, device)


def check_copies_equal(pools: PoolTensors, twin: PoolTensors, device: str) -> None:
    """Hold the kernels to the reference on pools with the same content."""
    images = {}
    for impl, those in (("triton", pools), ("reference", twin)):
        images[impl] = torch.full((3, pools.image_bytes), 77, dtype=torch.uint8, device=device)
        gather_blocks(those, [3, 1, 9], images[impl], impl=impl)
        scatter_blocks(those, [4, 2, 10], images[impl], impl=impl)
        copy_blocks(those, [4, 5], [7, 8], impl=impl)

    assert_same_bits(images["triton"], images["reference"], "images")
    for (rows, start, end), (twin_rows, _, _) in zip(pools.columns(), twin.columns(), strict=True):
        assert_same_bits(rows, twin_rows, f"tensor at {start}:{end}")
        assert_same_bits(rows[4], images["triton"][0, start:end], "a block filled from an image")


def check_distant_slots() -> None:
    """Slots, blocks and tokens further from the start than 32 bits can count; on the CPU."""
    num_blocks, dim = 2**15 + 3, 2**12
    last = num_blocks * 16 - 1
    keys = sparse_memory(num_blocks * 16 * dim, torch.float16).view(num_blocks, 16, 1, dim)
    values = sparse_memory(num_blocks * 16 * dim, torch.float16).view(num_blocks, 16, 1, dim)
    assert last * dim > 2**31
    new = torch.randn(2, 1, dim).half()

    kv_write(new, new, keys, values, torch.tensor([last, 17]), impl="triton")
    for slot, row in ((last, new[0]), (17, new[1])):
        assert_same_bits(keys.flatten(0, 1)[slot], row, f"keys at slot {slot}")
        assert_same_bits(values.flatten(0, 1)[slot], row, f"values at slot {slot}")

    # The kernel's float32 arithmetic on a rotation by nothing changes no float16 number.
    rotation = Rotation(torch.ones(2, dim // 2), torch.zeros(2, dim // 2))
    destination = StepKv(keys, values, torch.tensor([last - 1, 18]))
    rope_kv_write(new, new, new, rotation, destination, impl="triton")
    assert_same_bits(keys.flatten(0, 1)[last - 1], new[0], "rotated keys")

    pools = PoolTensors([keys, values])
    images = torch.zeros(1, pools.image_bytes, dtype=torch.uint8)
    gather_blocks(pools, [num_blocks - 1], images, impl="triton")
    assert_same_bits(images[0], torch.cat([keys[-1], values[-1]]).view(torch.uint8).flatten(), "")
    copy_blocks(pools, [num_blocks - 1], [num_blocks - 2], impl="triton")
    assert_same_bits(keys[-2], keys[-1], "a copied block")

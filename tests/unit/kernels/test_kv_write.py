"""Writing KV to slots, plain or after norm and rotation: references, and kernels equal to them."""

from dataclasses import replace

import pytest
import torch

from kvchat_kernels.kv_write import kv_write
from support.interpreter import Interpreter
from support.kv_kernel_checks import (
    KvCase,
    check_distant_slots,
    check_kv_write,
    check_rope_kv_write,
)

HALF = {"dtype": torch.float16, "pool_dtype": torch.float16}
WRITES = {
    "odd sizes": KvCase(),
    "no token": KvCase(num_tokens=0),
    "one token": KvCase(num_tokens=1),
    "many tokens": KvCase(num_tokens=23, num_kv_heads=1),
    "wide rows": KvCase(num_kv_heads=13, key_dim=96, value_dim=64),
    "head-major": KvCase(is_transposed=True),
    "not dense": KvCase(is_dense=False),
    "half": KvCase(**HALF),
    "rounded": KvCase(pool_dtype=torch.float16),
    "widened": KvCase(dtype=torch.float16),
}
ROTATIONS = {
    **{name: replace(case, value_dim=12) for name, case in WRITES.items()},
    "interleaved": KvCase(is_interleaved=True),
    "a part": KvCase(rotary_dim=8),
    "an interleaved part": KvCase(rotary_dim=6, is_interleaved=True),
    "normed": KvCase(has_norms=True),
    "normed with an offset": KvCase(has_norms=True, offset=1.0),
    "a part, normed": KvCase(rotary_dim=8, has_norms=True),
    "interleaved, normed": KvCase(is_interleaved=True, has_norms=True, key_dim=16, rotary_dim=16),
    "half, normed": KvCase(has_norms=True, **HALF),
    "many heads": KvCase(num_heads=71, num_kv_heads=1, key_dim=64, rotary_dim=64, value_dim=64),
}


def nan_pool(num_blocks: int, block_size: int, heads: int, dim: int) -> torch.Tensor:
    return torch.full((num_blocks, block_size, heads, dim), float("nan"))


def test_each_token_lands_in_its_slot_and_nowhere_else() -> None:
    keys, values = nan_pool(5, 4, 2, 3), nan_pool(5, 4, 2, 6)
    slots = [4, 19, 7, 8]
    key, value = torch.randn(4, 2, 3), torch.randn(4, 2, 6)

    kv_write(key, value, keys, values, torch.tensor(slots))

    for pool, new in ((keys, key), (values, value)):
        by_slot = pool.view(20, *pool.shape[2:])
        assert torch.equal(by_slot[slots], new)
        others = [slot for slot in range(20) if slot not in slots]
        assert torch.isnan(by_slot[others]).all()


def test_strided_heads_are_written_as_they_read() -> None:
    keys, values = nan_pool(3, 4, 2, 5), nan_pool(3, 4, 2, 5)
    key = torch.randn(2, 6, 5).transpose(0, 1)
    value = torch.randn(2, 6, 5).transpose(0, 1)

    kv_write(key, value, keys, values, torch.arange(4, 10))

    assert torch.equal(keys.view(12, 2, 5)[4:10], key)
    assert torch.equal(values.view(12, 2, 5)[4:10], value)


def test_values_are_rounded_to_the_pools_dtype() -> None:
    keys, values = torch.zeros(2, 2, 1, 1).half(), torch.zeros(2, 2, 1, 1).bfloat16()

    kv_write(
        torch.full((1, 1, 1), 1.0001), torch.full((1, 1, 1), 1.001), keys, values, torch.tensor([3])
    )

    assert keys.flatten()[3].item() == 1.0
    assert values.flatten()[3].item() == 1.0


def test_padding_rows_may_share_the_scratch_block() -> None:
    keys, values = nan_pool(3, 2, 1, 1), nan_pool(3, 2, 1, 1)

    kv_write(
        torch.arange(4.0).view(4, 1, 1),
        torch.arange(4.0).view(4, 1, 1),
        keys,
        values,
        torch.tensor([0, 0, 0, 5]),
    )

    assert keys.flatten()[5] == 3.0
    assert torch.isnan(keys.flatten()[1:5]).all()


def test_a_token_at_slot_minus_one_is_not_written() -> None:
    keys, values = nan_pool(2, 2, 1, 1), nan_pool(2, 2, 1, 1)
    rows = torch.arange(3.0).view(3, 1, 1)

    kv_write(rows, rows, keys, values, torch.tensor([-1, 3, -1]))

    assert keys.flatten()[3] == 1.0
    assert torch.isnan(keys.flatten()[:3]).all()


def test_a_slot_beyond_the_pool_is_no_slot_to_skip() -> None:
    keys, values = nan_pool(2, 2, 1, 1), nan_pool(2, 2, 1, 1)
    rows = torch.arange(2.0).view(2, 1, 1)

    with pytest.raises(IndexError):
        kv_write(rows, rows, keys, values, torch.tensor([-1, 4]))


@pytest.mark.parametrize("name", WRITES)
def test_the_kernel_writes_what_the_twin_writes(interpreter: Interpreter, name: str) -> None:
    interpreter(check_kv_write, WRITES[name])


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotated_heads_are_as_exact_as_the_twins(interpreter: Interpreter, name: str) -> None:
    interpreter(check_rope_kv_write, ROTATIONS[name])


def test_slots_beyond_the_reach_of_32_bits_are_found(interpreter: Interpreter) -> None:
    interpreter(check_distant_slots)

"""Writing KV to slots and copying blocks: what is named changes, nothing else does."""

import torch

from kvchat_kernels.block_copy import block_copy
from kvchat_kernels.kv_write import kv_write


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


def test_copied_blocks_equal_their_sources_and_the_rest_is_untouched() -> None:
    pool = torch.randn(8, 4, 2, 3)
    before = pool.clone()

    block_copy(pool, torch.tensor([1, 1, 6]), torch.tensor([3, 5, 2]))

    assert torch.equal(pool[[3, 5, 2]], before[[1, 1, 6]])
    assert torch.equal(pool[[0, 1, 4, 6, 7]], before[[0, 1, 4, 6, 7]])

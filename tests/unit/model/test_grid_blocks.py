"""Formats of GGUF files whose weights are points of a grid: the same numbers at the file's size."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kvchat.model.gguf import tensors
from kvchat.model.gguf.file import GgufTensor
from kvchat.model.gguf.forms import Form
from kvchat.model.gguf.grid_blocks import GRID_FORMATS, grid_bytes, read_grids
from kvchat_kernels.linear.blocks import BlockWeights, dequantised, with_columns, without_grid
from kvchat_kernels.linear.cpu import BlockProduct
from kvchat_kernels.linear.gguf_blocks import block_weights
from kvchat_kernels.linear.table_rows import TableRows, can_read
from support.matrix import spread

# Bytes of memory beside those of the file, at most.
_MOST = {"IQ1_M": 1.04}
GRIDS = sorted(GRID_FORMATS)


def random_rows(name: str, num_rows: int, num_in: int) -> np.ndarray:
    """Return rows of random bytes whose steps are finite; the first block has the step 0."""
    num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]][1]
    generator = np.random.default_rng(num_bytes)
    blocks = generator.integers(0, 256, (num_rows * num_in // 256, num_bytes), dtype=np.uint8)
    if name == "IQ1_M":
        words = blocks[:, 48:56].view(np.uint16)
        words[:, 3] = words[:, 3] & 0x0FFF | 0x2000  # the bits of the step that count most
    else:
        at = 52 if name == "TQ1_0" else 0
        steps = generator.uniform(0.00001, 0.1, len(blocks)).astype(np.float16)
        steps[0] = 0
        blocks[:, at : at + 2] = steps.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(num_rows, -1)


def random_weights(
    name: str, num_rows: int, num_in: int, is_interleaved: bool = True
) -> BlockWeights:
    rows = torch.from_numpy(random_rows(name, num_rows, num_in))
    with ThreadPoolExecutor(2) as pool:
        return read_grids(rows, name, pool, is_interleaved)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("name", sorted(GRID_FORMATS))
def test_weights_are_the_numbers_that_the_file_means(name, is_interleaved, monkeypatch):
    """Also where rows are read by several tiles."""
    monkeypatch.setattr("kvchat.model.gguf.grid_blocks._AT_ONCE", 3 * 512)
    rows = random_rows(name, 7, 512)

    weights = random_weights(name, 7, 512, is_interleaved)

    meant = torch.from_numpy(dequantize(rows, GGMLQuantizationType[name]))
    assert torch.equal(dequantised(weights), meant)
    is_in_planes = name == "TQ1_0" and not is_interleaved
    assert is_in_planes or weights.num_bytes == grid_bytes(rows.size, name)
    assert weights.num_bytes <= (1.23 if is_in_planes else _MOST.get(name, 1.0)) * rows.size


@pytest.mark.parametrize("name", ["IQ3_S", "IQ2_XS", "IQ1_S", "TQ1_0"])
def test_rows_of_a_table_are_looked_up(name: str) -> None:
    weights = random_weights(name, 7, 512)
    out = np.empty((2, 512), np.float32)

    assert can_read(weights)
    TableRows(weights).write(np.array([5, 0]), out)

    assert np.array_equal(out, dequantised(weights)[[5, 0]].numpy())


def assert_products(name: str) -> None:
    """Points that kernels look up give the products of whole levels, to the bit."""
    for num_out, num_in in ((1, 256), (7, 2304)):
        weights = random_weights(name, num_out, num_in)
        product, of_levels = BlockProduct(weights), BlockProduct(without_grid(weights))
        exact = dequantised(weights).double()
        for num_rows in (1, 2, 20):
            x = torch.randn(num_rows, num_in, generator=torch.Generator().manual_seed(num_rows))

            found = product(x)

            assert torch.equal(found, of_levels(x))
            bound = 1e-4 * (x.double().abs() @ exact.abs().t())
            assert ((found - x.double() @ exact.t()).abs() <= bound).all()


@pytest.mark.parametrize("name", GRIDS)
def test_points_are_looked_up_in_products(name: str) -> None:
    assert_products(name)


@pytest.mark.parametrize("name", spread(GRIDS, ["IQ1_M", "IQ2_XS", "IQ3_S", "TQ1_0"]))
def test_points_are_multiplied_with_activations_of_8_bits(name: str) -> None:
    """As in large models; 20 rows share one reading of the points."""
    weights = random_weights(name, 7, 2304)
    product, exact = BlockProduct(weights), dequantised(weights).double()
    product.round_coarsely()
    x = torch.randn(20, 2304, generator=torch.Generator().manual_seed(1))
    rows = product.rounded(x)

    found = product(x)

    meant = rows.values().double() @ exact.t()
    assert (found - meant).norm() <= 1e-5 * meant.norm()
    assert torch.equal(found[:3], product(x[:3]))


@pytest.mark.parametrize("name", ["IQ3_XXS", "IQ2_S", "IQ1_M", "TQ1_0"])
def test_columns_in_another_order_are_codes(name: str) -> None:
    """A file's rows may have runs of 128 columns in another order than transformers' modules."""
    weights = random_weights(name, 3, 512, is_interleaved=False)
    order = torch.arange(512).view(-1, 128).flip(0).flatten()

    moved = with_columns(weights, order)

    assert torch.equal(dequantised(moved), dequantised(weights)[:, order])
    assert moved.bits <= 4


@pytest.mark.parametrize("run", [128, 256])
@pytest.mark.parametrize("name", [*GRIDS, "Q4_K", "Q6_K", "Q8_0"])
def test_memory_of_moved_columns_is_told_as_it_is(name: str, run: int) -> None:
    """It was told as if they stayed: a few per cent too low, of all weights of a model."""
    kind = GGMLQuantizationType[name]
    block, num_bytes = GGML_QUANT_SIZES[kind]
    rows = torch.zeros(3, 512 // block * num_bytes, dtype=torch.uint8)
    order = torch.arange(512).view(-1, run).flip(0).flatten()
    form = Form(re.compile("x"), ("y",), columns=lambda num_in, config: order)
    tensor = GgufTensor("y", (3, 512), kind.value, Path("y"), 0, rows.numel())

    weights = block_weights(rows, name)
    if weights is None:
        with ThreadPoolExecutor(1) as pool:
            weights = read_grids(rows, name, pool, is_interleaved=False)

    moved = with_columns(weights, order)
    for for_cpu in (True, False):
        assert tensors._held_bytes(tensor, form, None, for_cpu) == moved.num_bytes


@pytest.mark.parametrize("name", GRIDS)
def test_points_are_codes_on_a_gpu(name: str) -> None:
    """They became 16 bits there."""
    rows = torch.from_numpy(random_rows(name, 5, 512))
    tensor = GgufTensor("y", (5, 512), GGMLQuantizationType[name].value, Path("y"), 0, rows.numel())
    with ThreadPoolExecutor(1) as pool:
        weights = read_grids(rows, name, pool, is_interleaved=False, in_codes=True)

    assert weights.grid is None
    assert torch.equal(dequantised(weights), dequantised(random_weights(name, 5, 512)))
    assert tensors._held_bytes(tensor, None, None, for_cpu=False) == weights.num_bytes
    assert 8 * weights.num_bytes <= 4.6 * 5 * 512

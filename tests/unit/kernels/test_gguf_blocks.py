"""GGUF's blocks: the same numbers as the package gguf unpacks."""

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kvchat_kernels.linear import cpu as linear_cpu
from kvchat_kernels.linear import gguf_blocks
from kvchat_kernels.linear.blocks import BlockWeights, dequantised, interleaved, with_planes_apart
from kvchat_kernels.linear.cpu import read_blocks, rounding_beside
from kvchat_kernels.linear.file_formats import FILE_FORMATS
from kvchat_kernels.linear.gguf_blocks import block_weights, held_bytes
from support.gguf_files import SCALES_AT
from support.matrix import spread

FORMATS = [name for name in FILE_FORMATS if name in GGMLQuantizationType.__members__]
# Compiled code reads these in different ways: runs of all lengths, a head, codes, whole scales.
_DIFFERENT = ["Q4_1", "Q5_0", "Q5_K", "Q6_K", "IQ4_XS"]
WIDTHS = {256: (256, 2048), 64: (64, 448), 32: (32, 96, 480, 512)}


def random_rows(name: str, num_rows: int, num_in: int) -> np.ndarray:
    """Return rows of random bytes, but that every float16 in them is finite and not tiny."""
    kind = GGMLQuantizationType[name]
    block, num_bytes = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(len(name) + num_in)
    blocks = generator.integers(0, 256, (num_rows * num_in // block, num_bytes), dtype=np.uint8)
    if name == "NVFP4":
        blocks[:, :4] &= 0x7E  # neither a sign nor NaN
    if name == "MXFP4":
        blocks[:, 0] %= 250  # no infinity
    for place in SCALES_AT.get(name, ()):
        values = generator.uniform(0.001, 0.1, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = values.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_are_the_numbers_that_the_file_means(name: str) -> None:
    """To the bit; but where there is a minimum, gguf rounds in another order."""
    rows = random_rows(name, 6, 512)

    weights = block_weights(torch.from_numpy(rows), name)

    assert weights is not None
    meant = torch.from_numpy(dequantize(rows, GGMLQuantizationType[name]))
    tolerance = 1e-6 if weights.has_minimums or weights.layout.is_centred else 0.0
    for form in (weights, with_planes_apart(weights)):
        assert torch.allclose(dequantised(form), meant, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_stay_at_the_size_that_they_have_in_the_file(name: str) -> None:
    """Those of 5 and 6 bits became 8, and a file of 5 GB needed 7."""
    rows = torch.from_numpy(random_rows(name, 4, 512))

    assert read_blocks(rows, name, is_interleaved=True).num_bytes <= 1.05 * rows.numel()


def test_other_formats_have_no_layout() -> None:
    assert block_weights(torch.zeros(1, 256, dtype=torch.uint8), "F16") is None


@pytest.mark.parametrize("name", FORMATS)
def test_rows_that_are_read_tile_by_tile_are_the_same(name, monkeypatch):
    rows = torch.from_numpy(random_rows(name, 7, 512))
    whole = block_weights(rows, name)
    monkeypatch.setattr(gguf_blocks, "_BYTES_AT_ONCE", 3 * rows.shape[1])

    tiled = block_weights(rows, name)

    assert whole is not None
    assert tiled is not None
    assert_same(tiled, whole)
    assert held_bytes(rows.numel(), name) == whole.num_bytes


def assert_same(found: BlockWeights, wanted: BlockWeights) -> None:
    """The same bytes in the same layout."""
    assert found.layout == wanted.layout
    assert found.parts().keys() == wanted.parts().keys()
    for key, part in wanted.parts().items():
        assert part.shape == found.parts()[key].shape
        assert part.view(torch.uint8).equal(found.parts()[key].view(torch.uint8)), key


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("name", spread(FORMATS, _DIFFERENT))
def test_compiled_code_reads_the_same_bytes(name: str, is_interleaved: bool) -> None:
    for num_in in WIDTHS[FILE_FORMATS[name].columns]:
        for num_rows in (1, 37):
            rows = torch.from_numpy(random_rows(name, num_rows, num_in))
            plain = block_weights(rows, name)
            assert plain is not None

            found = read_blocks(rows, name, is_interleaved)

            turned = interleaved(plain, rounding_beside(plain)) if is_interleaved else plain
            assert_same(found, turned)


@pytest.mark.parametrize("name", spread(FORMATS, _DIFFERENT))
def test_rows_that_lie_anywhere_in_a_file_are_read(name: str) -> None:
    rows = torch.from_numpy(random_rows(name, 5, 256))
    anywhere = torch.zeros(rows.numel() + 7, dtype=torch.uint8)
    anywhere[7:] = rows.flatten()

    found = read_blocks(anywhere[7:].view(rows.shape), name, True)

    assert_same(found, read_blocks(rows, name, True))


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_blocks_are_read_without_compiled_code(is_interleaved, monkeypatch):
    rows = torch.from_numpy(random_rows("Q4_K", 5, 512))
    compiled = read_blocks(rows, "Q4_K", is_interleaved)
    monkeypatch.setattr(linear_cpu, "compiled_calls", lambda: None)

    assert_same(read_blocks(rows, "Q4_K", is_interleaved), compiled)

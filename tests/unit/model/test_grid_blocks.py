"""Formats of GGUF files whose weights are points of a grid: their codes are the same numbers."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kvchat.model.gguf.grid_blocks import GRID_FORMATS, grid_bytes, read_grids
from kvchat_kernels.linear.blocks import dequantised

# Bytes of memory beside those of the file, at most.
_MOST = {"IQ3_S": 1.26, "IQ3_XXS": 1.41, "IQ2_S": 1.4, "TQ1_0": 1.23}


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


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("name", sorted(GRID_FORMATS))
def test_codes_are_the_numbers_that_the_file_means(
    name: str, is_interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where rows are read by several tiles."""
    monkeypatch.setattr("kvchat.model.gguf.grid_blocks._AT_ONCE", 3 * 512)
    rows = random_rows(name, 7, 512)

    with ThreadPoolExecutor(2) as pool:
        weights = read_grids(torch.from_numpy(rows), name, pool, is_interleaved)

    meant = torch.from_numpy(dequantize(rows, GGMLQuantizationType[name]))
    assert torch.equal(dequantised(weights), meant)
    assert weights.num_bytes == grid_bytes(rows.size, name) <= _MOST.get(name, 2.13) * rows.size

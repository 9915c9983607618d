"""The real kernel passes the autotuner's comparison with torch, in Triton's interpreter."""

import pytest
import torch
from interpreter import Interpreter

from support.autotuning import check_triton_kernel_agrees


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(24, 64), (37, 300)], ids=str)
def test_the_kernel_computes_torchs_numbers_in_every_bucket(
    interpreter: Interpreter, sizes: tuple[int, int], dtype: torch.dtype, has_bias: bool
) -> None:
    interpreter(check_triton_kernel_agrees, sizes, dtype, has_bias)

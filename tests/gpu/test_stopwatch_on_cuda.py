"""Times of passes on a CUDA device are the device's."""

from statistics import median

import pytest
import torch
from torch.nn.functional import linear

from kvchat.model.gpu.attention_race import CudaStopwatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def test_twice_the_work_takes_about_twice_the_time() -> None:
    watch = CudaStopwatch(torch.device("cuda", torch.cuda.current_device()))
    weight = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(1, 8192, device="cuda", dtype=torch.bfloat16)

    def run(num_products: int) -> torch.Tensor:
        out = rows
        for _ in range(num_products):
            out = linear(rows, weight)
        return out

    one, other = watch.times_s([lambda: run(8), lambda: run(16)], 15)

    assert len(one) == len(other) == 15
    assert 1.6 < median(other) / median(one) < 2.4

"""Products in low precision are given few numbers of rows, and the rows they are asked for."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import linear

from kvchat_kernels.cpu_products import (
    few_sizes,
    linear_of_few_sizes,
    multiplies_fast_in,
    multiplies_in,
)


def test_sizes_are_few_and_never_a_quarter_above_what_is_asked_for() -> None:
    for count in range(1, 5000):
        assert count <= few_sizes(count) <= max(count + 15, 1.25 * count)
    assert {few_sizes(count) for count in range(17, 513)} == {
        *(32, 48, 64, 80, 96, 112, 128),
        *(160, 192, 224, 256, 320, 384, 448, 512),
    }


@pytest.mark.parametrize("count", [1, 16, 17, 100])
@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_that_were_added_are_cut_off_again(count: int, has_bias: bool) -> None:
    torch.manual_seed(count)
    x = torch.randn(1, count, 24, dtype=torch.bfloat16)
    weight = torch.randn(40, 24, dtype=torch.bfloat16)
    bias = torch.randn(40, dtype=torch.bfloat16) if has_bias else None
    found, expected = linear_of_few_sizes(x, weight, bias), linear(x, weight, bias)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)


@pytest.fixture
def asked_anew() -> Iterator[None]:
    for answer in (multiplies_in, multiplies_fast_in):
        answer.cache_clear()
    yield
    for answer in (multiplies_in, multiplies_fast_in):
        answer.cache_clear()


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize(
    ("processor", "is_fast"),
    [
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True}, False),
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": True}, True),
        ({"cpu_name": "AMD EPYC", "avx512_bf16": True}, True),
        ({"avx512_bf16": True}, True),
        ({"cpu_name": "AMD EPYC"}, False),
    ],
)
def test_intels_bfloat16_without_amx_is_no_faster_than_float32(processor, is_fast, monkeypatch):
    """A prompt took 1.2 times as long there: torch is slow with the instructions that exist."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor | {"avx512_fp16": True})

    assert multiplies_fast_in(torch.bfloat16) is is_fast
    assert multiplies_fast_in(torch.float16)

"""Products with weights in blocks: the layout, and compiled kernels against their plain form."""

import pytest
import torch

from kvchat_kernels.linear import cpu
from kvchat_kernels.linear.blocks import BlockWeights, dequantised, fits, quantised
from kvchat_kernels.linear.cpu import FEW_ROWS, BlockProduct, rows_of

SHAPES = [(16, 64), (48, 96), (1, 256), (80, 160), (33, 4864), (17, 2080)]
# Bits, columns of a block, type of the scales, whether there are minimums.
KINDS = [
    (8, 32, torch.float16, False),
    (8, 32, torch.float32, False),
    (8, 32, torch.float16, True),
    (8, 16, torch.float32, False),
    (4, 32, torch.float16, True),
    (4, 32, torch.float32, True),
]


def random_blocks(
    shape: tuple[int, int],
    bits: int,
    block: int,
    dtype: torch.dtype,
    has_minimums: bool,
) -> BlockWeights:
    """Every level, scale and minimum that a file may hold."""
    torch.manual_seed(shape[1] + bits)
    num_out, num_in = shape
    scales = torch.randn(num_out, num_in // block).to(dtype)
    levels = torch.randint(-128, 128, shape, dtype=torch.int8)
    if bits == 4:
        levels = torch.randint(0, 256, (num_out, num_in // 2), dtype=torch.uint8)
    minimums = torch.randn_like(scales) if has_minimums else None
    return BlockWeights(bits, block, levels, scales, minimums)


def outlying(rows: int, width: int) -> torch.Tensor:
    """Activations as transformers have them: one channel fifty times the others."""
    torch.manual_seed(rows)
    x = torch.randn(rows, width)
    x[:, 5] *= 50
    return x


@pytest.fixture(params=["compiled", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The compiled kernels, and what runs where llvmlite is missing."""
    if request.param == "plain":
        monkeypatch.setattr(cpu, "_kernels", lambda: None)
    return str(request.param)


@pytest.mark.parametrize("num_rows", [1, 3, 4, 7, FEW_ROWS, FEW_ROWS + 1, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_unpacked_weights(
    kind: tuple[int, int, torch.dtype, bool], num_rows: int, way: str
) -> None:
    for shape in SHAPES:
        weights, x = random_blocks(shape, *kind), outlying(num_rows, shape[1])
        rows = rows_of(x)

        out = BlockProduct(weights)(rows)

        exact = rows.values().double() @ dequantised(weights).double().t()
        assert (out - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_any_number_of_threads_does_all_rows(num_threads: int) -> None:
    weights, x = random_blocks((4096, 512), 4, 32, torch.float16, True), outlying(5, 512)
    product, rows = BlockProduct(weights), rows_of(x)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        few, many = product(rows), product(rows_of(outlying(20, 512)))
    finally:
        torch.set_num_threads(before)

    assert (few - rows.values() @ dequantised(weights).t()).abs().max() < 0.05
    assert not many.isnan().any()


def test_activations_keep_16_bits_of_each_block(way: str) -> None:
    x = outlying(4, 320)
    values = rows_of(x).values()

    largest = x.view(4, -1, 32).abs().amax(dim=-1, keepdim=True)
    assert ((values - x).view(4, -1, 32).abs() <= largest / 65000).all()


def test_both_ways_round_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    x = outlying(3, 640)
    compiled = rows_of(x)
    monkeypatch.setattr(cpu, "_kernels", lambda: None)
    plain = rows_of(x)

    assert (compiled.levels.int() - plain.levels.int()).abs().max() <= 1
    assert torch.allclose(compiled.scales, plain.scales)
    assert torch.allclose(compiled.sums, plain.sums, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_rows_result_does_not_hang_on_its_neighbours(bits: int) -> None:
    product = BlockProduct(quantised(torch.randn(48, 96), bits))
    x = outlying(6, 96)
    alone = torch.cat([product(rows_of(row[None])) for row in x])
    x[5] *= 1e4

    assert torch.equal(product(rows_of(x))[:5], alone[:5])


@pytest.mark.parametrize("bits", [8, 4])
def test_nothing_in_gives_nothing_out(bits: int, way: str) -> None:
    product = BlockProduct(quantised(torch.zeros(16, 64), bits))
    for x in (torch.zeros(2, 64), torch.randn(2, 64)):
        assert product(rows_of(x)).abs().max() < 1e-5


@pytest.mark.parametrize(("bits", "error"), [(8, 0.006), (4, 0.11)])
def test_rounding_is_within_half_a_step_of_each_block(bits: int, error: float) -> None:
    weight = torch.randn(64, 1024) * torch.rand(64, 1)

    values = dequantised(quantised(weight, bits))

    assert error / 2 < (values - weight).norm() / weight.norm() < error
    blocks, rounded = weight.view(64, -1, 32), values.view(64, -1, 32)
    step = (blocks.amax(-1) - blocks.amin(-1)) / (15 if bits == 4 else 100)
    assert ((blocks - rounded).abs() <= 0.6 * step[..., None] + 1e-6).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_turned_weights_lie_as_the_compiled_code_reads_them(bits: int) -> None:
    """GPT-2's are turned; the levels once kept their strides, and only the plain form heeded it."""
    weight, rows = torch.randn(64, 48).t(), rows_of(outlying(3, 64))

    out = BlockProduct(quantised(weight, bits))(rows)

    assert torch.allclose(out, rows.values() @ dequantised(quantised(weight, bits)).t(), atol=0.01)


def test_only_whole_blocks_fit() -> None:
    assert fits(64)
    assert not fits(72)

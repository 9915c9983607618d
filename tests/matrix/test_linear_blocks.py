"""Products with weights in blocks: the layout, and compiled kernels against their plain form."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvchat_kernels.cpu import block_products, code, compiler
from kvchat_kernels.cpu.activation_rounding import rounding_kernel
from kvchat_kernels.cpu.block_products import block_product_kernel
from kvchat_kernels.cpu.block_rounding import weight_rounding_kernel
from kvchat_kernels.cpu.block_rows import unpacking_kernel
from kvchat_kernels.cpu.calls import multiplies_bytes
from kvchat_kernels.cpu.object_cache import ObjectCache, object_cache
from kvchat_kernels.cpu.products import product_kernel
from kvchat_kernels.cpu.step import MANY_ROWS
from kvchat_kernels.linear import cpu
from kvchat_kernels.linear.block_order import GROUPS, alternating, in_order
from kvchat_kernels.linear.blocks import (
    CENTRE,
    FLOATS_OF_8_BITS,
    PLANES,
    BlockWeights,
    Rounding,
    dequantised,
    fits,
    interleaved,
    quantised,
)
from kvchat_kernels.linear.cpu import FEW_ROWS, BlockProduct, FloatProduct, rounded, rows_of
from kvchat_kernels.linear.table_rows import TableRows, can_read
from support.matrix import spread

# Each number of blocks behind whole groups of 8 has code of its own, which takes a second to
# compile: here there are none, or 7, so that groups of 4, 2 and 1 are read.
SHAPES = [(16, 224), (48, 480), (1, 256), (33, 4864), (17, 2272)]
STEPPED = [(1, 256), (33, 4864), (16, 2304), (48, 768)]
# Bits, columns of a block, type of the scales, whether there are minimums; whether activations
# have 8 bits; what is subtracted from levels; what levels stand for.
Kind = (
    tuple[int, int, torch.dtype, bool]
    | tuple[int, int, torch.dtype, bool, bool]
    | tuple[int, int, torch.dtype, bool, bool, int]
    | tuple[int, int, torch.dtype, bool, bool, int, tuple[int, ...] | None]
)
_WHOLE = (torch.int8, torch.uint8)
CODES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
KINDS: list[Kind] = [
    (8, 32, torch.float16, False),
    (8, 32, torch.float32, False),
    (8, 32, torch.float16, True),
    (8, 16, torch.float32, False),
    (4, 32, torch.float16, True),
    (4, 32, torch.float32, True),
    (4, 32, torch.float16, False),
    (4, 32, torch.int8, True),
    (4, 32, torch.int8, False),
    (8, 32, torch.int8, True),
    (8, 16, torch.int8, False),
    (4, 32, torch.float16, False, True),
    (4, 32, torch.int8, True, True),
    (5, 32, torch.float16, False, False, 16),
    (5, 32, torch.int8, True),
    (6, 16, torch.int8, False, False, 32),
    (3, 16, torch.int8, False, False, 4),
    (4, 32, torch.float16, False, False, 0, CODES),
    (4, 32, torch.int8, False, False, 0, CODES),
    (2, 16, torch.uint8, False),
    (2, 256, torch.float16, False, False, 1),
    (4, 32, torch.float8_e8m0fnu, False, False, 0, CODES),
    (4, 16, torch.float8_e4m3fn, False, False, 0, CODES),
    (4, 16, torch.float32, False, False, 0, CODES),
    (5, 32, torch.int8, True, True),
    (6, 16, torch.int8, False, True, 32),
    (4, 32, torch.float16, False, True, 0, CODES),
    (2, 16, torch.uint8, False, True),
]
_EACH = [(kind,) for kind in KINDS]
# In these the bits, blocks, kinds of scales, minimums and roundings all occur.
_DIFFERENT = [_EACH[number] for number in (0, 3, 4, 6, 9, 12, 13, 15, 17, 19, 24, 25)]


def random_blocks(
    shape: tuple[int, int],
    bits: int,
    block: int,
    dtype: torch.dtype,
    has_minimums: bool,
    _is_coarse: bool = False,
    zero: int = 0,
    codes: tuple[int, ...] | None = None,
) -> BlockWeights:
    """Every level, scale and minimum that a file may hold."""
    torch.manual_seed(shape[1] + bits)
    num_out, num_in = shape
    scales = torch.randn(num_out, num_in // block)
    if dtype == torch.int8:
        scales = (scales * 30).clamp(-128, 127)
    scales = scales.abs() * 100 if dtype == torch.uint8 else scales
    scales = (scales.abs() if dtype in FLOATS_OF_8_BITS else scales).to(dtype)
    levels = torch.randint(-128, 128, shape, dtype=torch.int8)
    if bits < 8:
        levels = torch.randint(0, 256, (num_out, num_in * bits // 8), dtype=torch.uint8)
    minimums = scales[torch.randperm(num_out)].roll(1, dims=1) if has_minimums else None
    steps = None
    if dtype in _WHOLE:
        count = 1 + (has_minimums or dtype == torch.uint8)
        steps = torch.rand(num_out, num_in // 256, count).half() / 30
    return BlockWeights(*(bits, block, levels, scales, minimums, steps), zero=zero, codes=codes)


def product_with(weights: BlockWeights, kind: Kind) -> BlockProduct:
    product = BlockProduct(weights)
    if is_coarse(kind):
        product.round_coarsely()
    return product


def is_coarse(kind: Kind) -> bool:
    return len(kind) > 4 and kind[4]


def is_stepped(kind: Kind) -> bool:
    """Whether rows are whole runs of 256 columns."""
    return kind[2] in _WHOLE or kind[1] == 256


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
        monkeypatch.setattr(cpu, "compiled_calls", lambda: None)
    return str(request.param)


@pytest.mark.parametrize("num_rows", [1, 2, FEW_ROWS, 40])
def test_floats_of_8_bits_are_multiplied_as_they_are(num_rows: int, way: str) -> None:
    """Every float there is but those that are no number."""
    levels = torch.arange(37 * 384).remainder(256).to(torch.uint8).view(37, 384)
    levels[levels & 0x7F == 0x7F] = 0
    weights = BlockWeights(8, 128, levels.view(torch.float8_e4m3fn), torch.rand(37, 3), None)
    x = outlying(num_rows, 384)

    out = BlockProduct(weights)(x)

    exact = x.double() @ dequantised(weights).double().t()
    assert (out - exact).norm() <= 1e-5 * exact.norm()
    if way == "compiled":
        assert torch.equal(out[:1], BlockProduct(weights)(x[:1]))  # whatever rows are beside it


@pytest.mark.parametrize("num_rows", [1, 3, 4, 7, FEW_ROWS, FEW_ROWS + 1, 40])
@pytest.mark.parametrize("kind", spread(_EACH, _DIFFERENT))
def test_products_are_those_of_the_unpacked_weights(kind: Kind, num_rows: int, way: str) -> None:
    for shape in STEPPED if is_stepped(kind) else SHAPES:
        weights, x = random_blocks(shape, *kind), outlying(num_rows, shape[1])
        product = product_with(weights, kind)
        rows = product.rounded(x)

        out = product.of_rows(rows)

        exact = rows.values().double() @ dequantised(weights).double().t()
        assert (out - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("rest", spread(range(1, 7), [2, 5]))
def test_any_number_of_blocks_may_lie_behind_whole_groups(rest: int) -> None:
    for num_blocks in (rest, 8 + rest):
        weights = random_blocks((48, 32 * num_blocks), *KINDS[4])
        product = BlockProduct(weights)
        for num_rows in (1, 7, 40):
            rows = product.rounded(outlying(num_rows, 32 * num_blocks))

            out = product.of_rows(rows)

            exact = rows.values().double() @ dequantised(weights).double().t()
            assert (out - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("kind", spread(_EACH, _DIFFERENT))
def test_levels_are_the_same_numbers_as_bytes_and_as_16_bits(kind: Kind) -> None:
    """A processor with instructions for bytes answers as one without; so do few rows and many."""
    for shape in STEPPED if is_stepped(kind) else SHAPES:
        weights, x = random_blocks(shape, *kind), outlying(MANY_ROWS + 1, shape[1])
        own = weights.layout.rounding
        roundings = (_other(own) if is_coarse(kind) else own, _other(own))
        product, other = (product_with(interleaved(weights, as_), kind) for as_ in roundings)

        many, few, otherwise = product(x), product(x[:3]), other(x[:3])

        assert torch.equal(many[:3], few)
        assert torch.equal(otherwise, few)


def _other(rounding: Rounding) -> Rounding:
    is_other = rounding is Rounding.SHORT and multiplies_bytes()
    return Rounding.HALVES if is_other else rounding


@pytest.mark.parametrize("kind", spread(_EACH, _DIFFERENT))
def test_weights_are_unpacked_as_they_are(kind: Kind, way: str) -> None:
    """A table of embeddings in 4 bits without minimums was once 8 levels too high."""
    for shape in STEPPED if is_stepped(kind) else SHAPES:
        weights = random_blocks(shape, *kind)
        out = torch.empty(shape)

        cpu.unpack(weights, out)

        assert torch.allclose(out, dequantised(weights), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rounding", [Rounding.SHORT, Rounding.HALVES])
@pytest.mark.parametrize("kind", spread(_EACH, _DIFFERENT))
def test_rows_of_a_table_are_the_same_numbers_by_numpy(kind: Kind, rounding: Rounding) -> None:
    for shape in STEPPED if is_stepped(kind) else SHAPES:
        plain = random_blocks(shape, *kind)
        bytes_alternate = plain.layout.rounding is not Rounding.SHORT
        for weights in (plain, interleaved(plain, None if bytes_alternate else rounding)):
            rows = np.array([0, shape[0] - 1, shape[0] // 2])
            if weights.scales.dtype in FLOATS_OF_8_BITS:
                assert not can_read(weights)
                continue
            out = np.empty((3, shape[1]), np.float32)

            TableRows(weights).write(rows, out)

            assert np.array_equal(out, dequantised(weights)[rows].numpy())


def test_a_table_has_no_row_behind_its_last() -> None:
    weights = random_blocks((48, 96), *KINDS[0])
    with pytest.raises(IndexError):
        TableRows(weights).write(np.array([3, 48]), np.empty((2, 96), np.float32))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_any_number_of_threads_does_all_rows(num_threads: int) -> None:
    weights, x = random_blocks((4096, 512), 4, 32, torch.float16, True), outlying(5, 512)
    product, rows = BlockProduct(weights), rows_of(x, Rounding.BYTES)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        few, many = product(x), product(outlying(20, 512))
    finally:
        torch.set_num_threads(before)

    assert (few - rows.values() @ dequantised(weights).t()).abs().max() < 0.05
    assert not many.isnan().any()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("rounding", "steps"),
    [
        (Rounding.SHORT, 65000),
        (Rounding.BYTES, 65000),
        (Rounding.HALVES, 65000),
        (Rounding.BYTE, 253),
        (Rounding.COARSE, 253),
    ],
)
@pytest.mark.parametrize("width", [320, 32, 992])
def test_activations_keep_their_bits_of_each_block(rounding, steps, width):
    x = outlying(4, width)
    values = rows_of(x, rounding).values()

    largest = x.view(4, -1, 32).abs().amax(dim=-1, keepdim=True)
    assert ((values - x).view(4, -1, 32).abs() <= largest / steps).all()


@pytest.mark.usefixtures("way")
def test_both_parts_of_a_level_fit_in_bytes() -> None:
    """The largest level is 127 * 256 + 127: one more would make a high part of 128."""
    x = torch.tensor([1.0, -1.0, 0.5, -0.5, 127.5 / 32639, -128.5 / 32639] + [0.0] * 26)

    levels = rows_of(x[None], Rounding.BYTES).whole_levels()[0, 0]

    assert levels[:6].tolist() == [32639, -32639, 16320, -16320, 128, -128]


@pytest.mark.parametrize("rounding", Rounding)
def test_both_ways_round_alike(rounding: Rounding, monkeypatch: pytest.MonkeyPatch) -> None:
    x = outlying(3, 640)
    compiled = rows_of(x, rounding)
    monkeypatch.setattr(cpu, "compiled_calls", lambda: None)
    plain = rows_of(x, rounding)

    assert (compiled.whole_levels() - plain.whole_levels()).abs().max() <= 1
    assert torch.allclose(compiled.scales, plain.scales)
    assert torch.allclose(compiled.sums, plain.sums, rtol=1e-3, atol=1e-2)
    levels = compiled.whole_levels()
    if rounding.has_sums_of_halves:
        halves = levels.view(3, -1, 16).sum(dim=-1, dtype=torch.int32)
        assert torch.equal(compiled.starts, halves)
    else:
        assert torch.equal(compiled.starts, levels.sum(dim=-1, dtype=torch.int32) * -CENTRE)


@pytest.mark.parametrize(("bits", "has_minimums"), [(8, False), (4, True), (4, False)])
@pytest.mark.parametrize("width", [224, 480])
def test_a_rows_result_does_not_hang_on_its_neighbours(bits, has_minimums, width):
    """Widths with groups of 8, 4, 2 and 1 blocks; the last two rows are no four."""
    weights = random_blocks((50, width), bits, 32, torch.float16, has_minimums)
    product, x = BlockProduct(weights), outlying(FEW_ROWS, width)
    alone = torch.cat([product(row[None]) for row in x])
    for num_rows in (3, 6, FEW_ROWS):
        beside = x[:num_rows].clone()
        beside[-1] *= 1e4

        assert torch.equal(product(beside)[:-1], alone[: num_rows - 1])


@pytest.mark.parametrize("bits", [8, 4])
def test_a_prompt_and_an_answer_are_the_same_numbers(bits: int) -> None:
    """A history that was computed token by token stands for one that is read at once."""
    product, x = BlockProduct(quantised(torch.randn(48, 1248), bits)), outlying(140, 1248)

    many, few = product(x), torch.cat([product(rows) for rows in x.split(1)])

    assert torch.equal(many, few)


@pytest.mark.parametrize("bits", PLANES)
@pytest.mark.parametrize("num_blocks", [*range(1, 18), 152])
def test_interleaved_levels_are_the_same_weights(num_blocks: int, bits: int) -> None:
    weights = random_blocks((5, 32 * num_blocks), bits, 32, torch.float16, True)
    turned = interleaved(weights)

    assert torch.equal(dequantised(turned), dequantised(weights))
    assert torch.equal(dequantised(turned.rows(1, 3)), dequantised(weights)[1:3])


@pytest.mark.parametrize("bits", [8, 4])
def test_a_matrix_of_one_block_may_lie_anywhere_in_its_bytes(bits: int) -> None:
    """Levels are interleaved as whole numbers, which may not begin at an odd byte."""
    weights = random_blocks((1, 32), bits, 32, torch.float16, True)
    stored = torch.cat((weights.levels[:, :1], weights.levels), dim=1)
    odd = weights.made_of(weights.parts() | {"levels": stored[:, 1:]})

    assert torch.equal(dequantised(interleaved(odd)), dequantised(weights))


@pytest.mark.parametrize("num_blocks", [8, 19])
def test_words_of_two_columns_of_8_bits_alternate(num_blocks: int) -> None:
    weights = random_blocks((1, 32 * num_blocks), 8, 32, torch.float16, False)

    lying = interleaved(weights).levels[0]

    first = [column for block in range(8) for column in (32 * block, 32 * block + 1)]
    assert torch.equal(lying[:16], weights.levels[0, first])
    assert torch.equal(lying, alternating(weights.levels.view(1, -1, 32), Rounding.SHORT.word)[0])


@pytest.mark.parametrize("num_blocks", [1, 8, 18, 27])
def test_columns_lie_as_the_levels_beside_them(num_blocks: int) -> None:
    """The low bits of a group's bytes are its first columns, the high bits the others."""
    weights = random_blocks((1, 32 * num_blocks), 4, 32, torch.float16, True)
    packed = weights.levels.view(1, -1, 16)
    columns = alternating(torch.cat((packed & 15, packed >> 4), dim=-1), Rounding.BYTE.word)
    lying = interleaved(weights).levels

    start = 0
    while start < 16 * num_blocks:
        size = next(s for s in GROUPS if start + 16 * s <= 16 * num_blocks) * 16
        group = lying[:, start : start + size]
        assert torch.equal(columns[:, 2 * start : 2 * start + size], group & 15)
        assert torch.equal(columns[:, 2 * start + size : 2 * (start + size)], group >> 4)
        start += size
    assert torch.equal(
        in_order(columns, 32, Rounding.BYTE.word), torch.cat((packed & 15, packed >> 4), dim=-1)
    )


@pytest.mark.parametrize("num_rows", [3, FEW_ROWS + 9])
def test_rows_of_another_dtype_than_the_weights_are_multiplied(num_rows: int) -> None:
    """Where the processor multiplies in bfloat16, many rows in float32 were refused by torch."""
    torch.manual_seed(0)
    weight, x = torch.randn(48, 992).bfloat16(), torch.randn(num_rows, 992)

    found = FloatProduct(weight, None)(x)

    assert found.dtype == torch.float32
    torch.testing.assert_close(found, x @ weight.float().T, rtol=1e-3, atol=1e-3)


@pytest.fixture
def without_features(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile as for a processor that is not of the x86 family, into a directory of its own.

    That a processor converts no floats of 16 bits stays known: LLVM's code would call a function
    for it that is nowhere, and the process would end.
    """
    kernels = (
        block_product_kernel,
        product_kernel,
        rounding_kernel,
        unpacking_kernel,
        weight_rounding_kernel,
    )
    converts = code.has_feature("f16c")
    monkeypatch.setattr(code, "has_feature", lambda name: name == "sse2" and not converts)
    monkeypatch.setattr(block_products, "has_feature", lambda name: False)
    monkeypatch.setattr(
        compiler, "object_cache", lambda: ObjectCache(object_cache().directory / "plain")
    )
    for kernel in kernels:
        kernel.cache_clear()
    yield
    for kernel in kernels:
        kernel.cache_clear()


@pytest.mark.parametrize("bits", spread([8, 4], [4]))
def test_plain_instructions_compute_the_same(bits: int, request: pytest.FixtureRequest) -> None:
    weights, x = random_blocks((48, 992), bits, 32, torch.float16, True), outlying(3, 992)
    fast = BlockProduct(weights)(x)
    request.getfixturevalue("without_features")

    plain = BlockProduct(weights)(x)

    assert (fast - plain).norm() <= 1e-6 * fast.norm()


@pytest.mark.usefixtures("without_features")
@pytest.mark.parametrize("kind", spread(_EACH, [_EACH[7]]))
def test_rows_of_weights_side_by_side_are_the_same_products(kind, monkeypatch):
    """What processors with whole vectors of 512 bits do, here by plain instructions."""
    monkeypatch.setattr(block_products, "_is_wide_faster", lambda are_bytes: True)
    shape, num_rows = ((19, 768) if is_stepped(kind) else (19, 480)), 19
    weights = random_blocks(shape, *kind)
    product = BlockProduct(weights)
    rows = product.rounded(outlying(num_rows, shape[1]))

    out = product.of_rows(rows)

    exact = rows.values().double() @ dequantised(weights).double().t()
    assert (out - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("bits", [8, 4])
def test_nothing_in_gives_nothing_out(bits: int, way: str) -> None:
    product = BlockProduct(quantised(torch.zeros(16, 64), bits))
    for x in (torch.zeros(2, 64), torch.randn(2, 64)):
        assert product(x).abs().max() < 1e-5


@pytest.mark.parametrize(("bits", "error"), [(8, 0.006), (4, 0.11)])
def test_rounding_is_within_half_a_step_of_each_block(bits: int, error: float) -> None:
    weight = torch.randn(64, 1024) * torch.rand(64, 1)

    values = dequantised(quantised(weight, bits))

    assert error / 2 < (values - weight).norm() / weight.norm() < error
    blocks, rounded = weight.view(64, -1, 32), values.view(64, -1, 32)
    step = (blocks.amax(-1) - blocks.amin(-1)) / (15 if bits == 4 else 100)
    assert ((blocks - rounded).abs() <= 0.6 * step[..., None] + 1e-6).all()


FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def many_sizes(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Rows of numbers from the least that float16 can scale to nearly its largest, and zeros."""
    torch.manual_seed(shape[1])
    weight = torch.randn(shape).clamp(-4, 4) * torch.logspace(-9, 4, shape[0])[:, None]
    weight[shape[0] // 2] = 0
    weight[-1, ::3] = -0.0
    return weight.to(dtype)


def is_the_same(one: BlockWeights, other: BlockWeights) -> bool:
    pairs = zip(one.parts().values(), other.parts().values(), strict=True)
    return one.layout == other.layout and all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [8, 4])
def test_compiled_rounding_is_the_plain_one_bit_by_bit(bits: int, dtype: torch.dtype) -> None:
    for shape in [(1, 32), (9, 64), (50, 480), (33, 4864), (7, 2080)]:
        weight = many_sizes(shape, dtype)

        assert is_the_same(rounded(weight, bits), interleaved(quantised(weight, bits))), shape


@pytest.mark.parametrize("bits", [8, 4])
def test_numbers_halfway_between_two_levels_are_rounded_alike(bits: int) -> None:
    """A product with the scale's inverse would send some of them to the other level."""
    steps = torch.arange(-127, 127) + 0.5
    row = torch.cat([steps.view(-1, 254).expand(31, -1), torch.full((1, 254), 127.0)]).t()
    weight = (row.reshape(1, -1) * torch.tensor([1.0, 0.75, 2**-9])[:, None]).contiguous()

    assert is_the_same(rounded(weight, bits), interleaved(quantised(weight, bits)))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("bits", [8, 4])
def test_a_matrix_of_any_form_is_rounded_in_whole_blocks(bits, monkeypatch):
    """GPT-2's are turned, and rows of 72 or 100 columns end within a block."""
    monkeypatch.setattr(cpu, "_ROUNDED_AT_ONCE", 1000)
    for weight in (torch.randn(96, 48).t(), torch.randn(40, 72), torch.randn(72, 40).t()):
        padded = torch.nn.functional.pad(weight, [0, -weight.shape[1] % 32])

        assert is_the_same(rounded(weight, bits), interleaved(quantised(padded, bits)))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_damaged_weight_is_not_rounded_to_a_number(bits: int, bad: float) -> None:
    weight = torch.randn(3, 64)
    weight[1, 40] = bad

    values = dequantised(rounded(weight, bits))

    assert values[1, 32:].isnan().any()
    assert values[[0, 2]].isfinite().all()


@pytest.mark.usefixtures("without_features")
@pytest.mark.parametrize("bits", spread([8, 4], [4]))
def test_plain_instructions_round_the_same(bits: int) -> None:
    weight = many_sizes((20, 480), torch.bfloat16)

    assert is_the_same(rounded(weight, bits), interleaved(quantised(weight, bits)))


@pytest.mark.parametrize("bits", [8, 4])
def test_turned_weights_lie_as_the_compiled_code_reads_them(bits: int) -> None:
    """GPT-2's are turned; the levels once kept their strides, and only the plain form heeded it."""
    weight = torch.randn(64, 48).t()
    product = BlockProduct(quantised(weight, bits))
    rows = product.rounded(outlying(3, 64))

    out = product.of_rows(rows)

    assert torch.allclose(out, rows.values() @ dequantised(quantised(weight, bits)).t(), atol=0.01)


def test_only_whole_blocks_fit() -> None:
    assert fits(64)
    assert not fits(72)

"""KV in few bits: the compiled kernels and the layer's own code against the plain formulas."""

import random
from dataclasses import dataclass, replace

import pytest
import torch

from kvchat_kernels.coded_kv import CodedKv
from kvchat_kernels.cpu import attention, rotation
from kvchat_kernels.cpu.program import Operation
from kvchat_kernels.kv_code import (
    FP8,
    INT4,
    INT8,
    K8V4,
    Form,
    KvCode,
    NumberCode,
    group_size,
    turned,
    turned_queries,
)
from kvchat_kernels.paged_attention import (
    FULL,
    AttentionSpan,
    DeviceSequences,
    PagedSequences,
    Scoring,
)
from kvchat_kernels.paged_attention.reference import paged_attention_reference
from support.attention_checks import CASES, assert_exact, span_of
from support.coded_kv_checks import coded_problem, zeroed_pools
from support.cpu_tasks import attended, header, run_units
from support.matrix import spread

SPANS = [FULL, AttentionSpan(window=37), AttentionSpan(chunk=64)]


@dataclass(frozen=True)
class Scene:
    """A layer's KV with sequences that have it in blocks out of order, and rows that ask."""

    kv: CodedKv
    sequences: PagedSequences
    query: torch.Tensor
    span: AttentionSpan
    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def scoring(self) -> Scoring:
        return Scoring(0.125, self.span, self.softcap, self.sinks)

    def exact(self) -> torch.Tensor:
        """The plain twin: all of the pool as float32, and the formula over it."""
        code = self.kv.code
        keys = code.keys.plain(self.kv.keys, self.kv.key_scales)
        values = code.values.plain(self.kv.values, self.kv.value_scales)
        return paged_attention_reference(self.query, keys, values, self.sequences, self.scoring)

    @property
    def form(self) -> attention.AttentionForm:
        return attention.AttentionForm(
            self.query.shape[1],
            self.kv.keys.shape[2],
            *self.kv.dims,
            self.kv.keys.shape[1],
            self.kv.code,
            self.softcap is not None,
            self.sinks is not None,
        )

    def compiled(self, num_threads: int = 1) -> torch.Tensor:
        return attended(
            self.form,
            self.span,
            self.sequences,
            self.asked().flatten(1),
            self.kv,
            softcap=self.softcap or 0.0,
            sinks=self.sinks,
            num_threads=num_threads,
        )

    def asked(self) -> torch.Tensor:
        """The queries as the keys are."""
        return turned_queries(self.query) if self.kv.code.keys.turned else self.query

    def by_torch(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        query = self.query.to(dtype)
        return self.kv.attend(query, self.sequences, self.scoring)


WIDTHS = 8, 16, 24, 40, 64, 80, 96
CODED = [*((seed, INT8) for seed in range(8)), *((seed, K8V4) for seed in range(8, 14))]
CODED += [*((seed, INT4) for seed in range(14, 20)), *((seed, FP8) for seed in range(20, 24))]
# Each seed has kernels of its own: two of a code, and three of the most used, run always.
CODED_SCENES = spread(CODED, [CODED[number] for number in (0, 1, 2, 8, 9, 14, 15, 20, 21)])


def scene(seed: int, widths: tuple[int, ...] = WIDTHS, code: KvCode = INT8) -> Scene:
    """Return a scene of random sizes. What no sequence has is not a number."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    num_kv_heads, group = draw.choice([(1, 7), (2, 3), (3, 1), (1, 1), (2, 4)])
    block = draw.choice([2, 4, 8, 16, 32])
    key_dims = [dim for dim in widths if code.keys.takes(dim)]
    value_dims = [dim for dim in widths if code.values.takes(dim)]
    dims = draw.choice(key_dims), draw.choice(value_dims)
    lengths = [draw.choice([1, 3, 31, 100, 257, 530]) for _ in range(draw.randint(1, 3))]
    counts = [draw.randint(1, min(5, length)) for length in lengths]
    needed = [-(-length // block) for length in lengths]
    num_blocks = 1 + sum(needed) + 3
    order = (torch.randperm(num_blocks - 1) + 1).int()
    tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    for table, own in zip(tables, order.split([*needed, 3])[:-1], strict=True):
        table[: len(own)] = own
    kv = zeroed_pools(num_blocks, block, num_kv_heads, *dims, code=code)
    for scales in (kv.key_scales, kv.value_scales):
        scales.fill_(float("nan"))
    sequences = PagedSequences(tuple(counts), tuple(lengths), tables, block)
    for table, length in zip(tables, lengths, strict=True):
        positions = torch.arange(length)
        slots = table.long()[positions // block] * block + positions % block
        # Some channels are far larger than others, as those of real keys are.
        keys = torch.randn(length, num_kv_heads, dims[0]) * (1 + 20 * (torch.rand(dims[0]) > 0.95))
        kv.write(keys * 0.3, torch.randn(length, num_kv_heads, dims[1]), slots)
    heads = num_kv_heads * group
    return Scene(
        kv,
        sequences,
        torch.randn(sum(counts), heads, dims[0]),
        draw.choice(SPANS),
        draw.choice([None, 20.0]),
        draw.choice([None, torch.randn(heads)]),
    )


@pytest.mark.parametrize(("seed", "code"), CODED_SCENES)
def test_the_compiled_attention_is_that_of_the_formula(seed: int, code: KvCode) -> None:
    found = scene(seed, code=code)

    if found.form.in_bytes:
        found = replace(found, query=in_16_bits(found))
    error = (found.compiled() - found.exact()).abs().max()

    # Each of a part's weights is right to a 65,278th of the largest of them, and there are 256.
    assert error < (5e-4 if found.form.in_bytes else 2e-5)


def in_16_bits(found: Scene) -> torch.Tensor:
    """The queries as the compiled attention has them where it multiplies bytes."""
    groups = found.asked().unflatten(-1, (-1, group_size(found.query.shape[-1])))
    units = groups.abs().amax(-1, keepdim=True) / 32639
    groups = (groups / units).round() * units
    return (turned(groups) if found.kv.code.keys.turned else groups).flatten(-2)


@pytest.mark.parametrize("code", [INT8, K8V4, INT4], ids=lambda code: code.name)
def test_values_that_are_no_numbers_are_not_attended_as_such(code: KvCode) -> None:
    """In the columns of their group, and of no sequence but their own."""
    torch.manual_seed(0)
    kv = zeroed_pools(5, 16, 1, 64, 64, code=code)
    kv.write(torch.randn(64, 1, 64), torch.randn(64, 1, 64), torch.arange(64))
    kv.value_scales[1, 3, 0, 1] = float("nan")
    tables = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    sequences = PagedSequences((1, 1), (32, 32), tables, 16)
    found = Scene(kv, sequences, torch.randn(2, 2, 64), FULL, None, None)

    out = found.compiled()

    assert out[0, :, 32:].isnan().all()
    assert out[0, :, :32].isfinite().all()
    assert torch.allclose(out[1], found.exact()[1], atol=1e-3)


@pytest.mark.parametrize(
    ("code", "softcap"),
    spread(
        [(code, softcap) for code in (INT8, K8V4, INT4, FP8) for softcap in (None, 20.0)],
        always=[(INT8, None), (INT4, None), (K8V4, 20.0), (FP8, 20.0)],
    ),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_key_that_is_no_number_makes_none_of_what_sees_it(code, softcap):
    """Its weight was 0 once: an answer without it, as fluent as the right one."""
    torch.manual_seed(0)
    kv = zeroed_pools(5, 16, 1, 64, 64, code=code)
    kv.write(torch.randn(64, 1, 64), torch.randn(64, 1, 64), torch.arange(64))
    kv.key_scales[1, 3, 0, 1] = float("nan")
    tables = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    sequences = PagedSequences((1, 1), (32, 32), tables, 16)
    query = torch.randn(2, 2, 64)
    found = Scene(kv, sequences, query, FULL, softcap, None)

    out = found.compiled()

    assert out[0].isnan().all()
    assert torch.allclose(out[1], found.exact()[1], atol=1e-3)
    behind = replace(found, span=AttentionSpan(window=12))
    assert torch.allclose(behind.compiled(), behind.exact(), atol=1e-3)


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize(("dim", "is_turned"), [(64, True), (48, True), (64, False)])
def test_changed_numbers_are_those_restored_changed_and_rounded(form, dim, is_turned):
    torch.manual_seed(3)
    code = NumberCode(form, turned=is_turned)
    stored = code.quantised(torch.randn(40, 2, dim))

    changed = code.changed(*stored, lambda keys: keys.flip(-1) * 2.0)

    expected = code.quantised(code.plain(*stored).flip(-1) * 2.0)
    # Another order of sums may round a number to the level beside it, here and there.
    differs = (code.plain(*changed) - code.plain(*expected)).abs() > 1e-5
    assert differs.float().mean() < 0.01


@pytest.mark.parametrize(("seed", "code"), CODED_SCENES)
def test_attention_by_torch_is_that_of_the_formula(seed: int, code: KvCode) -> None:
    """Head dims that no vector fills too: the compiled kernels do not take these."""
    found = scene(seed, (8, 20, 33, 64), code)
    found.kv.keys[0] = 1  # the reference reads block 0 of unused columns
    for scales in (found.kv.key_scales, found.kv.value_scales):
        scales[0] = 0

    assert torch.allclose(found.by_torch(), found.exact(), atol=2e-5)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.allclose(found.by_torch(dtype).float(), found.exact(), atol=0.06)


@pytest.mark.parametrize("name", ["window 100", "chunk 48"])
def test_tables_with_positions_of_their_own_are_read_alike_by_both(name: str) -> None:
    case = replace(CASES[name], key_dim=64, value_dim=64)
    problem, parts = coded_problem(case, ((1, 63), (3, 50), (18, 300)), is_private=True)
    assert isinstance(problem.sequences, PagedSequences)
    query = turned(problem.query.unflatten(-1, (-1, 32))).flatten(-2)  # is turned back
    found = Scene(CodedKv(*parts), problem.sequences, query, span_of(case), None, None)

    assert_exact(found.by_torch(), problem, case)
    assert torch.allclose(found.compiled(), found.by_torch(), atol=1e-3)


def test_attention_by_torch_over_lengths_that_are_on_the_device() -> None:
    found = scene(0)
    own = found.sequences
    on_device = DeviceSequences(
        own.num_tokens,
        max(own.query_lens),
        own.query_starts,
        own.context_lens_device,
        own.block_tables,
        own.block_size,
    )

    again = found.kv.attend(found.query, on_device, found.scoring)

    assert torch.equal(again, found.by_torch())


@pytest.mark.parametrize(
    ("code", "span"),
    spread(
        [(code, span) for code in (INT8, K8V4, INT4, FP8) for span in SPANS],
        always=[*((code, FULL) for code in (INT8, K8V4, INT4, FP8)), (INT8, SPANS[1])],
    ),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_row_is_the_same_beside_others_and_on_any_number_of_threads(span, code):
    torch.manual_seed(1)
    count, end, heads = 16, 601, 3
    kv = zeroed_pools(38, 16, 1, 64, 32, code=code)
    kv.write(torch.randn(608, 1, 64), torch.randn(608, 1, 32), torch.arange(608))
    tables, query = torch.arange(38).int()[None], torch.randn(count, heads, 64)
    rows = Scene(kv, PagedSequences((count,), (end,), tables, 16), query, span, None, None)
    together = rows.compiled()

    assert torch.equal(rows.compiled(num_threads=3), together)
    for row in range(count):
        alone = PagedSequences((1,), (end - count + row + 1,), tables, 16)
        own = Scene(kv, alone, query[row : row + 1], span, None, None)
        assert torch.equal(own.compiled()[0], together[row])


@pytest.mark.parametrize(
    ("code", "dims"),
    [
        *((code, dims) for code in (INT8, FP8) for dims in [(64, 64), (8, 16), (40, 136)]),
        *((code, dims) for code in (K8V4, INT4) for dims in [(64, 64), (16, 80)]),
    ],
)
def test_the_compiled_write_stores_the_same_bytes_as_the_plain_one(code, dims):
    """From the smallest floats to the largest, zeros, ties, and what is not a number."""
    torch.manual_seed(0)
    num_rows, num_heads, num_kv_heads = 16, 4, 2
    width = (num_heads + num_kv_heads) * dims[0] + num_kv_heads * dims[1]
    qkv = torch.randn(num_rows, width)
    qkv[1] *= 1e-38
    qkv[2] *= 1e37
    qkv[3] = 0
    qkv[4] = torch.arange(width) % 255 - 127.5  # ties
    qkv[5, ::7] = float("nan")
    qkv[6, ::9] = float("inf")
    qkv[7, ::5] = -float("inf")
    qkv[8] = 1e-30 * torch.rand(width)
    qkv[9, ::3] *= 1000
    slots = torch.tensor([3, 9, 18, 11, 2, 0, 1, 4, 5, 6, -1, 7, 8, 10, 12, 13])
    kv, plain = (zeroed_pools(5, 4, num_kv_heads, *dims, code=code) for _ in range(2))
    heads = rotation.Heads(num_heads, num_kv_heads, *dims, 0, rotation.HeadNorm.NONE, kv.code)
    task = rotation.RotationTask(
        qkv=qkv,
        qkv_stride=qkv.stride(0) * 4,
        keys=kv.keys,
        values=kv.values,
        key_scales=kv.key_scales,
        value_scales=kv.value_scales,
    )

    kernel = rotation.rotation_kernel(heads)
    run_units(Operation(kernel, task, header(num_rows, slots), None), num_rows, 1)
    _, keys, values = qkv.split(
        [num_heads * dims[0], num_kv_heads * dims[0], num_kv_heads * dims[1]], dim=1
    )
    plain.write(
        keys.unflatten(1, (num_kv_heads, -1)), values.unflatten(1, (num_kv_heads, -1)), slots
    )

    for ours, theirs in zip(kv.tensors, plain.tensors, strict=True):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
        assert torch.equal(ours.isnan(), theirs.isnan())
    read = code.keys.restored(kv.keys, kv.key_scales).flatten(0, 1)
    is_finite = read.isfinite().flatten(1).all(dim=1)
    assert not is_finite[[0, 1, 4]].any(), "what is not a number is not read as one"
    assert is_finite[[3, 9, 18, 11, 2, 5, 6]].all()


@pytest.mark.parametrize("dim", [8, 20, 64, 80, 128])
def test_the_error_of_a_number_is_at_most_half_a_step_of_its_group(dim: int) -> None:
    torch.manual_seed(dim)
    for magnitude in (1e-20, 1.0, 1e20):
        values = torch.randn(50, 3, dim) * magnitude
        numbers, scales = INT8.values.quantised(values)

        off = (
            (INT8.values.restored(numbers, scales) - values)
            .unflatten(-1, (-1, group_size(dim)))
            .abs()
        )
        peaks = values.unflatten(-1, (-1, group_size(dim))).abs().amax(-1)
        assert bool((off.amax(-1) <= 0.501 * scales.float()).all())
        assert bool((scales.float() <= 1.004 * peaks / 127).all())


def test_a_large_channel_leaves_the_other_groups_of_its_head_as_they_are() -> None:
    """Why a head has more than one scale: keys have such channels."""
    torch.manual_seed(0)
    values = torch.randn(64)
    with_large = values.clone()
    with_large[3] = 500.0

    one, other = (INT8.values.restored(*INT8.values.quantised(x)) for x in (values, with_large))

    assert torch.equal(one[32:], other[32:])
    assert (one - values)[32:].abs().max() < 0.02


def test_a_large_channel_is_spread_over_the_group_of_a_turned_key() -> None:
    """Only so do keys of 8 bits leave a model with such channels as it is."""
    torch.manual_seed(0)
    queries, keys = torch.randn(200, 64), torch.randn(200, 64)
    keys[:, 3] *= 100
    queries[:, 3] /= 100

    def error(code: NumberCode, asked: torch.Tensor) -> float:
        restored = code.restored(*code.quantised(keys))
        return float(((asked * restored).sum(-1) - (queries * keys).sum(-1)).square().mean())

    is_turned = error(INT8.keys, turned_queries(queries))

    assert is_turned < error(INT8.values, queries) / 2


@pytest.mark.parametrize("turned_first", [False, True])
def test_the_searched_scale_of_four_bits_leaves_less_error_than_the_largest_number(turned_first):
    """The error of attention is that of its values: the search takes an eighth of it away."""
    torch.manual_seed(0)
    values = torch.randn(500, 64)
    groups = values.unflatten(-1, (-1, 32))
    plain = (turned(groups) if turned_first else groups).flatten(-2)
    scale = plain.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 8
    usual = (plain.unflatten(-1, (-1, 32)) / scale).round().clamp(-8, 7) * scale
    usual_error = (usual.flatten(-2) - plain).square().mean()

    code = NumberCode(Form.INT4, turned=turned_first)
    found = code.restored(*code.quantised(values))

    assert (found - plain).square().mean() < 0.9 * usual_error


def test_floats_of_8_bits_keep_four_bits_of_every_number() -> None:
    """Beside a large number, small ones are as exact, down to a 14th power of two below it."""
    torch.manual_seed(0)
    values = torch.randn(200, 32) * 2.0 ** -torch.randint(0, 12, (200, 32))
    code = FP8.values

    off = (code.restored(*code.quantised(values)) - values).abs()

    floor = values.abs().amax(-1, keepdim=True) / 448 * 2**-10
    assert bool((off <= torch.maximum(values.abs() / 15.9, floor * 1.01)).all())


def test_every_four_bit_group_is_at_its_best_level() -> None:
    """No level has less error beside the scale that was stored."""
    torch.manual_seed(0)
    values = torch.randn(200, 32) * 10.0 ** torch.randint(-20, 20, (200, 1))
    code = NumberCode(Form.INT4)
    numbers, scales = code.quantised(values)
    levels = torch.arange(-8, 8)[:, None, None] * scales.float()

    least = (levels - values).abs().amin(0)

    assert torch.equal((code.restored(numbers, scales) - values).abs(), least)


@pytest.mark.parametrize(("code", "times"), [(INT8, 1.88), (FP8, 1.88), (K8V4, 2.46), (INT4, 3.56)])
def test_a_cache_holds_so_many_times_the_tokens_of_16_bits(code: KvCode, times: float) -> None:
    """With keys of 8 bits no scales at all would make 2.67 of it: 3.2 times needs keys of 4."""
    for dim in (32, 64, 96, 128, 256):
        assert 2 * 2 * dim / code.num_bytes(dim, dim) == pytest.approx(times, abs=0.01)


def test_bfloat16_is_read_as_float32_rounded_once() -> None:
    torch.manual_seed(0)
    numbers, scales = INT8.values.quantised(torch.randn(40, 64))

    out = INT8.values.restored(numbers, scales, torch.empty(40, 64, dtype=torch.bfloat16))

    assert torch.equal(out, INT8.values.restored(numbers, scales).bfloat16())

"""Packed weights of the hub, read by compiled code: the bytes of the plain form, and no others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from kvchat.model.packed import unpacking
from kvchat_kernels.cpu import group_calls
from kvchat_kernels.linear import group_reading
from kvchat_kernels.linear.blocks import BlockWeights, interleaved
from kvchat_kernels.linear.group_reading import read_floats, read_groups
from kvchat_kernels.linear.stored_groups import StoredGroups, WordOrder
from support.matrix import spread
from support.other_process import run_python

# Rows and columns; groups have 32 columns, 96 or all of a row. Lines of 8 words and blocks in
# eights, and what is left of each.
SHAPES = [(8, 32), (64, 256), (72, 96), (136, 480), (24, 2784)]
ODD_ROWS = [(1, 32), (7, 96), (37, 480)]


@dataclass(frozen=True)
class Case:
    """A matrix as a file has it, for compiled code and for the plain form."""

    stored: StoredGroups
    plain: unpacking.Grouped


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def floats(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return numbers that float16 holds, and with float32 some that it does not."""
    values = torch.randint(-64, 64, shape) / 1024
    if dtype == torch.float32 and torch.rand(()) < 0.5:
        values = values + torch.rand(shape) * 1e-6
    return values.to(dtype)


def zeros_of(bits: int, kind: str, *shape: int) -> torch.Tensor:
    """Return words of zeros: any, or the middle in all of them, as it is or less one."""
    if kind == "any":
        return words(*shape)
    level = 2 ** (bits - 1) - (kind == "middle, less one")
    word = sum(level << at for at in range(0, 32, bits))
    return torch.full(shape, word, dtype=torch.int64).to(torch.int32)


def gptq(num_out: int, num_in: int, groups: int, bits: int, kind: str, dtype: torch.dtype) -> Case:
    parts = (
        words(num_in * bits // 32, num_out),
        zeros_of(bits, kind, groups, -(-num_out * bits // 32)),
        floats(dtype, groups, num_out),
    )
    less = int(kind != "middle")
    plain = unpacking.gptq(*parts, None, bits, less)
    stored = StoredGroups(WordOrder.TURNED, bits, parts[0], parts[2], parts[1], zero_offset=less)
    return Case(stored, plain)


def awq(num_out: int, num_in: int, groups: int, bits: int, kind: str, dtype: torch.dtype) -> Case:
    parts = (
        words(num_in, num_out // 8),
        zeros_of(bits, kind, groups, num_out // 8),
        floats(dtype, groups, num_out),
    )
    stored = StoredGroups(WordOrder.AWQ, bits, parts[0], parts[2], parts[1])
    return Case(stored, unpacking.awq(*parts))


def packed(
    num_out: int, num_in: int, groups: int, bits: int, kind: str, dtype: torch.dtype
) -> Case:
    zeros = None
    if kind != "none":
        zeros = zeros_of(bits, kind, -(-num_out * bits // 32), groups)
    stored_words, scales = words(num_out, num_in * bits // 32), floats(dtype, num_out, groups)
    plain = unpacking.packed_integers(stored_words, zeros, scales, None, bits, num_in)
    return Case(StoredGroups(WordOrder.ROWS, bits, stored_words, scales, zeros), plain)


def mlx(num_out: int, num_in: int, groups: int, bits: int, kind: str, dtype: torch.dtype) -> Case:
    stored_words = words(num_out, num_in * bits // 32).view(torch.uint32)
    scales, offsets = floats(dtype, num_out, groups), floats(torch.bfloat16, num_out, groups)
    offsets[0] = -0.0
    plain = unpacking.affine(stored_words, scales, offsets, bits, num_in)
    return Case(StoredGroups(WordOrder.ROWS, bits, stored_words, scales, offsets=offsets), plain)


Make = Callable[[int, int, int, int, str, torch.dtype], Case]
FORMATS: dict[str, tuple[Make, int, str]] = {
    "awq, any": (awq, 4, "any"),
    "awq, middle": (awq, 4, "middle"),
    "mlx 4": (mlx, 4, ""),
    "mlx 8": (mlx, 8, ""),
}
for _bits in (4, 8):
    for _kind in ("any", "middle", "middle, less one"):
        FORMATS[f"gptq {_bits}, {_kind}"] = (gptq, _bits, _kind)
    for _kind in ("any", "middle", "none"):
        FORMATS[f"compressed-tensors {_bits}, {_kind}"] = (packed, _bits, _kind)


def cases(name: str) -> Iterator[Case]:
    make, bits, kind = FORMATS[name]
    torch.manual_seed(len(name) + bits)
    for num_out, num_in in SHAPES + (ODD_ROWS if make is not awq else []):
        for size in {32, num_in, 96 if num_in % 96 == 0 else 32}:
            for dtype in (torch.float32, torch.float16 if make in (gptq, awq) else torch.bfloat16):
                yield make(num_out, num_in, num_in // size, bits, kind, dtype)


def assert_same(found: BlockWeights | None, wanted: BlockWeights | None) -> None:
    """The same bytes in the same layout; one NaN is as good as another."""
    assert found is not None
    assert wanted is not None
    assert found.layout == wanted.layout
    for key, part in wanted.parts().items():
        ours = found.parts()[key]
        assert ours.shape == part.shape
        if part.is_floating_point():
            assert torch.equal(ours.isnan(), part.isnan()), key
            ours, part = ours.nan_to_num(1), part.nan_to_num(1)
        assert torch.equal(ours.view(torch.uint8), part.view(torch.uint8)), key


# A format of each package in both bits; the other levels of zero run by turns.
USUAL = ["awq, any", "mlx 4", "mlx 8", "gptq 4, any", "gptq 8, middle", "compressed-tensors 4, any"]


@pytest.mark.parametrize("name", spread(FORMATS, USUAL))
def test_compiled_code_reads_the_same_bytes(name: str) -> None:
    seen = set()
    for case in cases(name):
        plain = case.plain.blocks()
        assert plain is not None
        seen.add(plain.layout)

        assert_same(read_groups(case.stored), plain)
        assert_same(read_groups(case.stored, True), interleaved(plain))
    assert len(seen) > 1, "numbers that float16 holds, and others"


@pytest.mark.parametrize("name", ["gptq 4, any", "compressed-tensors 8, any", "mlx 4", "mlx 8"])
def test_odd_scales_are_read_as_they_are(name: str) -> None:
    for case in list(cases(name))[:3]:
        odd = torch.tensor([float("inf"), float("nan"), -0.0, 1e-7, 65504.0, 3e38, 6e-8, -1e-40])
        flat = case.stored.scales.view(-1)
        flat[: len(odd)] = odd[: len(flat)].to(flat.dtype)

        assert_same(read_groups(case.stored), case.plain.blocks())


def assert_floats(case: Case, dtype: torch.dtype) -> None:
    """The same numbers; one NaN is as good as another."""
    found, wanted = read_floats(case.stored, dtype), case.plain.weight().to(dtype)
    assert found is not None
    assert found.dtype == dtype
    assert torch.equal(found.isnan(), wanted.isnan())
    found, wanted = found.nan_to_num(1), wanted.nan_to_num(1)
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("name", spread(FORMATS, USUAL))
def test_compiled_code_unpacks_to_the_same_floats(name, monkeypatch):
    """The whole at once, and by tiles of a few lines."""
    for number, case in enumerate(cases(name)):
        monkeypatch.setattr(group_calls, "_LEVELS_AT_ONCE", 1 << 20 if number % 2 else 3000)
        assert_floats(case, (torch.bfloat16, torch.float32, torch.float16)[number % 3])


@pytest.mark.parametrize("name", ["gptq 4, any", "gptq 8, any", "compressed-tensors 4, any"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_columns_may_be_of_any_groups(name: str, dtype: torch.dtype) -> None:
    """GPTQ sorts columns by activation, and lists the group of each."""
    for case in cases(name):
        num_in, num_groups = case.stored.num_in, case.stored.num_groups
        listed = torch.randint(0, num_groups, (num_in,), dtype=dtype)
        stored = replace(case.stored, group_of=listed)
        plain = replace(case.plain, group_of=listed.long())

        assert_floats(Case(stored, plain), torch.bfloat16)
        assert read_groups(stored) is None


@pytest.mark.parametrize("group", [-1, 4, 2**31 - 1, -(2**31), 2**40])
def test_a_group_that_there_is_not_is_never_looked_up(group: int) -> None:
    """Of a file that lists it a sentence is told before; it might change while it is mapped."""
    case = gptq(64, 256, 4, 4, "any", torch.float16)
    listed = torch.zeros(256, dtype=torch.int64)
    listed[17] = group
    for changed in (listed, listed[:-1], torch.zeros(256)):
        assert read_floats(replace(case.stored, group_of=changed), torch.float32) is None


def test_groups_of_no_whole_blocks_are_unpacked_too() -> None:
    for num_in, groups in ((64, 4), (96, 2), (480, 5)):
        assert_floats(packed(9, num_in, groups, 4, "any", torch.float16), torch.bfloat16)
    assert read_floats(packed(8, 40, 1, 4, "any", torch.float16).stored, torch.float32) is None
    assert read_floats(packed(8, 64, 1, 4, "any", torch.float16).stored, torch.float64) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_scale_that_is_no_number_makes_no_weight_zero(dtype: torch.dtype) -> None:
    """The bits of some NaNs, rounded as those of numbers are, become those of 0."""
    case = gptq(64, 256, 4, 4, "any", torch.float16)
    flat = case.stored.scales.view(torch.int16).view(-1)
    flat[:4] = torch.tensor([0x7FFF, -1, 0x7C01, 0x7C00], dtype=torch.int16)

    assert_floats(case, dtype)


@pytest.mark.parametrize("name", ["gptq 4, any", "awq, any", "mlx 4"])
def test_any_number_of_threads_reads_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, bits, kind = FORMATS[name]
    case = make(1032, 512, 4, bits, kind, torch.float16)
    monkeypatch.setattr(group_calls, "_WEIGHTS_PER_THREAD", 1)
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            assert_same(read_groups(case.stored), case.plain.blocks())
            assert_floats(case, torch.bfloat16)
    finally:
        torch.set_num_threads(before)


def test_groups_that_end_within_a_block_have_none() -> None:
    for num_in, groups in ((64, 4), (96, 2)):
        case = packed(8, num_in, groups, 4, "any", torch.float16)
        assert read_groups(case.stored) is None
        assert not case.stored.fits_blocks()
        assert case.plain.blocks() is None


def cut(part: torch.Tensor, dim: int) -> torch.Tensor:
    return part.narrow(dim, 0, part.shape[dim] - 1).contiguous()


@pytest.mark.parametrize(
    "name", ["gptq 4, any", "gptq 8, any", "awq, any", "compressed-tensors 4, any", "mlx 8"]
)
def test_tensors_that_do_not_fit_each_other_are_not_read(name: str) -> None:
    """The file's reader refuses them in a sentence before; code that reads memory looks again."""
    make, bits, kind = FORMATS[name]
    stored = make(64, 256, 4, bits, kind, torch.float16).stored
    assert stored.is_sound()
    spoilt: list[dict[str, object]] = [{"bits": 3}, {"words": stored.words.view(torch.int16)}]
    for part in ("words", "scales", "zeros", "offsets"):
        tensor = getattr(stored, part)
        if tensor is not None:
            # Fewer words of a row are fewer columns, which then are no whole groups.
            spoilt += [{part: cut(tensor, dim)} for dim in (0, 1)]
            spoilt += [{part: tensor.flatten()}, {part: tensor[:0]}, {part: tensor.bool()}]
            spoilt += [{part: tensor.repeat(1, 2)[:, ::2]}]
    for change in spoilt:
        changed = replace(stored, **change)  # type: ignore[arg-type]
        assert read_groups(changed) is None, change


def test_no_byte_beyond_a_tensor_is_read() -> None:
    """Each tensor ends where memory ends that may be read; another process would die."""
    run_python(
        """
        import ctypes, mmap
        from dataclasses import replace
        import torch
        from matrix.test_stored_groups import FORMATS, Case, assert_floats, assert_same
        from kvchat_kernels.linear.blocks import interleaved
        from kvchat_kernels.linear.group_reading import read_floats, read_groups

        libc, kept = ctypes.CDLL(None, use_errno=True), []

        def at_the_end(part):
            size = -(-part.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            memory = mmap.mmap(-1, size + mmap.PAGESIZE)
            kept.append(memory)
            start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            assert not libc.mprotect(ctypes.c_void_p(start + size), mmap.PAGESIZE, 0)
            whole = torch.frombuffer(memory, dtype=torch.uint8, count=size)
            there = whole[size - part.nbytes :].view(part.dtype).view(part.shape)
            return there.copy_(part)

        for make, bits, kind in FORMATS.values():
            for shape in [(64, 256), (24, 480), (72, 96)]:
                case = make(*shape, shape[1] // 32, bits, kind, torch.float16)
                stored = case.stored
                names = ("words", "scales", "zeros", "offsets")
                parts = {name: getattr(stored, name) for name in names}
                parts = {name: part for name, part in parts.items() if part is not None}
                stored = replace(stored, **{k: at_the_end(part) for k, part in parts.items()})
                assert_same(read_groups(stored), case.plain.blocks())
                assert_same(read_groups(stored, True), interleaved(case.plain.blocks()))
                assert_floats(Case(stored, case.plain), torch.bfloat16)
        """
    )


def test_nothing_is_read_where_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_reading, "compiled_calls", lambda: None)
    stored = packed(8, 64, 1, 4, "any", torch.float16).stored
    assert read_groups(stored) is None
    assert read_floats(stored, torch.float32) is None

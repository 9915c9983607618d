"""Products with weights in blocks on a GPU: interpreted, and compiled for several GPUs."""

import pytest
import torch

from kvchat_kernels.launch import Launch
from kvchat_kernels.linear.blocks import dequantised, joined, quantised, quantised_on
from kvchat_kernels.linear.kernel import block_linear_launch, unpack_launch
from support.block_linear_checks import (
    KINDS,
    Kind,
    check_block_linear,
    check_many_rows_by_tiles,
    check_rows_beside_others,
    empty_blocks,
)
from support.compiling import (
    AMPERE,
    BLACKWELL,
    GPUS,
    HOPPER,
    RTX_30,
    RTX_40,
    RTX_50,
    Gpu,
    compile_for,
)
from support.interpreter import Interpreter
from support.soak_sizes import short_and_long


@pytest.mark.parametrize("num_rows", [1, 2, 5, 16])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_products_are_those_of_the_unpacked_weights(interpreter, kind, num_rows):
    interpreter(check_block_linear, kind, (num_rows, 90, 37), torch.float16, num_rows == 5)


@short_and_long(6, 200)
def test_products_of_random_sizes(interpreter: Interpreter, size: int) -> None:
    generator = torch.Generator().manual_seed(size)

    def below(limit: int) -> int:
        return int(torch.randint(1, limit, (1,), generator=generator))

    for _ in range(size):
        kind = KINDS[below(len(KINDS) + 1) - 1]
        sizes = below(25), below(1500), below(70)
        dtype = (torch.float16, torch.float32)[below(3) - 1]
        interpreter(check_block_linear, kind, sizes, dtype, below(3) == 1)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_many_rows_multiply_with_tiles(interpreter: Interpreter, impl: str) -> None:
    interpreter(check_many_rows_by_tiles, impl)


def test_a_row_does_not_depend_on_the_rows_beside_it(interpreter: Interpreter) -> None:
    interpreter(check_rows_beside_others)


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_rounded_by_tiles_are_those_rounded_at_once(bits, monkeypatch):
    monkeypatch.setattr("kvchat_kernels.linear.blocks._ELEMENTS_AT_ONCE", 200)
    weight = torch.randn(11, 64)

    tiled, whole = quantised_on(weight, bits, torch.device("cpu")), quantised(weight, bits)

    assert torch.equal(dequantised(tiled), dequantised(whole))


def test_matrices_of_other_layouts_are_not_joined() -> None:
    one, other = (quantised(torch.randn(4, 64), bits) for bits in (4, 8))

    assert torch.equal(dequantised(joined([one, one])), dequantised(one).repeat(2, 1))
    with pytest.raises(ValueError, match="other layouts"):
        joined([one, other])


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def check_compiled(gpu: Gpu, launch: Launch) -> dict[str, int]:
    """Hold a launch to what every variant must keep; return how often wide copies stand in it."""
    code = compile_for(
        gpu, launch.kernel, launch.values, num_warps=launch.num_warps, num_stages=launch.num_stages
    )
    assert code.stack_bytes == 0, "registers were spilled"
    # Two programs share a multiprocessor.
    assert 2 * (code.shared_bytes + 1024) <= gpu.shared_bytes + 1024
    assert 2 * code.registers * 32 * launch.num_warps <= 65536
    names = ("cp.async.cg", "cp.async.ca", "mma.sync", "ld.global.v4", "ld.global.v2")
    return {name: code.ptx_count(name) for name in names}


# Of planes, codes and floats those of the most usual files.
_USUAL = [KINDS[number] for number in (0, 2, 6, 9, 17, 18)]
USUAL = [(RTX_40, kind) for kind in _USUAL] + [(HOPPER, KINDS[0]), (HOPPER, KINDS[-1])]
OTHERS = [(gpu, kind) for gpu in GPUS for kind in KINDS if (gpu, kind) not in USUAL]
LONG = [pytest.param(*pair, marks=pytest.mark.soak) for pair in OTHERS]


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize(("gpu", "kind"), [*USUAL, *LONG], ids=str)
def test_weights_are_on_their_way_before_they_are_needed(gpu, kind, num_rows):
    out = meta(num_rows, 14336)
    launch = block_linear_launch(meta(num_rows, 4096), empty_blocks((14336, 4096), kind), None, out)

    counts = check_compiled(gpu, launch)

    # The first planes of 2 and 3 bits have 8 bytes of a block.
    assert counts["cp.async.cg"] + (counts["cp.async.ca"] if kind.bits < 4 else 0) > 0
    assert (counts["mma.sync"] > 0) == (num_rows > 1)


@pytest.mark.parametrize("gpu", [AMPERE, RTX_30, BLACKWELL, RTX_50], ids=str)
def test_no_kind_of_gpu_is_left_out(gpu: Gpu) -> None:
    weights = empty_blocks((14336, 4096), KINDS[0])
    check_compiled(gpu, block_linear_launch(meta(5, 4096), weights, None, meta(5, 14336)))


@pytest.mark.parametrize(("gpu", "kind"), [*USUAL, *LONG], ids=str)
def test_unpacking_loads_words_of_16_bytes(gpu: Gpu, kind: Kind) -> None:
    launch = unpack_launch(empty_blocks((14336, 4096), kind), meta(14336, 4096))

    counts = check_compiled(gpu, launch)

    assert counts["ld.global.v4" if kind.bits > 3 else "ld.global.v2"] > 0

"""Packs weights as other programs do, from the formats' public definitions.

Each packer draws numbers of its format, so that nothing is rounded, and returns the tensors of the
file with the weight that they stand for. Nothing here is shared with the reader under test.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Draw = random.Random
Rows = list[list[int]]
# E2M1: sign, two bits of exponent, one of mantissa.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class PackedWeight:
    """The tensors that a file holds for one weight, by the end of their names; and the weight."""

    parts: dict[str, torch.Tensor]
    weight: torch.Tensor


def words_of(levels: list[int], bits: int) -> list[int]:
    """Return a stream of numbers, lowest bits first, as signed 32-bit words."""
    stream = sum(level << (bits * place) for place, level in enumerate(levels))
    num_bytes = -(-len(levels) * bits // 32) * 4
    data = stream.to_bytes(num_bytes, "little")
    return [
        int.from_bytes(data[start : start + 4], "little", signed=True)
        for start in range(0, num_bytes, 4)
    ]


def words(rows: Rows, bits: int) -> torch.Tensor:
    return torch.tensor([words_of(row, bits) for row in rows], dtype=torch.int32)


def columns_of(rows: Rows) -> Rows:
    return [list(column) for column in zip(*rows, strict=True)]


def levels(draw: Draw, rows: int, columns: int, bits: int) -> Rows:
    return [[draw.randrange(2**bits) for _ in range(columns)] for _ in range(rows)]


def scales(draw: Draw, rows: int, columns: int) -> torch.Tensor:
    """Return positive numbers that half precision holds exactly."""
    return torch.tensor(
        [[draw.randrange(1, 64) / 1024 for _ in range(columns)] for _ in range(rows)]
    )


def _of_columns(numbers: torch.Tensor, group: int, columns: int) -> torch.Tensor:
    """Return a number for each column; `numbers` has one for each group of them."""
    return numbers.repeat_interleave(group, 1)[:, :columns]


def gptq(
    draw: Draw,
    rows: int,
    columns: int,
    bits: int = 4,
    group: int = 32,
    zero_less: int = 1,
    is_ordered_by_activation: bool = False,
    is_symmetric: bool = False,
) -> PackedWeight:
    num_groups = -(-columns // group)
    values = levels(draw, rows, columns, bits)
    scale = scales(draw, num_groups, rows)
    middle = 2 ** (bits - 1)
    zeros = [
        [middle if is_symmetric else draw.randrange(1, 2**bits) for _ in range(rows)]
        for _ in range(num_groups)
    ]
    group_of = [column // group for column in range(columns)]
    if is_ordered_by_activation:
        draw.shuffle(group_of)
    weight = (torch.tensor(values) - torch.tensor(zeros)[group_of].t()) * scale[group_of].t()
    stored = [[zero - zero_less for zero in row] for row in zeros]
    return PackedWeight(
        {
            "qweight": words(values, bits).t().contiguous(),
            "qzeros": words(stored, bits),
            "scales": scale.half(),
            "g_idx": torch.tensor(group_of, dtype=torch.int32),
        },
        weight.contiguous(),
    )


def awq(draw: Draw, rows: int, columns: int, group: int = 32) -> PackedWeight:
    num_groups = columns // group
    values, zeros = levels(draw, columns, rows, 4), levels(draw, num_groups, rows, 4)
    scale = scales(draw, num_groups, rows)
    zero, factor = (_of_columns(x.t(), group, columns) for x in (torch.tensor(zeros), scale))
    weight = (torch.tensor(values).t() - zero) * factor
    parts = {"qweight": _awq_words(values), "qzeros": _awq_words(zeros), "scales": scale.half()}
    return PackedWeight(parts, weight.contiguous())


def _awq_words(rows: Rows) -> torch.Tensor:
    shuffled = [
        [row[start + place] for start in range(0, len(row), 8) for place in AWQ_ORDER]
        for row in rows
    ]
    return words(shuffled, 4)


def fp8_blocks(draw: Draw, rows: int, columns: int, block: tuple[int, int]) -> PackedWeight:
    values = _fp8(draw, rows, columns)
    scale = scales(draw, -(-rows // block[0]), -(-columns // block[1]))
    factors = scale.repeat_interleave(block[0], 0)[:rows]
    weight = values.float() * _of_columns(factors, block[1], columns)
    return PackedWeight({"weight": values, "weight_scale_inv": scale}, weight)


def fp8_whole(draw: Draw, rows: int, columns: int) -> PackedWeight:
    values, scale = _fp8(draw, rows, columns), scales(draw, 1, 1).reshape(())
    parts = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    return PackedWeight(parts, values.float() * scale)


def _fp8(draw: Draw, rows: int, columns: int) -> torch.Tensor:
    numbers = [[draw.uniform(-8, 8) for _ in range(columns)] for _ in range(rows)]
    return torch.tensor(numbers).to(torch.float8_e4m3fn)


def by_rows(draw: Draw, rows: int, columns: int, dtype: torch.dtype) -> PackedWeight:
    """compressed-tensors' int-quantized and float-quantized, a scale for each row."""
    values = _fp8(draw, rows, columns)
    if dtype is torch.int8:
        values = torch.tensor(
            [[draw.randrange(-127, 128) for _ in range(columns)] for _ in range(rows)]
        )
    scale = scales(draw, rows, 1)
    parts = {"weight": values.to(dtype), "weight_scale": scale}
    return PackedWeight(parts, values.to(dtype).float() * scale)


def pack_quantized(
    draw: Draw, rows: int, columns: int, bits: int = 4, group: int = 32, has_zeros: bool = False
) -> PackedWeight:
    num_groups, middle = -(-columns // group), 2 ** (bits - 1)
    values, scale = levels(draw, rows, columns, bits), scales(draw, rows, num_groups)
    zeros = levels(draw, rows, num_groups, bits)
    if not has_zeros:
        zeros = [[middle] * num_groups for _ in range(rows)]
    zero, factor = (_of_columns(x, group, columns) for x in (torch.tensor(zeros), scale))
    weight = (
        torch.tensor(values) - zero
    ) * factor  # both are stored plus the middle, which cancels
    parts = {
        "weight_packed": words(values, bits),
        "weight_scale": scale.half(),
        "weight_shape": torch.tensor([rows, columns]),
    }
    if has_zeros:
        parts["weight_zero_point"] = words(columns_of(zeros), bits).t().contiguous()
    return PackedWeight(parts, weight)


def _halves(numbers: Rows, low_first: bool = True) -> torch.Tensor:
    """Return two numbers of 4 bits a byte."""
    low, high = (0, 1) if low_first else (1, 0)
    return torch.tensor(
        [
            [pair[low] | pair[high] << 4 for pair in zip(row[::2], row[1::2], strict=True)]
            for row in numbers
        ],
        dtype=torch.uint8,
    )


def _fp4_rows(draw: Draw, rows: int, columns: int, group: int, scale: torch.Tensor) -> Any:
    codes = levels(draw, rows, columns, 4)
    weight = torch.tensor(FP4)[torch.tensor(codes)] * _of_columns(scale, group, columns)
    return _halves(codes), weight


def nvfp4(draw: Draw, rows: int, columns: int, is_modelopt: bool = False) -> PackedWeight:
    """Groups of 16 with FP8 scales; the whole is divided (or for ModelOpt multiplied) once more."""
    scale = scales(draw, rows, columns // 16).mul_(64).to(torch.float8_e4m3fn)
    whole = 1 / 32
    packed, weight = _fp4_rows(draw, rows, columns, 16, scale.float() * whole)
    if is_modelopt:
        names = {"weight": packed, "weight_scale": scale, "weight_scale_2": torch.tensor(whole)}
    else:
        divisor = torch.tensor([1 / whole])
        names = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": divisor}
    return PackedWeight(names, weight)


def mxfp4_experts(draw: Draw, experts: int, rows: int, columns: int) -> PackedWeight:
    """gpt-oss's experts: [experts, out, groups, 16] in a file, [experts, in, out] in the model."""
    blocks, exponents, weights = [], [], []
    for _ in range(experts):
        powers = [[draw.randrange(120, 126) for _ in range(columns // 32)] for _ in range(rows)]
        scale = torch.tensor([[2.0 ** (power - 127) for power in row] for row in powers])
        packed, weight = _fp4_rows(draw, rows, columns, 32, scale)
        blocks.append(packed.reshape(rows, columns // 32, 16))
        exponents.append(torch.tensor(powers, dtype=torch.uint8))
        weights.append(weight.t())
    parts = {"blocks": torch.stack(blocks), "scales": torch.stack(exponents)}
    return PackedWeight(parts, torch.stack(weights))


def bitsandbytes_4(
    draw: Draw, rows: int, columns: int, kind: str = "nf4", is_nested: bool = False
) -> PackedWeight:
    """Blocks of 64 of the flat weight; the higher half of a byte comes first."""
    block, table = 64, torch.tensor(sorted(draw.uniform(-1, 1) for _ in range(16)))
    codes = levels(draw, 1, rows * columns, 4)[0]
    num_blocks = len(codes) // block
    absmax = scales(draw, 1, num_blocks)[0]
    parts = {"weight.absmax": absmax}
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": block,
        "dtype": "bfloat16",
        "shape": [rows, columns],
    }
    if is_nested:
        numbers = [draw.randrange(256) for _ in range(num_blocks)]
        inner = torch.tensor([draw.uniform(0, 1) for _ in range(256)])
        outer = scales(draw, 1, -(-num_blocks // 16))[0]
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": 0.25}
        parts = {
            "weight.absmax": torch.tensor(numbers, dtype=torch.uint8),
            "weight.nested_quant_map": inner,
            "weight.nested_absmax": outer,
        }
        absmax = torch.stack(
            [inner[number] * outer[place // 16] + 0.25 for place, number in enumerate(numbers)]
        )
    flat = [table[code] * absmax[place // block] for place, code in enumerate(codes)]
    raw = list(json.dumps(state).encode())
    parts |= {
        "weight": _halves([codes], low_first=False).reshape(-1, 1),
        "weight.quant_map": table,
        f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(raw, dtype=torch.uint8),
    }
    return PackedWeight(parts, torch.stack(flat).reshape(rows, columns))


def bitsandbytes_8(draw: Draw, rows: int, columns: int) -> PackedWeight:
    values = torch.tensor(
        [[draw.randrange(-127, 128) for _ in range(columns)] for _ in range(rows)], dtype=torch.int8
    )
    largest = scales(draw, 1, rows)[0]
    weight = values.float() * (largest / 127).unsqueeze(1)
    return PackedWeight(
        {"weight": values, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)},
        weight,
    )


def mlx(draw: Draw, rows: int, columns: int, bits: int = 4, group: int = 32) -> PackedWeight:
    values = levels(draw, rows, columns, bits)
    scale, offset = (scales(draw, rows, columns // group) for _ in range(2))
    factor, below = (_of_columns(x, group, columns) for x in (scale, offset))
    weight = torch.tensor(values) * factor - below
    parts = {
        "weight": words(values, bits).view(torch.uint32),
        "scales": scale.half(),
        "biases": -offset.half(),
    }
    return PackedWeight(parts, weight)


Packer = Callable[[Draw, int, int], PackedWeight]


def pack_checkpoint(plain: Path, packed: Path, packer: Packer, settings: dict[str, Any]) -> None:
    """Pack every linear layer of the decoder; `plain` gets the weights that these stand for.

    Both are directories of the same checkpoint. `settings` goes into the packed one's config.json.
    """
    draw = Draw(7)
    tensors = load_file(plain / "model.safetensors")
    parts: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if not stem.endswith(("_proj", ".w1", ".w2", ".w3")):
            parts[name] = tensor
            continue
        made = packer(draw, *tensor.shape)
        tensors[name] = made.weight.to(tensor.dtype)
        parts |= {f"{stem}.{ending}": part for ending, part in made.parts.items()}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(parts, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | settings))

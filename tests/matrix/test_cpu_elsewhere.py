"""The CPU kernels on processors that this one may not be: ARM, and x86 with AVX-512 and VNNI."""

from collections.abc import Callable
from dataclasses import replace
from inspect import unwrap
from typing import Any

import llvmlite.binding as llvm
import pytest
import torch

from kvchat_kernels.cpu import (
    activation_rounding,
    attention_kernels,
    attention_task,
    block_products,
    block_reading,
    block_rounding,
    group_factors,
    group_floats,
    group_levels,
    products,
    program,
    rotation,
)
from kvchat_kernels.cpu import code as code_module
from kvchat_kernels.cpu.code import Code
from kvchat_kernels.cpu.maths import Stored
from kvchat_kernels.cpu.task import Task
from kvchat_kernels.kv_code import INT4, INT8
from kvchat_kernels.linear.blocks import Layout, Rounding
from kvchat_kernels.linear.grids import Grid, Signs
from kvchat_kernels.linear.stored_groups import WordOrder
from support.matrix import spread

NIBBLES = Layout(4, 32, torch.float16, True, True, Rounding.BYTES)
CENTRED = Layout(4, 32, torch.float16, False, True, Rounding.BYTES)
BYTES = Layout(8, 32, torch.float16, False, True)
PLANES = Layout(5, 32, torch.float16, False, True, zero=16)
LOOKED_UP = Layout(4, 32, torch.float16, False, True, codes=tuple(range(-8, 8)))
POINTS = replace(BYTES, grid=Grid("points", (1, 3, 5, 7), tuple(range(256)), 8, Signs.EVEN))
HALVES = replace(PLANES, rounding=Rounding.HALVES)
COARSE = replace(PLANES, rounding=Rounding.COARSE)
FORM = attention_task.AttentionForm(6, 2, 64, 64, 16, Stored.BFLOAT)
EIGHT, FOUR = (attention_task.AttentionForm(6, 2, 64, 64, 16, code) for code in (INT8, INT4))
HEADS, HEADS_OF_FOUR = (
    rotation.Heads(6, 2, 64, 64, 32, rotation.HeadNorm.NONE, code) for code in (INT8, INT4)
)
FACTORS = group_factors.FactorForm(WordOrder.AWQ, 4, Stored.HALF, True, None)
FLOATS = group_floats.FloatForm(8, False, False, Stored.BFLOAT)
WRITERS: dict[str, tuple[type[Task] | None, Callable[[Code], None]]] = {
    "attention": (
        attention_task.AttentionTask,
        lambda code: attention_kernels.part_of(code, FORM, False).write(),
    ),
    "scores of slots": (
        attention_task.SlotScoresTask,
        lambda code: attention_kernels.part_of(code, FORM, False).write_slot_scores(),
    ),
    "attention over 8 bits": (
        attention_task.AttentionTask,
        lambda code: attention_kernels.part_of(code, EIGHT, False).write(),
    ),
    "attention over 4 bits": (
        attention_task.AttentionTask,
        lambda code: attention_kernels.part_of(code, FOUR, False).write(),
    ),
    "KV of 4 bits": (
        rotation.RotationTask,
        lambda code: unwrap(rotation.rotation_kernel)(code, HEADS_OF_FOUR),
    ),
    "KV of 8 bits": (
        rotation.RotationTask,
        lambda code: unwrap(rotation.rotation_kernel)(code, HEADS),
    ),
    "4 bits": (
        block_products.BlockProductTask,
        lambda code: block_products._write(code, NIBBLES, True, False),
    ),
    "4 bits without minimums": (
        block_products.BlockProductTask,
        lambda code: block_products._write(code, CENTRED, True, False),
    ),
    "bfloat16": (
        products.ProductTask,
        lambda code: products._Product(code, Stored.BFLOAT, True, False).write(),
    ),
    "8 bits": (
        block_products.BlockProductTask,
        lambda code: block_products._write(code, BYTES, True, False),
    ),
    "5 bits in planes": (
        block_products.BlockProductTask,
        lambda code: block_products._write(code, PLANES, True, False),
    ),
    "5 bits in bytes": (
        block_products.BlockProductTask,
        lambda code: block_products._write(code, HALVES, True, False),
    ),
    "5 bits in bytes, beside 8 bits": (
        block_products.BlockProductTask,
        lambda code: block_products._write(code, COARSE, True, False),
    ),
    "codes of 4 bits": (
        block_products.BlockProductTask,
        lambda code: block_products._write(code, LOOKED_UP, True, False),
    ),
    "points of a grid": (
        block_products.BlockProductTask,
        lambda code: block_products._write(code, POINTS, True, False),
    ),
    "rounding": (
        activation_rounding.RoundingTask,
        lambda code: activation_rounding.write_rounding(code, Rounding.BYTES),
    ),
    "rounding of weights": (
        block_rounding.WeightRoundingTask,
        lambda code: unwrap(block_rounding.weight_rounding_kernel)(code, 4, Stored.BFLOAT),
    ),
    "reading of 4 bits": (
        block_reading.ReadingTask,
        lambda code: unwrap(block_reading.block_reading_kernel)(code, "Q4_K", 4),
    ),
    "reading of 5 bits": (
        block_reading.ReadingTask,
        lambda code: unwrap(block_reading.block_reading_kernel)(code, "Q5_0", None),
    ),
    "levels of AWQ": (
        group_levels.LevelsTask,
        lambda code: unwrap(group_levels.group_levels_kernel)(code, WordOrder.AWQ, 4, True),
    ),
    "factors looked at": (
        group_factors.FactorsTask,
        lambda code: unwrap(group_factors.looking_kernel)(code, FACTORS),
    ),
    "factors": (
        group_factors.FactorsTask,
        lambda code: unwrap(group_factors.factors_kernel)(code, FACTORS, True, True),
    ),
    "floats of groups": (
        group_floats.FloatsTask,
        lambda code: unwrap(group_floats.group_floats_kernel)(code, FLOATS),
    ),
    "driver": (None, program._write),
}


def written(kernel: str, processor: code_module._Processor, monkeypatch: Any) -> str:
    """Return the code of a kernel as LLVM's text, as if this were another processor."""
    monkeypatch.setattr(code_module, "_processor", lambda: processor)
    return code_module.written(*WRITERS[kernel])


def assembled(code: str, triple: str, name: str) -> str:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=name, opt=2)
    assembly: str = machine.emit_assembly(llvm.parse_assembly(code))
    return assembly


@pytest.mark.parametrize("kernel", spread(WRITERS, ["4 bits"]))
def test_a_kernel_compiles_for_arm(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features have other names there: no instruction of x86 is named in the code."""
    arm = code_module._Processor("generic", "", frozenset({"neon"}))

    code = written(kernel, arm, monkeypatch)

    assert "llvm.x86" not in code
    assert "ret" in assembled(code, "aarch64-linux-gnu", "generic")


@pytest.mark.parametrize("kernel", spread(WRITERS, ["8 bits"]))
def test_a_kernel_compiles_for_vnni(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    features = frozenset({"sse2", "avx2", "f16c", "avx512vl", "avx512vnni"})
    newer = code_module._Processor("znver4", "", features)

    assembly = assembled(written(kernel, newer, monkeypatch), "x86_64-linux-gnu", "znver4")

    of_bytes = ("4 bits", "5 bits in bytes", "attention over ")
    assert ("vpdpbusd" in assembly) == kernel.startswith(of_bytes)
    assert "vpmaddubsw" not in assembly, "what four products at once replace"

"""Kernels called outside of a step's program: products, rounding, reading, unpacking, attention.

`compiled_calls` of `cpu_products.py` imports this file, where anything can be compiled.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvchat_kernels.cpu.attention_kernels import attention_kernel, joining_kernel
from kvchat_kernels.cpu.attention_task import AttentionForm, AttentionTask
from kvchat_kernels.cpu.block_reading import ReadingTask, block_reading_kernel
from kvchat_kernels.cpu.block_rounding import WeightRoundingTask, weight_rounding_kernel
from kvchat_kernels.cpu.block_rows import UnpackingTask, unpacking_kernel
from kvchat_kernels.cpu.code import LANES, Kernel, OfTask, has_feature, has_vnni
from kvchat_kernels.cpu.features import has_tiles
from kvchat_kernels.cpu.maths import stored_as
from kvchat_kernels.cpu.matrix_products import (
    Product,
    block_product,
    float_product,
    many_are_short,
    rounding,
)
from kvchat_kernels.cpu.parts import Parts
from kvchat_kernels.cpu.products import unit_rows
from kvchat_kernels.cpu.program import Operation, Program
from kvchat_kernels.cpu.step import FEW_ROWS, MANY_ROWS, MAX_ROWS, MOST_BLOCKS, NUM_HEADERS, Header
from kvchat_kernels.linear.blocks import COLUMNS, BlockWeights, Rounding
from kvchat_kernels.linear.rows import Rows
from kvchat_kernels.paged_attention.sequences import PagedSequences, Scoring

# Below this many weights a thread more costs more than it saves.
_WEIGHTS_PER_THREAD = 1 << 16
# The same of attention: its threads wait for one that another program keeps from its core.
_PRODUCTS_PER_THREAD = 1 << 20
# Rows of a unit where a matrix is unpacked.
_UNPACKED_ROWS = 16
# Bytes of the results of parts of contexts that the rows of a group may have.
_RESULT_BYTES = 1 << 26


def check() -> None:
    """Raise what compiling raises where nothing can be compiled."""
    has_feature("")


def run(operations: Sequence[Operation], num_threads: int) -> None:
    """Run operations one after another, each with its number of units."""
    program = Program(operations)
    program.prepare()
    program.run(max(1, min(torch.get_num_threads(), num_threads)))


def _run(
    kernel: Kernel[OfTask],
    task: OfTask,
    num_units: int,
    num_weights: int,
    num_rows: int = 1,
    are_many: bool = False,
) -> None:
    """Run a kernel on as many threads as its work pays for."""
    header: Any = np.zeros(NUM_HEADERS, np.int64)
    header[Header.NUM_ROWS], header[Header.ARE_MANY] = num_rows, are_many
    run([Operation(kernel, task, header, num_units)], num_weights // _WEIGHTS_PER_THREAD)


def _multiply(product: Product, num_rows: int, num_weights: int, are_many: bool = False) -> None:
    num_weights *= num_rows
    _run(product.kernel, product.task, product.num_units, num_weights, num_rows, are_many)


def rounding_of(weights: BlockWeights, num_rows: int) -> Rounding:
    """Return how so many rows are rounded to be multiplied with an interleaved matrix."""
    own = weights.layout.rounding
    return Rounding.SHORT if _are_many(weights, num_rows) and many_are_short(own) else own


def _are_many(weights: BlockWeights, num_rows: int) -> bool:
    return num_rows >= MANY_ROWS and weights.num_in // COLUMNS <= MOST_BLOCKS


def multiply_blocks(weights: BlockWeights, rows: Rows, out: torch.Tensor) -> None:
    """Multiply rows, rounded as `rounding_of` or the layout says, with an interleaved matrix."""
    of_so_many = rounding_of(weights, len(rows))
    assert rows.rounding in (weights.layout.rounding, of_so_many)
    are_many = _are_many(weights, len(rows)) and rows.rounding is of_so_many
    num_weights = weights.num_out * weights.num_in
    _multiply(block_product(weights, rows, out), len(rows), num_weights, are_many)


def multiply_floats(
    weight: torch.Tensor | BlockWeights,
    bias: torch.Tensor | None,
    x: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Multiply float32 rows with a float matrix, or with blocks of floats."""
    product = float_product(weight, x, out, bias=bias)
    _multiply(product, len(x), x.shape[1] * out.shape[1])


def round_rows(x: torch.Tensor, rows: Rows) -> None:
    """Round float32 rows into `rows`."""
    kernel, task = rounding(x, rows)
    _run(kernel, task, len(x), x.numel())


def unpack_blocks(weights: BlockWeights, start: int, end: int, out: torch.Tensor) -> None:
    """Write rows [`start`, `end`) of a matrix that is not interleaved to `out`, float32."""
    task = UnpackingTask(
        num_out=end,
        num_blocks=weights.num_in // COLUMNS,
        **weights.parts(),
        out=out,
        first=start,
        chunk=_UNPACKED_ROWS,
    )
    num_units = -(-(end - start) // _UNPACKED_ROWS)
    _run(unpacking_kernel(weights.layout), task, num_units, (end - start) * weights.num_in)


def takes_floats(dtype: torch.dtype) -> bool:
    """Return whether kernels read and write floats of this dtype."""
    return stored_as(dtype) is not None


def round_blocks(weight: torch.Tensor, out: BlockWeights) -> None:
    """Round a contiguous matrix of whole blocks, and write it to `out`, interleaved."""
    num_out, num_in = weight.shape
    stored = stored_as(weight.dtype)
    assert stored is not None, weight.dtype
    chunk = unit_rows(num_out, num_in * weight.itemsize)
    task = WeightRoundingTask(
        num_out=num_out,
        num_blocks=num_in // COLUMNS,
        floats=weight,
        **out.parts(),
        chunk=chunk,
    )
    kernel = weight_rounding_kernel(out.bits, stored)
    _run(kernel, task, -(-num_out // chunk), weight.numel())


def multiplies_bytes() -> bool:
    """Return whether levels of more than 4 bits are multiplied as bytes without signs.

    Tiles take them as they lie beside activations of 16 bits.
    """
    return has_vnni() and not has_tiles()


def read_blocks(data: torch.Tensor, name: str, out: BlockWeights) -> None:
    """Read contiguous rows of a format of GGUF, and write them to the parts of `out`."""
    chunk = unit_rows(out.num_out, data.shape[1])
    task = ReadingTask(
        num_out=out.num_out,
        num_blocks=out.num_in // COLUMNS,
        stored=data,
        **out.parts(),
        chunk=chunk,
    )
    word = out.layout.rounding.word if out.is_interleaved else None
    kernel = block_reading_kernel(name, word)
    _run(kernel, task, -(-out.num_out // chunk), out.num_out * out.num_in)


def attention_form(
    num_heads: int, key_pool: torch.Tensor, value_pool: torch.Tensor, scoring: Scoring
) -> AttentionForm | None:
    """Return the form of a layer's attention over these pools, None where no kernel takes it."""
    _, block_size, num_kv_heads, key_dim = key_pool.shape
    value_dim = value_pool.shape[3]
    is_whole = not (key_dim % LANES or value_dim % LANES)
    is_contiguous = key_pool.is_contiguous() and value_pool.is_contiguous()
    stored = stored_as(key_pool.dtype)
    if stored is None or not (is_whole and is_contiguous and block_size.bit_count() == 1):
        return None
    rules = scoring.softcap is not None, scoring.sinks is not None
    return AttentionForm(num_heads, num_kv_heads, key_dim, value_dim, block_size, stored, *rules)


def attends_faster_than_torch(form: AttentionForm) -> bool:
    """Return whether the kernels take less time for many rows than torch's of 16 bits.

    torch has tiles where the processor has them. Elsewhere it takes 1.9 to 4 times as long, mostly
    for copies of the context and for rows that it rounds up to.
    """
    return form.in_pairs and not has_feature("amx-bf16")


def attend(
    form: AttentionForm,
    query: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    sequences: PagedSequences,
    scoring: Scoring,
    out: torch.Tensor,
) -> None:
    """Attend float32 rows, groups of them one after another; writes `out`, float32."""
    kind = (scoring.span, form.num_heads, form.num_kv_heads, form.value_dim)
    parts = sequences.plans.get(kind)
    if parts is None:
        parts = sequences.plans[kind] = Parts(*kind)
    header: Any = np.zeros(NUM_HEADERS, np.int64)
    sinks = None if scoring.sinks is None else scoring.sinks.float().contiguous()
    each = parts.result_bytes(max(sequences.context_lens))
    each_slot = form.num_heads * (form.key_dim + form.value_dim)
    size = max(FEW_ROWS, min(MAX_ROWS, _RESULT_BYTES // each))
    for start in range(0, sequences.num_tokens, size):
        end = min(start + size, sequences.num_tokens)
        group, _ = sequences.part(start, end)
        task = AttentionTask(
            record=parts.record,
            query=query[start:],
            query_stride=query.stride(0) * 4,
            keys=pools[0],
            values=pools[1],
            scale=scoring.scale,
            softcap=scoring.softcap or 0.0,
            sinks=sinks,
            out=out[start:],
        )
        num_units = parts.set(group) * form.num_kv_heads
        attending = Operation(attention_kernel(form), task, header, num_units)
        num_products = (end - start) * max(group.context_lens) * each_slot
        num_threads = min(num_units, num_products // _PRODUCTS_PER_THREAD)
        run([attending, Operation(joining_kernel(form), task, header, end - start)], num_threads)

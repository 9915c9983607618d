"""StepProgram: the operations of a step of a decoder, and the memory that they work in.

One decoder layer is: norm, Q K V, rotation and KV write, attention in parts, joining of the parts,
output, norm, gate and up, activation, down. Block weights are multiplied with rounded activations;
rounding is an operation more.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvchat.model.decoder import Decoder, DecoderAttention, DecoderLayer, Matrix, Norm
from kvchat_kernels.cpu import (
    attention,
    block_products,
    block_rows,
    gates,
    norms,
    products,
    rotation,
)
from kvchat_kernels.cpu.attention import AttentionForm
from kvchat_kernels.cpu.code import LANES, Kernel
from kvchat_kernels.cpu.maths import Stored, stored_as
from kvchat_kernels.cpu.norms import NormForm
from kvchat_kernels.cpu.parts import Parts
from kvchat_kernels.cpu.program import Operation, Program
from kvchat_kernels.cpu.rotation import Heads
from kvchat_kernels.cpu.step import MAX_ROWS, NUM_HEADERS
from kvchat_kernels.kv_layer import PlainKv
from kvchat_kernels.linear.blocks import COLUMNS, BlockWeights

_NUM_PLACES = 16

_Numbers = np.ndarray[Any, Any]
_Task = dict[Any, Any]


class Unfit(Exception):
    """A model whose sizes no kernel takes; says why, as words after "it"."""


def _floats(width: int) -> torch.Tensor:
    """Return zeros, [MAX_ROWS, width] float32.

    The dtype is said wherever memory is made: loading a model on another thread changes torch's
    default for the whole process, and kernels wrote beyond memory of 16 bits.
    """
    return torch.zeros(MAX_ROWS, width, dtype=torch.float32)


class Angles:
    """Cosines and sines of a step's positions, from a table made once for many positions."""

    _FIRST, _MOST = 1024, 1 << 14

    def __init__(self, rotary: Any, dtype: torch.dtype, kind: str | None) -> None:
        self._rotary, self._kinds = rotary, () if kind is None else (kind,)
        self._like = torch.zeros(1, dtype=dtype)
        self._table = self._made(torch.arange(self._FIRST))
        self.half = self._table[0].shape[1]
        self.cosines, self.sines = (_floats(self.half) for _ in range(2))

    def set(self, positions: torch.Tensor, end: int) -> None:
        """Renew both for `positions`, all below `end`."""
        table, rows = self._table, positions
        if end > self._MOST:
            table, rows = self._made(positions), torch.arange(len(positions))
        elif end > table[0].shape[0]:
            table = self._table = self._made(torch.arange(min(2 * end, self._MOST)))
        for values, out in zip(table, (self.cosines, self.sines), strict=True):
            torch.index_select(values, 0, rows, out=out[: len(rows)])

    def _made(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self._rotary(self._like, positions[None], *self._kinds)
        if not (isinstance(made, tuple) and len(made) == 2):
            raise Unfit("has angles of another kind")
        cos, sin = (part[0].float() for part in made)
        half = cos.shape[-1] // 2
        if not (torch.equal(cos[:, :half], cos[:, half:])):
            raise Unfit("has angles that do not repeat")
        return cos[:, :half].contiguous(), sin[:, :half].contiguous()


class _Rounded:
    """Activations [MAX_ROWS, width] in 16 or 8 bits, as the kernels of block weights read them."""

    def __init__(self, width: int, bits: int) -> None:
        kind = torch.int16 if bits == 16 else torch.int8
        self.levels = torch.zeros(MAX_ROWS, width, dtype=kind)
        self.scales, self.sums = (_floats(width // COLUMNS) for _ in range(2))


class _Input:
    """Activations [MAX_ROWS, width], and the same rounded where block weights read them."""

    def __init__(self, width: int) -> None:
        self.floats = _floats(width)
        self._rounded: dict[int, _Rounded] = {}

    def rounded(self, bits: int) -> _Rounded:
        found = self._rounded.get(bits)
        if found is None:
            found = self._rounded[bits] = _Rounded(self.floats.shape[1], bits)
        return found


class StepProgram:
    """The program of a decoder over the pools of its layers. Its parts are to be set for a step:

    stream               float32 [MAX_ROWS, hidden], the embedded tokens
    header, head_header  of the layers, and of the rows that logits are wanted of
    angles, parts        by the kinds of layers that share them
    of_rows, of_picked, of_head, of_parts
                         operations with as many units as rows, as wanted rows, as `head_units`
                         if any row is wanted, and as jobs times KV heads
    logits_address       where the logits go, [wanted rows, vocab] float32
    """

    def __init__(self, decoder: Decoder, pools: Sequence[PlainKv]) -> None:
        """Compile what is needed, 0.1 to 1 s. Raises Unfit, or what llvmlite raises."""
        self._decoder = decoder
        self._pools = pools
        table: Any = decoder.embedding.weight
        self._dtype: torch.dtype = table.dtype
        self._operations: list[Operation] = []
        self._of_rows: list[int] = []
        self._of_picked: list[int] = []
        self._of_head: list[int] = []
        self._of_parts: dict[Any, list[int]] = {}
        self._inputs: dict[tuple[str, int], _Input] = {}
        self._outputs: dict[tuple[str, int], torch.Tensor] = {}
        self._own: list[torch.Tensor] = []  # what tasks have addresses of
        self.stream = _floats(decoder.norm.weight.numel())
        self.header, self.head_header = np.zeros((2, NUM_HEADERS), np.int64)
        self.angles: dict[str | None, Angles] = {}
        self.parts: dict[Any, Parts] = {}
        self.logits_address = self._build()
        self.program = Program(self._operations)
        self.of_rows, self.of_picked, self.of_head = (
            np.array(found) for found in (self._of_rows, self._of_picked, self._of_head)
        )
        self.of_parts = {kind: np.array(found) for kind, found in self._of_parts.items()}
        self.head_units = self.program.units[self.of_head].copy()

    def _build(self) -> _Numbers:
        """Add all operations; return the place of the logits' address."""
        hidden = self.stream.shape[1]
        _check(hidden)
        added, after = None, None
        for layer in self._decoder.layers:
            attended = self._output("attended", hidden)
            self._add_norm(added, after, layer.before_attention)
            self._attention(layer.attention, layer.before_attention is not None, attended)
            self._add_norm(attended, layer.after_attention, layer.before_mlp)
            added, after = self._output("mlp", hidden), layer.after_mlp
            self._mlp(layer, added)
        self._add_norm(added, after, None)
        return self._head(hidden)

    def _input(self, name: str, width: int) -> _Input:
        return self._inputs.setdefault((name, width), _Input(width))

    def _output(self, name: str, width: int) -> torch.Tensor:
        found = self._outputs.get((name, width))
        if found is None:
            found = self._outputs[name, width] = _floats(width)
        return found

    def _add(
        self,
        kernel: Kernel,
        task: _Task,
        num_units: int | None,
        *,
        header: Any = None,
        waits: bool = True,
    ) -> _Numbers:
        """Add an operation; without `num_units` it has as many as rows."""
        numbers = np.zeros(_NUM_PLACES, np.int64)
        for place, value in task.items():
            numbers[place] = self._number(value)
        is_head = header is not None
        header = self.header if header is None else header
        index = len(self._operations)
        if num_units is None:
            (self._of_picked if is_head else self._of_rows).append(index)
        elif is_head:
            self._of_head.append(index)
        self._operations.append(Operation(kernel, numbers, header, num_units, waits))
        return numbers

    def _number(self, value: Any) -> int:
        if isinstance(value, torch.Tensor):
            self._own.append(value)
            return value.data_ptr()
        if isinstance(value, float):
            return int(np.array([value, 0], np.float32).view(np.int64)[0])
        return int(value)

    def _add_norm(
        self, added: torch.Tensor | None, after: Norm | None, before: Norm | None
    ) -> None:
        """Add to the stream what is to be added, and norm it into the input of what follows."""
        if added is None and before is None:
            return
        stream = self.stream
        form = NormForm(added is not None, after is not None, before is not None)
        place = norms.Place
        task: _Task = {
            place.STREAM: stream,
            place.WIDTH: stream.shape[1],
            place.FACTOR: self._decoder.residual_factor,
            place.EPSILON: (after or before or self._decoder.norm).epsilon,
        }
        if added is not None:
            task[place.ADDEND] = added
        if after is not None:
            task[place.ADDEND_WEIGHT] = after.weight
        if before is not None:
            task[place.WEIGHT] = before.weight
            task[place.OUT] = self._input("normed", stream.shape[1]).floats
        if after is not None and before is not None and after.epsilon != before.epsilon:
            raise Unfit("has norms with different epsilons")
        self._add(norms.norm_kernel(form), task, None)

    def _source(self, is_normed: bool) -> tuple[_Input, torch.Tensor]:
        """Return what the products of a layer's half read: the normed stream or the stream."""
        stream = self.stream
        source = self._input("normed", stream.shape[1])
        return source, source.floats if is_normed else stream

    def _products(
        self,
        matrices: Sequence[Matrix],
        source: _Input,
        floats: torch.Tensor,
        out: torch.Tensor,
        header: Any = None,
    ) -> list[_Numbers]:
        """Multiply `floats`, rounded into `source`; outputs lie side by side in `out`.

        Returns the tasks, one a matrix.
        """
        blocks = [m.weights for m in matrices if isinstance(m.weights, BlockWeights)]
        for bits in sorted({weights.layout.activation_bits for weights in blocks}):
            self._round(source.rounded(bits), bits, floats, header)
        tasks, start = [], 0
        for matrix in matrices:
            if matrix.num_in != floats.shape[1]:
                raise Unfit("has matrices of other widths")
            part, waits = out[:, start:], start == 0
            tasks.append(self._product(matrix, source, floats, part, header, waits))
            start += matrix.num_out
        return tasks

    def _round(self, rounded: _Rounded, bits: int, floats: torch.Tensor, header: Any) -> None:
        place = block_rows.Place
        task: _Task = {
            place.NUM_BLOCKS: floats.shape[1] // COLUMNS,
            place.FLOATS: floats,
            place.X: rounded.levels,
            place.X_SCALES: rounded.scales,
            place.X_SUMS: rounded.sums,
        }
        self._add(block_rows.rounding_kernel(bits), task, None, header=header)

    def _product(
        self,
        matrix: Matrix,
        source: _Input,
        floats: torch.Tensor,
        out: torch.Tensor,
        header: Any,
        waits: bool,
    ) -> _Numbers:
        weights, has_bias = matrix.weights, matrix.bias is not None
        if isinstance(weights, BlockWeights):
            row_bytes = matrix.num_in * weights.bits // 8
            kernel = block_products.block_product_kernel(weights.layout, has_bias)
            task = _block_task(weights, source.rounded(weights.layout.activation_bits))
            place: Any = block_rows.Place
        else:
            row_bytes = weights.stride(0) * weights.itemsize
            stored = stored_as(weights.dtype)
            if stored is None or matrix.num_in % products.COLUMNS:
                raise Unfit(f"has {matrix.num_in} columns of {weights.dtype}")
            kernel = products.product_kernel(stored, has_bias)
            task = _float_task(weights, floats)
            place = products.Place
        chunk = products.unit_rows(matrix.num_out, row_bytes)
        task |= {
            place.NUM_OUT: matrix.num_out,
            place.OUT: out,
            place.OUT_STRIDE: out.stride(0) * 4,
            place.CHUNK: chunk,
        }
        if has_bias:
            task[place.BIAS] = matrix.bias
        return self._add(kernel, task, -(-matrix.num_out // chunk), header=header, waits=waits)

    def _attention(self, layer: DecoderAttention, is_normed: bool, out: torch.Tensor) -> None:
        spec = layer.spec
        qkv_width = (spec.num_heads + spec.num_kv_heads) * spec.key_dim
        qkv_width += spec.num_kv_heads * spec.value_dim
        qkv = self._output("qkv", qkv_width)
        self._products(layer.qkv, *self._source(is_normed), qkv)
        pool = self._pools[spec.pool_index]
        stored = stored_as(pool.keys.dtype)
        _check(spec.key_dim, spec.value_dim)
        if stored is None or not (pool.keys.is_contiguous() and pool.values.is_contiguous()):
            raise Unfit("has KV of another form")
        self._rotation(layer, qkv, pool, stored)
        form = AttentionForm(
            spec.num_heads,
            spec.num_kv_heads,
            spec.key_dim,
            spec.value_dim,
            pool.keys.shape[1],
            stored,
            layer.softcap is not None,
            layer.sinks is not None,
        )
        kind = (spec.span, spec.num_heads, spec.num_kv_heads, spec.value_dim)
        parts = self.parts.get(kind)
        if parts is None:
            parts = Parts(spec.span, spec.num_heads, spec.num_kv_heads, spec.value_dim)
            self.parts[kind] = parts
        attended = self._input("heads", spec.num_heads * spec.value_dim)
        place = attention.Place
        task: _Task = {
            place.RECORD: parts.record.ctypes.data,
            place.QUERY: qkv,
            place.QUERY_STRIDE: qkv.stride(0) * 4,
            place.KEYS: pool.keys,
            place.VALUES: pool.values,
            place.SCALE: layer.scale,
            place.SOFTCAP: layer.softcap or 0.0,
            place.OUT: attended.floats,
        }
        if layer.sinks is not None:
            task[place.SINKS] = layer.sinks
        self._of_parts.setdefault(kind, []).append(len(self._operations))
        self._add(attention.attention_kernel(form), task, 0)
        self._add(attention.joining_kernel(form), task, None)
        self._products((layer.out,), attended, attended.floats, out)

    def _rotation(
        self, layer: DecoderAttention, qkv: torch.Tensor, pool: PlainKv, stored: Stored
    ) -> None:
        spec, place = layer.spec, rotation.Place
        task: _Task = {
            place.QKV: qkv,
            place.QKV_STRIDE: qkv.stride(0) * 4,
            place.KEYS: pool.keys,
            place.VALUES: pool.values,
        }
        rotated = 0
        if layer.rotates:
            angles = self.angles.get(layer.kind)
            if angles is None:
                angles = Angles(self._decoder.rotary, self._dtype, layer.kind)
                self.angles[layer.kind] = angles
            _check(angles.half)
            rotated = 2 * angles.half
            task |= {place.COSINES: angles.cosines, place.SINES: angles.sines}
        if layer.head_norms is not None:
            query, key = layer.head_norms
            task |= {
                place.QUERY_NORM: query.weight,
                place.KEY_NORM: key.weight,
                place.EPSILON: query.epsilon,
            }
        heads = Heads(
            spec.num_heads,
            spec.num_kv_heads,
            spec.key_dim,
            spec.value_dim,
            rotated,
            layer.head_norm,
            stored,
        )
        self._add(rotation.rotation_kernel(heads), task, None)

    def _mlp(self, layer: DecoderLayer, out: torch.Tensor) -> None:
        width = layer.down.num_in
        _check(width)
        both = self._output("gate and up", 2 * width)
        self._products(layer.gate_up, *self._source(layer.before_mlp is not None), both)
        gated = self._input("gated", width)
        place = gates.Place
        task: _Task = {place.BOTH: both, place.OUT: gated.floats, place.WIDTH: width}
        units = -(-width // gates.UNIT_COLUMNS)
        self._add(gates.gate_kernel(layer.activation), task, units)
        self._products((layer.down,), gated, gated.floats, out)

    def _head(self, hidden: int) -> _Numbers:
        """Norm the rows that logits are wanted of, and multiply with the head."""
        header, norm = self.head_header, self._decoder.norm
        source = self._input("last", hidden)
        place = norms.Place
        task: _Task = {
            place.STREAM: self.stream,
            place.WIDTH: hidden,
            place.WEIGHT: norm.weight,
            place.OUT: source.floats,
            place.EPSILON: norm.epsilon,
        }
        form = NormForm(adds=False, picks=True)
        self._add(norms.norm_kernel(form), task, None, header=header)
        out = torch.empty(1, self._decoder.head.num_out, dtype=torch.float32)
        (numbers,) = self._products((self._decoder.head,), source, source.floats, out, header)
        is_block = isinstance(self._decoder.head.weights, BlockWeights)
        index = block_rows.Place.OUT if is_block else products.Place.OUT
        return numbers[index : index + 1]


def _block_task(weights: BlockWeights, x: _Rounded) -> _Task:
    """Return what the task of a product says of its operands."""
    place = block_rows.Place
    task: _Task = {
        place.NUM_BLOCKS: weights.num_in // COLUMNS,
        place.LEVELS: weights.levels,
        place.SCALES: weights.scales,
        place.X: x.levels,
        place.X_SCALES: x.scales,
        place.X_SUMS: x.sums,
    }
    if weights.minimums is not None:
        task[place.MINIMUMS] = weights.minimums
    if weights.steps is not None:
        task[place.STEPS] = weights.steps
    return task


def _float_task(weights: torch.Tensor, x: torch.Tensor) -> _Task:
    """Return what the task of a product says of its operands."""
    place = products.Place
    return {
        place.WEIGHTS: weights,
        place.NUM_IN: weights.shape[1],
        place.X: x,
        place.X_STRIDE: x.stride(0) * 4,
    }


def _check(*widths: int) -> None:
    if any(width % LANES for width in widths):
        raise Unfit(f"has sizes that are no multiples of {LANES}")

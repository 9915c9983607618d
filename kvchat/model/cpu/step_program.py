"""StepProgram: the operations of a step of a decoder, and the memory that they work in.

One decoder layer is: norm, Q K V, rotation and KV write, attention in parts, joining of the parts,
output, norm, gate and up, activation, down. Block weights are multiplied with rounded activations;
rounding is an operation more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from kvchat.model.cpu.step_experts import add_mixture, add_mlp
from kvchat.model.cpu.step_inputs import Angles, QueryFactors
from kvchat.model.cpu.step_joined import JoinedRows
from kvchat.model.cpu.step_latents import add_latents
from kvchat.model.cpu.step_operations import (
    Activations,
    StepOperations,
    StepScores,
    Unfit,
    check_widths,
    floats,
)
from kvchat.model.cpu.step_recurrent import RecurrentLayers
from kvchat.model.decoder.decoder import (
    Ahead,
    BesideMlp,
    Decoder,
    DecoderAttention,
    DecoderLayer,
    Mixture,
    Mlp,
    SideGate,
)
from kvchat.model.decoder.matrices import Matrix, Norm
from kvchat.model.spec import LayerSpec
from kvchat_kernels.coded_kv import CodedKv
from kvchat_kernels.cpu import attention_kernels, gates, norms, rotation
from kvchat_kernels.cpu.attention_task import AttentionForm, AttentionTask
from kvchat_kernels.cpu.code import Kernel
from kvchat_kernels.cpu.gates import HeadsTask
from kvchat_kernels.cpu.maths import Stored, stored_as
from kvchat_kernels.cpu.norms import JoinedNormTask, NormForm, NormTask
from kvchat_kernels.cpu.parts import Parts
from kvchat_kernels.cpu.program import Program
from kvchat_kernels.cpu.rotation import Heads, RotationTask
from kvchat_kernels.cpu.step import MAX_ROWS, NUM_OF_SEQUENCE, Header
from kvchat_kernels.cpu.task import Numbers
from kvchat_kernels.kv_code import KvCode
from kvchat_kernels.kv_layer import PlainKv
from kvchat_kernels.paged_attention import AttentionSpan

# KV that the kernels write and read.
CompiledKv = PlainKv | CodedKv


def _stored(pool: CompiledKv) -> Stored | KvCode:
    """Return how a pool holds numbers."""
    if not all(tensor.is_contiguous() for tensor in pool.tensors):
        raise Unfit("has KV of another form")
    if isinstance(pool, CodedKv):
        return pool.code
    stored = stored_as(pool.keys.dtype)
    if stored is None:
        raise Unfit("has KV of another form")
    return stored


def _scales(pool: CompiledKv) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the scales of a pool's keys and values, where it has any."""
    return (pool.key_scales, pool.value_scales) if isinstance(pool, CodedKv) else (None, None)


def _side_memory(decoder: Decoder) -> torch.Tensor | None:
    """Return memory for the side inputs of all layers, None for a model without them."""
    widths = [layer.side.gate.num_out for layer in decoder.layers if layer.side is not None]
    if not widths:
        return None
    if decoder.side_inputs is None or len(widths) < len(decoder.layers):
        raise Unfit("has layers with and without inputs of their own")
    return floats(sum(widths))


@dataclass(frozen=True, slots=True)
class PartsKind:
    """The layers whose rows see the same slots, in results of the same shape.

    `has_window_blocks` says that their slots are those of window blocks.
    """

    span: AttentionSpan
    num_heads: int
    num_kv_heads: int
    value_dim: int
    has_window_blocks: bool


@dataclass(frozen=True, slots=True)
class _Output:
    """What a part of a layer adds to the stream: normed by `norm`, if it has one.

    The sum is multiplied with `stream_factor`.
    """

    values: torch.Tensor
    norm: Norm | None
    stream_factor: float = 1.0


class StepProgram:
    """The program of a decoder over the pools of its layers. Its parts are to be set for a step:

    stream               float32 [MAX_ROWS, hidden], the embedded tokens
    joined               of a head that drafts: its input, which has the embedded tokens then
    side                 float32 [MAX_ROWS, layers * width], the side inputs, of a model with them
    header, head_header  of the layers, and of the rows that logits are wanted of
    window_header        as `header`, with the slots of window blocks; None without any
    angles, parts        by the kinds of layers that share them
    query_factors        of a model whose Q is scaled by position
    of_rows, of_picked, of_head, of_parts, of_sequences
                         operations with as many units as rows, as wanted rows, as `head_units`
                         if any row is wanted, as jobs times KV heads, and as `sequence_units` times
                         sequences
    stream_copies        operations that copy a stream that is watched
    sequences            int64 [MAX_ROWS, NUM_OF_SEQUENCE], what the header names
    guess_bytes          what the inputs of a guess take that layers with a state keep
    reading              the program that lets the first sequence's state read right guesses
    scores               what scores slots
    logits_address       where the logits go, [wanted rows, vocab] float32
    """

    def __init__(
        self,
        decoder: Decoder,
        pools: Sequence[CompiledKv],
        windowed: frozenset[int] = frozenset(),
        watched: tuple[int, ...] = (),
        first_heads: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Begin to compile what is needed. Raises Unfit, or what llvmlite raises.

        `windowed` are the pools of window blocks. Of the layers `watched` the streams before them
        are copied; the number of all layers stands for the end of the last. `first_heads` are the
        layers whose slots are scored, as of StepScores.
        """
        self._decoder = decoder
        self._watched = watched
        self._streams = floats(len(watched) * decoder.norm.weight.numel()).numpy()
        self.stream_copies: list[int] = []
        self._pools = pools
        self._windowed = windowed
        table: Any = decoder.embedding.weight
        self._dtype: torch.dtype = table.dtype
        self._operations = StepOperations()
        self.scores = StepScores(self._operations, first_heads)
        self._of_parts: dict[PartsKind, list[int]] = {}
        self.stream = floats(decoder.norm.weight.numel())
        self.joined: JoinedRows | None = None
        self.side = _side_memory(decoder)
        self.header, self.head_header = self._operations.header, self._operations.head_header
        self.window_header = np.zeros_like(self.header) if windowed else None
        self.sequences = np.zeros((MAX_ROWS, NUM_OF_SEQUENCE), np.int64)
        self.header[Header.SEQUENCES] = self.sequences.ctypes.data
        self.angles: dict[str | None, Angles] = {}
        self.parts: dict[PartsKind, Parts] = {}
        scale = decoder.query_scale
        self.query_factors = QueryFactors(scale) if scale is not None else None
        self.logits_address = self._build()
        operations = self._operations
        self.program = Program(operations.all)
        self.of_rows, self.of_picked, self.of_head = (
            np.array(of) for of in (operations.of_rows, operations.of_picked, operations.of_head)
        )
        self.of_sequences, self.sequence_units = (
            np.array(list(part), np.int64)
            for part in (operations.of_sequences, operations.of_sequences.values())
        )
        self.guess_bytes = int(self.header[Header.GUESS_BYTES])
        self.reading = Program([operations.all[index] for index in operations.of_states])
        self.reading.units[:] = [operations.of_sequences[i] for i in operations.of_states]
        self.has_pairs = operations.has_pairs
        self.of_parts = {kind: np.array(indices) for kind, indices in self._of_parts.items()}
        self.head_units = self.program.units[self.of_head].copy()

    def set_pairs(self, num_rows: int) -> None:
        """Write the numbers of units that depend on the number of rows times experts of a row."""
        self._operations.set_pairs(self.program.units, num_rows)

    def _build(self) -> Numbers:
        """Add all operations; return the place of the logits' address."""
        hidden = self.stream.shape[1]
        check_widths(hidden)
        output: _Output | None = None
        recurrent = RecurrentLayers(self._operations, self._decoder.state, self._dtype)
        if self._decoder.first_norm is not None:
            self._operations.norm_rows(self._decoder.first_norm, self.stream, self.stream)
        if self._decoder.joined is not None:
            self.joined = JoinedRows(self._decoder.joined, self._operations, self.stream)
        joins = self._decoder.joined is not None and self._decoder.joined.projection is None
        if any(layer.ahead is not None for layer in self._decoder.layers):
            self._copy_stream("tokens")
        for index, layer in enumerate(self._decoder.layers):
            if layer.attention is not None:
                before = None if layer.ahead is not None else layer.before_attention
                self._add_norm(output, before)
                self._watch(index)
                if layer.ahead is not None:
                    self._add_ahead(layer.ahead, layer.before_attention)
                attended = self._operations.output("attended", hidden)
                self._attended(layer, recurrent, attended, is_of_pairs=joins and not index)
                output = _Output(attended, layer.after_attention)
            if layer.mlp is not None and not layer.is_parallel:
                self._add_norm(output, layer.before_mlp)
                if layer.attention is None:
                    self._watch(index)
                of_mlp = self._operations.output("mlp", hidden)
                self._mlp(layer.mlp, layer.before_mlp is not None, of_mlp)
                if layer.beside_mlp is not None:
                    self._add_beside_mlp(layer.beside_mlp, of_mlp)
                output = _Output(of_mlp, layer.after_mlp)
            if layer.side is not None:
                self._add_norm(output, None)
                output = self._gated_side(layer.side, index)
            if output is not None:
                output = replace(output, stream_factor=layer.stream_factor)
        self._add_norm(output, None)
        self._watch(len(self._decoder.layers))
        return self._head(hidden)

    def _watch(self, index: int) -> None:
        for place in (at for at, each in enumerate(self._watched) if each == index):
            self.stream_copies.append(len(self._operations.all))
            part = torch.from_numpy(self._streams[:, place * self.stream.shape[1] :])
            self._operations.copy(self.stream, part)

    def watched_rows(self, num_rows: int) -> torch.Tensor:
        """Return the streams of a step that are watched, side by side, in memory of their own;
        without any, its last, which the next step overwrites.
        """
        if not self._watched:
            return self.stream[:num_rows]
        # An operator of torch takes 0.05 ms between two steps, numpy's copy a tenth of that.
        return torch.from_numpy(self._streams[:num_rows].copy())

    def _gated_side(self, part: SideGate, index: int) -> _Output:
        """Add the part of layer `index` that has a side input; return what it adds."""
        assert self.side is not None
        width, hidden, operations = part.gate.num_out, self.stream.shape[1], self._operations
        check_widths(width)
        gate = operations.output("side gate", width)
        operations.products((part.gate,), *self._source(is_normed=False), gate)
        gated = operations.input("side", width)
        task = gates.SideTask(
            gate=gate,
            side=self.side[:, index * width :],
            side_stride=self.side.stride(0) * 4,
            out=gated.floats,
            width=width,
        )
        operations.add(gates.side_kernel(part.activation), task, None)
        out = operations.output("side", hidden)
        operations.products((part.projection,), gated, gated.floats, out)
        return _Output(out, part.norm)

    def _copy_stream(self, name: str) -> None:
        """Copy the stream as it is here; it begins with the embedded tokens."""
        self._operations.copy(self.stream, self._operations.output(name, self.stream.shape[1]))

    def _add_ahead(self, part: Ahead, norm: Norm | None) -> None:
        """Add what is ahead of a layer with a state; write that layer's input, normed by `norm`."""
        operations, hidden = self._operations, self.stream.shape[1]
        assert norm is not None
        both = operations.input("stream and tokens", 2 * hidden)
        task = JoinedNormTask(
            one=self.stream,
            other=operations.output("tokens", hidden),
            width=hidden,
            weight=part.norm.weight,
            epsilon=part.norm.epsilon,
            out=both.floats,
        )
        operations.add(norms.joined_norm_kernel(), task, None)
        attended, source = operations.output("attended", hidden), operations.input("normed", hidden)
        self._attention(part.attention, both, both.floats, attended)
        operations.norm_rows(part.before_mlp, attended, source.floats)
        of_mlp, ahead = operations.input("ahead", hidden), operations.output("ahead", hidden)
        add_mlp(operations, part.mlp, source, source.floats, of_mlp.floats)
        operations.products((part.out,), of_mlp, of_mlp.floats, ahead)
        operations.add_to(ahead, self.stream)
        operations.norm_rows(norm, ahead, source.floats)

    def _add_beside_mlp(self, part: BesideMlp, of_mlp: torch.Tensor) -> None:
        """Norm an MLP's output, and add to it that of the mixture beside the MLP, also normed."""
        operations, hidden = self._operations, of_mlp.shape[1]
        operations.norm_rows(part.after_mlp, of_mlp, of_mlp)
        for_router, source = (
            operations.input(f"normed for {n}", hidden) for n in ("router", "experts")
        )
        operations.norm_rows(part.for_router, self.stream, for_router.floats)
        operations.norm_rows(part.before, self.stream, source.floats)
        out = operations.output("mixture", hidden)
        add_mixture(operations, part.mixture, source, source.floats, out, for_router)
        task = NormTask(
            stream=of_mlp,
            width=hidden,
            addend=out,
            addend_weight=part.after.weight,
            epsilon=part.after.epsilon,
        )
        form = NormForm(adds=True, norms_addend=True, norms=False)
        operations.add(norms.norm_kernel(form), task, None)

    def _attended(
        self,
        layer: DecoderLayer,
        recurrent: RecurrentLayers,
        out: torch.Tensor,
        *,
        is_of_pairs: bool,
    ) -> None:
        """Add attention or a layer with a state, or both, and a parallel MLP: all added up.

        `is_of_pairs`: they read pairs of an embedded token and a hidden state.
        """
        source, values = self._source(layer.before_attention is not None)
        if is_of_pairs:
            assert self.joined is not None
            values = self.joined.rows
            source = self._operations.input("joined", values.shape[1])
        if isinstance(layer.attention, DecoderAttention):
            self._attention(layer.attention, source, values, out)
        elif layer.attention is not None:
            recurrent.add(layer.attention, source, values, out)
        if layer.beside is not None:
            beside = self._operations.output("beside", out.shape[1])
            recurrent.add(layer.beside, source, values, beside)
            self._operations.add_to(out, beside)
        if layer.is_parallel:
            self._add_parallel_mlp(layer, out)

    def _add_parallel_mlp(self, layer: DecoderLayer, out: torch.Tensor) -> None:
        """Add the MLP beside attention, whose output is added to attention's."""
        if layer.mlp is None or layer.after_attention is not None or layer.after_mlp is not None:
            raise Unfit("has parallel layers of another kind")
        self._add_norm(None, layer.before_mlp)
        beside = self._operations.output("mlp", out.shape[1])
        is_normed = layer.before_attention is not None or layer.before_mlp is not None
        self._mlp(layer.mlp, is_normed, beside)
        self._operations.add_to(out, beside)

    def _add_norm(self, output: _Output | None, before: Norm | None) -> None:
        """Add to the stream what is to be added, and norm it into the input of what follows."""
        if output is None and before is None:
            return
        width, after = self.stream.shape[1], None if output is None else output.norm
        form = NormForm(
            output is not None,
            after is not None,
            before is not None,
            centres=before is not None and before.bias is not None,
            scales=output is not None and output.stream_factor != 1.0,
        )
        if after is not None and after.bias is not None:
            raise Unfit("has norms of outputs of another kind")
        if after is not None and before is not None and after.epsilon != before.epsilon:
            raise Unfit("has norms with different epsilons")
        task = NormTask(
            stream=self.stream,
            width=width,
            addend=None if output is None else output.values,
            addend_weight=None if after is None else after.weight,
            weight=None if before is None else before.weight,
            out=self._operations.input("normed", width).floats,
            bias=None if before is None else before.bias,
            epsilon=(after or before or self._decoder.norm).epsilon,
            factor=self._decoder.residual_factor,
            stream_factor=1.0 if output is None else output.stream_factor,
        )
        self._operations.add(norms.norm_kernel(form), task, None)

    def _source(self, is_normed: bool) -> tuple[Activations, torch.Tensor]:
        """Return what the products of a layer's half read: the normed stream or the stream."""
        stream = self.stream
        source = self._operations.input("normed", stream.shape[1])
        return source, source.floats if is_normed else stream

    def _attention(
        self,
        layer: DecoderAttention,
        source: Activations,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        spec = layer.spec
        qkv_width = spec.num_heads * spec.key_dim
        if spec.stores_kv:
            qkv_width += spec.num_kv_heads * (spec.key_dim + spec.value_dim)
        qkv = self._operations.output("qkv", qkv_width)
        both = self._qkv(layer, source, values, qkv)
        pool = self._pools[spec.pool_index]
        check_widths(spec.key_dim, spec.value_dim)
        stored = _stored(pool)
        self._rotation(layer, qkv, pool)
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
        kind = PartsKind(
            spec.span,
            spec.num_heads,
            spec.num_kv_heads,
            spec.value_dim,
            spec.pool_index in self._windowed,
        )
        parts = self.parts.get(kind)
        if parts is None:
            parts = Parts(spec.span, spec.num_heads, spec.num_kv_heads, spec.value_dim)
            self.parts[kind] = parts
        attended = self._operations.input("heads", spec.num_heads * spec.value_dim)
        key_scales, value_scales = _scales(pool)
        task = AttentionTask(
            record=parts.record,
            query=qkv,
            query_stride=qkv.stride(0) * 4,
            keys=pool.keys,
            values=pool.values,
            scale=layer.scale,
            softcap=layer.softcap or 0.0,
            sinks=layer.sinks,
            out=attended.floats,
            key_scales=key_scales,
            value_scales=value_scales,
        )
        self._of_parts.setdefault(kind, []).append(len(self._operations.all))
        self._operations.add(attention_kernels.attention_kernel(form), task, 0)
        self._operations.add(attention_kernels.joining_kernel(form), task, None)
        scoring = self.scores.add(spec.module_name, form, task)
        if scoring is not None:
            self._of_parts[kind].append(scoring)
        if both is not None:
            self._add_heads(gates.heads_kernel(is_gate=True), spec, both, attended.floats)
        self._operations.products((layer.out,), attended, attended.floats, out)

    def _qkv(
        self,
        layer: DecoderAttention,
        source: Activations,
        values: torch.Tensor,
        qkv: torch.Tensor,
    ) -> torch.Tensor | None:
        """Multiply with Q, K and V; return the queries with their gates, None without gates."""
        if layer.latents is not None:
            angles = self._angles(layer.kind) if layer.rotates else None
            add_latents(self._operations, layer.latents, layer.spec, angles, source, values, qkv)
            return None
        if layer.order is not None:
            self._ordered(layer.qkv, layer.order, source, values, qkv)
            return None
        if not layer.is_gated:
            self._operations.products(layer.qkv, source, values, qkv)
            self._operations.add_adapters(layer.adapters, source, values, qkv)
            return None
        spec, query, *others = layer.spec, *layer.qkv
        width = spec.num_heads * spec.key_dim
        if query.num_out != 2 * width or spec.value_dim != spec.key_dim:
            raise Unfit("has gates of another width")
        both = self._operations.output("queries and gates", 2 * width)
        self._operations.products((query,), source, values, both)
        self._operations.products(others, source, values, qkv[:, width:])
        self._add_heads(gates.heads_kernel(is_gate=False), spec, both, qkv)
        return both

    def _ordered(
        self,
        matrices: Sequence[Matrix],
        order: torch.Tensor,
        source: Activations,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Multiply with matrices, and write the outputs in another order."""
        products = self._operations.output("products in another order", out.shape[1])
        self._operations.products(matrices, source, values, products)
        self._operations.reorder(products, order, out)

    def _add_heads(
        self,
        kernel: Kernel[HeadsTask],
        spec: LayerSpec,
        both: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        task = HeadsTask(
            both=both,
            out=out,
            out_stride=out.stride(0) * 4,
            num_heads=spec.num_heads,
            dim=spec.key_dim,
        )
        self._operations.add(kernel, task, None)

    def _angles(self, kind: str | None) -> Angles:
        """Return the angles of the layers of a kind."""
        if kind not in self.angles:
            self.angles[kind] = Angles(self._decoder, kind)
        return self.angles[kind]

    def _rotation(self, layer: DecoderAttention, qkv: torch.Tensor, pool: CompiledKv) -> None:
        spec, factors = layer.spec, self.query_factors
        is_rotated = layer.rotates and layer.latents is None
        angles = self._angles(layer.kind) if is_rotated else None
        query, key = layer.head_norms or (None, None)
        key_scales, value_scales = _scales(pool)
        task = RotationTask(
            qkv=qkv,
            qkv_stride=qkv.stride(0) * 4,
            keys=pool.keys,
            values=pool.values,
            cosines=None if angles is None else angles.cosines,
            sines=None if angles is None else angles.sines,
            query_norm=None if query is None else query.weight,
            key_norm=None if key is None else key.weight,
            epsilon=0.0 if query is None else query.epsilon,
            key_scales=key_scales,
            value_scales=value_scales,
            query_factors=None if factors is None else factors.values,
        )
        heads = Heads(
            spec.num_heads,
            spec.num_kv_heads,
            spec.key_dim,
            spec.value_dim,
            0 if angles is None else 2 * angles.half,
            layer.head_norm,
            _stored(pool),
            factors is not None,
            layer.turns_neighbours,
            layer.norms_last,
            layer.norms_value,
            spec.stores_kv,
        )
        header = self.window_header if spec.pool_index in self._windowed else None
        self._operations.add(rotation.rotation_kernel(heads), task, None, header=header)

    def _mlp(self, mlp: Mlp | Mixture, is_normed: bool, out: torch.Tensor) -> None:
        source, values = self._source(is_normed)
        if isinstance(mlp, Mixture):
            add_mixture(self._operations, mlp, source, values, out)
        else:
            add_mlp(self._operations, mlp, source, values, out)

    def _head(self, hidden: int) -> Numbers:
        """Norm the rows that logits are wanted of, and multiply with the head."""
        header, norm = self.head_header, self._decoder.norm
        source = self._operations.input("last", hidden)
        task = NormTask(
            stream=self.stream,
            width=hidden,
            weight=norm.weight,
            out=source.floats,
            bias=norm.bias,
            epsilon=norm.epsilon,
        )
        form = NormForm(adds=False, picks=True, centres=norm.bias is not None)
        self._operations.add(norms.norm_kernel(form), task, None, header=header)
        out = torch.empty(1, self._decoder.head.num_out, dtype=torch.float32)
        (product,) = self._operations.products(
            (self._decoder.head,), source, source.floats, out, header=header
        )
        return product.number("out")

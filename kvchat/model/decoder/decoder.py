"""Decoder: a model of Llama's kind, or a hybrid, as what it computes.

`reader.py` reads it from a module.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kvchat.model.decoder.matrices import LowRank, Matrix, Norm
from kvchat.model.decoder.recurrent import Recurrent
from kvchat.model.spec import LayerSpec, StateTensor
from kvchat_kernels.cpu.experts import ExpertSets, Factors
from kvchat_kernels.cpu.gates import Activation
from kvchat_kernels.cpu.rotation import HeadNorm


@dataclass(frozen=True, slots=True)
class Latents:
    """What Q, K and V are made of where it is less than they are, as DeepSeek V2 has it.

    query      the matrix of Q; with `of_query`, a matrix and a norm, its input is what these make
    keys       the matrix of the latents of K and V, behind them the rotated part of all keys
    norm       of the latents
    up         the matrix that makes the other part of each head's key, and its value, of them
    turns_neighbours, parts_neighbours   as of `latents.LatentForm`
    """

    query: Matrix
    of_query: tuple[Matrix, Norm] | None
    keys: Matrix
    norm: Norm
    up: Matrix
    turns_neighbours: bool
    parts_neighbours: bool

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        of_query = () if self.of_query is None else self.of_query[:1]
        return (*of_query, self.query, self.keys, self.up)


@dataclass(frozen=True, slots=True)
class DecoderAttention:
    """qkv: one matrix, or three. `head_norms` are those of Q and K. `kind` names its angles.

    `turns_neighbours` and `norms_last` are as of `rotation.Heads`. If it is gated, the first matrix
    has a gate behind each head's query. `norms_value` is as of `rotation.Heads`.

    A layer that shares the KV of another one has Q alone, whose norm is both `head_norms`.
    `order` says where each number of Q, K and V is in the outputs of `qkv`, int32; None: they are
    in this order. A layer with `latents` has no `qkv`. `adapters` add to the outputs of `qkv`.
    """

    spec: LayerSpec
    qkv: tuple[Matrix, ...]
    out: Matrix
    scale: float
    head_norm: HeadNorm
    head_norms: tuple[Norm, Norm] | None
    rotates: bool
    kind: str | None
    softcap: float | None
    sinks: torch.Tensor | None
    is_gated: bool = False
    turns_neighbours: bool = False
    norms_last: bool = False
    norms_value: bool = False
    order: torch.Tensor | None = None
    latents: Latents | None = None
    adapters: tuple[LowRank, ...] = ()

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        of_latents = () if self.latents is None else self.latents.matrices
        adapters = [matrix for each in self.adapters for matrix in each.matrices]
        return (*self.qkv, *adapters, *of_latents, self.out)


@dataclass(frozen=True, slots=True)
class Mlp:
    """A gated MLP; `gate_up` is one matrix, or two. One that is not gated has `up` alone there.

    `constants` are fields of `gates.GateTask`, where the activation has them. If it `is_by_turns`,
    the rows of gate and up are by turns those of one matrix. `adapters` add to their outputs.
    `module` is transformers' own, except of experts.
    """

    gate_up: tuple[Matrix, ...]
    down: Matrix
    activation: Activation
    is_gated: bool = True
    constants: Mapping[str, float] = field(default_factory=dict)
    module: Any = None
    is_by_turns: bool = False
    adapters: tuple[LowRank, ...] = ()

    @property
    def num_weights(self) -> int:
        adapters = [matrix for each in self.adapters for matrix in each.matrices]
        return sum(matrix.num_weights for matrix in (*self.gate_up, *adapters, self.down))


@dataclass(frozen=True, slots=True)
class Routing:
    """How factors of experts are made of their scores.

    bias        what sigmoids or shares are raised by for choosing alone, float32 [experts]
    scale       what they are multiplied with
    least_sum   what their sum is added to, where they are divided by it; of shares, the least that
                they are divided by
    tolerance   of a sparse mixer
    of_experts  what each expert's factor of a softmax is multiplied with, float32 [experts]
    sets        of which the best are chosen before their experts are; None: all are one set
    """

    factors: Factors = Factors.SOFTMAX
    bias: torch.Tensor | None = None
    scale: float = 1.0
    least_sum: float = 0.0
    tolerance: float = 0.0
    of_experts: torch.Tensor | None = None
    sets: ExpertSets | None = None


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts, of which each row has the `top_k` with the largest scores, and their weighted sum.

    router       the scores, a row for each expert
    normalises   whether a row's factors have the sum 1
    experts      matrices with the rows of all experts one below another
    shared       an expert that all rows have beside theirs
    shared_gate  the matrix of the one number whose sigmoid `shared` is multiplied with; None: by 1
    """

    router: Matrix
    top_k: int
    normalises: bool
    experts: Mlp
    shared: Mlp | None
    shared_gate: Matrix | None
    routing: Routing = field(default_factory=Routing)

    @property
    def num_experts(self) -> int:
        return self.router.num_out

    @property
    def num_weights(self) -> int:
        """The weights that one row reads."""
        shared = 0 if self.shared is None else self.shared.num_weights
        return (
            self.router.num_weights
            + shared
            + self.experts.num_weights // self.num_experts * self.top_k
        )


@dataclass(frozen=True, slots=True)
class SideGate:
    """A third part of a layer, after the MLP: act(gate(stream)) times the layer's side input, which
    is projected, normed and added to the stream. Gemma 4's small models have it.
    """

    gate: Matrix
    projection: Matrix
    norm: Norm
    activation: Activation


@dataclass(frozen=True, slots=True)
class BesideMlp:
    """A mixture of the same stream as a layer's MLP, each with norms of its own: both are added up.

    for_router, before, after   norms of the router's input, of the experts', and of the output
    after_mlp                   of the output of the MLP
    """

    mixture: Mixture
    for_router: Norm
    before: Norm
    after: Norm
    after_mlp: Norm


@dataclass(frozen=True, slots=True)
class Ahead:
    """A transformer's layer ahead of a layer with a state, whose weights several of Zamba's share.

    It reads the stream beside the embedded tokens, normed by `norm`, [2 * hidden], without adding
    to them. What `out` makes of it is added to the input of the layer with a state, before its
    norm, and not to the stream.
    """

    norm: Norm
    attention: DecoderAttention
    before_mlp: Norm
    mlp: Mlp
    out: Matrix

    @property
    def num_weights(self) -> int:
        matrices = (*self.attention.matrices, self.out)
        return self.mlp.num_weights + sum(matrix.num_weights for matrix in matrices)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention or a layer with a state, and an MLP or a mixture of them, each added to the stream.

    What is added is normed by `after_attention` and `after_mlp`, where there are such norms. The
    input is normed by `before_attention` and `before_mlp`; None: it is the stream itself. One of
    the two halves may be missing. `beside` has the same input as attention, and is added to it. If
    the layer is parallel, so is the MLP, whose input may have a norm of its own, and the norms of
    outputs are missing.
    `stream_factor` is what the stream is multiplied with at the end of the layer. `beside_mlp`
    stands beside an MLP, `ahead` before a layer with a state.

    Of a layer that is read in parts, a part that is not known is None, and without its norms it is
    `is_whole` no more. `other_norms` are those of its norms that stand nowhere else here. `module`
    is transformers' own.
    """

    attention: DecoderAttention | Recurrent | None
    mlp: Mlp | Mixture | None
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    beside: Recurrent | None = None
    is_parallel: bool = False
    side: SideGate | None = None
    beside_mlp: BesideMlp | None = None
    ahead: Ahead | None = None
    stream_factor: float = 1.0
    is_whole: bool = True
    other_norms: tuple[Norm, ...] = ()
    module: Any = None

    @property
    def placed_norms(self) -> tuple[Norm | None, Norm | None, Norm | None, Norm | None]:
        """The four norms around attention and the MLP, in their order."""
        return self.before_attention, self.after_attention, self.before_mlp, self.after_mlp

    @property
    def norms(self) -> tuple[Norm, ...]:
        """All norms that there are."""
        return (*(norm for norm in self.placed_norms if norm is not None), *self.other_norms)

    @property
    def num_weights(self) -> int:
        """The weights that one row reads."""
        matrices = [
            matrix
            for part in (self.attention, self.beside)
            if part is not None
            for matrix in part.matrices
        ]
        if self.side is not None:
            matrices += self.side.gate, self.side.projection
        of_mlp = 0 if self.mlp is None else self.mlp.num_weights
        if self.beside_mlp is not None:
            of_mlp += self.beside_mlp.mixture.num_weights
        if self.ahead is not None:
            of_mlp += self.ahead.num_weights
        return of_mlp + sum(matrix.num_weights for matrix in matrices)


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Q at position p is multiplied with 1 + beta * ln(1 + floor(p / length)): Ministral 3."""

    beta: float
    length: int


@dataclass(frozen=True, slots=True)
class Fusing:
    """What makes hidden states of several streams of the model, side by side.

    norm      of all of them together; None: there is none
    matrix    of as many columns, more than a hidden state has
    """

    norm: Norm | None
    matrix: Matrix


@dataclass(frozen=True, slots=True)
class Joined:
    """What a head that drafts joins its tokens with: hidden states of the model before it.

    norm         of both, [2 * hidden], a row's embedded token before its hidden state; None: they
                 are projected as they are, and may be wider than the stream
    projection   of both, normed, to the stream; None: they are the input of the first layer's
                 attention, and the stream is the hidden state
    take         returns the hidden states of the next so many rows, [rows, hidden], or streams of
                 the model that are to be fused
    of_stream    without a projection, a norm of that stream
    fusing       without a projection; None: there are no streams
    """

    norm: Norm | None
    projection: Matrix | None
    take: Callable[[int], torch.Tensor]
    of_stream: Norm | None = None
    fusing: Fusing | None = None


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole model. `rotary` is transformers' module for angles.

    residual_factor   what attention's and MLP's outputs are multiplied with
    embedding_factor  the same for the table's rows; the embedding module has its own beside it
    logits_divisor, logits_softcap   of the logits
    state             what its layers with a state keep of a sequence
    first_norm        of the embedded tokens
    turns_back        heads are rotated by the angles' opposites
    has_half_angles   `rotary` gives each angle once, as gpt-oss's does, and not twice
    side_inputs       makes the side inputs [rows, layers, width] of token ids [rows]
    joined            of a head for the next token
    """

    embedding: nn.Module
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: Matrix
    rotary: Any
    residual_factor: float = 1.0
    embedding_factor: float = 1.0
    logits_divisor: float = 1.0
    logits_softcap: float | None = None
    query_scale: QueryScale | None = None
    state: tuple[StateTensor, ...] = ()
    first_norm: Norm | None = None
    turns_back: bool = False
    has_half_angles: bool = False
    side_inputs: Callable[[torch.Tensor], torch.Tensor] | None = None
    joined: Joined | None = None


def num_weights(decoder: Decoder) -> int:
    """Return how many weights a step of one row reads."""
    return decoder.head.num_weights + sum(layer.num_weights for layer in decoder.layers)

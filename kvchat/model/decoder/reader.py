"""Reads a decoder from a loaded module.

Only what is read here is computed by the compiled step and by the fused layers of a GPU; anything
else runs transformers' own code. Reading is by model type, and refuses (`Unknown`) what it does not
know. A compiled step needs all of a model; a GPU takes the parts of layers that are known.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn

from kvchat.model.decoder.decoder import (
    Ahead,
    BesideMlp,
    Decoder,
    DecoderAttention,
    DecoderLayer,
    Fusing,
    Joined,
    Latents,
    Mixture,
    Mlp,
    QueryScale,
    Routing,
    SideGate,
)
from kvchat.model.decoder.families import FAMILIES, Family, Known, Rotated
from kvchat.model.decoder.matrices import (
    LowRank,
    Matrix,
    Norm,
    Unknown,
    float_row,
    float_values,
    matrices_of,
    matrix_of,
    whole,
)
from kvchat.model.decoder.mlps import activation_in, part_of, read_experts, read_mlp
from kvchat.model.decoder.recurrent import Mamba, Recurrent
from kvchat.model.spec import LayerSpec, ModelSpec
from kvchat_kernels.cpu.rotation import HeadNorm

# Ends of the names of norms that centre.
_CENTRED = "LayerNorm", "LayerNorm1P"
# The same of norms whose weights are offsets from one, where others of the model's are not.
_FROM_ONE = "CenteredRMSNorm"


_Part = TypeVar("_Part")
# Of modules with other parts than their type has here: another version of transformers may.
_UNREADABLE = (AttributeError, LookupError, TypeError, ValueError)


def read_decoder(module: Any, spec: ModelSpec, *, in_parts: bool = False) -> Decoder | str:
    """Return the decoder of a loaded model, or why it has none, as words after "it".

    `in_parts`: parts of layers that are not known are None.
    """
    try:
        owner = _owner_of_layers(module, spec)
        family = FAMILIES.get(owner.config.model_type)
        if family is None:
            return f"is of the type {owner.config.model_type}"
        if not in_parts:
            _require_all_known(owner, family)
        return _Reader(module, owner, spec, family, in_parts).read()
    except Unknown as reason:
        return str(reason)
    except _UNREADABLE as error:
        return f"lacks a part: {error}"


def _owner_of_layers(module: Any, spec: ModelSpec) -> Any:
    """Return the module that has the list of layers."""
    if not spec.layers:  # without attention, as Mamba
        return module.base_model
    # ...layers.0.self_attn; a model of text and images has its text model inside.
    return module.get_submodule(".".join(_path(spec.layers[0])[:-3]))


def _path(spec: LayerSpec) -> list[str]:
    """Return the names of the modules around a layer's attention, but for one of Zamba's."""
    return [name for name in spec.module_name.split(".") if not name.startswith("shared_transf")]


def _require_all_known(owner: Any, family: Family) -> None:
    """Raise Unknown for a model of which a compiled step could not compute all."""
    config = owner.config
    if Known.STEPS not in family.known:
        raise Unknown(f"is of the type {config.model_type}")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("short_mscale") != rope.get("long_mscale"):  # Phi-3.5-MoE's may differ
        raise Unknown("scales its angles by the length of a step")
    act = getattr(config, "hidden_act", None)
    if act == "xielu" and not family.allows_xielu:  # others compute it in bfloat16
        raise Unknown("has the activation xIELU")


class _Reader:
    """Reads a model; `owner` is the module that has the list of layers."""

    def __init__(
        self, module: Any, owner: Any, spec: ModelSpec, family: Family, in_parts: bool
    ) -> None:
        self._module = module
        self._owner = owner
        self._blocks = getattr(owner, family.layers)
        self._config = owner.config
        self._spec = spec
        self._family = family
        # Zamba2's configuration says it.
        rotary = family.rotary if getattr(owner.config, "use_mem_rope", True) else None
        self._rotary = None if rotary is None else getattr(owner, rotary)
        self._in_parts = in_parts
        # The class with the head has the code of the logits: most image-text classes change
        # nothing, whatever the configuration of their text model says.
        own_types = (owner.config.model_type, *family.outer_types)
        self._changes_logits = module.config.model_type in own_types

    def read(self) -> Decoder:
        config = self._config
        head = self._module.get_output_embeddings()
        norm = self._norm(getattr(self._owner, self._family.last_norm), config.hidden_size)
        first_norm = norm if self._family.norms_embedding else None
        if hasattr(self._blocks[0], "pre_ln"):  # RWKV's
            first_norm = self._norm(self._blocks[0].pre_ln, config.hidden_size)
        embedding = self._module.get_input_embeddings()
        return Decoder(
            embedding=getattr(embedding, "of_tokens", embedding),
            layers=self._layers(),
            norm=norm,
            head=matrix_of(head),
            rotary=self._rotary,
            residual_factor=float(getattr(self._blocks[0], "residual_multiplier", 1.0)),
            embedding_factor=float(getattr(self._owner, "embedding_multiplier", 1.0)),
            logits_divisor=self._logits_divisor(),
            logits_softcap=self._logits_softcap(),
            query_scale=self._query_scale(),
            state=self._spec.state,
            first_norm=first_norm,
            turns_back=self._family.turns_back,
            has_half_angles=self._family.has_half_angles,
            side_inputs=self._side_inputs(),
            joined=self._joined_pairs(embedding) if hasattr(embedding, "of_tokens") else None,
        )

    def _joined_pairs(self, embedding: Any) -> Joined:
        """Return what a head that drafts has before its layer: `next_head.py`, `eagle_head.py`."""
        width = self._config.hidden_size
        one, other = (self._norm(n, width) for n in (embedding.token_norm, embedding.hidden_norm))
        if one.bias is not None or hasattr(self._owner, "embedding_multiplier"):
            raise Unknown("joins tokens and hidden states in another way")
        both = Norm(torch.cat((one.weight, other.weight)), one.epsilon)
        if hasattr(embedding, "projection"):
            return Joined(both, matrix_of(embedding.projection), embedding.take)
        fusing = self._fusing(embedding.fuse)
        return Joined(both, None, embedding.take, other if embedding.norms_stream else None, fusing)

    def _fusing(self, fuse: Any) -> Fusing:
        matrix = matrix_of(fuse.linear)
        if matrix.num_in == self._config.hidden_size:
            raise Unknown("makes hidden states of one stream")
        norm = None if fuse.norm is None else self._norm(fuse.norm, matrix.num_in)
        if norm is not None and norm.bias is not None:
            raise Unknown("makes hidden states of streams in another way")
        return Fusing(norm, matrix)

    def _side_inputs(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return what makes Gemma 4's inputs of layers, in its modules; None if it has none."""
        owner = self._owner
        if not getattr(self._config, "hidden_size_per_layer_input", 0):
            return None

        def side_inputs(token_ids: torch.Tensor) -> torch.Tensor:
            ids = token_ids[None]
            found: torch.Tensor = owner.project_per_layer_inputs(
                owner.embed_tokens(ids), owner.get_per_layer_inputs(ids)
            )
            return found[0]

        return side_inputs

    def _logits_divisor(self) -> float:
        factor = self._family.logits_factor
        if factor is None or not self._changes_logits:
            return 1.0
        value = float(getattr(self._config, factor.name))
        return value if factor.divides else 1 / value

    def _logits_softcap(self) -> float | None:
        if not (self._family.caps_logits and self._changes_logits):
            return None
        softcap: float | None = self._config.final_logit_softcapping
        return softcap

    def _query_scale(self) -> QueryScale | None:
        if not self._family.scales_queries:
            return None
        settings = self._config.rope_parameters
        length = settings["original_max_position_embeddings"]
        return QueryScale(float(settings["llama_4_scaling_beta"]), int(length))

    def _layers(self) -> tuple[DecoderLayer, ...]:
        specs = {}
        for spec in self._spec.layers:
            path = _path(spec)
            if path[-1] != self._family.attention:
                raise Unknown("has attention elsewhere")
            if not spec.stores_kv and not self._family.shares_kv:
                raise Unknown("shares KV between layers")
            specs[int(path[-2])] = spec
        recurrent = self._family.recurrent
        if self._family.state_halves:
            halves = (self._state_halves(layer, at) for at, layer in enumerate(self._blocks))
            return tuple(chain.from_iterable(halves))
        if self._family.has_halves or self._family.has_ahead:
            read_one = self._half if self._family.has_halves else self._with_ahead
            layers = enumerate(self._blocks)
            return tuple(read_one(layer, index, specs.get(index)) for index, layer in layers)
        if recurrent is None:
            return tuple(
                self._layer(self._blocks[index], self._attention_of(index, spec))
                for index, spec in specs.items()
            )
        name, read = recurrent
        found = []
        for index, layer in enumerate(self._blocks):
            spec_here = specs.get(index)
            is_attention = spec_here is not None and name == self._family.attention
            mixer = None if is_attention else getattr(layer, name, None)
            other = None if mixer is None else read(mixer, index)
            if spec_here is None and other is None:
                raise Unknown("has a layer without attention and without a state")
            if spec_here is None:
                found.append(self._layer(layer, other))
            else:
                attention = self._attention_of(index, spec_here)
                both = replace(self._layer(layer, attention), beside=other)
                is_scaled = self._family.has_multipliers
                found.append(_with_multipliers(both, layer) if is_scaled else both)
        return tuple(found)

    def _half(self, block: Any, index: int, spec: LayerSpec | None) -> DecoderLayer:
        """Read a block of Nemotron-H, which is one half of a layer: it has one norm."""
        norm, mixer = self._norm(block.norm, self._config.hidden_size), block.mixer
        if spec is not None:
            part: Any = self._attention(mixer, spec, index)
        elif self._family.recurrent is not None and hasattr(mixer, "A_log"):
            part = self._family.recurrent[1](mixer, index)
        else:
            mlp = self._mlp_or_mixture(block)
            return DecoderLayer(None, mlp, None, None, norm, None)
        return DecoderLayer(part, None, norm, None, None, None)

    def _state_halves(self, block: Any, index: int) -> list[DecoderLayer]:
        """Read the halves of a layer of RWKV. Behind some layers its stream is divided by two."""
        every, width = self._config.rescale_every, self._config.hidden_size
        is_divided = every > 0 and (index + 1) % every == 0
        halves = [
            DecoderLayer(
                read(getattr(block, name), index),
                None,
                self._norm(getattr(block, norm), width),
                *(None, None, None),
            )
            for norm, name, read in self._family.state_halves
        ]
        halves[-1] = replace(halves[-1], stream_factor=0.5 if is_divided else 1.0)
        return halves

    def _with_ahead(self, layer: Any, index: int, spec: LayerSpec | None) -> DecoderLayer:
        """Read a layer of Zamba: Mamba, and what is ahead of it in a hybrid one."""
        decoder, width = layer if spec is None else layer.mamba_decoder, self._config.hidden_size
        assert self._family.recurrent is not None
        read = DecoderLayer(
            self._family.recurrent[1](decoder.mamba, index),
            None,
            self._norm(decoder.input_layernorm, width),
            None,
            None,
            None,
        )
        if spec is None:
            return read
        shared = part_of(layer, "shared_transformer", "shared_transf")
        attention, mlp = shared.self_attn, shared.feed_forward
        of_qkv: tuple[LowRank, ...] = ()
        of_mlp: tuple[LowRank, ...] = ()
        if hasattr(mlp, "gate_up_proj_adapter_list"):  # Zamba2's, of each place by itself
            number = mlp.layer_dic[index]
            of_mlp = (_adapter(mlp.gate_up_proj_adapter_list[number]),)
            if self._config.use_shared_attention_adapter:
                lists = (getattr(attention, f"linear_{name}_adapter_list") for name in "qkv")
                of_qkv = tuple(_adapter(each[number]) for each in lists)
        ahead = Ahead(
            self._norm(shared.input_layernorm, 2 * width),
            replace(self._attention(attention, spec, index), adapters=of_qkv),
            self._norm(shared.pre_ff_layernorm, width),
            replace(read_mlp(mlp), adapters=of_mlp),
            matrix_of(layer.linear),
        )
        return replace(read, ahead=ahead)

    def _attention_of(self, index: int, spec: LayerSpec) -> DecoderAttention | None:
        attention = getattr(self._blocks[index], self._family.attention)
        return self._if_known(Known.ATTENTION, lambda: self._attention(attention, spec, index))

    def _if_known(self, part: Known, read: Callable[[], _Part]) -> _Part | None:
        """Return what `read` returns; for a model in parts None, where this is not known."""
        if not self._in_parts:
            return read()
        if part not in self._family.known:
            return None
        try:
            return read()
        except (Unknown, *_UNREADABLE):
            return None

    def _layer(self, layer: Any, attention: DecoderAttention | Recurrent | None) -> DecoderLayer:
        mlp = self._if_known(Known.MLP, lambda: self._mlp_or_mixture(layer))
        whole = self._if_known(Known.LAYERS, lambda: self._joined(layer, attention, mlp))
        if whole is None:
            whole = DecoderLayer(attention, mlp, None, None, None, None, is_whole=False)
        if not self._in_parts:
            return whole
        return replace(whole, module=layer, other_norms=self._other_norms(layer, whole))

    def _joined(
        self,
        layer: Any,
        attention: DecoderAttention | Recurrent | None,
        mlp: Mlp | Mixture | None,
    ) -> DecoderLayer:
        """Return a layer of these parts with its norms, and with what may follow them."""
        names = self._family.norms
        if isinstance(attention, Recurrent):
            names = self._family.recurrent_norms or names
        before, after, before_mlp, after_mlp = (self._norm_of(layer, name) for name in names)
        # StableLM's configuration says it.
        is_parallel = getattr(layer, "use_parallel_residual", self._family.is_parallel)
        read = DecoderLayer(
            attention, mlp, before, after, before_mlp, after_mlp, is_parallel=is_parallel
        )
        return self._with_side(read, layer) if self._family.has_sides else read

    def _other_norms(self, layer: Any, read: DecoderLayer) -> tuple[Norm, ...]:
        """Return the RMS norms of a layer that are not in `read`'s own places."""
        known = {id(norm.module) for norm in read.norms}
        width = self._config.hidden_size
        found = (
            self._if_known(Known.NORMS, partial(self._norm, child, width))
            for child in layer.children()
            if type(child).__name__.endswith("RMSNorm") and id(child) not in known
        )
        return tuple(norm for norm in found if norm is not None)

    def _with_side(self, read: DecoderLayer, layer: Any) -> DecoderLayer:
        """Return a layer of Gemma 4 with what it has after its MLP."""
        side = None
        if layer.hidden_size_per_layer_input:
            side = SideGate(
                matrix_of(layer.per_layer_input_gate),
                matrix_of(layer.per_layer_projection),
                self._norm(layer.post_per_layer_input_norm, self._config.hidden_size),
                activation_in(layer),
            )
        beside = self._beside_mlp(layer) if layer.enable_moe_block else None
        return replace(read, side=side, beside_mlp=beside, stream_factor=float(layer.layer_scalar))

    def _beside_mlp(self, layer: Any) -> BesideMlp:
        """Read the mixture of a layer of Gemma 4 that has one beside its MLP."""
        width, router = self._config.hidden_size, layer.router
        mixture = Mixture(
            router=matrix_of(router.proj),
            top_k=int(self._config.top_k_experts),
            normalises=True,
            experts=read_experts(layer.experts),
            shared=None,
            shared_gate=None,
            routing=Routing(of_experts=float_row(router.per_expert_scale)),
        )
        weight = float_row(router.scale) * float(router.scalar_root_size)
        return BesideMlp(
            mixture,
            Norm(weight, float(router.eps)),
            self._norm(layer.pre_feedforward_layernorm_2, width),
            self._norm(layer.post_feedforward_layernorm_2, width),
            self._norm(layer.post_feedforward_layernorm_1, width),
        )

    def _norm_of(self, layer: Any, name: str | None) -> Norm | None:
        norm = None if name is None else getattr(layer, name)
        # HyperCLOVA X has norms of outputs that may do nothing.
        if norm is None or type(norm) is nn.Identity or hasattr(norm, "joins_pairs"):
            return None
        return self._norm(norm, self._config.hidden_size)

    def _mlp_or_mixture(self, layer: Any) -> Mlp | Mixture:
        family, module = self._family, getattr(layer, self._family.mlp)
        if module is None:  # Granite's hybrids without a mixture
            return read_mlp(layer.shared_mlp)
        if not hasattr(module, "experts"):
            return read_mlp(module)
        router = getattr(module, family.router)
        # Granite has it beside the mixture, Qwen and others in it.
        shared = getattr(layer, "shared_mlp", None)
        if shared is None:
            names = "shared_expert", "shared_experts", "shared_mlp"
            shared = part_of(module, *names, default=None)
        of_all = None if shared is None else read_mlp(shared)
        if of_all is not None and not of_all.num_weights:  # GLM's with no shared expert
            of_all = None
        gate = getattr(module, "shared_expert_gate", None)
        is_inside = hasattr(router, "wg")  # Hunyuan's router has a linear layer
        return Mixture(
            router=matrix_of(router.wg) if is_inside else _plain(router),
            top_k=int(router.top_k),
            normalises=router.norm_topk_prob if family.normalises is None else family.normalises,
            experts=read_experts(module.experts),
            shared=of_all,
            shared_gate=None if gate is None else matrix_of(gate),
            routing=Routing() if family.routing is None else family.routing(module, router),
        )

    def _attention(self, attention: Any, spec: LayerSpec, index: int) -> DecoderAttention:
        head_norm, norms = self._head_norms(attention, spec)
        kind = None
        if isinstance(getattr(self._rotary, "rope_type", None), dict):
            kind = self._config.layer_types[index]
        if getattr(self._config, "clip_qkv", None) is not None:
            raise Unknown("clips queries and keys")
        softcap = getattr(attention, "attn_logit_softcapping", None) if spec.has_softcap else None
        sinks = getattr(attention, "sinks", None) if spec.has_sinks else None
        if (softcap is not None) != spec.has_softcap or (sinks is not None) != spec.has_sinks:
            raise Unknown("has scores of another kind")
        return DecoderAttention(
            spec,
            self._qkv(attention, spec),
            matrix_of(part_of(attention, "o_proj", "out_proj", "dense")),
            float(attention.scaling),
            head_norm,
            norms,
            self._rotates(attention),
            kind,
            None if softcap is None else float(softcap),
            float_values(sinks) if sinks is not None else None,
            self._family.is_gated,
            self._family.turns_neighbours,
            self._family.norms_last,
            spec.stores_kv and getattr(attention, "v_norm", None) is not None,
            _order_of_heads(spec) if self._family.is_by_heads else None,
            self._latents(attention),
        )

    def _latents(self, attention: Any) -> Latents | None:
        if not hasattr(attention, "kv_a_proj_with_mqa"):
            return None
        of_query, name = None, "q_proj"
        if attention.q_lora_rank is not None:
            matrix = matrix_of(attention.q_a_proj)
            of_query, name = (
                (matrix, self._norm(attention.q_a_layernorm, matrix.num_out)),
                "q_b_proj",
            )
        up = matrix_of(attention.kv_b_proj)
        parts_neighbours = bool(getattr(self._config, "rope_interleave", False))
        return Latents(
            matrix_of(getattr(attention, name)),
            of_query,
            matrix_of(attention.kv_a_proj_with_mqa),
            self._norm(attention.kv_a_layernorm, up.num_in),
            up,
            parts_neighbours or self._family.turns_neighbours,
            parts_neighbours,
        )

    def _qkv(self, attention: Any, spec: LayerSpec) -> tuple[Matrix, ...]:
        if self._family.is_by_heads:
            return (matrix_of(attention.query_key_value),)
        if hasattr(attention, "kv_a_proj_with_mqa"):
            return ()
        if not spec.stores_kv:
            return (matrix_of(attention.q_proj),)
        if getattr(attention, "use_alternative_attention", False):  # Gemma 4: V is K, not rotated
            query, key = matrix_of(attention.q_proj), matrix_of(attention.k_proj)
            return query, key, key
        return matrices_of(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"))

    def _rotates(self, attention: Any) -> bool:
        if self._family.rotated is Rotated.WITH_WINDOWS:
            return attention.sliding_window is not None
        is_mixed = self._family.rotated is Rotated.WITH_WINDOWS_IF_ANY
        if is_mixed and attention.sliding_window is not None:  # of the model, in every layer
            return bool(attention.is_sliding)
        return self._rotary is not None and bool(getattr(attention, "use_rope", True))

    def _head_norms(
        self, attention: Any, spec: LayerSpec
    ) -> tuple[HeadNorm, tuple[Norm, Norm] | None]:
        query = part_of(attention, "q_norm", "q_layernorm", "query_layernorm", default=None)
        if query is None:
            return HeadNorm.NONE, None
        key = query
        if spec.stores_kv:
            key = part_of(attention, "k_norm", "k_layernorm", "key_layernorm")
        norms = self._norm(query, spec.key_dim), self._norm(key, spec.key_dim)
        if norms[0].bias is not None or norms[1].bias is not None:
            raise Unknown("centres Q and K")
        widths = tuple(norm.weight.numel() for norm in norms)
        if norms[0].epsilon != norms[1].epsilon:
            raise Unknown("norms Q and K differently")
        if widths == (spec.key_dim, spec.key_dim):
            return HeadNorm.HEAD, norms
        if widths == (spec.num_heads * spec.key_dim, spec.num_kv_heads * spec.key_dim):
            return HeadNorm.ALL_HEADS, norms
        raise Unknown("norms parts of heads")

    def _norm(self, norm: Any, width: int) -> Norm:
        """Return a norm; one without weights is of this width."""
        name = type(norm).__name__
        is_centred = name.endswith(_CENTRED)
        if not is_centred and not name.endswith("RMSNorm"):
            raise Unknown(f"has the norm {name}")
        weight = getattr(norm, "weight", None)
        if weight is None:  # OLMo's, nanochat's
            weight = torch.ones(width, dtype=torch.float32, device=self._module.device)
        offset = 1.0 if name.endswith(_FROM_ONE) else self._family.norm_offset
        weight = (float_row(weight) + offset).contiguous()
        bias = None
        if is_centred:
            own = getattr(norm, "bias", None)  # Cohere has none
            bias = torch.zeros_like(weight) if own is None else float_row(own).contiguous()
        return Norm(weight, _epsilon(norm), bias, norm)


def _order_of_heads(spec: LayerSpec) -> torch.Tensor:
    """Return where Q, K and V are in outputs that have those of each head together."""
    if spec.num_kv_heads != spec.num_heads or spec.value_dim != spec.key_dim:
        raise Unknown("has heads of other sizes")
    width = 3 * spec.num_heads * spec.key_dim
    numbers = torch.arange(width, dtype=torch.int32)
    return numbers.view(spec.num_heads, 3, spec.key_dim).transpose(0, 1).flatten()


def _adapter(pair: Any) -> LowRank:
    first, second = pair
    return LowRank(matrix_of(first), matrix_of(second))


def _epsilon(norm: Any) -> float:
    if type(norm).__name__ == "OlmoLayerNorm":  # has it in its forward
        return 1e-5
    epsilon = getattr(norm, "variance_epsilon", None)
    return float(norm.eps if epsilon is None else epsilon)


def _plain(router: Any) -> Matrix:
    bias = getattr(router, "bias", None)  # gpt-oss's
    return Matrix(whole(router.weight.detach()), None if bias is None else float_values(bias))


def _with_multipliers(read: DecoderLayer, layer: Any) -> DecoderLayer:
    """Return a layer of Falcon-H1 with the numbers that its inputs and outputs are scaled with."""
    attention, mamba, mlp = read.attention, read.beside, read.mlp
    if not (
        isinstance(attention, DecoderAttention)
        and isinstance(mamba, Mamba)
        and isinstance(mlp, Mlp)
    ):
        raise Unknown("has layers of another kind")
    of_input, of_keys = layer.attention_in_multiplier, layer.self_attn.key_multiplier
    query, key, value = attention.qkv
    attention = replace(
        attention,
        qkv=(
            query.scaled(1.0, of_input),
            key.scaled(of_keys, of_input),
            value.scaled(1.0, of_input),
        ),
        out=attention.out.scaled(layer.attn_out_multiplier),
    )
    of_parts = layer.mamba.mup_vector.detach().float().flatten()
    mamba = replace(
        mamba,
        inputs=mamba.inputs.scaled(of_parts, layer.mamba.ssm_in_multiplier),
        out=mamba.out.scaled(layer.ssm_out_multiplier),
    )
    module, (gate, up) = layer.feed_forward, mlp.gate_up
    mlp = replace(
        mlp,
        gate_up=(gate.scaled(module.gate_multiplier), up),
        down=mlp.down.scaled(module.down_multiplier),
    )
    return replace(read, attention=attention, beside=mamba, mlp=mlp)

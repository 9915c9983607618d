"""What families of models differ in, by model type.

`reader.py` reads a model of a type that is here. A new family is a line of FAMILIES; what
no line can say yet is an attribute more of Family.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, Flag, auto
from typing import Any

from torch import nn

from kvchat.model.decoder.decoder import Routing
from kvchat.model.decoder.matrices import Unknown, float_values
from kvchat.model.decoder.recurrent import (
    Recurrent,
    read_channel_mixing,
    read_delta_net,
    read_kimi_delta_net,
    read_mamba,
    read_olmo_delta_net,
    read_selective_scan,
    read_short_convolution,
    read_time_mixing,
    read_zamba_scan,
)
from kvchat_kernels.cpu.experts import ExpertSets, Factors

# Norms of a layer by their names, in the order of DecoderLayer.
_Names = tuple[str | None, str | None, str | None, str | None]
_LLAMA: _Names = ("input_layernorm", None, "post_attention_layernorm", None)
_GEMMA: _Names = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_OLMO: _Names = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_LFM: _Names = ("operator_norm", None, "ffn_norm", None)
_BAMBA: _Names = ("input_layernorm", None, "pre_ff_layernorm", None)
_GLM4: _Names = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)
_HYPERCLOVA: _Names = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
_VAULT: _Names = ("input_layernorm", None, "pre_feedforward_layernorm", None)
_APERTUS: _Names = ("attention_layernorm", None, "feedforward_layernorm", None)
_ONE: _Names = ("input_layernorm", None, None, None)


class Known(Flag):
    """What is known of the types of a family, beside their RMS norms. A GPU fuses that.

    ATTENTION, MLP   these parts, but for what the reader refuses
    LAYERS           that layers have no other parts
    STEPS            all the rest of a model: it has compiled steps on a CPU
    """

    NORMS = 0
    ATTENTION = auto()
    MLP = auto()
    LAYERS = auto()
    STEPS = auto()
    WHOLE_LAYERS = ATTENTION | MLP | LAYERS
    ALL = WHOLE_LAYERS | STEPS


class Rotated(Enum):
    """Which layers with attention rotate their heads."""

    ALL = auto()  # but those whose module says no
    WITH_WINDOWS = auto()  # in every model
    WITH_WINDOWS_IF_ANY = auto()  # all layers of a model without windows


@dataclass(frozen=True, slots=True)
class LogitsFactor:
    """The name of a factor of the logits in the configuration; the logits may be divided by it."""

    name: str
    divides: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """What types differ in. `norm_offset` is added to the weights of norms.

    known         see Known
    layers, last_norm, rotary   the names of the list of layers, of the norm before the head, and of
                  the module for angles
    attention, mlp, router   the names of these parts; a layer may have a mixture or a plain MLP
    normalises    whether factors of experts have the sum 1; None: the configuration says it
    is_gated      whether heads of attention are gated
    is_by_heads   whether one matrix has the query, the key and the value of each head together
    turns_neighbours, norms_last   as of `rotation.Heads`
    is_parallel   whether attention and MLP have the same input
    shares_kv     whether a layer may attend to the KV of an earlier one
    recurrent     the name of the part of a layer that keeps a state, and what reads it
    recurrent_norms    the norms of such layers; None: those of others
    has_halves    whether a layer is attention, or a part with a state, or an MLP, with one norm
    state_halves  of layers of two halves with a state: the norm of each, its name, what reads it
    routing       what reads how factors of experts are made of scores; None: of softmax alone
    rotated       which layers rotate their heads
    turns_back    whether heads are rotated by the angles' opposites
    norms_embedding    whether the last norm is the first one too, of the embedded tokens
    scales_queries     whether queries grow with their positions
    has_multipliers    whether inputs and outputs of a layer's parts have factors, as Falcon-H1's
    has_ahead          whether a layer with a state may have another ahead of it, as Zamba's
    has_sides          whether a layer may have a third part for its side input, as Gemma 4's
    allows_xielu       whether the activation xIELU is computed in float32, as here
    logits_factor, caps_logits   of the logits, by the configuration
    has_half_angles    as of Decoder
    steps_one_by_one   whether transformers' own code starts a step of several tokens from an empty
                       state
    outer_types   types of models around this one whose heads treat logits as its own head does
    """

    norms: _Names = _LLAMA
    norm_offset: float = 0.0
    layers: str = "layers"
    last_norm: str = "norm"
    rotary: str | None = "rotary_emb"
    attention: str = "self_attn"
    mlp: str = "mlp"
    router: str = "gate"
    normalises: bool | None = None
    is_gated: bool = False
    is_by_heads: bool = False
    turns_neighbours: bool = False
    norms_last: bool = False
    is_parallel: bool = False
    shares_kv: bool = False
    recurrent: tuple[str, Callable[[Any, int], Recurrent]] | None = None
    recurrent_norms: _Names | None = None
    has_halves: bool = False
    state_halves: tuple[tuple[str, str, Callable[[Any, int], Recurrent]], ...] = ()
    routing: Callable[[Any, Any], Routing] | None = None
    rotated: Rotated = Rotated.ALL
    turns_back: bool = False
    norms_embedding: bool = False
    scales_queries: bool = False
    has_multipliers: bool = False
    has_ahead: bool = False
    has_sides: bool = False
    allows_xielu: bool = False
    logits_factor: LogitsFactor | None = None
    caps_logits: bool = False
    has_half_angles: bool = False
    steps_one_by_one: bool = False
    outer_types: tuple[str, ...] = ()
    known: Known = Known.ALL


# How families' mixtures make factors of their experts' scores, read from their modules.


def _sets(router: Any, of_score: int) -> ExpertSets | None:
    """Return the sets of experts of which a router takes the best first."""
    number, num_best = router.num_group, router.topk_group
    if number == num_best:
        return None
    size = router.num_experts // number
    if size * number != router.num_experts or size < of_score or size * num_best < router.top_k:
        raise Unknown("has sets of experts that are too small")
    return ExpertSets(int(number), int(num_best), of_score)


def _route_deepseek(mixture: Any, router: Any) -> Routing:
    """Sigmoids, a bias that chooses, sets, and one scale, as DeepSeek V3's."""
    latent = getattr(mixture, "fc1_latent_proj", None)
    if not isinstance(latent, nn.Identity | None):
        raise Unknown("has a mixture of another kind")
    bias = float_values(router.e_score_correction_bias).flatten()
    scale = float(router.routed_scaling_factor)
    return Routing(Factors.SIGMOID, bias, scale, 1e-20, sets=_sets(router, of_score=2))


def _route_deepseek_v2(mixture: Any, router: Any) -> Routing:
    """Shares of all experts, sets, and one scale."""
    if router.topk_method not in ("greedy", "group_limited_greedy"):
        raise Unknown("has a mixture of another kind")
    sets = None if router.topk_method == "greedy" else _sets(router, of_score=1)
    return Routing(Factors.SHARE, scale=float(router.routed_scaling_factor), sets=sets)


def _route_minimax(mixture: Any, router: Any) -> Routing:
    """Sigmoids and a bias that chooses."""
    return Routing(Factors.SIGMOID, float_values(mixture.e_score_correction_bias).flatten())


def _route_lfm2(mixture: Any, router: Any) -> Routing:
    """Sigmoids, a bias that chooses where the configuration has one, and one scale."""
    bias = float_values(mixture.expert_bias).flatten() if mixture.use_expert_bias else None
    return Routing(Factors.SIGMOID, bias, float(router.routed_scaling_factor), 1e-6)


def _route_ernie(mixture: Any, router: Any) -> Routing:
    """Shares, a bias that chooses, and a least sum."""
    bias = float_values(router.moe_statics.e_score_correction_bias).flatten()
    return Routing(Factors.SHARE, bias, least_sum=float(router.norm_min))


def _route_phi(mixture: Any, router: Any) -> Routing:
    """A sparse mixer, whose code takes two experts, whatever the configuration says."""
    if router.top_k != 2:
        raise Unknown(f"chooses two experts in place of {router.top_k}")
    return Routing(Factors.SPARSE, tolerance=2 * float(router.router_jitter_noise))


_DELTA = ("linear_attn", read_delta_net)
_MAMBA = ("mamba", read_mamba)
_SHORT_CONVOLUTION = ("conv", read_short_convolution)
_LFM2 = Family(_LFM, last_norm="embedding_norm", mlp="feed_forward", recurrent=_SHORT_CONVOLUTION)
_BAMBAS = Family(_BAMBA, last_norm="final_layernorm", mlp="feed_forward", recurrent=_MAMBA)
_HALVES = Family(
    last_norm="norm_f",
    rotary=None,
    attention="mixer",
    mlp="mixer",
    recurrent=("mixer", read_mamba),
    has_halves=True,
    routing=_route_deepseek,
)
_GRANITE_FACTOR = LogitsFactor("logits_scaling", divides=True)
_GRANITE_MIXTURE = Family(
    mlp="block_sparse_moe", router="router", normalises=True, logits_factor=_GRANITE_FACTOR
)
_COHERE = Family(
    _ONE, turns_neighbours=True, is_parallel=True, logits_factor=LogitsFactor("logit_scale")
)
_DEEPSEEK_MIXTURE = Family(routing=_route_deepseek)
_HUNYUAN = Family(norms_last=True)
_LIKE_LLAMA = (
    *("llama", "mistral", "ministral", "qwen2", "qwen3", "seed_oss", "internlm3", "iquestcoder"),
    *("cwm", "smollm3", "arcee", "olmo", "starcoder2", "jais2", "stablelm", "phi3", "qwen2_moe"),
    *("qwen3_moe", "olmoe", "mellum"),
)
FAMILIES = {
    **dict.fromkeys(_LIKE_LLAMA, Family()),
    "ministral3": Family(scales_queries=True),
    **dict.fromkeys(("nemotron", "gemma"), Family(norm_offset=1.0)),
    "phi": Family(_ONE, last_norm="final_layernorm", is_parallel=True),
    "gpt_neox": Family(last_norm="final_layer_norm", attention="attention", is_by_heads=True),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, rotated=Rotated.WITH_WINDOWS),
    **dict.fromkeys(("glm", "ernie4_5", "helium"), Family(turns_neighbours=True)),
    "glm4": Family(_GLM4, turns_neighbours=True),
    "hunyuan_v1_dense": _HUNYUAN,
    "nanochat": replace(_HUNYUAN, turns_back=True, norms_embedding=True, caps_logits=True),
    "apertus": Family(_APERTUS, allows_xielu=True),
    "hyperclovax": Family(
        _HYPERCLOVA,
        logits_factor=LogitsFactor("logits_scaling"),
        outer_types=("hyperclovax_vision_v2",),
    ),
    "granite": Family(logits_factor=_GRANITE_FACTOR),
    **dict.fromkeys(("gemma2", "gemma3_text"), Family(_GEMMA, 1.0, caps_logits=True)),
    "gemma4_text": Family(
        _GEMMA, shares_kv=True, has_sides=True, caps_logits=True, outer_types=("gemma4",)
    ),
    "vaultgemma": Family(_VAULT, 1.0, caps_logits=True),
    **dict.fromkeys(("olmo2", "olmo3", "flex_olmo"), Family(_OLMO)),
    "exaone4": Family(_OLMO, rotated=Rotated.WITH_WINDOWS_IF_ANY),
    "mixtral": Family(normalises=True),
    **dict.fromkeys(("glm4_moe", "dots1", "solar_open"), _DEEPSEEK_MIXTURE),
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "youtu"), _DEEPSEEK_MIXTURE),
    "deepseek_v2": Family(turns_neighbours=True, normalises=False, routing=_route_deepseek_v2),
    "minimax_m2": Family(normalises=True, routing=_route_minimax),
    "ernie4_5_moe": Family(normalises=True, turns_neighbours=True, routing=_route_ernie),
    "hunyuan_v1_moe": replace(_HUNYUAN, normalises=True),
    "phimoe": Family(router="router", normalises=False, routing=_route_phi),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text"), Family(norm_offset=1.0, is_gated=True, recurrent=_DELTA)
    ),
    "qwen3_5_moe_text": Family(norm_offset=1.0, normalises=True, is_gated=True, recurrent=_DELTA),
    "kimi_linear": replace(
        _DEEPSEEK_MIXTURE, rotary=None, recurrent=("self_attn", read_kimi_delta_net)
    ),
    "olmo_hybrid": Family(
        _OLMO, recurrent=("linear_attn", read_olmo_delta_net), recurrent_norms=_LLAMA
    ),
    "lfm2": _LFM2,
    "lfm2_moe": replace(_LFM2, rotary="pos_emb", routing=_route_lfm2),
    "bamba": _BAMBAS,
    "falcon_h1": replace(
        _BAMBAS, has_multipliers=True, logits_factor=LogitsFactor("lm_head_multiplier")
    ),
    "nemotron_h": _HALVES,
    "mamba2": _HALVES,
    **dict.fromkeys(
        ("mamba", "falcon_mamba"),
        replace(_HALVES, recurrent=("mixer", read_selective_scan), steps_one_by_one=True),
    ),
    "zamba2": Family(
        _ONE, last_norm="final_layernorm", recurrent=("mamba", read_mamba), has_ahead=True
    ),
    "zamba": Family(
        _ONE,
        last_norm="final_layernorm",
        rotary=None,
        recurrent=("mamba", read_zamba_scan),
        has_ahead=True,
        steps_one_by_one=True,
    ),
    "jamba": replace(
        _BAMBAS,
        rotary=None,
        router="router",
        normalises=False,
        recurrent=("mamba", read_selective_scan),
        steps_one_by_one=True,
    ),
    "rwkv": Family(
        layers="blocks",
        last_norm="ln_out",
        rotary=None,
        state_halves=(
            ("ln1", "attention", read_time_mixing),
            ("ln2", "feed_forward", read_channel_mixing),
        ),
    ),
    "gpt_oss": Family(router="router", normalises=True, has_half_angles=True),
    "granitemoehybrid": replace(_GRANITE_MIXTURE, recurrent=_MAMBA),
    **dict.fromkeys(("granitemoe", "granitemoeshared"), _GRANITE_MIXTURE),
}
_LAYERS = Family(known=Known.WHOLE_LAYERS)
_ATTENTION = Family(known=Known.ATTENTION)
_MLP = Family(known=Known.MLP)
_NORMS = Family(known=Known.NORMS)
# Types without compiled steps, of which a GPU fuses what is known.
_OF_KNOWN_LAYERS = (
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "glm4v_moe_text"),
    *("paddleocr_vl_text", "mllama_text_model", "emu3_text_model", "phi4_multimodal"),
    *("granite_swa", "granite_docling_text", "hy_v3"),
)
_OF_KNOWN_MLPS = (
    *("axk1", "mistral4", "minicpm3", "mimo_v2_flash", "laguna", "afmoe", "beam", "glm4v_text"),
    *("glm_ocr_text", "muse_glimmer_text"),
)
FAMILIES |= {
    **dict.fromkeys(_OF_KNOWN_LAYERS, _LAYERS),
    "exaone_moe": replace(_LAYERS, rotated=Rotated.WITH_WINDOWS_IF_ANY),
    "flint": replace(_LAYERS, rotated=Rotated.WITH_WINDOWS),
    "minimax_m3_vl_text": replace(_ATTENTION, norm_offset=1.0),
    **dict.fromkeys(("aria_text", "cosmos3_edge_text", "granitemoe_swa"), _ATTENTION),
    "kolibri1": replace(_ATTENTION, rotated=Rotated.WITH_WINDOWS_IF_ANY),
    "cohere2_moe": replace(_ATTENTION, turns_neighbours=True, rotated=Rotated.WITH_WINDOWS),
    **dict.fromkeys(_OF_KNOWN_MLPS, _MLP),
    "gemma3n_text": replace(_MLP, shares_kv=True),
    "gemma4_unified_text": replace(_MLP, shares_kv=True),
    "bitnet": _NORMS,
    "moshi": replace(_NORMS, rotary=None),
    "jetmoe": replace(_NORMS, attention="self_attention"),
    "step3p5": replace(_NORMS, norm_offset=1.0),  # its MLP cuts large numbers off
}
COMPILED_TYPES = tuple(sorted(name for name in FAMILIES if Known.STEPS in FAMILIES[name].known))


def steps_one_by_one(model_type: str) -> bool:
    """Return whether the modules of a type compute a context in steps of one token."""
    family = FAMILIES.get(model_type)
    return family is not None and family.steps_one_by_one

"""What the families of models with compiled steps differ in, by model type.

`reader.py` reads a model of a type that is here. A new family is a line of FAMILIES; what
no line can say yet is an attribute more of Family.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvchat.model.cpu.step_delta import read_delta_net
from kvchat.model.cpu.step_mamba import read_mamba
from kvchat.model.cpu.step_recurrent import Recurrent
from kvchat.model.cpu.step_short_conv import read_short_convolution

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
_ONE: _Names = ("input_layernorm", None, None, None)


@dataclass(frozen=True, slots=True)
class Family:
    """What types differ in. `norm_offset` is added to the weights of norms.

    last_norm, rotary   the names of the norm before the head, and of the module for angles
    attention, mlp, router   the names of these parts; a layer may have a mixture or a plain MLP
    normalises    whether factors of experts have the sum 1; None: the configuration says it
    is_gated      whether heads of attention are gated
    turns_neighbours, norms_last   as of `rotation.Heads`
    is_parallel   whether attention and MLP have the same input
    shares_kv     whether a layer may attend to the KV of an earlier one
    recurrent     the name of the part of a layer that keeps a state, and what reads it
    """

    norms: _Names = _LLAMA
    norm_offset: float = 0.0
    last_norm: str = "norm"
    rotary: str | None = "rotary_emb"
    attention: str = "self_attn"
    mlp: str = "mlp"
    router: str = "gate"
    normalises: bool | None = None
    is_gated: bool = False
    turns_neighbours: bool = False
    norms_last: bool = False
    is_parallel: bool = False
    shares_kv: bool = False
    recurrent: tuple[str, Callable[[Any, int], Recurrent]] | None = None


_DELTA = ("linear_attn", read_delta_net)
_MAMBA = ("mamba", read_mamba)
_SHORT_CONVOLUTION = ("conv", read_short_convolution)
_LFM2 = Family(_LFM, last_norm="embedding_norm", mlp="feed_forward", recurrent=_SHORT_CONVOLUTION)
_BAMBAS = Family(_BAMBA, last_norm="final_layernorm", mlp="feed_forward", recurrent=_MAMBA)
_GRANITE_MIXTURE = Family(mlp="block_sparse_moe", router="router", normalises=True)
_COHERE = Family(_ONE, turns_neighbours=True, is_parallel=True)
_HUNYUAN = Family(norms_last=True)
FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "ministral": Family(),
    "ministral3": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "seed_oss": Family(),
    "internlm3": Family(),
    "iquestcoder": Family(),
    "cwm": Family(),
    "smollm3": Family(),
    "arcee": Family(),
    "olmo": Family(),
    "starcoder2": Family(),
    "nemotron": Family(norm_offset=1.0),
    "jais2": Family(),
    "stablelm": Family(),
    "phi": Family(_ONE, last_norm="final_layernorm", is_parallel=True),
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "glm": Family(turns_neighbours=True),
    "glm4": Family(_GLM4, turns_neighbours=True),
    "ernie4_5": Family(turns_neighbours=True),
    "helium": Family(turns_neighbours=True),
    "hunyuan_v1_dense": _HUNYUAN,
    "nanochat": _HUNYUAN,
    "apertus": Family(("attention_layernorm", None, "feedforward_layernorm", None)),
    "hyperclovax": Family(_HYPERCLOVA),
    "phi3": Family(),
    "granite": Family(),
    "gemma": Family(norm_offset=1.0),
    "gemma2": Family(_GEMMA, 1.0),
    "gemma3_text": Family(_GEMMA, 1.0),
    "gemma4_text": Family(_GEMMA, shares_kv=True),
    "vaultgemma": Family(_VAULT, 1.0),
    "olmo2": Family(_OLMO),
    "olmo3": Family(_OLMO),
    "exaone4": Family(_OLMO),
    "mixtral": Family(normalises=True),
    "qwen2_moe": Family(),
    "qwen3_moe": Family(),
    "olmoe": Family(),
    "flex_olmo": Family(_OLMO),
    "mellum": Family(),
    "glm4_moe": Family(),
    "dots1": Family(),
    "solar_open": Family(),
    "minimax_m2": Family(normalises=True),
    "ernie4_5_moe": Family(normalises=True, turns_neighbours=True),
    "hunyuan_v1_moe": replace(_HUNYUAN, normalises=True),
    "phimoe": Family(router="router", normalises=False),
    "qwen3_next": Family(norm_offset=1.0, is_gated=True, recurrent=_DELTA),
    "qwen3_5_text": Family(norm_offset=1.0, is_gated=True, recurrent=_DELTA),
    "qwen3_5_moe_text": Family(norm_offset=1.0, normalises=True, is_gated=True, recurrent=_DELTA),
    "lfm2": _LFM2,
    "lfm2_moe": replace(_LFM2, rotary="pos_emb"),
    "bamba": _BAMBAS,
    "falcon_h1": _BAMBAS,
    "nemotron_h": Family(last_norm="norm_f", rotary=None, attention="mixer", mlp="mixer"),
    "granitemoehybrid": replace(_GRANITE_MIXTURE, recurrent=_MAMBA),
    "granitemoe": _GRANITE_MIXTURE,
    "granitemoeshared": _GRANITE_MIXTURE,
}
COMPILED_TYPES = tuple(sorted(FAMILIES))
# Types whose experts have factors as DeepSeek V3's: sigmoids, a bias chooses, then one scale.
LIKE_DEEPSEEK = frozenset({"nemotron_h", "glm4_moe", "dots1", "solar_open"})
# Types whose logits have a factor: its name, and whether they are divided by it.
LOGITS_FACTORS = {
    "granite": ("logits_scaling", True),
    "granitemoe": ("logits_scaling", True),
    "granitemoeshared": ("logits_scaling", True),
    "granitemoehybrid": ("logits_scaling", True),
    "hyperclovax": ("logits_scaling", False),
    "hyperclovax_vision_v2": ("logits_scaling", False),
    "falcon_h1": ("lm_head_multiplier", False),
    "cohere": ("logit_scale", False),
    "cohere2": ("logit_scale", False),
}
LOGITS_CAPPED = frozenset(
    {"gemma2", "gemma3_text", "gemma4", "gemma4_text", "vaultgemma", "nanochat"}
)

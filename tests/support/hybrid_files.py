"""Models with recurrent layers whose matrices all formats of GGUF files can hold, and their files.

Every matrix has rows of whole blocks of 256 columns. What llama.cpp itself never stores in blocks
of these (convolutions, decays, small projections) is float32.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.checkpoints import tiny_model
from support.gguf_files import write_gguf

_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_DELTA_DATA = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 64,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 256,
    "rope.dimension_count": 16,
}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_expand": 1,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
_MAMBA_DATA = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 8,
    "ssm.inner_size": 256,
}
_SCAN_DATA = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 16,
    "ssm.inner_size": 512,
}
_SHORT_DATA = {
    "attention.head_count_kv": [0, 2],
    "attention.layer_norm_rms_epsilon": 1e-5,
    "shortconv.l_cache": 3,
}

# name -> (model type, settings, metadata)
HYBRIDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen35": ("qwen3_5_text", _DELTA, _DELTA_DATA),
    "qwen35, heads in order": (
        "qwen3_5_text",
        {**_DELTA, "linear_num_key_heads": 4},
        {**_DELTA_DATA, "ssm.group_count": 4},
    ),
    "qwen3next": ("qwen3_next", {**_DELTA, **_MOE}, _DELTA_DATA),
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        _SHORT_DATA,
    ),
    "granitehybrid": (
        "granitemoehybrid",
        {
            **_MAMBA,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 512,
            "head_dim": None,
        },
        {**_MAMBA_DATA, "expert_count": 0, "attention.head_count_kv": [0, 2]},
    ),
    "falcon-h1": ("falcon_h1", {**_MAMBA, "mamba_d_ssm": 256}, _MAMBA_DATA),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "mlp"],
            "num_hidden_layers": None,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 8,
        },
        {
            **_MAMBA_DATA,
            "attention.head_count_kv": [0, 2, 0],
            "feed_forward_length": [0, 0, 512],
            "attention.layer_norm_rms_epsilon": 1e-5,
            "expert_count": None,
        },
    ),
    "mamba": (
        "mamba",
        {"state_size": 16, "time_step_rank": 16, "expand": 2, "head_dim": None},
        {**_SCAN_DATA, "attention.head_count": 0, "attention.layer_norm_rms_epsilon": 1e-5},
    ),
    "jamba": (
        "jamba",
        {"mamba_d_state": 16, "mamba_dt_rank": 16, "num_experts": 4, "num_experts_per_tok": 2,
         "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
         "expert_layer_offset": 1},
        {**_SCAN_DATA, "attention.head_count_kv": [0, 2]},
    ),
    "mamba2": (
        "mamba2",
        {"state_size": 16, "num_heads": 8, "head_dim": 32, "expand": 1, "n_groups": 2,
         "chunk_size": 8, "intermediate_size": 256},
        {**_MAMBA_DATA, "attention.head_count": 0, "attention.key_length": None,
         "attention.layer_norm_rms_epsilon": 1e-5},
    ),
}  # fmt: skip
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
_FLOATS = ("ssm_conv1d", "shortconv.conv", "ffn_gate_inp", "ssm_norm", "ssm_dt.")


def write_hybrid(path: Path, name: str, kind: str | Callable[[str], str]) -> Path:
    """Write a model whose matrices are in a block format, or each in what `kind` returns for it."""
    model_type, settings, metadata = HYBRIDS[name]
    model = tiny_model(model_type, **{**SIZES, **settings})
    return write_gguf(path, model, formats_of(kind), metadata)


def formats_of(kind: str | Callable[[str], str]) -> Callable[[str], str]:
    """Return what returns the block format of each tensor of a hybrid by its name in the file."""

    def format_of(stored: str) -> str:
        if any(part in stored for part in _FLOATS) or stored.endswith((".ssm_a", ".ssm_d")):
            return "F32"
        return kind(stored) if callable(kind) else kind

    return format_of

"""Tiny configurations of architectures with recurrent state, and conversations with them.

Small chunk sizes inside the networks, so that prompts cross them. The oracle computes the whole
context of an answer again, without any cache.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from kvchat.core.config import CacheConfig, EngineConfig, ModelConfig
from kvchat.core.events import RequestEvent, RequestFailed, SampleFinished, TokensGenerated
from kvchat.core.text import Size
from kvchat.core.types import NO_MEMORY, SamplingParams
from kvchat.engine.assembly import engine_around
from kvchat.engine.engine import Engine
from kvchat.engine.request import RequestSpec
from kvchat.engine.speculation import Speculation
from kvchat.model.checkpoint.source import find_model
from kvchat.model.loader import LoadedModel, load_model
from support.chains import be_patient
from support.checkpoints import save_checkpoint, tiny_model
from support.models_page import load_table

_KNOWN = load_table()
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}
_MAMBA1 = {"state_size": 8, "head_dim": None, "time_step_rank": 8}

_ALL: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {**_MOE, **_DELTA, "shared_expert_intermediate_size": 32}),
    "qwen3_5": ("qwen3_5_text", _DELTA),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {**_MOE, **_DELTA, "shared_expert_intermediate_size": 32},
    ),
    # Heads of which whole vectors are rotated.
    "qwen3_5, compiled": ("qwen3_5_text", {**_DELTA, "head_dim": 64}),
    "qwen3_5_moe, compiled": (
        "qwen3_5_moe_text",
        {**_MOE, **_DELTA, "shared_expert_intermediate_size": 32, "head_dim": 64},
    ),
    "olmo_hybrid": ("olmo_hybrid", _DELTA),
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {**_MOE, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_MAMBA2,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 64,
        },
    ),
    "falcon_h1": ("falcon_h1", {**_MAMBA2, "mamba_d_ssm": 128}),
    "bamba": ("bamba", {**_MAMBA2, "attn_layer_indices": [1]}),
    "rwkv": ("rwkv", {"attention_hidden_size": 64, "context_length": 512, "head_dim": None}),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "num_hidden_layers": 4,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 8,
            "conv_kernel": 4,
        },
    ),
    "zamba2": (
        "zamba2",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "mamba_d_state": 16,
            "n_mamba_heads": 8,
            "mamba_headdim": 16,
            "mamba_ngroups": 1,
            "chunk_size": 8,
            "num_mem_blocks": 1,
            "adapter_rank": 32,
            "head_dim": None,
            "attention_head_dim": 32,
            "attention_hidden_size": 128,
        },
    ),
    "zamba, mamba-1": (
        "zamba",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "mamba_d_state": 8,
            "n_mamba_heads": 2,
            "mamba_dt_rank": 8,
            "head_dim": None,
            "attention_head_dim": 32,
            "attention_hidden_size": 128,
        },
    ),
    "jamba, mamba-1": (
        "jamba",
        {
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 8,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
        },
    ),
    "minimax": (
        "minimax",
        {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2,
         "block_size": 8},
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "dense"],
            "linear_head_dim": 32,
            "linear_num_heads": 4,
            "num_local_experts": 4,
            "moe_intermediate_size": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
            "head_dim": None,
        },
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_experts": 4,
            "moe_intermediate_size": 32,
        },
    ),
    "zaya": ("zaya", {}),
    "lfm3": ("lfm3", {"layer_types": ["conv", "full_attention"]}),
    "lfm3, windows": (
        "lfm3",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
            "sliding_window": 20,
        },
    ),
    "minimax, windows": (
        "minimax",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 2,
            "block_size": 8,
            "sliding_window": 20,
        },
    ),
    "zaya, windows": ("zaya", {"layer_types": ["hybrid_sliding", "hybrid"], "sliding_window": 20}),
    "mamba, no attention": ("mamba", _MAMBA1),
    "falcon_mamba, no attention": ("falcon_mamba", _MAMBA1),
    "mamba2, no attention": (
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 8},
    ),
}  # fmt: skip

# name -> (model type, settings beside those every tiny model has). An older transformers has fewer
# of the types in the table of verdicts; a type that is not in that table is an error.
STATEFUL = {
    name: each for name, each in _ALL.items() if each[0] in CONFIG_MAPPING or each[0] not in _KNOWN
}

# Each form of state once. The first six run with every commit, the others by turns.
FORMS = [
    name
    for name in (
        "qwen3_next",
        "qwen3_5, compiled",
        "lfm2",
        "granitemoehybrid",
        "falcon_h1",
        "rwkv",
        "jamba, mamba-1",
        "minimax",
        "kimi_linear",
        "mamba2, no attention",
        "lfm3, windows",
    )
    if name in STATEFUL
]
Loaded = tuple[PreTrainedModel, LoadedModel]
MAX_CONTEXT = 400
NUM_GENERATED = 8


def words(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def load_stateful(name: str, directory: Path) -> Loaded:
    """Save a tiny model of a type and load it; return it and what was loaded."""
    model_type, settings = STATEFUL[name]
    reference = tiny_model(model_type, **settings)
    source = find_model(str(save_checkpoint(directory, reference)))
    return reference, load_model(source, ModelConfig(dtype="float32"), MAX_CONTEXT, lambda _: None)


def open_engine(
    loaded: LoadedModel,
    directory: Path | None,
    num_bytes: int = 32 << 20,
    step_tokens: int = 48,
    host_bytes: int = 0,
    speculation: Speculation | None = None,
    whole_windows: bool = False,
    kv_dtype: str = "auto",
) -> Engine:
    """Return an engine whose KV is kept in `directory`, nowhere if that is None.

    With `whole_windows`, layers with a window keep everything.
    """
    cache = CacheConfig(
        device_bytes=Size(num_bytes=num_bytes),
        host_bytes=Size(num_bytes=host_bytes),
        directory=directory,
        whole_windows=whole_windows,
        kv_dtype=kv_dtype,
    )
    settings = EngineConfig(max_step_tokens=step_tokens)
    engine = engine_around(loaded, cache, settings, NO_MEMORY, speculation)
    be_patient(engine.chain)
    return engine


@dataclass
class Answer:
    """A sample's tokens; how many prompt tokens were cached, and how many of those on the disk."""

    ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_from_disk: int = 0
    num_from_host: int = 0


@dataclass
class Chat:
    """Runs greedy requests on an engine, and knows the right answers."""

    reference: PreTrainedModel
    engine: Engine

    def ask(self, *prompts: Sequence[int], num_samples: int = 1) -> list[Answer]:
        """Answer prompts in one batch; the answers of a prompt's samples stand together."""
        answers: dict[tuple[int, int], Answer] = {}
        for prompt in prompts:
            spec = RequestSpec(
                tuple(prompt),
                SamplingParams(temperature=0.0),
                max_tokens=NUM_GENERATED,
                num_samples=num_samples,
            )
            number = self.engine.submit(spec)
            answers.update({(number, sample): Answer() for sample in range(num_samples)})
        while self.engine.has_work:
            for event in self.engine.step():
                assert not isinstance(event, RequestFailed), event.error
                if isinstance(event, TokensGenerated):
                    answers[event.request_id, event.sample].ids.extend(event.token_ids)
                if isinstance(event, SampleFinished):
                    cached = event.usage.cached
                    answers[event.request_id, event.sample].num_cached = cached.total
                    answers[event.request_id, event.sample].num_from_disk = cached.disk
                    answers[event.request_id, event.sample].num_from_host = cached.host
            running = [r.table for r in self.engine.running() if r.table is not None]
            self.engine.cache.check(running)
        return list(answers.values())

    def preempt_at(self, *numbers: int) -> None:
        """Preempt the request that came last before each of these steps, counted from 1."""
        step, num_steps = self.engine.step, itertools.count(1)

        def preempting() -> list[RequestEvent]:
            if next(num_steps) in numbers:
                self.engine._scheduler._preempt(self.engine._scheduler._running[-1])
            return step()

        self.engine.step = preempting  # type: ignore[method-assign]

    def right_answer(self, prompt: Sequence[int], given: Sequence[int]) -> list[int]:
        """Return the greedy token behind the prompt, and behind each token given but the last.

        Only where all that is given is the greedy answer is it the same. One pass over the whole
        context, without any cache, computes it.
        """
        assert len(given) == NUM_GENERATED
        ids = torch.tensor([[*prompt, *given[:-1]]])
        with torch.inference_mode():
            logits = self.reference(ids, use_cache=False).logits
        return logits[0, len(prompt) - 1 :].argmax(-1).tolist()

"""Tiny models of Gemma 4 with a random drafter, and what it computes in transformers' code."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, PreTrainedModel

from kvchat.model.assistant import layers_that_share
from support.checkpoints import VOCAB_SIZE, save_checkpoint, tiny_model

_KINDS = ["sliding_attention", "full_attention"]
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "intermediate_size": 64,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "sliding_window": 24,
    "max_position_embeddings": 512,
    "pad_token_id": 256,
}


@dataclass(frozen=True)
class WithAssistant:
    """A model and its drafter, both in float32."""

    model: PreTrainedModel
    assistant: PreTrainedModel

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], guesses: Sequence[int]) -> torch.Tensor:
        """Return the drafter's logits after a context and guesses, [vocab]."""
        known = self.model(
            torch.tensor([ids[:-1]]), output_hidden_states=True, return_shared_kv_states=True
        )
        hidden, position = known.hidden_states[-1][:, -1:], torch.tensor([[len(ids) - 1]])
        kv = dict(known.shared_kv_states)
        # Of the window's tokens the newest has no KV yet.
        kv["sliding_attention"] = tuple(
            part[:, :, -(_TEXT["sliding_window"] - 1) :] for part in kv["sliding_attention"]
        )
        found = None
        for token in (ids[-1], *guesses):
            embedded = self.model.get_input_embeddings()(torch.tensor([[token]]))
            found = self.assistant(
                inputs_embeds=torch.cat([embedded, hidden], dim=-1),
                position_ids=position,
                shared_kv_states=kv,
            )
            hidden = found.last_hidden_state
        assert found is not None
        logits: torch.Tensor = found.logits[0, -1]
        return logits


def write_with_assistant(directory: Path, *, is_ordered: bool) -> WithAssistant:
    """Write a model to `directory`/target and its drafter to `directory`/drafter."""
    torch.manual_seed(0)
    model = tiny_model(
        "gemma4_text",
        **{**_TEXT, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB_SIZE},
        hidden_size=64,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=_KINDS * 2,
    )
    config = Gemma4AssistantConfig(
        text_config={
            **_TEXT,
            "model_type": "gemma4_text",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_kv_shared_layers": 2,
            "layer_types": _KINDS,
        },
        backbone_hidden_size=64,
        use_ordered_embeddings=is_ordered,
        num_centroids=16,
        centroid_intermediate_top_k=4,
    )
    with layers_that_share():
        assistant = Gemma4AssistantForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in assistant.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
        if is_ordered:
            order = torch.randperm(VOCAB_SIZE)
            assistant.masked_embedding.token_ordering.copy_(order)
    save_checkpoint(directory / "target", model)
    assistant.save_pretrained(directory / "drafter")
    return WithAssistant(model, assistant)

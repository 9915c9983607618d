"""Gemma 4's drafter, a small model that reads the KV of the model it drafts for.

It has no KV of its own. For each guess it projects the embedding of the newest token, by the
model's table, beside a hidden state of as many numbers: the model's last one, then its own. Its
layers attend to the KV of the model's last layers of the same types. All guesses stand at the
position of the newest known token, whose own KV does not exist yet.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from transformers.models.auto.configuration_auto import AutoConfig

from kvchat.core.errors import ModelError
from kvchat.model.batch import SequencePiece, build_batch
from kvchat.model.checkpoint.source import ModelSource
from kvchat.model.checkpoint.tensors import mapped_tensors, refuse_gaps
from kvchat.model.cpu.compiled_step import CompiledStep
from kvchat.model.cpu.step_program import CompiledKv
from kvchat.model.decoder.decoder import Decoder, Joined
from kvchat.model.decoder.matrices import matrix_of
from kvchat.model.decoder.reader import read_decoder
from kvchat.model.files.checkpoint_files import read_json
from kvchat.model.hf.config_limits import check_counts
from kvchat.model.hf.model_class import on_meta
from kvchat.model.loader import LOADING, LoadedModel
from kvchat.model.packed.quantise import use_cpu_products
from kvchat.model.part_loader import files_limit
from kvchat.model.spec import LayerSpec, ModelSpec


@contextmanager
def layers_that_share() -> Iterator[None]:
    """Let transformers build a model of Gemma 4 all of whose layers share KV, as a drafter's do.

    transformers 5.23 looks for layers of the same model that store what they share, and finds none.
    """
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

    own = Gemma4TextConfig.kv_sharing_modes

    def modes(config: Any) -> list[str | None]:
        if config.num_kv_shared_layers == config.num_hidden_layers:
            return ["reuse"] * config.num_hidden_layers
        found: list[str | None] = own.fget(config)
        return found

    Gemma4TextConfig.kv_sharing_modes = property(modes)
    try:
        yield
    finally:
        Gemma4TextConfig.kv_sharing_modes = own


class Assistant:
    """A drafter of Gemma 4 on a CPU, in compiled steps; one thread uses it.

    `vocab_size` is the model's. `read_from` says where the model's KV is.
    """

    def __init__(self, module: Any, decoder: Decoder, vocab_size: int) -> None:
        joined = Joined(None, matrix_of(module.pre_projection), self._take)
        self._module, self._decoder = module, replace(decoder, joined=joined)
        self.vocab_size = vocab_size
        self._step: CompiledStep | None = None
        self._block_size = 0
        self._window_blocks: torch.Tensor | None = None
        # Of the rows of a step that come next, and of those that were computed: a step of many rows
        # has several groups.
        self._given = torch.empty(0)
        self._streams: list[torch.Tensor] = []

    def _take(self, num_rows: int) -> torch.Tensor:
        taken, self._given = self._given[:num_rows], self._given[num_rows:]
        assert len(taken) == num_rows
        return taken

    def read_from(
        self,
        pools: Sequence[CompiledKv],
        block_size: int,
        windowed: frozenset[int] = frozenset(),
        window_blocks: torch.Tensor | None = None,
    ) -> None:
        """Compile the steps over the model's pools; raises what CompiledStep raises.

        `windowed` are those of window blocks, `window_blocks` as of `build_batch`.
        """
        self._step = CompiledStep(self._decoder, pools, windowed)
        self._step.watch = self._note
        self._block_size, self._window_blocks = block_size, window_blocks

    def _note(self, stream: torch.Tensor) -> None:
        self._streams.append(stream.clone())  # the next group overwrites it

    @torch.inference_mode()
    def guess(
        self, tokens: Sequence[int], pieces: Sequence[SequencePiece], hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits of the next tokens [rows, vocab] float32, and the hidden states [rows,
        hidden of the model] that the guesses after them go on from.

        tokens   the newest token of each sequence, which may be a guess
        pieces   the last token of each sequence that has KV
        hidden   the states that these tokens follow, [rows, hidden of the model]
        """
        assert self._step is not None
        batch = build_batch(pieces, self._block_size, torch.device("cpu"), self._window_blocks)
        self._given = hidden.float()
        ids = torch.tensor(list(tokens), dtype=torch.int64)
        self._streams.clear()
        self._step.logits(replace(batch, token_ids=ids, positions=batch.positions + 1))
        rows = self._module.model.norm(torch.cat(self._streams).to(self._module.dtype))
        return self._logits(rows), self._module.post_projection(rows)

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        clusters, head = self._module.masked_embedding, self._module.lm_head
        if clusters is None:
            logits: torch.Tensor = head(rows).float()
            return logits
        order = clusters.token_ordering.view(clusters.num_centroids, -1)
        best = clusters.centroids(rows).topk(clusters.centroid_intermediate_top_k, dim=-1).indices
        ids = order[best].flatten(1)
        scores = (head.weight[ids] @ rows[:, :, None])[:, :, 0].float()
        out = torch.full((len(rows), self.vocab_size), -torch.inf, dtype=torch.float32)
        return out.scatter_(1, ids, scores)


def load_assistant(target: LoadedModel, source: ModelSource) -> Assistant:
    """Return a drafter of Gemma 4 for a loaded model on a CPU.

    Raises ModelError for one of another model.
    """
    from transformers.models.gemma4_assistant.modeling_gemma4_assistant import (
        Gemma4AssistantForCausalLM,
    )

    content = read_json(source.config_file) or {}
    check_counts(content)
    config = AutoConfig.for_model(**content)
    with LOADING, layers_that_share():
        with files_limit(source).guarded(), on_meta():
            Gemma4AssistantForCausalLM(deepcopy(config))
        module, report = Gemma4AssistantForCausalLM.from_pretrained(
            None,
            config=config,
            state_dict=mapped_tensors(source),
            dtype=target.dtype,
            attn_implementation="eager",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    refuse_gaps(source, report)
    module.eval().requires_grad_(False)
    text = config.get_text_config()
    width = target.module.get_decoder().norm.weight.numel()
    if config.backbone_hidden_size != width or text.vocab_size != target.spec.vocab_size:
        raise _of_another(source, target)
    layers = tuple(
        _layer(module, index, target, source) for index in range(len(module.model.layers))
    )
    spec = ModelSpec("Gemma4AssistantForCausalLM", text.model_type, layers, text.vocab_size, 0, 0)
    use_cpu_products(module)
    decoder = read_decoder(module, spec)
    if isinstance(decoder, str):
        raise ModelError(f"No compiled step drafts with {source.name}: it {decoder}.")
    embedding = target.module.get_input_embeddings()
    return Assistant(module, replace(decoder, embedding=embedding), text.vocab_size)


def _layer(module: Any, index: int, target: LoadedModel, source: ModelSource) -> LayerSpec:
    """Return a layer over the KV of the model's last layer of its type that stores any."""
    attention = module.model.layers[index].self_attn
    num_heads = module.config.get_text_config().num_attention_heads
    kinds = getattr(target.module.config.get_text_config(), "layer_types", None) or ()
    of_kind = [
        layer
        for layer, kind in zip(target.spec.layers, kinds, strict=False)
        if layer.stores_kv and kind == attention.layer_type
    ]
    if not of_kind or of_kind[-1].key_dim != attention.head_dim:
        raise _of_another(source, target)
    shared = of_kind[-1]
    if not num_heads or num_heads % shared.num_kv_heads:
        raise _of_another(source, target)
    span = shared.span
    if span.window is not None:  # it counts the newest token, which has no KV yet
        span = replace(span, window=span.window - 1)
    return replace(
        shared,
        module_name=f"model.layers.{index}.self_attn",
        num_heads=num_heads,
        span=span,
        stores_kv=False,
    )


def _of_another(source: ModelSource, target: LoadedModel) -> ModelError:
    return ModelError(f"{source.name} is a drafter of another model than {target.source.name}.")

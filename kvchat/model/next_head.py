"""The head for the next token (MTP) of a checkpoint, which guesses one token after the model's own.

A position's head joins the model's last hidden state there with the embedding of the token that
follows, and runs one layer with attention over them:

    x = projection([norm(embedding(token)), norm(hidden)]);  logits = head(norm(layer(x)))

Embedding and head are the model's. transformers drops these tensors: here the layer is a model of
one layer, of the same class, whose embedding is the first part of the above.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from kvchat.model.checkpoint.tensors import stored_names
from kvchat.model.loader import LoadedModel
from kvchat.model.paged_model import KvLayers, PagedModel
from kvchat.model.part_loader import Part, load_part

# What the model of one layer has of the model.
_TABLES = ("model.embed_tokens.weight", "lm_head.weight")
# What is before the layer, in the embedding of the model of one layer.
_BEFORE = ("token_norm", "hidden_norm", "projection")


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The names of a head's tensors: its layer's begin with `layer`, the others are whole.

    `one` is what the layer's begin with in the same files of a model of one layer.
    """

    layer: str
    token_norm: str
    hidden_norm: str
    projection: str
    norm: str
    one: str = "model.layers.0."

    @property
    def own(self) -> tuple[str, ...]:
        return self.token_norm, self.hidden_norm, self.projection, self.norm

    def names_in(self, names: Iterable[str]) -> dict[str, str]:
        """Return the names of the head's tensors in the files by those in a model of one layer."""
        start = len(self.layer)
        of_layer = {
            f"{self.one}{name[start:]}": name
            for name in names
            if name.startswith(self.layer) and name not in self.own and not self._is_copy(name)
        }
        ours = (*(f"model.embed_tokens.{part}.weight" for part in _BEFORE), "model.norm.weight")
        return of_layer | dict(zip(ours, self.own, strict=True))

    def _is_copy(self, name: str) -> bool:
        """Whether a tensor is the model's embedding or head once more."""
        return name[len(self.layer) :].startswith(("embed_tokens.", "shared_head.", "nextn."))


def find_layout(names: Iterable[str], num_layers: int) -> HeadLayout | None:
    """Return the layout of a checkpoint's head for the next token; None if there is none."""
    behind, in_gguf = f"model.layers.{num_layers}.", f"blk.{num_layers}."
    layouts = (
        HeadLayout(
            "mtp.layers.0.",
            "mtp.pre_fc_norm_embedding.weight",
            "mtp.pre_fc_norm_hidden.weight",
            "mtp.fc.weight",
            "mtp.norm.weight",
        ),
        HeadLayout(
            behind,
            f"{behind}enorm.weight",
            f"{behind}hnorm.weight",
            f"{behind}eh_proj.weight",
            f"{behind}shared_head.norm.weight",
        ),
        HeadLayout(
            in_gguf,
            f"{in_gguf}nextn.enorm.weight",
            f"{in_gguf}nextn.hnorm.weight",
            f"{in_gguf}nextn.eh_proj.weight",
            f"{in_gguf}nextn.shared_head_norm.weight",
            "blk.0.",
        ),
    )
    there = set(names)
    return next((layout for layout in layouts if there.issuperset(layout.own)), None)


class JoinedEmbedding(nn.Module):
    """The embedding of the model of one layer; `hidden` are the rows of its next step.

    A step in parts takes as many at a time as a part has tokens. Compiled steps do the same with
    its parts (`Joined` of `model/decoder/decoder.py`).
    """

    def __init__(self, embedding: Any, norm: Any) -> None:
        """`norm` is of the kind of those before the layer."""
        super().__init__()
        self.of_tokens = embedding
        self.weight = embedding.weight  # its dtype is asked for
        self.token_norm, self.hidden_norm = deepcopy(norm), deepcopy(norm)
        self.hidden: torch.Tensor | None = None

    def take(self, count: int) -> torch.Tensor:
        """Return the hidden states of the next rows, [count, hidden]."""
        assert self.hidden is not None
        taken, self.hidden = self.hidden[:count], self.hidden[count:]
        assert len(taken) == count
        return taken


class _ProjectedEmbedding(JoinedEmbedding):
    def __init__(self, embedding: Any, norm: Any) -> None:
        super().__init__(embedding, norm)
        width = norm.weight.shape[0]
        self.projection = nn.Linear(2 * width, width, bias=False, device="meta")

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        dtype = self.projection.weight.dtype
        tokens = self.token_norm(self.of_tokens(token_ids).to(dtype))
        hidden = self.hidden_norm(self.take(token_ids.numel()).to(dtype))
        joined = torch.cat([tokens, hidden.view_as(tokens)], dim=-1)
        out: torch.Tensor = self.projection(joined)
        return out


class HeadModel(PagedModel):
    """A head for the next token over its own KV: `given` are the hidden states of its next step."""

    # It was trained for the next token alone: further guesses, from its own hidden states, are
    # worse.
    most_guesses = 4
    # Which of its own hidden states a further guess goes on from, as of `keep_hidden`.
    goes_on_before: tuple[int, ...] = ()

    def __init__(self, loaded: LoadedModel, pools: KvLayers) -> None:
        super().__init__(loaded, pools)
        self.keep_hidden(self.goes_on_before)

    def give(self, hidden: torch.Tensor) -> None:
        """Set the hidden states that the rows of the next step follow, [rows, hidden]."""
        self.loaded.module.get_input_embeddings().hidden = hidden

    def guess_below(self, most_ids: int) -> None:
        """Compute no logits of token ids far above this in compiled steps: they are -inf."""
        if self.compiled is not None:
            self.compiled.most_ids = most_ids


def load_head(target: LoadedModel) -> LoadedModel | None:
    """Return the head of a loaded model's checkpoint as a model of one layer; None without one.

    It has the model's embedding and head. Raises what `load_model` raises.
    """
    config = target.module.config.get_text_config()
    layout = find_layout(stored_names(target.source), config.num_hidden_layers)
    if layout is None:
        return None

    def join(module: Any, tensors: Mapping[str, Any]) -> None:
        """Give the module the model's tables, and what is before its layer."""
        table, norm = target.module.get_input_embeddings(), module.get_decoder().norm
        joined = _ProjectedEmbedding(table, norm)
        for part in _BEFORE if tensors else ():
            weight = tensors[f"model.embed_tokens.{part}.weight"][...].to(target.dtype)
            joined.get_submodule(part).weight = nn.Parameter(weight, requires_grad=False)
        module.set_input_embeddings(joined)
        module.set_output_embeddings(target.module.get_output_embeddings())

    part = Part(
        target.source, _one_layer(config), layout.names_in, _TABLES, join, target.asked_weights
    )
    loaded = load_part(target, part)
    return replace(loaded, spec=replace(loaded.spec, vocab_size=target.spec.vocab_size))


def _one_layer(config: Any) -> Any:
    """Return the configuration of a model of one layer: as the configuration says that its head is,
    else like those with attention.

    Its tables have one row: they are replaced by the model's.
    """
    one = deepcopy(config)
    one.num_hidden_layers, one.vocab_size, one.tie_word_embeddings = 1, 1, False
    one.pad_token_id = None
    if getattr(one, "layer_types", None):
        one.layer_types = (getattr(one, "mtp_layer_types", None) or ["full_attention"])[:1]
    if getattr(one, "mlp_layer_types", None):
        own = getattr(one, "mtp_mlp_layer_types", None)
        one.mlp_layer_types = own[:1] if own else one.mlp_layer_types[-1:]
    for name in ("first_k_dense_replace", "mlp_only_layers"):  # a head's experts are the later ones
        if hasattr(one, name):
            setattr(one, name, 0 if name == "first_k_dense_replace" else [])
    return one

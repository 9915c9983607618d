"""The head of an EAGLE-3 checkpoint, which guesses tokens from the streams of three layers.

Its one layer is Llama's, but for the input of attention: a position's hidden state beside the
embedding of the token that follows.

    hidden = fuse([low, middle, high]), or the layer's own output of the position before
    x = hidden + attention([norm(embedding(token)), norm(hidden)]);  output = x + mlp(norm(x))
    logits = head(norm(output)), of some of the vocabulary

Checkpoints are SpecForge's and SGLang's (`LlamaForCausalLMEagle3`) or those of speculators.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.models.auto.configuration_auto import AutoConfig

from kvchat.core.errors import ModelError
from kvchat.model.batch import ForwardBatch
from kvchat.model.checkpoint.drafters import EagleForm
from kvchat.model.checkpoint.source import ModelSource
from kvchat.model.checkpoint.tensors import stored_names
from kvchat.model.loader import IN_BLOCKS, LoadedModel
from kvchat.model.next_head import HeadModel, JoinedEmbedding
from kvchat.model.packed.quantise import pack_of
from kvchat.model.paged_model import KvLayers
from kvchat.model.part_loader import Part, files_limit, load_part

_LAYER = "model.layers.0."
_WIDE = ("q_proj", "k_proj", "v_proj")
_BOTH = ("weight", "bias")
# Names in the files, those of the layer after "layer.": tensors that Llama does not have so, and
# others.
_NEEDED = (
    "fc.weight",
    "lm_head.weight",
    "layer.input_layernorm.weight",
    "layer.hidden_norm.weight",
    *(f"layer.self_attn.{name}.weight" for name in _WIDE),
)
_OWN = (
    *_NEEDED,
    "input_norm.weight",
    "embed_tokens.weight",
    "d2t",
    *(f"layer.self_attn.{name}.bias" for name in _WIDE),
)
_OF_LLAMA = (
    "norm.weight",
    "layer.post_attention_layernorm.weight",
    *(f"layer.self_attn.o_proj.{kind}" for kind in _BOTH),
    *(f"layer.mlp.{name}_proj.{kind}" for name in ("gate", "up", "down") for kind in _BOTH),
)
_UNREAD = ("t2d", "verifier_", "layer.self_attn.rotary_emb.")
# What the module has of the head, and not as Llama has it.
_JOINED = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    f"{_LAYER}input_layernorm.weight",
    *(f"{_LAYER}self_attn.{name}.{kind}" for name in _WIDE for kind in _BOTH),
)


@dataclass(frozen=True, slots=True)
class _Fuse:
    """What makes hidden states of streams side by side, which `norm`, if there is one, norms."""

    linear: nn.Linear
    norm: nn.Module | None

    def __call__(self, streams: torch.Tensor) -> torch.Tensor:
        # What is packed takes float32.
        is_packed = pack_of(self.linear) is not None
        streams = streams.float() if is_packed else streams.to(self.linear.weight.dtype)
        out: torch.Tensor = self.linear(streams if self.norm is None else self.norm(streams))
        return out


class _PairEmbedding(JoinedEmbedding):
    """Returns hidden states, and keeps the embedded tokens beside them."""

    def __init__(self, embedding: Any, norm: Any, fuse: _Fuse, *, norms_stream: bool) -> None:
        super().__init__(embedding, norm)
        self.fuse, self.norms_stream = fuse, norms_stream
        self._tokens: torch.Tensor | None = None

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        dtype = self.token_norm.weight.dtype
        self._tokens = self.token_norm(self.of_tokens(token_ids).to(dtype))
        hidden = self.take(token_ids.numel())
        if hidden.shape[1] != self.token_norm.weight.numel():
            hidden = self.fuse(hidden)
        hidden = hidden.to(dtype).view(*token_ids.shape, -1)
        return self.hidden_norm(hidden) if self.norms_stream else hidden

    def pairs(self, stream: torch.Tensor) -> torch.Tensor:
        """Return the pairs of a step, normed, [..., 2 * hidden]."""
        assert self._tokens is not None
        hidden = stream if self.norms_stream else self.hidden_norm(stream)
        return torch.cat([self._tokens, hidden], dim=-1)


class _PairNorm(nn.Module):
    """Stands for the norm before attention; has what is before the layer, which is packed with it.

    places   the model's ids of the head's vocabulary, int64
    """

    joins_pairs = True

    def __init__(self, embedding: _PairEmbedding, places: Any) -> None:
        super().__init__()
        self.fuse, self.norm = embedding.fuse.linear, embedding.fuse.norm
        self.register_buffer("places", places, persistent=False)
        self._pairs = embedding.pairs

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        return self._pairs(stream)


class EagleModel(HeadModel):
    """An EAGLE-3 head over its own KV, as `HeadModel`."""

    most_guesses = 7  # it was trained on as many of its own outputs
    goes_on_before = (1,)  # the end of its layer, not normed

    def __init__(self, loaded: LoadedModel, pools: KvLayers) -> None:
        super().__init__(loaded, pools)
        self._places: Any = loaded.module.get_decoder().layers[0].input_layernorm.places.numpy()
        self._out = np.empty((0, loaded.spec.vocab_size), np.float32)

    def guess_below(self, most_ids: int) -> None:
        """Does nothing: the head knows frequent tokens only."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return logits of the model's vocabulary, -inf of tokens that the head does not know.

        The next call overwrites them: they are several times as many as the head's own.
        """
        logits = super().forward(batch)
        if len(logits) > len(self._out):
            self._out = np.full((len(logits), self._out.shape[1]), -np.inf, np.float32)
        out = self._out[: len(logits)]
        out[:, self._places] = logits.numpy()
        return torch.from_numpy(out)


def load_eagle(
    target: LoadedModel, source: ModelSource, form: EagleForm
) -> tuple[LoadedModel, tuple[int, ...]]:
    """Return an EAGLE-3 head for a loaded model, and the layers that it reads the streams before.

    Raises ModelError for a head of another model, and what `load_model` raises.
    """
    names = _names(source)
    decoder = target.module.get_decoder()
    num_layers = len(decoder.layers)
    before = form.layers_of(num_layers)
    if not all(0 <= index <= num_layers for index in before):
        raise _of_another(source, target, f"it reads layer {max(before)}")
    config = _config(form, target)

    def join(module: Any, tensors: Mapping[str, Any]) -> None:
        """Give the module what a Llama does not have."""
        if tensors:
            given = {name: tensors[f"eagle.{name}"][...] for name in names if name in _OWN}
            _join(module, given, target, source, form, len(before))

    # Where the model's own weights have few bits, the head's need no 16.
    of_blocks = "int8" if target.weights == IN_BLOCKS else "auto"
    weights = of_blocks if target.asked_weights == "auto" else target.asked_weights

    def names_in(stored: Iterable[str]) -> Mapping[str, str]:
        return {_name_here(name): stored for name, stored in names.items()}

    limit = files_limit(source)
    part = Part(source, config, names_in, _JOINED, join, weights, owns_head=True, limit=limit)
    loaded = load_part(target, part)
    return replace(loaded, spec=replace(loaded.spec, vocab_size=target.spec.vocab_size)), before


def _names(source: ModelSource) -> dict[str, str]:
    """Return the names of tensors in the files by those in `_OWN` and `_OF_LLAMA`."""
    names = {}
    for stored in stored_names(source):
        name = stored.removeprefix("model.")
        for prefix in ("midlayer.", "layers.0."):
            if name.startswith(prefix):
                name = f"layer.{name.removeprefix(prefix)}"
        if not name.startswith(_UNREAD):
            names[name] = stored
    unknown = names.keys() - {*_OWN, *_OF_LLAMA}
    if unknown:
        raise ModelError(f"{source.name} is an EAGLE-3 head with another tensor, {min(unknown)}.")
    missing = {*_NEEDED} - names.keys()
    if missing:
        raise ModelError(f"{source.name} is an EAGLE-3 head without {min(missing)}.")
    return names


def _name_here(name: str) -> str:
    if name in _OWN:
        return f"eagle.{name}"
    return f"model.{name.replace('layer.', 'layers.0.')}"


def _config(form: EagleForm, target: LoadedModel) -> Any:
    """Return the configuration of the layer as of a Llama of one; its tables have one row."""
    others = ("architectures", "model_type", "quantization_config", "auto_map", "layer_types")
    settings = {name: value for name, value in form.layer.items() if name not in others}
    if settings.get("rope_theta", 0) is None:
        rope = target.module.config.get_text_config().rope_parameters
        settings["rope_theta"] = rope["rope_theta"]
    settings |= {"num_hidden_layers": 1, "vocab_size": 1, "tie_word_embeddings": False}
    return AutoConfig.for_model("llama", **{**settings, "pad_token_id": None})


def _join(
    module: Any,
    given: Mapping[str, torch.Tensor],
    target: LoadedModel,
    source: ModelSource,
    form: EagleForm,
    num_streams: int,
) -> None:
    dtype, vocab_size = target.dtype, target.spec.vocab_size
    decoder, attention = module.get_decoder(), module.get_decoder().layers[0].self_attn
    hidden = decoder.norm.weight.numel()
    width = target.module.get_decoder().norm.weight.numel()
    _require_shapes(given, attention, hidden, source)
    fuse, head = given["fc.weight"], given["lm_head.weight"]
    if fuse.shape[1] != num_streams * width:
        raise _of_another(source, target, f"it reads {fuse.shape[1]} numbers of a row")
    offsets = given.get("d2t", torch.zeros(len(head), dtype=torch.int64))
    places = torch.arange(len(offsets)) + offsets
    if len(places) != len(head) or not 0 <= places.min() <= places.max() < vocab_size:
        raise _of_another(source, target, "its vocabulary is another")
    table = given.get("embed_tokens.weight")
    embedding = target.module.get_input_embeddings()
    if table is not None:
        embedding = nn.Embedding.from_pretrained(table.to(dtype))
    if table is None and width != hidden:
        raise _of_another(source, target, "it has no embedding of its width")

    def linear(name: str) -> nn.Linear:
        weight, bias = given[f"{name}.weight"].to(dtype), given.get(f"{name}.bias")
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
        return layer

    def norm(name: str) -> nn.Module:
        copy = deepcopy(decoder.norm)
        copy.weight = nn.Parameter(given[name].to(dtype), requires_grad=False)
        return copy

    first = norm("input_norm.weight") if "input_norm.weight" in given else None
    fusing = _Fuse(linear("fc"), first)
    pairs = _PairEmbedding(embedding, decoder.norm, fusing, norms_stream=form.norms_stream)
    pairs.token_norm = norm("layer.input_layernorm.weight")
    pairs.hidden_norm = norm("layer.hidden_norm.weight")
    decoder.layers[0].input_layernorm = _PairNorm(pairs, places)
    for name in _WIDE:
        setattr(attention, name, linear(f"layer.self_attn.{name}"))
    module.set_input_embeddings(pairs)
    module.set_output_embeddings(linear("lm_head"))


def _require_shapes(
    given: Mapping[str, torch.Tensor], attention: Any, hidden: int, source: ModelSource
) -> None:
    """Raise ModelError for tensors of other sizes than kernels read; None stands for any."""
    pairs = 2 * hidden
    num_rows = {name: getattr(attention, name).out_features for name in _WIDE}
    shapes: dict[str, tuple[int | None, ...]] = {
        "fc.weight": (hidden, None),
        "lm_head.weight": (None, hidden),
        "embed_tokens.weight": (None, hidden),
        "d2t": (None,),
        "layer.input_layernorm.weight": (hidden,),
        "layer.hidden_norm.weight": (hidden,),
        "input_norm.weight": (given["fc.weight"].shape[-1],),
        **{f"layer.self_attn.{name}.weight": (rows, pairs) for name, rows in num_rows.items()},
        **{f"layer.self_attn.{name}.bias": (rows,) for name, rows in num_rows.items()},
    }
    for name, tensor in given.items():
        wanted, sizes = shapes[name], tuple(tensor.shape)
        if len(sizes) != len(wanted) or any(
            want not in (None, size) for size, want in zip(sizes, wanted, strict=True)
        ):
            raise ModelError(f"{source.name} is an EAGLE-3 head whose {name} has another shape.")


def _of_another(source: ModelSource, target: LoadedModel, why: str) -> ModelError:
    return ModelError(f"{source.name} is a head of another model than {target.source.name}: {why}.")

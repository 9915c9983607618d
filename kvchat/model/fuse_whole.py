"""A whole model's step of few tokens on a CPU: embedding, layers, norm and head in four calls.

Where every layer is a script, what lies between them, transformers' own code and one call a layer,
takes a tenth of a small model's step and half of a tiny one's. Here all layers are one script.
Knows what they need of a step. Whether a model is no more than its parts is proven by its first
steps that anybody wants logits of: they run both ways.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvchat.model.attention import binding_of
from kvchat.model.batch import ForwardBatch
from kvchat.model.fuse_attention import rotation
from kvchat.model.fuse_kernels import takes_kernels
from kvchat.model.fuse_layer import FusedLayer
from kvchat.model.fuse_linear import Product
from kvchat.model.fuse_parts import RmsNorm
from kvchat.model.fuse_script import LayerScript, reason_of
from kvchat.model.spec import LayerSpec, ModelSpec
from kvchat_kernels.paged_attention import PagedSequences
from kvchat_kernels.paged_attention.cpu_step import FusedStep, columns_of

_log = logging.getLogger(__name__)

Forward = Callable[[ForwardBatch], torch.Tensor]

# In each form that TorchScript gives a script: as it is run first, and from then on. That a model
# is more than its parts does not hang on the number of rows.
_NUM_PROOFS = 2
_FIRST_ANGLES = 1024
_MOST_ANGLES = 1 << 14


class Angles:
    """Cosines and sines of positions, as `rotation` gives them, made once for many positions.

    `rotary` is transformers' module, its frequencies fixed; `like` a tensor in the dtype that its
    output is to have; `kinds` names the kind of layer, where a module has angles for several. They
    are handed on in `dtype`.
    """

    def __init__(self, rotary: Any, like: torch.Tensor, dtype: torch.dtype, *kinds: str) -> None:
        """Raises ValueError where the module gives anything but cosines and sines."""
        self._rotary, self._like, self._dtype, self._kinds = rotary, like, dtype, kinds
        self._cos, self._sin = self._made(torch.arange(_FIRST_ANGLES))

    def at(self, positions: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both for `positions`, [num_tokens] and all below `end`: [num_tokens, 1, dim]."""
        if end > _MOST_ANGLES:
            return self._made(positions)
        if end > self._cos.shape[0]:
            self._cos, self._sin = self._made(torch.arange(min(2 * end, _MOST_ANGLES)))
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _made(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self._rotary(self._like, positions[None], *self._kinds)
        if not (isinstance(made, tuple) and len(made) == 2):
            raise ValueError("angles of another kind")
        return rotation(*made, self._dtype, {})


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """A decoder layer, the attention module its binding is tied to, and its angles."""

    fused: FusedLayer
    attention: nn.Module
    angles: Angles


class WholeModel:
    """Runs steps of one sequence whose layers all are scripts, once it has proven that it may.

    What it is made of belongs to the model.
    """

    def __init__(
        self,
        embedding: nn.Module,
        layers: Sequence[BoundLayer],
        script: LayerScript,
        norm: RmsNorm,
        head: Product,
        compute_dtype: torch.dtype,
        max_rows: int,
    ) -> None:
        self._embedding = embedding
        self._layers = tuple(layers)
        self._angles = tuple(dict.fromkeys(layer.angles for layer in layers))
        # Layers of a kind reach a step's tokens in one way, which is asked for once.
        kinds = [_kind(layer.fused.attention.layer) for layer in layers]
        self._kinds = tuple(kinds.index(kind) for kind in kinds)
        self._script = script
        self._norm = norm
        self._head = head
        self._compute_dtype = compute_dtype
        self._max_rows = max_rows
        self._num_proofs = 0
        self._is_refuted = False

    @property
    def is_proven(self) -> bool:
        """Whether no step runs both ways any more."""
        return self._is_refuted or self._num_proofs >= _NUM_PROOFS

    def logits(self, batch: ForwardBatch, own: Forward) -> torch.Tensor:
        """Run a step as `own` does, which is asked where this cannot, or has not proven itself.

        Returns [num_rows, vocab_size] float32, owned by the caller.
        """
        num_rows = batch.token_ids.shape[0]
        if self._is_refuted or num_rows > self._max_rows:
            return own(batch)
        if not self.is_proven and not batch.logit_rows.shape[0]:
            return own(batch)
        steps = self._steps(batch)
        if steps is None:
            return own(batch)
        return self._run(batch, steps) if self.is_proven else self._proving(batch, steps, own)

    def _steps(self, batch: ForwardBatch) -> list[FusedStep] | None:
        """Return how each layer reaches the step's tokens; None where one takes another way."""
        steps: dict[int, FusedStep] = {}
        for kind in dict.fromkeys(self._kinds):
            layer = self._layers[kind]
            step = layer.fused.attention.fused_step(binding_of(layer.attention), batch)
            if step is None:
                return None
            steps[kind] = step
        return [steps[kind] for kind in self._kinds]

    def _run(self, batch: ForwardBatch, steps: Sequence[FusedStep]) -> torch.Tensor:
        assert isinstance(batch.sequences, PagedSequences)
        (end,) = batch.sequences.context_lens
        x = self._embedding(batch.token_ids[None])[0].to(self._compute_dtype)
        made = {angles: angles.at(batch.positions, end) for angles in self._angles}
        cos, sin = zip(*(made[layer.angles] for layer in self._layers), strict=True)
        bindings = [binding_of(layer.attention) for layer in self._layers]
        pools = [(binding.keys, binding.values) for binding in bindings]
        where = list(cos), list(sin), pools, batch.slot_mapping
        try:
            x = self._script.run(x, *where, *columns_of(steps))
        except RuntimeError as error:
            if reason := reason_of(error):
                raise RuntimeError(reason) from error
            raise
        if x.shape[0] > 1 or not batch.logit_rows.shape[0]:
            x = x.index_select(0, batch.logit_rows)
        return self._head(self._norm(x)).float()

    def _proving(
        self, batch: ForwardBatch, steps: Sequence[FusedStep], own: Forward
    ) -> torch.Tensor:
        """Run a step both ways and compare; `own` goes last, so that the KV is its own.

        Nothing may differ, for the operations are the same. What is no number proves nothing, and
        no more do logits that are all alike.
        """
        try:
            logits = self._run(batch, steps)
        except (RuntimeError, TypeError, ValueError, LookupError) as error:
            _log.warning("not run as a whole: %s", error)
            logits = None
        expected = own(batch)
        if logits is not None and torch.equal(logits, expected):
            self._num_proofs += bool((expected != expected[:, :1]).any())
        elif logits is None or bool(expected.isfinite().all()):
            self._is_refuted = True
            _log.info("not run as a whole: it is more than its parts")
        return expected


def join_model(
    module: Any,
    owner: Any,
    spec: ModelSpec,
    fused: Mapping[nn.Module, FusedLayer],
    norm: RmsNorm,
    head: Product,
    compute_dtype: torch.dtype,
    max_rows: int,
) -> WholeModel | None:
    """Return a loaded model's fused parts as one, None where a layer is no script.

    owner      the module that has the list of layers, and what makes their angles
    fused      the layers by their attention modules
    max_rows   of a step whose layers run fused

    Raises whatever a model's own code does where it is not built so.
    """
    embedding = module.get_input_embeddings()
    if takes_kernels(embedding.weight):
        return None
    attentions = [module.get_submodule(layer.module_name) for layer in spec.layers]
    own = [fused[attention] for attention in attentions]
    script = own[0].script
    is_one = all(layer.script is script and layer.index == i for i, layer in enumerate(own))
    if script is None or not is_one:
        return None
    like = embedding(torch.zeros(1, 1, dtype=torch.int64))
    angles = _angles_of_layers(owner, len(own), like, compute_dtype)
    layers = [BoundLayer(*parts) for parts in zip(own, attentions, angles, strict=True)]
    return WholeModel(embedding, layers, script, norm, head, compute_dtype, max_rows)


def _kind(layer: LayerSpec) -> tuple[object, ...]:
    return layer.span, layer.num_heads, layer.num_kv_heads, layer.key_dim, layer.value_dim


def _angles_of_layers(
    owner: Any, num_layers: int, like: torch.Tensor, dtype: torch.dtype
) -> list[Angles]:
    rotary = owner.rotary_emb
    if not isinstance(rotary.rope_type, dict):
        return [Angles(rotary, like, dtype)] * num_layers
    kinds = owner.config.layer_types[:num_layers]
    made = {kind: Angles(rotary, like, dtype, kind) for kind in set(kinds)}
    return [made[kind] for kind in kinds]

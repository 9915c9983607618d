"""What config.json says of an EAGLE-3 head, as SpecForge and SGLang write it, and speculators."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvchat.core.errors import ModelError
from kvchat.model.checkpoint.source import ModelSource
from kvchat.model.files.checkpoint_files import read_json


@dataclass(frozen=True, slots=True)
class EagleForm:
    """What an EAGLE-3 checkpoint's config.json says of its head.

    layer           the settings of its layer, as of a Llama
    before          the streams before these layers of the model are fused; None: the usual three
    norms_stream    whether what attention is added to is the normed hidden state
    """

    layer: Mapping[str, Any]
    before: tuple[int, ...] | None
    norms_stream: bool

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers of a model with so many."""
        return self.before or (2, num_layers // 2, num_layers - 3)


def eagle_form(source: ModelSource) -> EagleForm | None:
    """Return the form of an EAGLE-3 head; None for another checkpoint.

    Raises ModelError for a head of another kind.
    """
    content = {} if source.gguf is not None else read_json(source.config_file) or {}
    if "vision_config" in content:
        return None  # NVIDIA has models of text and images called Eagle
    kind = f"{content.get('architectures')} {content.get('speculators_model_type')}".lower()
    layer = _object(content, "transformer_layer_config") or content
    is_small = "draft_vocab_size" in content and layer.get("num_hidden_layers") == 1
    if "eagle3" not in kind and not is_small:
        if "eagle" in kind:
            raise ModelError(f"{source.name} is a head of EAGLE 1 or 2; EAGLE-3 heads can draft.")
        return None
    own = _object(content, "eagle_config")
    # Type and number of layers are often those of the model it was trained with: tensors decide.
    if own.get("use_aux_hidden_state") is False or content.get("norm_output"):
        raise ModelError(f"{source.name} is no EAGLE-3 head over the streams of three layers.")
    key, shift = "eagle_aux_hidden_state_layer_ids", 0
    ids = content.get(key) or own.get(key) or ()
    if not isinstance(ids, Sequence) or not all(isinstance(index, int) for index in ids):
        raise ModelError(f"{source.name}: {key} are no numbers of layers.")
    if "speculators_model_type" not in content:
        shift = 1  # they count outputs, speculators' count inputs
    before = tuple(index + shift for index in ids) or None
    return EagleForm(layer, before, bool(content.get("norm_before_residual")))


def _object(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = content.get(name)
    return found if isinstance(found, Mapping) else {}

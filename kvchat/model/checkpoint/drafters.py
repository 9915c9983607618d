"""Tells checkpoints that only draft for another model, and finds the one of a model.

Of an EAGLE-3 head it reads config.json, as SpecForge and SGLang write it, and speculators.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvchat.core.errors import ModelError, ModelUnsupported
from kvchat.model.checkpoint.source import HUB_ID, ModelSource
from kvchat.model.files.checkpoint_files import read_json
from kvchat.model.files.hub_cache import snapshots

# The drafter of a model is published under the model's name and this.
_SUFFIX = "-assistant"
_BELOW = ("assistant", "drafter")


def is_assistant(source: ModelSource) -> bool:
    """Whether a checkpoint is a drafter of Gemma 4."""
    return _type(source) == "gemma4_assistant"


def own_drafter(source: ModelSource) -> ModelSource | None:
    """Return the drafter of a Gemma 4 on this machine, None without one; downloads nothing.

    It is in a directory below the model's, in one beside it or in the Hugging Face cache.
    """
    if not _type(source).startswith("gemma4"):
        return None
    place, name = source.directory.absolute(), f"{source.name}{_SUFFIX}"
    paths = [*(place / below for below in _BELOW), place.parent / f"{place.name}{_SUFFIX}"]
    found = [(str(path), path) for path in paths]
    if HUB_ID.match(name):
        found += [(name, path) for path in snapshots(name)]
    for name, path in found:
        drafter = ModelSource(name, path, notes=(f"{name} drafts: --spec found it.",))
        with suppress(ModelError):  # what cannot be read is none
            if is_assistant(drafter):
                return drafter
    return None


def _type(source: ModelSource) -> str:
    """Return the model type by its files, "" if they do not say."""
    if source.gguf is not None:
        return source.gguf.architecture
    return str((read_json(source.config_file) or {}).get("model_type", ""))


def refuse_drafter(source: ModelSource) -> None:
    """Raise ModelUnsupported for a checkpoint that is no model but a drafter of one."""
    kind = "a drafter of Gemma 4" if is_assistant(source) else "an EAGLE-3 head"
    if is_assistant(source) or eagle_form(source) is not None:
        name = source.name
        how = f"it guesses for one with --model MODEL --draft {name}."
        raise ModelUnsupported(f"{name} is {kind}, no model: {how}")


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

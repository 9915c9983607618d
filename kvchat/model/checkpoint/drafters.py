"""Tells checkpoints that only draft for another model, and finds the one of a model."""

from contextlib import suppress

from kvchat.core.errors import ModelError, ModelUnsupported
from kvchat.model.checkpoint.eagle_form import eagle_form
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

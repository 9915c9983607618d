"""Tells checkpoints that only draft for another model."""

from kvchat.core.errors import ModelUnsupported
from kvchat.model.checkpoint.eagle_form import eagle_form
from kvchat.model.checkpoint.source import ModelSource
from kvchat.model.files.checkpoint_files import read_json


def is_assistant(source: ModelSource) -> bool:
    """Whether a checkpoint is a drafter of Gemma 4."""
    content = {} if source.gguf is not None else read_json(source.config_file) or {}
    return content.get("model_type") == "gemma4_assistant"


def refuse_drafter(source: ModelSource) -> None:
    """Raise ModelUnsupported for a checkpoint that is no model but a drafter of one."""
    kind = "a drafter of Gemma 4" if is_assistant(source) else "an EAGLE-3 head"
    if is_assistant(source) or eagle_form(source) is not None:
        name = source.name
        how = f"it guesses for one with --model MODEL --draft {name}."
        raise ModelUnsupported(f"{name} is {kind}, no model: {how}")

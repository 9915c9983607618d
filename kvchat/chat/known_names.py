"""KnownNames: what a user may name in a chat: models of this machine, and presets."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvchat.chat.presets import Presets
from kvchat.model.checkpoint.local_models import model_lines


@dataclass(frozen=True, slots=True)
class KnownNames:
    """Names for `/model` and `/preset`.

    model_lines   returns a line for each model on this machine
    model_names   returns aliases, and the short names of models that were used
    """

    model_lines: Callable[[], list[str]] = model_lines
    model_names: Callable[[], list[str]] = list
    presets: Presets = field(default_factory=lambda: Presets(None))

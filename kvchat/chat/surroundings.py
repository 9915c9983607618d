"""Surroundings: the models of this machine, the user's presets, the project of the directory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvchat.chat.presets import Presets
from kvchat.chat.project_file import ProjectFile

# What leads from the demo to a model that is of use.
TO_A_REAL_MODEL = (
    "A real model: `kvchat models fit` says what this machine runs well, `kvchat pull ORG/NAME` "
    "downloads one, `kvchat -m FILE` takes one that you have."
)


def _local_lines() -> list[str]:
    from kvchat.model.checkpoint.local_models import model_lines

    return model_lines()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is around a chat, beside its conversation.

    model_lines   returns a line for each model on this machine
    model_names   returns aliases, and the short names of models that were used
    """

    model_lines: Callable[[], list[str]] = _local_lines
    model_names: Callable[[], list[str]] = list
    presets: Presets = field(default_factory=lambda: Presets(None))
    project: ProjectFile = field(default_factory=lambda: ProjectFile(Path.cwd(), None))

    @property
    def has_demo_only(self) -> bool:
        """Whether there is no model on this machine but the demo."""
        return len(self.model_lines()) <= 1

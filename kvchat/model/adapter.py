"""A LoRA adapter's files: checks that it is one that can be merged, and reads its settings.

An adapter of another kind is refused by name. Imports neither torch nor transformers, so that a
wrong directory is reported at once. `lora.py` merges.
"""

import os
import re
from dataclasses import dataclass, field
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

from kvchat.core.errors import ModelError, ModelUnsupported
from kvchat.model.checkpoint_files import check_weights, read_json

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_REMEDY = "Merge it into its model with peft, and save that."
# What these first values are does not matter once training is over; others change the base.
_HARMLESS_INITS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class Adapter:
    """The directory of a LoRA adapter, and the scale of each layer's change.

    alpha          divided by the rank, or by its root if `is_root`, gives the scale
    alphas         alphas of layers whose names a pattern matches
    base_name      the model that it was made for, as its author named it; "" if not said
    """

    directory: Path
    alpha: float
    is_root: bool = False
    alphas: dict[str, float] = field(default_factory=dict)
    base_name: str = ""

    @property
    def files(self) -> tuple[Path, Path]:
        """Its settings and its weights."""
        return self.directory / SETTINGS, self.directory / WEIGHTS

    def scale(self, layer: str, rank: int) -> float:
        """Return the factor of a layer's change, which has this rank."""
        for pattern, alpha in self.alphas.items():
            if layer == pattern or layer.endswith(f".{pattern}"):
                return alpha / (sqrt(rank) if self.is_root else rank)
        return self.alpha / (sqrt(rank) if self.is_root else rank)


def is_adapter(directory: Path) -> bool:
    """Return whether a directory holds an adapter's settings, perhaps beside a whole model."""
    return os.path.isfile(directory / SETTINGS)


def read_adapter(directory: Path) -> Adapter:
    """Read an adapter's settings.

    Raises ModelError if files are missing or damaged, ModelUnsupported for an adapter that is not
    plain LoRA.
    """
    settings = read_json(directory / SETTINGS)
    if settings is None:
        raise ModelError(f"{directory} has no {SETTINGS}.", "Give a directory that peft wrote.")
    kind = _odd_kind(settings)
    if kind:
        raise ModelUnsupported(f"The adapter in {directory} is {kind}, not plain LoRA.", _REMEDY)
    if not os.path.isfile(directory / WEIGHTS):
        raise ModelError(
            f"{directory} has no {WEIGHTS}.", "Pickle files are never opened; save safetensors."
        )
    check_weights((directory / WEIGHTS,))
    alphas = settings.get("alpha_pattern") or {}
    numbers = [
        settings.get("lora_alpha"),
        *(alphas.values() if isinstance(alphas, dict) else [None]),
    ]
    if not all(type(n) in (int, float) and isfinite(n) for n in numbers):
        raise ModelError(f"{SETTINGS} of {directory} gives no lora_alpha.", "Is it complete?")
    return Adapter(
        directory,
        float(settings["lora_alpha"]),
        settings.get("use_rslora") is True,
        {str(name): float(alpha) for name, alpha in alphas.items()},
        str(settings.get("base_model_name_or_path") or ""),
    )


def _odd_kind(settings: dict[str, Any]) -> str:
    """Return the name of what cannot be merged as plain LoRA, or ""."""
    kind = settings.get("peft_type")
    if kind != "LORA":
        return f"of the type {str(kind)[:40]!r}"
    for name, value in settings.items():
        if value and re.match(r"use_(?!rslora$)", name):
            return f"made with {str(name)[:40]}"
    for name in ("layer_replication", "target_parameters", "trainable_token_indices", "lora_bias"):
        if settings.get(name):
            return f"made with {name}"
    if any("^" in str(p) or "*" in str(p) for p in settings.get("alpha_pattern") or ()):
        return "made with patterns in alpha_pattern"
    init = settings.get("init_lora_weights")
    return (
        "" if init in _HARMLESS_INITS else f"made with {str(init)[:40]!r}, which changes the base"
    )

"""A LoRA adapter's files: checks that it is one that can be merged, and reads its settings.

An adapter of another kind is refused by name. Imports neither torch nor transformers, so that a
wrong directory is reported at once. `lora.py` merges.
"""

import os
import re
from dataclasses import dataclass
from math import isfinite, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvchat.core.errors import ModelError, ModelUnsupported
from kvchat.model.files.checkpoint_files import check_weights, read_json

if TYPE_CHECKING:
    from regex import Pattern

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# For one pattern and one layer's name, which is short.
_MATCH_S = 0.5
_MAX_PATTERN_CHARS = 2000
_REMEDY = "Merge it into its model with peft, and save that."
# What these first values are does not matter once training is over; others change the base.
_HARMLESS_INITS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class Adapter:
    """The directory of a LoRA adapter, and the scale of each layer's change.

    alpha          divided by the rank, or by its root if `is_root`, gives the scale
    alphas         alphas of layers whose names a pattern matches; the first that matches holds
    base_name      the model that it was made for, as its author named it; "" if not said
    """

    directory: Path
    alpha: float
    is_root: bool = False
    alphas: tuple[tuple["Pattern[str]", float], ...] = ()
    base_name: str = ""

    @property
    def files(self) -> tuple[Path, Path]:
        """Its settings and its weights."""
        return self.directory / SETTINGS, self.directory / WEIGHTS

    def scale(self, layer: str, rank: int) -> float:
        """Return the factor of a layer's change, which has this rank.

        Raises ModelError if a pattern needs too long for the layer's name.
        """
        try:
            for pattern, alpha in self.alphas:
                if pattern.match(layer, timeout=_MATCH_S):
                    return alpha / (sqrt(rank) if self.is_root else rank)
        except TimeoutError as error:
            raise ModelError(_bad_pattern(self.directory, "takes too long"), _REMEDY) from error
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
        _patterns(directory, alphas),
        str(settings.get("base_model_name_or_path") or ""),
    )


def _patterns(
    directory: Path, alphas: dict[str, float]
) -> tuple[tuple["Pattern[str]", float], ...]:
    """Compile the keys of alpha_pattern, which peft takes for regular expressions.

    A key matches a layer's name from its start or from behind a dot, and to its end.
    """
    if not alphas:
        return ()
    import regex  # as `re`, but with a limit of time: an adapter is a stranger's

    try:
        if max(map(len, alphas)) > _MAX_PATTERN_CHARS:
            raise ModelError(_bad_pattern(directory, "is too long"), _REMEDY)
        return tuple(
            (regex.compile(rf"(.*\.)?({key})$"), float(alpha)) for key, alpha in alphas.items()
        )
    except (regex.error, RecursionError, OverflowError) as error:
        raise ModelError(_bad_pattern(directory, "is no regular expression"), _REMEDY) from error


def _bad_pattern(directory: Path, fault: str) -> str:
    return f"A key of alpha_pattern in {directory / SETTINGS} {fault}."


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
    init = settings.get("init_lora_weights")
    return (
        "" if init in _HARMLESS_INITS else f"made with {str(init)[:40]!r}, which changes the base"
    )

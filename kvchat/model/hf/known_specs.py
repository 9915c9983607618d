"""KnownSpecs: what the probe found out about models, in a memory.

A probe builds the model and runs it once, both without memory, and for that torch imports sympy and
its operators in Python: a third of a small model's start. Its result depends on the configuration,
on the code that was probed and on the code that probed: all of them are in the key.
"""

import hashlib
import json
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
import transformers

from kvchat.core.types import Memory
from kvchat.model.device import dtype_name, dtype_of
from kvchat.model.files.checkpoint_files import mark
from kvchat.model.hf.config_limits import ParameterLimit
from kvchat.model.hf.model_class import class_and_config
from kvchat.model.spec import ModelSpec

_KIND = "specs"


def spec_key(config: Any, limit: ParameterLimit) -> str:
    """Return the name of a probe's result: 32 hex digits over all that the result depends on.

    Raises KeyError for a config that transformers has no class for, OSError if a file of code
    cannot be looked at.
    """
    model_class, _ = class_and_config(config)
    # The marks tell of every change of these files, in a checkout too, whose version stays.
    ours = sorted(Path(__file__).parents[1].rglob("*.py"))
    theirs = _files_of(model_class)
    facts = [torch.__version__, transformers.__version__, type(config).__qualname__]
    facts += [config.to_json_string(use_diff=False), repr(limit)]
    facts += [mark(path) for path in (*ours, *theirs)]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def _files_of(model_class: Any) -> Sequence[Path]:
    """Return the files that define a class and those it is made of."""
    modules = dict.fromkeys(each.__module__ for each in model_class.__mro__)
    found = (getattr(sys.modules[name], "__file__", None) for name in modules)
    return [Path(name) for name in found if name is not None]


class KnownSpecs:
    """The known specs in a memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def find(self, key: str) -> ModelSpec | None:
        """Return the spec that was noted under a key; None if there is none, or not as written."""
        return _sound(self._memory.get(_KIND, key))

    def note(self, key: str, spec: ModelSpec) -> None:
        """Remember a spec."""
        content = asdict(spec, dict_factory=_named)
        self._memory.set(_KIND, key, {"spec": content, "digest": _digest(content)})


def _named(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a dataclass as JSON has them: a dtype by its name."""
    is_dtype = torch.dtype
    return {name: dtype_name(x) if isinstance(x, is_dtype) else x for name, x in items}


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sound(entry: object) -> ModelSpec | None:
    """Return the spec of an entry as it was written; None for anything else."""
    if not isinstance(entry, dict) or entry.get("digest") != _digest(entry.get("spec")):
        return None
    try:
        spec: ModelSpec = _built(ModelSpec, entry["spec"])
    except (TypeError, ValueError, LookupError, AttributeError):
        return None
    return spec


def _built(kind: Any, value: Any) -> Any:
    """Return the value of the annotated type `kind` that JSON `value` stands for.

    Raises TypeError for a value of another type.
    """
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        if value.keys() != {each.name for each in fields(kind)}:
            raise TypeError(kind)
        return kind(**{name: _built(hints[name], value[name]) for name in value})  # type: ignore[operator]
    if get_origin(kind) in (Union, types.UnionType):
        (other,) = (each for each in get_args(kind) if each is not types.NoneType)
        return None if value is None else _built(other, value)
    if get_origin(kind) is tuple:
        build: Callable[[Any], Any] = partial(_built, get_args(kind)[0])
        return tuple(build(each) for each in _checked(list, value))
    if kind is torch.dtype:
        if (dtype := dtype_of(value)) is None:
            raise TypeError(kind)
        return dtype
    return _checked(kind, value)


def _checked(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(kind)
    return value

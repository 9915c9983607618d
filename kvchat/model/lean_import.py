"""Imports transformers without two parts of torch that kvchat never uses.

transformers marks functions for `torch.compile`, and imports the types of sharded tensors. Either
makes Python import torch's compiler, with sympy and more: over half of the time that transformers
takes to import. kvchat compiles no model and shards none. So a stand-in that knows the marks takes
the compiler's place until something else of it is used, which imports the compiler itself; and
while transformers is imported, torch says that it was built without distribution, as some of its
builds are.
"""

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_log = logging.getLogger(__name__)

_COMPILER = "torch._dynamo"
# What every model needs, and what imports the two parts.
_NEEDED = ("modeling_utils", "masking_utils", "generation", "models.auto.modeling_auto")


def import_transformers() -> None:
    """Import transformers' base of all models; without it each part is imported when it is used.

    Does nothing where the compiler or that base is imported already. Falls back to a plain import
    where transformers or torch need more than the stand-in has.
    """
    import torch

    if _COMPILER in sys.modules or "transformers.modeling_utils" in sys.modules:
        return
    _stand_in(torch)
    try:
        with _without_distribution(torch):
            _import_needed()
    except (AttributeError, ImportError, TypeError) as error:
        _log.info("transformers is imported with torch's compiler: %s", type(error).__name__)
        import_compiler()
        _import_needed()


def import_compiler() -> Any:
    """Import torch's compiler itself in the place of the stand-in, and return it."""
    if isinstance(sys.modules.get(_COMPILER), _StandIn):
        for name in [name for name in sys.modules if name.split(".")[:2] == _COMPILER.split(".")]:
            del sys.modules[name]
    return importlib.import_module(_COMPILER)


def _import_needed() -> None:
    for name in _NEEDED:
        importlib.import_module(f"transformers.{name}")


class _StandIn(ModuleType):
    """The marks of torch's compiler, which do nothing to functions that nobody compiles."""

    def disable(self, function: Any = None, *_: object, **__: object) -> Any:
        return self.disable if function is None else function

    allow_in_graph = assume_constant_result = disable

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself asks every module for
            raise AttributeError(name)
        return getattr(import_compiler(), name)


def _stand_in(torch: Any) -> None:
    module = _StandIn(_COMPILER)
    module.__spec__ = importlib.util.find_spec(_COMPILER)
    assert module.__spec__ is not None
    # Its other modules stay importable: transformers uses one that does not need the compiler.
    module.__path__ = module.__spec__.submodule_search_locations or []
    sys.modules[_COMPILER] = torch._dynamo = module


@contextmanager
def _without_distribution(torch: Any) -> Iterator[None]:
    """Let torch say that it cannot distribute tensors; transformers keeps the first answer."""
    is_available: Callable[[], bool] = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = is_available

"""Imports torch and transformers without parts of them that an answer does not need.

- torch's compiler: transformers marks functions for `torch.compile`, and kvchat compiles no model.
  A stand-in that knows the marks takes the compiler's place.
- sharded tensors: while transformers is imported, torch says that it was built without
  distribution, as some of its builds are.
- torch's operators on the meta device that are written in Python: a third of the time that torch
  takes to import. An empty stand-in takes the place of their registration.
  `import_meta_operators` brings them where one is used: `model_class.operators_on_meta`.
- the names of all models' classes, for which transformers reads over a thousand files, twice.
  They are read when one is asked for that is not known.

Whatever else of a stand-in is used imports the module itself.
"""

import ctypes
import gc
import importlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from kvchat.core.library_environment import set_for_libraries

_log = logging.getLogger(__name__)

_COMPILER = "torch._dynamo"
_META_OPERATORS = "torch._meta_registrations"
_NAMES = "transformers.utils.import_utils"
_LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"
# What every model needs, and what imports the parts of torch.
_NEEDED = ("modeling_utils", "masking_utils", "generation", "models.auto.modeling_auto")


def load_library() -> None:
    """Load the largest library of torch, if it is not imported yet; for a thread of its own.

    That takes 0.25 s of a processor, for which `import` keeps Python's lock, and so does
    ctypes.CDLL: called as a function of the C library, dlopen lets other threads go on. Where torch
    has no such file, or it cannot be loaded alone, `import` does all.
    """
    spec = importlib.util.find_spec("torch") if "torch" not in sys.modules else None
    places = spec.submodule_search_locations if spec is not None else None
    if not places or sys.platform != "linux":
        return
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    dlopen(os.fsencode(Path(places[0], "lib", "libtorch_cpu.so")), os.RTLD_LAZY)


@contextmanager
def without_collection() -> Iterator[None]:
    """Import modules without Python's search for garbage, which finds none of what they make.

    It looked through all that was imported again and again: 0.25 s of 2.15 s for torch,
    transformers and kvchat's engine. What is there after the first time is not looked through any
    more. Later ones import nothing new, and what is there then has to be found when it is garbage,
    such as a model that another has taken the place of.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():
                gc.freeze()
            gc.enable()


def import_transformers() -> None:
    """Import torch, and transformers' base of all models, which it imports only when it is used.

    Leaves alone what is imported already. Falls back to a plain import where transformers or torch
    need more than the stand-ins have.
    """
    torch = _import_torch()
    if _COMPILER in sys.modules or "transformers.modeling_utils" in sys.modules:
        return
    _stand_in(torch)
    try:
        with _without_distribution(torch), _names_on_demand():
            _import_needed()
    except (AttributeError, ImportError, TypeError) as error:
        _log.info("transformers is imported with torch's compiler: %s", type(error).__name__)
        import_compiler()
        _import_needed()


def import_compiler() -> Any:
    """Import torch's compiler itself in the place of the stand-in, and return it."""
    import_meta_operators()
    return _imported(_COMPILER)


def import_meta_operators() -> bool:
    """Import torch's Python operators on the meta device; false if they were there already."""
    was_left_out = isinstance(sys.modules.get(_META_OPERATORS), _Deferred)
    if was_left_out:
        _imported(_META_OPERATORS)
    return was_left_out


def _import_torch() -> Any:
    if "torch" in sys.modules:
        return importlib.import_module("torch")
    sys.modules[_META_OPERATORS] = _Deferred(_META_OPERATORS)
    # torch asks for large pages where Linux gives them to who asks: of weights in pages of 4 KiB a
    # processor read 25 to 31 GB/s, in large ones 33.
    set_for_libraries(_LARGE_PAGES, "1")
    torch = importlib.import_module("torch")
    try:
        # In the version that has it, one of the modules left out completes torch.Generator so.
        if hasattr(torch._C, "_set_generator_metaclass"):
            torch._C._set_generator_metaclass(torch._opaque_base.OpaqueBaseMeta)
        torch.Generator()
    except (AttributeError, RuntimeError) as error:
        _log.info("torch is imported with all operators: %s", type(error).__name__)
        import_meta_operators()
    return torch


def _import_needed() -> None:
    for name in _NEEDED:
        importlib.import_module(f"transformers.{name}")


def _imported(wanted: str) -> Any:
    """Import a module itself in the place of its stand-in, and return it."""
    if isinstance(sys.modules.get(wanted), _Deferred):
        parts = wanted.split(".")
        for name in [name for name in sys.modules if name.split(".")[: len(parts)] == parts]:
            del sys.modules[name]
    return importlib.import_module(wanted)


class _Deferred(ModuleType):
    """Takes the place of a module, and imports it when anything of it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself asks every module for
            raise AttributeError(name)
        if self.__name__ == _COMPILER:
            return getattr(import_compiler(), name)
        return getattr(_imported(self.__name__), name)


class _StandIn(_Deferred):
    """The marks of torch's compiler, which do nothing to functions that are never compiled."""

    def disable(self, function: Any = None, *_: object, **__: object) -> Any:
        return self.disable if function is None else function

    allow_in_graph = assume_constant_result = disable

    def mark_static_address(self, tensor: Any, guard: bool = True) -> None:
        """Do nothing: transformers says this of each layer's recurrent state."""


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


@contextmanager
def _names_on_demand() -> Iterator[None]:
    """Let transformers read its models' names when one is asked for, and not while imported."""
    finder = _NamesFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _NamesFinder:
    """Finds transformers' module that reads the names, and changes it once it is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's spec, whose loader defers the reading; None for other modules."""
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == _NAMES else None
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        spec.loader = _NamesLoader(name, spec.loader.path)
        return spec


class _NamesLoader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        lazy_module = getattr(module, "_LazyModule", None)
        read = getattr(module, "define_import_structure", None)
        if lazy_module is not None and read is not None:
            unread: dict[str, Callable[[], Any]] = {}
            module.define_import_structure = _deferring(read, unread)  # type: ignore[attr-defined]
            module._LazyModule = _filling(lazy_module, unread)  # type: ignore[attr-defined]


def _deferring(read: Callable[..., Any], unread: dict[str, Callable[[], Any]]) -> Any:
    """Return `read` for one model's directory; for that of all models, note it in `unread`."""

    def define_import_structure(module_path: Any, prefix: str | None = None) -> Any:
        path = str(module_path).removesuffix("/__init__.py")
        if not path.endswith("/transformers/models"):
            return read(module_path, prefix)
        unread["transformers" if prefix else "transformers.models"] = lambda: read(path, prefix)
        return {frozenset(): {}}

    return define_import_structure


def _filling(lazy_module: Any, unread: dict[str, Callable[[], Any]]) -> Any:
    """Return a class of lazy modules that take in what is unread at the first unknown name."""

    class NamesOnDemand(lazy_module):
        def __getattr__(self, name: str) -> Any:
            # Ask only for what is listed: transformers tries much for a name that it lacks.
            if self.__name__ in unread and not name.startswith("__") and not self._lists(name):
                self._fill(lazy_module(self.__name__, self.__file__, unread[self.__name__]()))
                unread.pop(self.__name__, None)  # another thread may have been as quick
            return super().__getattr__(name)

        def _lists(self, name: str) -> bool:
            listed = name in self._objects or name in self._class_to_module or name in self._modules
            return listed or importlib.util.find_spec(f"{self.__name__}.{name}") is not None

        def _fill(self, full: Any) -> None:
            self.__all__.extend(full.__all__)
            self._modules.update(full._modules)
            self._class_to_module.update(full._class_to_module)
            self._object_missing_backend.update(full._object_missing_backend)
            self._import_structure.update(full._import_structure)

    return NamesOnDemand

"""Does a forward pass depend on values only the host can look at? Then no graph can repeat it.

A captured graph repeats its kernels; what the host read, decided or copied in between stays as it
was. Knows torch's operators that make the host wait for values. Knows no model.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten

# What the size or the course of a computation comes from: each makes the host read a tensor.
_READING = frozenset(
    {
        _aten._local_scalar_dense,
        _aten.nonzero,
        _aten.nonzero_numpy,
        _aten.argwhere,
        _aten.masked_select,
        _aten.equal,
        _aten.is_nonzero,
        _aten._unique,
        _aten._unique2,
        _aten.unique_dim,
        _aten.unique_consecutive,
        _aten.bincount,
    }
)
_INDEXING = frozenset({_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_})
_COPYING = frozenset({_aten._to_copy, _aten.copy_, _aten.copy, _aten._copy_from})
_MAKING = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor})
_FLAGS = (torch.bool, torch.uint8)


class NotGraphable(Exception):
    """Why a forward pass cannot be captured, as the end of a sentence."""


@contextmanager
def trapping_host_reads() -> Iterator[None]:
    """Raise NotGraphable where code inside reads values of tensors, or copies between devices.

    On any device: on torch's meta device there are no values to read, and what is raised there for
    want of them says the same.
    """
    try:
        with _Trap(), _SendingTrap():
            yield
    except NotGraphable as error:
        raise NotGraphable(f"{error}{_place(error)}") from error
    except (NotImplementedError, RuntimeError) as error:
        if "meta tensor" not in str(error):
            raise
        raise NotGraphable(f"the host reads values{_place(error)}") from error


class _Trap(TorchDispatchMode):
    """Sees every operator before it runs."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        packet = func.overloadpacket
        if packet in _READING or _repeats_by_values(func):
            raise NotGraphable(f"the host reads values by {packet.__name__}")
        if packet in _INDEXING:
            _check_indices(packet, args)
        out = func(*args, **(kwargs or {}))
        if packet in _COPYING and _crosses_devices(args, out):
            raise NotGraphable("values are copied between the host and the device")
        return out


class _SendingTrap(TorchFunctionMode):
    """Sees tensors made of the host's numbers, which on some devices no operator shows."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _MAKING and out.device.type != "cpu" and not _is_there_already(args, kwargs):
            raise NotGraphable("numbers of the host's are sent to the device")
        return out


def _is_there_already(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    data = args[-1] if args else (kwargs or {}).get("data")
    return isinstance(data, torch.Tensor) and data.device.type != "cpu"


def _repeats_by_values(func: Any) -> bool:
    return func is _aten.repeat_interleave.Tensor


def _check_indices(packet: Any, args: tuple[Any, ...]) -> None:
    """Raise where rows have to be counted first, or indices have to be sent to the device."""
    indices = [index for index in args[1] if index is not None]
    # Setting a single number where a mask holds needs no counting.
    sets_one_number = packet is not _aten.index and args[2].numel() == 1
    if any(index.dtype in _FLAGS for index in indices) and not sets_one_number:
        raise NotGraphable("rows are selected by flags")
    if any(index.device != args[0].device for index in indices):
        raise NotGraphable("rows are selected by indices of the host's")


def _crosses_devices(args: tuple[Any, ...], out: Any) -> bool:
    """Tell whether an operator's tensors lie on several devices. Numbers of the host's may be."""
    tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, torch.Tensor)]
    return len({tensor.device for tensor in tensors}) > 1


def _place(error: BaseException) -> str:
    """Return where in a model's code an error came up, the innermost line outside of torch."""
    package = str(Path(torch.__file__).parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(package) and frame.filename != __file__:
            return f" ({Path(frame.filename).name}:{frame.lineno})"
    return ""

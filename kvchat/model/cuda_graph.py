"""Captures a step as a CUDA graph, replays it, and finds steps that no graph can repeat.

A captured graph repeats its kernels; what the host read, decided or copied in between stays as it
was. `trapping_host_reads` raises where a step does any of that, on any device. Does not decide
which steps are captured, or when.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

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


_T = TypeVar("_T")

# Before a capture everything that is made at first use must have been: kernels compiled and loaded,
# workspaces of the stream allocated.
_NUM_WARM_UPS = 2


class CudaGraphs:
    """Captures steps on one device; their graphs share memory, so only one is replayed at a time.

    A replay's output holds until any of them is replayed again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        # Those whose memory lies in the pool.
        self._replays: WeakSet[Callable[[], object]] = WeakSet()

    def capture(self, step: Callable[[], _T]) -> Callable[[], _T]:
        """Run `step` a few times, then record it; return what replays it on the current stream.

        `step` reads and writes tensors that outlive it, and the host takes no part in it. Raises
        whatever it raises, and RuntimeError where it cannot be recorded; the current stream is then
        as it was.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        # The same stream for both: workspaces of matrix products belong to a stream.
        with torch.cuda.stream(self._stream):
            for _ in range(_NUM_WARM_UPS):
                step()
            self._stream.synchronize()
            replay = self._record(step)
        current.wait_stream(self._stream)
        return replay

    def _record(self, step: Callable[[], _T]) -> Callable[[], _T]:
        # Not torch.cuda.graph: it frees all cached memory first, which the next eager step would
        # have to ask the driver for again, and leaves its stream current where recording fails.
        graph = torch.cuda.CUDAGraph()
        if not self._replays:  # torch refuses a pool that all of its graphs have left
            self._pool = torch.cuda.graph_pool_handle()
        # Other threads copy KV meanwhile, which is none of this graph's business.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            output = step()
        finally:
            self._end(graph)

        def replay() -> _T:
            graph.replay()
            return output

        self._replays.add(replay)
        return replay

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            # Until 2.12, torch's allocator believes from then on that a recording is under way, and
            # keeps all memory that two streams have used (pytorch pull request 180395).
            with suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            # Its allocator of pinned memory does too, and would not record to this pool again.
            self._replays = WeakSet()
            raise

"""Captures a step as a CUDA graph and replays it; detects steps that cannot be captured.

A graph repeats kernels only. A value that the host reads, decides by or copies during the step is
frozen at capture. `trapping_host_reads` raises for such a step, on any device.
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

# Operators that make the host read a tensor, because a size or a branch depends on its values.
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
    """A forward pass cannot be captured; the message is the end of a sentence."""


@contextmanager
def trapping_host_reads() -> Iterator[None]:
    """Inside this context, reading tensor values or copying between devices raises NotGraphable.

    Works on every device. On the meta device torch itself raises for such a read; that error is
    converted.
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
    """Checks every operator before it runs."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        packet = func.overloadpacket
        if packet in _READING or func is _aten.repeat_interleave.Tensor:
            raise NotGraphable(f"the host reads values by {packet.__name__}")
        if packet in _INDEXING:
            _check_indices(packet, args)
        out = func(*args, **(kwargs or {}))
        if packet in _COPYING and _crosses_devices(args, out):
            raise NotGraphable("values are copied between the host and the device")
        return out


class _SendingTrap(TorchFunctionMode):
    """Checks tensors built from Python numbers: on some devices no operator reveals the copy."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _MAKING and out.device.type != "cpu" and not _is_there_already(args, kwargs):
            raise NotGraphable("host values are copied to the device")
        return out


def _is_there_already(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    data = args[-1] if args else (kwargs or {}).get("data")
    return isinstance(data, torch.Tensor) and data.device.type != "cpu"


def _check_indices(packet: Any, args: tuple[Any, ...]) -> None:
    """Raise if a mask's true elements must be counted, or indices must be copied to the device."""
    indices = [index for index in args[1] if index is not None]
    # Assigning one scalar under a mask needs no count.
    sets_one_number = packet is not _aten.index and args[2].numel() == 1
    if any(index.dtype in _FLAGS for index in indices) and not sets_one_number:
        raise NotGraphable("rows are selected by a mask")
    if any(index.device != args[0].device for index in indices):
        raise NotGraphable("rows are selected by indices on the host")


def _crosses_devices(args: tuple[Any, ...], out: Any) -> bool:
    """Tell whether an operator's tensors are on several devices. Python numbers do not count."""
    tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, torch.Tensor)]
    return len({tensor.device for tensor in tensors}) > 1


def _place(error: BaseException) -> str:
    """Return file and line of the innermost frame outside torch, as ` (file.py:12)`."""
    package = str(Path(torch.__file__).parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(package) and frame.filename != __file__:
            return f" ({Path(frame.filename).name}:{frame.lineno})"
    return ""


_T = TypeVar("_T")

# Warm-up steps before a capture do the first-use work: compile and load kernels, allocate the
# stream's workspaces.
_NUM_WARM_UPS = 2


class CudaGraphs:
    """Captures steps on one device. The graphs share memory, so only one may run at a time.

    A replay's output is valid until the next replay of any of these graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        # The live replays whose memory is in `_pool`.
        self._replays: WeakSet[Callable[[], object]] = WeakSet()

    def capture(self, step: Callable[[], _T]) -> Callable[[], _T]:
        """Run `step` a few times, then capture it; return its replay on the current stream.

        `step` reads and writes tensors that outlive it, and needs no value on the host. Raises what
        `step` raises, and RuntimeError if the capture fails; the current stream stays current.
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
        # Not torch.cuda.graph: it frees all cached memory first, so the next eager step must ask
        # the driver for it again; and it leaves its own stream current when the capture fails.
        graph = torch.cuda.CUDAGraph()
        if not self._replays:  # torch refuses a pool that all of its graphs have left
            self._pool = torch.cuda.graph_pool_handle()
        # thread_local: other threads copy KV during the capture, which must not make it fail.
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
            # Before torch 2.12, the allocator then stays in capture mode and never frees memory
            # that two streams have used (pytorch pull request 180395).
            with suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            # The pinned-memory allocator stays in that mode too and refuses this pool: make a new
            # pool at the next capture.
            self._replays = WeakSet()
            raise

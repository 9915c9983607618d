"""Captures a step as a CUDA graph and replays it.

Knows CUDA streams and torch's graphs; not what a step computes, nor when to capture one.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakSet

import torch

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

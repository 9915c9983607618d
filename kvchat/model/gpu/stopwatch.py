"""Measures how long work takes on a GPU, without the host's time to launch it."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kvchat.model.gpu.cuda_graph import CudaGraphs

Pass = Callable[[], torch.Tensor]


class Stopwatch(Protocol):
    """Measures time on the device that holds the weights."""

    def times_s(self, passes: Sequence[Pass], num_repeats: int) -> list[list[float]]:
        """Run the passes in turn, `num_repeats` times each; return the seconds, pass by pass.

        May run passes more often, for example untimed warm-up runs.
        """
        ...


class CudaStopwatch:
    """Times passes on `device` with CUDA events around the replays of their graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs = CudaGraphs(device)

    def times_s(self, passes: Sequence[Pass], num_repeats: int) -> list[list[float]]:
        """See Stopwatch. Raises what a pass raises, and RuntimeError if a capture fails."""
        replays = [self._graphs.capture(one) for one in passes]
        for replay in replays:
            replay()  # the first replay uploads the graph
        stream = torch.cuda.current_stream(self._device)
        marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in replays]
        # Queue all replays at once, alternating: the device never waits for the host, and a change
        # of the GPU's clock affects all passes equally.
        for _ in range(num_repeats):
            for replay, own_marks in zip(replays, marks, strict=True):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record(stream)
                replay()
                end.record(stream)
                own_marks.append((start, end))
        stream.synchronize()
        return [[start.elapsed_time(end) / 1e3 for start, end in pairs] for pairs in marks]

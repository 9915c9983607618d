"""Stops the time of products as a decode step runs them: captured in a CUDA graph.

Launched one by one, products of few rows take as long as their launches, which a graph has none of.
Knows CUDA's events; not what is raced.
"""

import time
from collections.abc import Sequence

import torch

from kvchat.model.cuda_graph import CudaGraphs
from kvchat.model.linear_race import Pass


class CudaStopwatch:
    """Times passes on `device`, by events around the replays of their graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs = CudaGraphs(device)

    def now_s(self) -> float:
        return time.perf_counter()

    def times_s(self, passes: Sequence[Pass], num_repeats: int) -> list[list[float]]:
        """See Stopwatch. Raises what a pass raises, and RuntimeError where one has no graph."""
        replays = [self._graphs.capture(one) for one in passes]
        for replay in replays:
            replay()  # the first brings the graph to the device
        stream = torch.cuda.current_stream(self._device)
        marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in replays]
        # All of it is put on the stream at once, and in turn: the device never waits for the host,
        # and a clock that rises or falls meanwhile does so for each of them.
        for _ in range(num_repeats):
            for replay, own_marks in zip(replays, marks, strict=True):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record(stream)
                replay()
                end.record(stream)
                own_marks.append((start, end))
        stream.synchronize()
        return [[start.elapsed_time(end) / 1e3 for start, end in pairs] for pairs in marks]

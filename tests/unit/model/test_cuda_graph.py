"""The calls to CUDA when a step is captured, and their order, on a fake device.

tests/gpu checks that real graphs compute the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from kvchat.model.gpu import cuda_graph
from kvchat.model.gpu.cuda_graph import CudaGraphs


class NoCuda:
    """Writes down what it is asked for. `current` is the stream that work goes to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_end_refused = False
        self.num_pools = 0
        self.current = self.new_stream("main")

    def new_stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.asked.append(f"{name} waits for {other.name}"),
            synchronize=lambda: self.asked.append(f"host waits for {name}"),
        )

    def Stream(self, device: torch.device) -> SimpleNamespace:
        return self.new_stream("side")

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return self.current

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def graph_pool_handle(self) -> str:
        self.num_pools += 1
        return f"pool {self.num_pools}"

    def CUDAGraph(self) -> SimpleNamespace:
        def begin(pool: str, capture_error_mode: str) -> None:
            self.asked.append(f"begin on {self.current.name}, {pool}, {capture_error_mode}")

        return SimpleNamespace(
            capture_begin=begin,
            capture_end=self._end,
            replay=lambda: self.asked.append(f"replay on {self.current.name}"),
        )

    def _end(self) -> None:
        self.asked.append("end")
        if self.is_end_refused:
            raise RuntimeError("operation failed due to a previous error during capture")

    def forget_pool(self, device: int, pool: str) -> None:
        self.asked.append(f"nothing goes to {pool} of {device} any more")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> NoCuda:
    cuda = NoCuda()
    private = SimpleNamespace(_cuda_endAllocateToPool=cuda.forget_pool)
    monkeypatch.setattr(
        cuda_graph, "torch", SimpleNamespace(cuda=cuda, _C=private, Tensor=torch.Tensor)
    )
    return cuda


def test_a_step_is_warmed_up_and_recorded_on_one_stream(cuda: NoCuda) -> None:
    output = torch.ones(1)

    def step() -> torch.Tensor:
        cuda.asked.append(f"step on {cuda.current.name}")
        return output

    replay = CudaGraphs(torch.device("cuda", 0)).capture(step)

    assert cuda.asked == [
        "side waits for main",
        *["step on side"] * 2,
        "host waits for side",
        "begin on side, pool 1, thread_local",
        "step on side",
        "end",
        "main waits for side",
    ]
    assert replay() is output
    assert cuda.asked[-1] == "replay on main"


def test_a_step_that_fails_while_it_is_recorded_ends_the_recording(cuda: NoCuda) -> None:
    num_steps = 0

    def step() -> torch.Tensor:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaGraphs(torch.device("cuda", 0)).capture(step)

    assert cuda.asked[-1] == "end"
    assert cuda.current.name == "main"


def test_a_recording_that_cannot_be_ended_leaves_no_memory_reserved(cuda: NoCuda) -> None:
    """torch 2.11 went on as if it recorded, and freed nothing that two streams had used."""
    cuda.is_end_refused = True

    with pytest.raises(RuntimeError, match="previous error"):
        CudaGraphs(torch.device("cuda", 0)).capture(lambda: torch.ones(1))

    assert cuda.asked[-2:] == ["end", "nothing goes to pool 1 of 0 any more"]
    assert cuda.current.name == "main"


def pools_of(cuda: NoCuda) -> list[str]:
    return [asked.split(", ")[1] for asked in cuda.asked if asked.startswith("begin")]


def test_graphs_share_memory_as_long_as_one_of_them_is_there(cuda: NoCuda) -> None:
    """torch's allocator asserts that a pool it is given is in use: one that all graphs have
    left is refused for ever. Every shape but the first lost to torch's product by that."""
    graphs = CudaGraphs(torch.device("cuda", 0))
    first = graphs.capture(lambda: torch.ones(1))
    second = graphs.capture(lambda: torch.ones(1))
    del first
    third = graphs.capture(lambda: torch.ones(1))
    del second, third

    graphs.capture(lambda: torch.ones(1))

    assert pools_of(cuda) == ["pool 1"] * 3 + ["pool 2"]


def test_a_pool_whose_recording_could_not_be_ended_is_not_recorded_to_again(cuda: NoCuda) -> None:
    graphs = CudaGraphs(torch.device("cuda", 0))
    kept = graphs.capture(lambda: torch.ones(1))
    cuda.is_end_refused = True
    with pytest.raises(RuntimeError, match="previous error"):
        graphs.capture(lambda: torch.ones(1))
    cuda.is_end_refused = False

    graphs.capture(lambda: torch.ones(1))

    assert pools_of(cuda) == ["pool 1", "pool 1", "pool 2"]
    assert kept().tolist() == [1.0]

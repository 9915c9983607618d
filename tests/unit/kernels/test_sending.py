"""Numbers copied to a device and back are equal, and on CUDA the host waits for them alone."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvchat_kernels import launch
from kvchat_kernels.launch import begin_reading, on_device


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("numbers", [[3, 1, 2], (3, 1), [[1, 2], [3, 4]], []], ids=str)
def test_numbers_arrive_in_the_dtype_asked_for(numbers: Any, device: str) -> None:
    sent = on_device(numbers, torch.int32, torch.device(device))

    expected = torch.tensor(numbers, dtype=torch.int32)
    assert (sent.dtype, sent.shape, sent.device.type) == (torch.int32, expected.shape, device)
    if device == "cpu":
        assert torch.equal(sent, expected)


def test_what_goes_to_a_cuda_device_is_pinned_and_only_queued(monkeypatch):
    """torch.tensor(..., device="cuda") had the sampler wait for the whole step, and launch only
    when the device had nothing left to do."""
    asked: list[object] = []

    def tensor(numbers: Any, dtype: torch.dtype, **how: object) -> Any:
        assert not isinstance(numbers, np.ndarray), "can't pin tensor constructed from numpy"
        asked.append(how)
        made = torch.tensor(numbers, dtype=dtype)
        return SimpleNamespace(to=lambda device, **how: asked.append((device, how)) or made)

    monkeypatch.setattr(launch, "torch", SimpleNamespace(tensor=tensor))
    device = torch.device("cuda", 0)

    for numbers in ([1, 2], np.array([1, 2], np.int32)):
        asked.clear()
        assert on_device(numbers, torch.int64, device).tolist() == [1, 2]
        assert asked == [{"pin_memory": True}, (device, {"non_blocking": True})]


def test_what_is_read_is_what_stood_there_when_the_reading_began() -> None:
    numbers = torch.tensor([4, -1, 9])
    read = begin_reading(numbers)
    numbers.fill_(0)

    assert read() == [4, -1, 9]


def test_what_comes_from_a_cuda_device_is_waited_for_by_its_own_mark(monkeypatch):
    """The memory has the numbers only after the mark, which is behind the copy and nothing else."""
    there = SimpleNamespace(shape=(2,), dtype=torch.int64, device=torch.device("cuda", 0))
    queue: list[str] = []

    class Memory:
        numbers = (-77, -77)

        def copy_(self, tensor: object, **how: object) -> None:
            assert (tensor, how) == (there, {"non_blocking": True})
            queue.append("copy")

        def tolist(self) -> list[int]:
            return list(self.numbers)

    class Mark:
        def record(self, stream: str) -> None:
            assert stream == "the stream"
            queue.append("mark")

        def synchronize(self) -> None:
            queue.append("wait")
            memory.numbers = (5, 6)

    def empty(shape: object, **how: object) -> Memory:
        assert (shape, how) == ((2,), {"dtype": torch.int64, "pin_memory": True})
        return memory

    memory = Memory()
    cuda = SimpleNamespace(Event=Mark, current_stream=lambda device: "the stream")
    monkeypatch.setattr(launch, "torch", SimpleNamespace(empty=empty, cuda=cuda))

    read = begin_reading(there)  # type: ignore[arg-type]

    assert queue == ["copy", "mark"]
    assert read() == [5, 6]
    assert queue == ["copy", "mark", "wait"]

"""Numbers copied from the host to a device are equal, and on CUDA the host does not wait."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvchat_kernels import launch
from kvchat_kernels.launch import on_device


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("numbers", [[3, 1, 2], (3, 1), [[1, 2], [3, 4]], []], ids=str)
def test_numbers_arrive_in_the_dtype_asked_for(numbers: Any, device: str) -> None:
    sent = on_device(numbers, torch.int32, torch.device(device))

    expected = torch.tensor(numbers, dtype=torch.int32)
    assert (sent.dtype, sent.shape, sent.device.type) == (torch.int32, expected.shape, device)
    if device == "cpu":
        assert torch.equal(sent, expected)


def test_what_goes_to_a_cuda_device_is_pinned_and_only_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch.tensor(..., device="cuda") had the sampler wait for the whole step, and launch only
    when the device had nothing left to do."""
    asked: list[object] = []

    def tensor(numbers: Any, dtype: torch.dtype, **how: object) -> Any:
        asked.append(how)
        made = torch.tensor(numbers, dtype=dtype)
        return SimpleNamespace(to=lambda device, **how: asked.append((device, how)) or made)

    monkeypatch.setattr(launch, "torch", SimpleNamespace(tensor=tensor))
    device = torch.device("cuda", 0)

    assert on_device([1, 2], torch.int64, device).tolist() == [1, 2]
    assert asked == [{"pin_memory": True}, (device, {"non_blocking": True})]

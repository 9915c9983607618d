"""The runner returns when a step was computed, or leaves waiting to the reader of its logits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvchat.engine import runner
from kvchat.engine.runner import Runner
from kvchat.model.batch import SequencePiece


@pytest.mark.parametrize("num_rows", [0, 1])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_step_without_rows_is_waited_for_on_a_gpu(num_rows, device, monkeypatch):
    """A part of a prompt asks for no logits. A step that was only queued looked fast enough to
    compute everything anew rather than bring it up from memory or disk, and could not be
    interrupted: the whole of a prompt was queued at once."""
    waited: list[torch.device] = []

    def current_stream(device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: waited.append(device))

    cuda = SimpleNamespace(current_stream=current_stream)
    monkeypatch.setattr(runner, "torch", SimpleNamespace(cuda=cuda))
    model: Any = SimpleNamespace(device=torch.device(device))
    graphs: Any = SimpleNamespace(run=lambda pieces: torch.zeros(num_rows, 7))

    logits = Runner(model, 16, graphs).run_pieces([SequencePiece([1, 2], 0, [1], num_rows)])

    assert logits.shape == (num_rows, 7)
    assert waited == ([torch.device("cuda")] if device == "cuda" and not num_rows else [])

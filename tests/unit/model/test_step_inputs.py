"""Angles of compiled steps: what they ask the rotary modules of other versions and models for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvchat.model.cpu.step_inputs import Angles
from kvchat.model.cpu.step_operations import Unfit


def angles_of(rotary: Any) -> Angles:
    decoder: Any = SimpleNamespace(turns_back=False, has_half_angles=False, rotary=rotary)
    return Angles(decoder, None)


class OfGrids:
    """Qwen3.5's of transformers 5.17, in which no Qwen3.5 was loaded on a CPU."""

    mrope_section = (2, 1, 1)

    def __call__(self, like: torch.Tensor, positions: torch.Tensor) -> Any:
        angles = positions[:, :, None, :].float().transpose(2, 3).expand(3, -1, -1, 8)[0]
        return angles.cos(), angles.sin()


class OfOtherInputs:
    def __call__(self, like: torch.Tensor, positions: torch.Tensor) -> Any:
        raise IndexError("too many indices")


def test_a_module_of_grids_gets_a_grid_of_positions() -> None:
    angles = angles_of(OfGrids())

    angles.set(torch.tensor([5, 900]))

    assert angles.half == 4
    expected = torch.tensor([5.0, 900.0]).cos()[:, None].expand(-1, 4)
    torch.testing.assert_close(angles.cosines[:2], expected)


def test_a_module_of_other_inputs_leaves_all_steps_to_the_model() -> None:
    with pytest.raises(Unfit):
        angles_of(OfOtherInputs())

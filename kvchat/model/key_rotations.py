"""The ways in which a model may turn its keys by their positions, read from its rotary modules.

Which of them each layer has is found out by keys that it computes (`engine/kv_mover.py`).
"""

from typing import Any

import torch

from kvchat.model.loader import LoadedModel
from kvchat_kernels.key_rotation import KeyRotation

_FREQUENCIES = "inv_freq"


def possible_rotations(loaded: LoadedModel) -> list[KeyRotation]:
    """Return no rotation, and those by the frequencies of the model's rotary modules.

    Empty for a model that cannot compute a token alone at any position, and for one with recurrent
    state: then no key can be moved.
    """
    if loaded.spec.gathered is not None or loaded.spec.state:
        return []
    known: list[torch.Tensor] = []
    for module in loaded.module.modules():
        for frequencies in _frequencies_in(module):
            if not any(torch.equal(frequencies, each) for each in known):
                known.append(frequencies)
    return [
        KeyRotation(torch.empty(0, dtype=torch.float64)),
        *(
            KeyRotation(frequencies * sign, neighbours)
            for frequencies in known
            for neighbours in (False, True)
            for sign in (1, -1)
        ),
    ]


def _frequencies_in(module: Any) -> list[torch.Tensor]:
    """Return a module's frequencies, one vector for each type of layers: [num_pairs] float64."""
    buffers = module.named_buffers(recurse=False)
    found = (buffer for name, buffer in buffers if name.endswith(_FREQUENCIES))
    return [buffer.detach().double().cpu() for buffer in found if buffer.dim() == 1]

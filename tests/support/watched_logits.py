"""The logits of an engine's steps, as its runner returns them."""

from typing import Any

import torch

from kvchat.engine.engine import Engine


def watched_logits(engine: Engine, method: str = "run_pieces") -> list[torch.Tensor]:
    """Return a list to which every call of a method of the engine's runner adds its logits."""
    rows: list[torch.Tensor] = []
    run = getattr(engine._runner, method)

    def watched(*arguments: Any) -> torch.Tensor:
        rows.append(run(*arguments).clone())
        return rows[-1]

    setattr(engine._runner, method, watched)
    return rows

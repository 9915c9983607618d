"""Sequences half way through their answers, in pools of NaN, and two ways to run their next step.

Everything that is not a sequence's own is NaN but the scratch block: a step that reads a foreign
block shows it in its logits, and one that writes there in the pools.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from kvchat.core.config import ModelConfig
from kvchat.model.batch import SequencePiece, build_batch
from kvchat.model.checkpoint.source import find_model
from kvchat.model.gpu.graphs import Capturing, GraphRunner
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.paged_model import PagedModel
from support.architectures import SUPPORTED
from support.checkpoints import save_checkpoint, tiny_model

SCRATCH = 0
MAX_CONTEXT = 448


def load_tiny(
    name: str, directory: Path, device: str = "cpu", max_context: int = MAX_CONTEXT
) -> LoadedModel:
    """Return a supported architecture in float32, for contexts of so many tokens."""
    model_type, settings = SUPPORTED[name]
    if max_context > MAX_CONTEXT:
        settings = {**settings, "max_position_embeddings": max_context}
    source = find_model(str(save_checkpoint(directory, tiny_model(model_type, **settings))))
    config = ModelConfig(device=device, dtype="float32")
    return load_model(source, config, max_context, lambda _: None)


class Scene:
    """One model's pools, with `num_blocks` blocks, and the graphs of its steps."""

    def __init__(
        self,
        loaded: LoadedModel,
        capturing: Capturing,
        block_size: int = 8,
        num_blocks: int = 200,
        max_context: int = MAX_CONTEXT,
    ) -> None:
        self.block_size = block_size
        self.device = loaded.device
        generator = torch.Generator().manual_seed(0)
        self._free = [1 + i for i in torch.randperm(num_blocks - 1, generator=generator).tolist()]
        self.pools = [
            tuple(
                torch.full((num_blocks, block_size, layer.num_kv_heads, dim), float("nan"))
                .to(loaded.dtype)
                .to(loaded.device)
                for dim in (layer.key_dim, layer.value_dim)
            )
            for layer in loaded.spec.storing_layers
        ]
        for tensor in self.tensors():
            tensor[SCRATCH] = 0
        self.model = PagedModel(loaded, self.pools)  # type: ignore[arg-type]
        self.graphs = GraphRunner(self.model, block_size, max_context, SCRATCH, capturing)

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for pair in self.pools for tensor in pair]

    def read(self, context: int, new: Sequence[int]) -> SequencePiece:
        """Have the model read `context` tokens; return the piece that follows, of `new` tokens."""
        count = -(-(context + len(new)) // self.block_size)
        blocks = [self._free.pop() for _ in range(count)]
        for tensor in self.tensors():
            tensor[blocks] = 0
        if context:
            ids = torch.randint(
                0, 256, (context,), generator=torch.Generator().manual_seed(context)
            )
            self.eager([SequencePiece(ids.tolist(), 0, blocks, 1)])
        return SequencePiece(list(new), context, blocks, len(new))

    def piece_over_anything(self, context: int, new: Sequence[int]) -> SequencePiece:
        """Return a piece that follows KV of no meaning, which costs no forward pass."""
        count = -(-(context + len(new)) // self.block_size)
        blocks = [self._free.pop() for _ in range(count)]
        generator = torch.Generator().manual_seed(context)
        for tensor in self.tensors():
            shape = (count, *tensor.shape[1:])
            tensor[blocks] = torch.randn(shape, generator=generator).to(tensor)
        return SequencePiece(list(new), context, blocks, len(new))

    def eager(self, pieces: Sequence[SequencePiece]) -> torch.Tensor:
        return self.model.forward(build_batch(pieces, self.block_size, self.device))

    def capture_for(self, pieces: Sequence[SequencePiece]) -> None:
        """Want a step often enough, and have it captured."""
        for _ in range(3):
            self.graphs.run(pieces)
        assert self.graphs.capture_wanted()

    def check(self, pieces: Sequence[SequencePiece]) -> torch.Tensor:
        """Hold a replay to the eager step: the same logits, the same KV, nothing else touched."""
        before = [tensor.clone() for tensor in self.tensors()]
        expected = self.eager(pieces)
        written = [tensor.clone() for tensor in self.tensors()]
        for tensor, old in zip(self.tensors(), before, strict=True):
            tensor.copy_(old)

        logits = self.graphs.run(pieces)

        assert logits is not None, "no graph took it"
        difference, largest = (logits - expected).abs().max(), expected.abs().max()
        assert difference <= 1e-4 * largest, (difference, largest)
        for tensor, want in zip(self.tensors(), written, strict=True):
            got, want = tensor[SCRATCH + 1 :], want[SCRATCH + 1 :]
            assert torch.allclose(got, want, atol=1e-4, equal_nan=True)
        assert all(bool(tensor[SCRATCH].isfinite().all()) for tensor in self.tensors())
        return logits

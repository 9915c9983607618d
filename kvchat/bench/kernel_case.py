"""KernelCase: one kernel on one shape, with its data, its twin and its peers.

Knows what a measurement needs of a kernel; knows no kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class KernelShape:
    """The sizes of a model that its kernels see."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    num_layers: int

    @classmethod
    def of(cls, config: Any) -> "KernelShape":
        """Read them from a configuration of transformers."""
        num_heads = config.num_attention_heads
        return cls(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            num_heads=num_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            vocab=config.vocab_size,
            num_layers=config.num_hidden_layers,
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where cases live: device, dtype, bytes of the cache that must not hold what is measured."""

    device: torch.device
    dtype: torch.dtype
    cache_bytes: int

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def copies(self, num_bytes: int) -> int:
        """Return how many sets of `num_bytes` are more than the cache holds twice over."""
        return min(64, 1 + 2 * self.cache_bytes // num_bytes)


@dataclass(frozen=True, slots=True)
class Peer:
    """Somebody else's kernel for the same, which `run` runs on the i-th set of data.

    Where `is_same` is false it leaves something out, a mask say, and is compared by time alone.
    """

    name: str
    run: Callable[[int], torch.Tensor]
    is_same: bool = True


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel on one shape.

    num_bytes        what has to be read and written, each once
    is_read_only     nearly all of that is reading
    run              runs the kernel on the i-th of `num_sets` sets of data
    twin             computes in plain torch what `run` returns for set 0
    peers            what the kernel is to be better than
    num_flops        multiplications and additions of a kernel that these bound, not bytes; else 0
    """

    name: str
    num_bytes: int
    is_read_only: bool
    num_sets: int
    run: Callable[[int], torch.Tensor]
    twin: Callable[[], torch.Tensor]
    peers: tuple[Peer, ...] = ()
    num_flops: int = 0

    def is_right(self) -> bool:
        """Compare with the twin: equal integers, or all numbers as close as their dtype tells."""
        return self.is_near_twin(self.run(0))

    def is_near_twin(self, ours: torch.Tensor) -> bool:
        """Compare a result on the first set with the twin's."""
        expected = self.twin()
        if not ours.is_floating_point():
            return torch.equal(ours, expected)
        tolerance = 8 * torch.finfo(ours.dtype).eps * expected.abs().max().item()
        return torch.allclose(ours.float(), expected.float(), rtol=0.0, atol=tolerance)

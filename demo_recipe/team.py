"""Data-parallel training on one machine: several processes of one thread each, gradients averaged.

On a CPU that is shared with other programs this is far faster than one process with several
threads, whose kernels all wait at every barrier for the thread that was preempted. Knows
gradients; knows no network.
"""

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.multiprocessing.spawn import spawn


class Team:
    """This process's place among its peers. A team of one does nothing."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def average(self, gradients: Iterable[Tensor]) -> None:
        """Replace each gradient by its mean over the team, in place."""
        if self.size == 1:
            return
        parts = list(gradients)
        flat = _flatten_dense_tensors(parts)
        dist.all_reduce(flat)
        flat /= self.size
        for gradient, mean in zip(parts, _unflatten_dense_tensors(flat, parts), strict=True):
            gradient.copy_(mean)

    def wait(self) -> None:
        """Return once every member is here."""
        if self.size > 1:
            dist.barrier()


def run_team(size: int, job: Callable[[Team], None]) -> None:
    """Run `job` in `size` processes of one thread each and wait; with size 1, here and as it is.

    `job` must be picklable by reference; it is sent to our own children only.
    """
    if size == 1:
        job(Team())
        return
    with tempfile.TemporaryDirectory() as folder:
        spawn(_member, (size, str(Path(folder) / "meeting"), job), nprocs=size)


def _member(rank: int, size: int, meeting: str, job: Callable[[Team], None]) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    try:
        job(Team(rank, size))
    finally:
        dist.destroy_process_group()

"""What fits in a GPU's memory, tested on a machine without one."""

import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvchat.core.config import ModelConfig
from kvchat.core.errors import ModelError
from kvchat.model import loader
from kvchat.model.checkpoint.source import find_model
from kvchat.model.device import free_bytes
from kvchat.model.gpu import memory as gpu_memory
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.self_test import compare_with_own
from support.checkpoints import save_checkpoint, tiny_model

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MIB = 1 << 20


@dataclass
class Driver:
    """A GPU's memory: what no process has, and what torch keeps of freed tensors."""

    free: int
    kept: int

    def empty_cache(self) -> None:
        self.free, self.kept = self.free + self.kept, 0

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, 24 << 30


def test_memory_that_torch_keeps_of_freed_tensors_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """An 8 B model on a 32 GB card had 6 GB for KV instead of 12: merging the weights of its layers
    had left the rest with torch."""
    driver = Driver(free=8 << 30, kept=7 << 30)
    monkeypatch.setattr(torch.cuda, "empty_cache", driver.empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", driver.mem_get_info)

    assert free_bytes(GPU) == 15 << 30


def test_a_limit_of_the_process_leaves_what_it_does_not_have(monkeypatch):
    """Under `ulimit -v` a share of all memory was asked for, and --device-cache was blamed."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = num_pages * resource.getpagesize() + (64 << 20)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, resource.RLIM_INFINITY))

    assert 0 < free_bytes(CPU) <= 64 << 20


@pytest.fixture
def load_beside_a_gpu(monkeypatch, tmp_path) -> Callable[..., LoadedModel]:
    """Loads a tiny model where a GPU has so much free memory."""
    source = find_model(str(save_checkpoint(tmp_path, tiny_model("llama"))))

    def load(free: int, **settings: str) -> LoadedModel:
        choose, own_free = loader.choose_device, gpu_memory.free_bytes
        monkeypatch.setattr(
            loader, "choose_device", lambda c: choose(c) if c.device == "cpu" else GPU
        )
        monkeypatch.setattr(
            gpu_memory, "free_bytes", lambda device: free if device == GPU else own_free(device)
        )
        return load_model(source, ModelConfig(**settings), 128, lambda _: None)

    return load


def test_a_model_that_does_not_fit_on_the_gpu_runs_on_the_cpu_and_says_so(load_beside_a_gpu):
    loaded = load_beside_a_gpu(100 * MIB)

    assert loaded.device == CPU
    [note] = loaded.notes
    assert note.endswith("and 100 MiB of the GPU's memory are free. The model runs on the CPU.")
    assert compare_with_own(loaded) > 0.999


def test_a_model_that_was_asked_for_on_the_gpu_is_refused_there(load_beside_a_gpu):
    with pytest.raises(ModelError, match="100 MiB of the GPU's memory are free") as caught:
        load_beside_a_gpu(100 * MIB, device="cuda")

    assert caught.value.hint == "Use a smaller model or --device cpu."


def test_what_is_for_a_cpu_alone_is_decided_once_the_model_is_on_its_device(
    monkeypatch: pytest.MonkeyPatch, load_beside_a_gpu: Callable[..., LoadedModel]
) -> None:
    """A module that is still on its way to a GPU says that it is on the CPU."""
    order = []
    monkeypatch.setattr(loader, "move_weights", lambda *_: order.append("moved"))
    monkeypatch.setattr(loader, "use_cpu_products", lambda _: order.append("decided"))
    monkeypatch.setattr(loader, "slow_attention", lambda *_: ())

    load_beside_a_gpu(8 << 30)

    assert order == ["moved", "decided"]


def test_memory_that_others_take_during_the_load_is_no_crash(monkeypatch, load_beside_a_gpu):
    own_to = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if GPU in args:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return own_to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)

    loaded = load_beside_a_gpu(8 << 30)

    assert loaded.device == CPU
    assert len(loaded.notes) == 1

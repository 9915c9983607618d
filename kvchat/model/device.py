"""Chooses a model's device, dtype and number of threads, and measures free memory."""

import os
import resource
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from kvchat import __version__
from kvchat.core.config import ModelConfig
from kvchat.core.errors import ModelError
from kvchat.core.library_environment import set_for_libraries

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def choose_device(config: ModelConfig) -> torch.device:
    """Return the device to run on. Raises ModelError if CUDA is requested and unusable."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ModelError("There is no usable CUDA device.", "Use --device cpu.")
    if config.device == "cuda" or (config.device == "auto" and has_cuda):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """Return the GPU's name or `cpu`: the key under which measured speeds are stored."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def machine_name(device: torch.device) -> str:
    """Return what timings depend on: the device and the versions of torch, Triton and kvchat."""
    name = device_name(device)
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return f"{name}, torch {torch.__version__}, triton {triton}, kvchat {__version__}"


def is_lost(device: torch.device) -> bool:
    """Whether a GPU computes nothing more for this process, as after an illegal memory access.

    Then every question fails; after any other error only the first one may, by an error that came
    before it.
    """
    return all(_cannot_wait(device) for _ in range(2))


def _cannot_wait(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def dtype_of(name: str) -> torch.dtype | None:
    """Return the torch dtype of a setting, None for `auto`."""
    return _DTYPES.get(name)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as the settings spell it."""
    return str(dtype).removeprefix("torch.")


def can_change_threads() -> bool:
    """Tell whether torch uses OpenMP threads; only their number may change between steps."""
    return "ATen parallel backend: OpenMP" in torch.__config__.parallel_info()


def set_threads(config: ModelConfig) -> None:
    """Set torch's number of threads if configured; torch's default is the physical cores."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)


# A step of a model needs a dozen compiled shapes; what chats need again and again is there for the
# next. oneDNN itself keeps 1,024, and so grew by a gigabyte over a chat.
_NUM_KEPT = "64"
# oneDNN's own, and that of ideep, through which torch calls it. Both are read at the first product.
_LIMITS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def limit_kept_shapes() -> None:
    """Let this process's libraries keep few compiled shapes; before the first product is computed.

    What the user has set stays.
    """
    for name in _LIMITS:
        set_for_libraries(name, _NUM_KEPT)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can be allocated on `device` without swapping.

    On the CPU: MemAvailable of /proc/meminfo, or what the limits of the cgroup and of the process
    (`ulimit -v`) leave if that is less. On a GPU memory that torch keeps for reuse counts as free:
    it is handed back first.
    """
    if device.type == "cuda":
        # Merging the weights of layers leaves hundreds of MiB a layer that torch keeps.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    available = _meminfo_available()
    limit = _read_number(Path("/sys/fs/cgroup/memory.max"))
    used = _read_number(Path("/sys/fs/cgroup/memory.current"))
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return min(available, _left_of_addresses())


def _left_of_addresses() -> int:
    """Return the bytes of addresses that the process may still take; very many without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return limit
    return max(0, limit - num_pages * resource.getpagesize())


def _meminfo_available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None

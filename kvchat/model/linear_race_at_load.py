"""Which of a loaded model's products take kvchat's kernel for few rows: settled before it is used.

Knows where weights lie and what the machine is called. The choice is made once, by shape and number
of rows alone, so that whatever captures a step later captures the same kernels.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from kvchat import __version__
from kvchat.model.device import device_name
from kvchat.model.fuse_kernels import few_rows_linear
from kvchat.model.fuse_linear import MergedProduct
from kvchat.model.linear_race import LinearRace, LinearShape, Operands, Outcomes, rows_won
from kvchat.model.linear_race_clock import CudaStopwatch
from kvchat.model.linear_race_memory import RaceMemory
from kvchat.model.loader import LoadedModel
from kvchat_kernels.launch import kernel_refusal

_log = logging.getLogger(__name__)


def settle_products(
    loaded: LoadedModel, directory: Path | None, race: LinearRace | None = None
) -> tuple[str, ...]:
    """Let products take the kernel where it has won; return where it has, sorted, in words.

    Races what was not raced yet on this machine, which takes seconds at the most, and keeps the
    outcomes in `directory`; None keeps none. Without a `race` of the caller's there is one on CUDA
    devices only. Nothing that goes wrong costs more than speed.
    """
    if loaded.fusing is None:
        return ()
    if race is None:
        if loaded.device.type != "cuda" or kernel_refusal(loaded.device) is not None:
            return ()
        race = LinearRace(CudaStopwatch(loaded.device), few_rows_linear)
    products = loaded.fusing.merged_products()
    layers: dict[LinearShape, list[Operands]] = defaultdict(list)
    for product in products:
        if product.operands.weight.is_contiguous():
            layers[product.operands.shape].append(product.operands)
    memory = RaceMemory(directory, machine_name(loaded.device))
    known = memory.read()
    outcomes = race.run(layers, known)
    if outcomes.keys() != known.keys():
        memory.write(outcomes)
    return _install(products, layers, outcomes)


def machine_name(device: torch.device) -> str:
    """Return what times depend on: the device, and the versions of what computes on it."""
    name = device_name(device)
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return f"{name}, torch {torch.__version__}, triton {triton}, kvchat {__version__}"


def _install(
    products: Sequence[MergedProduct],
    layers: dict[LinearShape, list[Operands]],
    outcomes: Outcomes,
) -> tuple[str, ...]:
    for product in products:
        if product.operands.shape in layers and product.operands.weight.is_contiguous():
            product.take_kernel(rows_won(outcomes, product.operands.shape))
    own = {key: found for key, found in outcomes.items() if key[0] in layers}
    won = sorted(f"{shape}, {rows} rows" for (shape, rows), found in own.items() if found.is_won)
    _log.info("kvchat's product is faster for %d of %d sizes", len(won), len(own))
    return tuple(won)

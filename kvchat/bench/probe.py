"""The machine's speed: how fast memory is read and products are computed, measured once and kept.

It takes about a second. A new version of torch or kvchat measures it again. What is measured while
other programs keep the cores busy is used, and not kept.
"""

import os

import torch

from kvchat.bench.measure import measure_bandwidth, measure_products
from kvchat.core.types import Memory
from kvchat.engine.sizing import MachineSpeed
from kvchat.model.device import machine_name

_KIND = "machine speed"
# More programs than this wait for each core: a measurement would be of what they leave.
_BUSY = 0.5


def machine_speed(memory: Memory, device: torch.device, load: float | None = None) -> MachineSpeed:
    """Return how fast a device is, as the memory has it or as it is measured now.

    `load` counts the programs that run or wait; the last minute's where it is not given.
    """
    known = known_speed(memory, device)
    if known is not None:
        return known
    load = os.getloadavg()[0] if load is None else load
    speed = _measured(device)
    if load <= _BUSY * (os.cpu_count() or 1):
        memory.set(_KIND, machine_name(device), {"read": speed.read, "products": speed.products})
    return speed


def known_speed(memory: Memory, device: torch.device) -> MachineSpeed | None:
    """Return how fast a device is as the memory has it; None if it was not measured while idle."""
    known = memory.get(_KIND, machine_name(device))
    if isinstance(known, dict) and all(_is_rate(known.get(x)) for x in ("read", "products")):
        return MachineSpeed(float(known["read"]), float(known["products"]))
    return None


def _measured(device: torch.device) -> MachineSpeed:
    return MachineSpeed(measure_bandwidth(device).read, measure_products(device, torch.bfloat16))


def _is_rate(value: object) -> bool:
    return type(value) is float and 0 < value < 1e18

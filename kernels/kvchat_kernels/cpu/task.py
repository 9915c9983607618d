"""Task: the memory and the sizes that a kernel works on, by name; and numbers by name in general.

A kind of kernel has a class of tasks with a field for each of them. Compiled code reads a task as
numbers of 64 bits, in the order of the fields; what writes the code reads them by the fields' names
(`Code.task`). So no kernel and no caller counts places.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, dataclass_transform

import numpy as np
import torch

Numbers = np.ndarray[Any, Any]
# Memory that a kernel reads or writes; its owner keeps it where it is.
Memory = torch.Tensor | Numbers


class Place(IntEnum):
    """Numbers of 64 bits that lie one behind another, named in this order by `auto()`."""

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[Any]) -> int:
        return count


@dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=False)
class Task:
    """What a kernel works on; it keeps the memory alive, and each subclass is a dataclass.

    A field is the address of memory, of a kernel or of another task, a float, or a whole number.
    None is 0: what the kernel's form does not read needs no value.
    """

    _places: ClassVar[Mapping[str, int]] = {}
    _floats: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        dataclass(kw_only=True, frozen=True, eq=False)(cls)
        own = fields(cls)  # type: ignore[arg-type]
        assert not any(hasattr(Task, field.name) for field in own), "a field would hide a method"
        cls._places = MappingProxyType({field.name: place for place, field in enumerate(own)})
        cls._floats = frozenset(field.name for field in own if field.type is float)

    @classmethod
    def place_of(cls, name: str) -> int:
        """Return the place of a field among the task's numbers; raises KeyError."""
        return cls._places[name]

    @classmethod
    def names(cls) -> Set[str]:
        """Return the names of the fields."""
        return cls._places.keys()

    @classmethod
    def is_float(cls, name: str) -> bool:
        """Return whether a field is a float32, which lies in the first half of its number."""
        return name in cls._floats

    @cached_property
    def numbers(self) -> Numbers:
        """The task as kernels read it, int64; changes of it are what the next run works on."""
        numbers = [_number(name in self._floats, value) for name, value in self.items()]
        return np.array(numbers, np.int64)

    def items(self) -> list[tuple[str, Any]]:
        """Return the names of the fields and what they were given, in order."""
        return [(name, getattr(self, name)) for name in self._places]

    def number(self, name: str) -> Numbers:
        """Return the number of a field, int64 [1], as a part of `numbers`."""
        place = self.place_of(name)
        return self.numbers[place : place + 1]


def _number(is_float: bool, value: Any) -> int:
    if value is None:
        return 0
    if is_float:
        return int(np.array([value, 0], np.float32).view(np.int64)[0])
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, Task):
        value = value.numbers
    if isinstance(value, np.ndarray):
        return int(value.ctypes.data)
    return int(getattr(value, "address", value))  # that of a kernel

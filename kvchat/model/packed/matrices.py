"""PackedMatrices: the matrices of a model in 8 or 4 bits, rounded now or mapped from the store.

A file of the store is a safetensors file with one tensor of bytes for each matrix: its levels,
scales and minimums, each padded to 64 bytes; and their sums as 64-bit numbers, by which a page that
a power cut has lost is found. Its header follows from the key and the matrices, so a file that
begins otherwise is another's.
"""

import hashlib
import json
import logging
import mmap
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from kvchat.core.text import format_bytes
from kvchat_kernels.linear.blocks import BlockWeights, made_of_bytes, part_bytes
from kvchat_kernels.linear.cpu import rounded

_log = logging.getLogger(__name__)

# Increase it when the same weights are rounded otherwise, or lie otherwise.
_VERSION = 1
_ALIGN = 64
# Weights that are rounded and written at once.
_TILE_ELEMENTS = 1 << 24
# Rounding less than this takes no time that a file would save.
_LEAST_BYTES = 64 << 20
_SUMS = "sums"


class NewFile(Protocol):
    """A file that is being written, which `memory` shows; then it is finished or abandoned."""

    @property
    def memory(self) -> mmap.mmap: ...

    def write(self, at: int, data: memoryview) -> None: ...

    def finish(self) -> bool: ...

    def abandon(self) -> None: ...


class WeightStore(Protocol):
    """Where files of packed weights are; `cache/disk/weight_files.py` has it."""

    def find(self, key: str, header: bytes, num_bytes: int) -> mmap.mmap | None: ...

    def begin(self, key: str, num_bytes: int) -> NewFile | None: ...


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where packed weights are kept, if anywhere, and of what.

    key    stands for the checkpoint, and for all else that its weights depend on
    check  raises what it likes where the checkpoint has changed since `key` was made
    """

    store: WeightStore | None
    key: str
    check: Callable[[], None]


NOWHERE = Keeping(None, "", lambda: None)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix to pack. `num_in` is a multiple of 32: columns of zeros fill the last block."""

    name: str
    num_out: int
    num_in: int
    bits: int


class PackedMatrices:
    """Packs the matrices of one model on a CPU, each once. Without a store all are rounded.

    As a context: at its end what was rounded is kept for the next start, and `note` says so to the
    user; after an error or an interrupt nothing is kept, for a part of it has no use. `what` tells
    packings of one checkpoint apart.
    """

    def __init__(self, keeping: Keeping, what: str, matrices: Sequence[Matrix]) -> None:
        self.note = ""
        self._check = keeping.check
        self._places = {}
        start = 0
        for matrix in matrices:
            self._places[matrix.name] = matrix, start
            start += _num_bytes(matrix)
        header = _header(f"{keeping.key} {what}", matrices, start)
        self._first, self._sums_at = len(header), len(header) + start
        self._new: NewFile | None = None
        self._bytes: torch.Tensor | None = None
        self._size = self._sums_at + 8 * len(matrices)
        store = keeping.store
        if store is None or self._size < _LEAST_BYTES:
            return
        name = hashlib.sha256(header).hexdigest()[:32]
        memory = store.find(name, header, self._size)
        if memory is not None:
            self._bytes = _tensor(memory)
        if self._bytes is None or not torch.equal(self._sums(), self._stored_sums()):
            self._bytes, self._new = None, store.begin(name, self._size)
        if self._new is not None:
            self._bytes = _tensor(self._new.memory)
            self._write(0, memoryview(header))

    def pack(self, name: str, weight: torch.Tensor) -> BlockWeights:
        """Return the matrix of this name, which `weight` [out, in] is rounded to if need be."""
        matrix, start = self._places[name]
        if self._new is not None:
            self._round_into_file(matrix, weight, self._first + start)
        if self._bytes is None:
            return rounded(weight, matrix.bits)
        region = self._bytes[self._first + start :][: _num_bytes(matrix)]
        return made_of_bytes(region, matrix.num_out, matrix.num_in, matrix.bits, _ALIGN)

    def _round_into_file(self, matrix: Matrix, weight: torch.Tensor, at: int) -> None:
        """Round a matrix by tiles, in memory that is used again, and write them from `at` on.

        0.9 GB of int8 took 3.2 s of a processor so, 4.1 s where pages of the file were first
        written through memory, and 1.1 s without a file.
        """
        num_in, bits = matrix.num_in, matrix.bits
        step = min(matrix.num_out, max(1, _TILE_ELEMENTS // num_in))
        room = torch.empty(sum(part_bytes(step, num_in, bits)), dtype=torch.uint8)
        for first in range(0, matrix.num_out, step):
            rows = min(step, matrix.num_out - first)
            size = sum(part_bytes(rows, num_in, bits))
            tile = made_of_bytes(room[:size], rows, num_in, bits)
            parts = rounded(weight[first : first + rows], bits, tile).parts().values()
            place = at
            for part, whole in zip(
                parts, part_bytes(matrix.num_out, num_in, bits, _ALIGN), strict=True
            ):
                offset = first * (part.nbytes // rows)
                self._write(place + offset, part.numpy().data.cast("B"))
                place += whole

    def _write(self, at: int, data: memoryview) -> None:
        """Write to the file; where the disk fails, what comes later is rounded in memory."""
        if self._new is None:
            return
        try:
            self._new.write(at, data)
        except OSError as error:
            _log.warning("packed weights not kept: %s", error)
            self._abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                self._check()
                self._finish()
        finally:
            self._abandon()  # nothing, if it is finished

    def _finish(self) -> None:
        if self._new is None:
            return
        self._write(self._sums_at, self._sums().numpy().data.cast("B"))
        new, self._new = self._new, None
        if new is not None and new.finish():
            size = format_bytes(self._size)
            self.note = f"The next start maps the packed weights: {size} on the disk."

    def _abandon(self) -> None:
        if self._new is not None:
            self._new.abandon()
            self._new = self._bytes = None

    def _stored_sums(self) -> torch.Tensor:
        assert self._bytes is not None
        return self._bytes[self._sums_at :].view(torch.int64)

    def _sums(self) -> torch.Tensor:
        assert self._bytes is not None
        words = self._bytes[self._first : self._sums_at].view(torch.int64)
        sizes = [_num_bytes(matrix) // 8 for matrix, _ in self._places.values()]
        return torch.stack([part.sum() for part in words.split(sizes)])


def _tensor(memory: mmap.mmap) -> torch.Tensor:
    """Return memory as bytes; it stays as long as a tensor of it does."""
    return torch.frombuffer(memory, dtype=torch.uint8)


def _num_bytes(matrix: Matrix) -> int:
    return sum(part_bytes(matrix.num_out, matrix.num_in, matrix.bits, _ALIGN))


def _header(key: str, matrices: Sequence[Matrix], data_bytes: int) -> bytes:
    """Return a safetensors header, padded so that the data begin at a multiple of 64 bytes."""
    facts = [[m.name, m.num_out, m.num_in, m.bits] for m in matrices]
    about = {"kvchat": f"packed weights {_VERSION}", "key": key, "matrices": json.dumps(facts)}
    content: dict[str, object] = {"__metadata__": about}
    start = 0
    for matrix in matrices:
        size = _num_bytes(matrix)
        content[matrix.name] = _entry("U8", size, start, start + size)
        start += size
    content[_SUMS] = _entry("I64", len(matrices), data_bytes, data_bytes + 8 * len(matrices))
    text = json.dumps(content).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    return struct.pack("<Q", len(text)) + text


def _entry(dtype: str, count: int, start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": [count], "data_offsets": [start, end]}

"""A program: kernels one after another, run on any number of threads by one call.

Every operation has a number of units. Threads take units from the operation's counter, in order of
the operations; a unit begins once all units of the operations it needs are done. So a thread that
another program keeps from its core delays the others by the one unit it is at, and a thread that
comes late finds the work done. The threads are those of torch's OpenMP (`GOMP_parallel`): a second
pool of threads would compete with the first.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import auto
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir

from kvchat_kernels.cpu.code import I64, Code, Kernel, Value, compiled, has_feature
from kvchat_kernels.cpu.task import Numbers, Place, Task

_VOID = ir.VoidType()
# A waiting thread lets others have its core after so many looks at the counter.
_LOOKS = 2000


class _Op(Place):
    """The numbers of an operation. A unit begins once REQUIRED units of the program are done."""

    KERNEL = auto()
    TASK = auto()
    HEADER = auto()
    NUM_UNITS = auto()
    NEXT = auto()
    REQUIRED = auto()


# An operation has a cache line of its own: threads count its units at once.
_NUM_NUMBERS = 8


class _Run(Place):
    """The numbers of a run. YIELD is the address of the C library's `sched_yield`."""

    NUM_OPS = auto()
    OPS = auto()
    DONE = auto()
    YIELD = auto()


@dataclass(frozen=True, slots=True)
class Operation:
    """A kernel, its task and its header (int64), which the operation keeps alive.

    num_units   None: as many as rows of the header
    waits       whether units of the operation before it must be done; those before that must be
                in any case
    """

    kernel: Kernel[Any]
    task: Task
    header: Numbers
    num_units: int | None
    waits: bool = True

    def __post_init__(self) -> None:
        assert isinstance(self.task, self.kernel.task), (self.kernel.name, self.task)


class Program:
    """Operations in order. `units` may be changed between runs; one run at a time."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._operations = tuple(operations)  # own what their addresses are of
        self._kernels: list[int] | None = None
        self._ops = np.zeros((len(operations), _NUM_NUMBERS), np.int64)
        for numbers, operation in zip(self._ops, operations, strict=True):
            numbers[_Op.TASK] = operation.task.numbers.ctypes.data
            numbers[_Op.HEADER] = operation.header.ctypes.data
            numbers[_Op.NUM_UNITS] = operation.num_units or 0
        self.units = self._ops[:, _Op.NUM_UNITS]
        # The operation from which on an operation does not wait.
        firsts = np.arange(len(operations))
        for index, operation in enumerate(operations):
            if index and not operation.waits:
                firsts[index] = firsts[index - 1]
        self._firsts = firsts
        self._run = np.zeros(len(_Run), np.int64)
        self._run[_Run.YIELD] = _address_of("sched_yield")
        self._driver = _driver()
        self._parallel = parallel()

    def prepare(self) -> None:
        """Take note of changed `units`. The first call waits until all kernels are compiled.

        It raises what compiling raises.
        """
        if self._kernels is None:
            self._kernels = [operation.kernel.address for operation in self._operations]
            self._ops[:, _Op.KERNEL] = self._kernels
        before = np.concatenate(([0], np.cumsum(self.units)))
        self._ops[:, _Op.REQUIRED] = before[self._firsts]

    def run(
        self, num_threads: int, between: Callable[[], int] | None = None, num_pieces: int = 1
    ) -> None:
        """Run all operations; `prepare` was called since `units` changed.

        They run in `num_pieces` parts, one after another. `between` is called between them and
        returns the number of threads from then on. It may raise: then the operations after it have
        not run.
        """
        self._ops[:, _Op.NEXT] = 0
        self._run[_Run.DONE] = 0
        num_ops = len(self._operations)
        num_pieces = min(num_pieces, num_ops)
        for piece in range(num_pieces):
            if piece and between is not None:
                num_threads = between()
            first, last = (num_ops * number // num_pieces for number in (piece, piece + 1))
            self._run[_Run.OPS] = self._ops[first:].ctypes.data
            self._run[_Run.NUM_OPS] = last - first
            self._run_piece(num_threads)

    def _run_piece(self, num_threads: int) -> None:
        if num_threads == 1 or self._parallel is None:
            self._driver.call(self._run.ctypes.data)
        else:
            self._parallel(self._driver.address, self._run.ctypes.data, num_threads, 0)


class _Driver:
    """The compiled function that each thread of a run executes."""

    def __init__(self) -> None:
        self._function = compiled("driver", (), None, _write)
        self.address = self._function.address
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)


@cache
def _driver() -> _Driver:
    return _Driver()


def _write(code: Code) -> None:
    """Write what each thread runs: the units it takes of each operation."""
    run, builder = code.address, code.builder
    ops = code.load(run, 8 * _Run.OPS, I64)
    done = _pointer(code, run + 8 * _Run.DONE)
    with code.loop(0, code.load(run, 8 * _Run.NUM_OPS, I64)) as index:
        op = ops + index * (8 * _NUM_NUMBERS)
        kernel, task, header, num_units, required = (
            code.load(op, 8 * place, I64)
            for place in (_Op.KERNEL, _Op.TASK, _Op.HEADER, _Op.NUM_UNITS, _Op.REQUIRED)
        )
        next_unit = _pointer(code, op + 8 * _Op.NEXT)
        head, body, after = (builder.append_basic_block() for _ in range(3))
        builder.branch(head)
        builder.position_at_end(head)
        one = ir.Constant(I64, 1)
        unit = Value(code, builder.atomic_rmw("add", next_unit, one, "monotonic"))
        builder.cbranch((unit < num_units).raw, body, after)
        builder.position_at_end(body)
        _wait(code, done, required)
        code.run_kernel(kernel, task, header, unit)
        builder.atomic_rmw("add", done, one, "release")
        builder.branch(head)
        builder.position_at_end(after)


def _wait(code: Code, done: Any, required: Value) -> None:
    """Write: look at the counter until it is what is required."""
    builder = code.builder
    look, again, after = (builder.append_basic_block() for _ in range(3))
    before = builder.block
    builder.branch(look)
    builder.position_at_end(look)
    count = builder.phi(I64)
    count.add_incoming(ir.Constant(I64, 1), before)
    num_done = Value(code, builder.load_atomic(done, "acquire", 8))
    builder.cbranch((num_done >= required).raw, after, again)
    builder.position_at_end(again)
    if has_feature("sse2"):
        code.call("llvm.x86.sse2.pause", _VOID)
    looks = Value(code, count)
    with builder.if_then(builder.icmp_signed("==", (looks % _LOOKS).raw, ir.Constant(I64, 0))):
        yield_type = ir.FunctionType(ir.IntType(32), []).as_pointer()
        let_others_run = code.load(code.address, 8 * _Run.YIELD, I64)
        builder.call(builder.inttoptr(let_others_run.raw, yield_type), [])
    count.add_incoming((looks + 1).raw, builder.block)
    builder.branch(look)
    builder.position_at_end(after)


def _pointer(code: Code, address: Value) -> Any:
    return code.builder.inttoptr(address.raw, I64.as_pointer())


@cache
def _address_of(name: str) -> int:
    """Return the address of a function of the C library."""
    address = ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value
    assert address is not None
    return address


@cache
def parallel() -> Any:
    """Return GNU OpenMP's function that runs a C function on threads, of torch's own library.

    None where torch has another OpenMP; then one thread does the work.
    """
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    if not bundled:
        return None
    function = ctypes.CDLL(str(bundled[0])).GOMP_parallel
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function

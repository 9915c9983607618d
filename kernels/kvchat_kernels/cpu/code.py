"""Writing and compiling CPU kernels: LLVM instructions (llvmlite) as Python expressions.

A kernel is a function of three numbers: the address of its task (`task.py`: what stays the same
from step to step, addresses of weights and buffers, and sizes), the address of the step's header
(`step.py`), and the number of the unit to compute. Its code is written in vectors of 8 floats,
which LLVM turns into the instructions of the processor.

Compiling a kernel takes 20 ms to 4 s (`compiler.py`); compiled code is kept on the disk
(`object_cache.py`).

`KVCHAT_CPU=x86-64-v3` compiles for any processor with AVX2, as if this one had no more,
`x86-64-v3+avxvnni` for one with AVX-VNNI beside it, and `x86-64-v2` for one without AVX
(`level.py`).
"""

import ctypes
import gc
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from kvchat_kernels.cpu.compiler import Function, Target
from kvchat_kernels.cpu.level import CPU_VARIABLE, level
from kvchat_kernels.cpu.object_cache import file_name
from kvchat_kernels.cpu.task import Place, Task

# Floats of a vector. Widths and head dims are multiples of it.
LANES = 8

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
F32S = ir.VectorType(F32, LANES)
I32S = ir.VectorType(I32, LANES)

_CONTRACT = ("contract",)
# Conversions between float16 and float32: kernels have no other floats.
_OF_HALVES = {"fpext": "_halves_as_floats", "fptrunc": "_floats_as_halves"}


def _operator(for_ints: str, for_floats: str = "") -> Callable[["Value", "Value | float"], "Value"]:
    """Return an operator of values that writes one of these instructions."""

    def write(value: "Value", other: "Value | float") -> "Value":
        builder, operands = value.code.builder, (value.raw, value._other(other))
        if _is_float(value.type):
            return Value(value.code, getattr(builder, for_floats)(*operands, flags=_CONTRACT))
        return Value(value.code, getattr(builder, for_ints)(*operands))

    return write


class Value:
    """A number or a vector in code that is being written; operators write instructions.

    Integers are signed. Python numbers on the other side become constants of the same type.
    Comparisons give a value for `Code.select` and `Code.when`.
    """

    __slots__ = ("code", "raw")

    def __init__(self, code: "Code", raw: Any) -> None:
        self.code = code
        self.raw = raw

    @property
    def type(self) -> Any:
        return self.raw.type

    def _other(self, other: "Value | float") -> Any:
        return other.raw if isinstance(other, Value) else constant(other, self.type)

    __add__ = _operator("add", "fadd")
    __sub__ = _operator("sub", "fsub")
    __mul__ = _operator("mul", "fmul")
    __truediv__ = _operator("", "fdiv")
    __floordiv__ = _operator("sdiv")
    __mod__ = _operator("srem")
    __and__ = _operator("and_")
    __or__ = _operator("or_")
    __xor__ = _operator("xor")
    __lshift__ = _operator("shl")
    __rshift__ = _operator("lshr")  # fills with zeros

    def shifted_down(self, bits: int) -> "Value":
        """Return whole numbers shifted right; what comes in front has the sign's bit."""
        return Value(self.code, self.code.builder.ashr(self.raw, constant(bits, self.type)))

    def _compare(self, sign: str, other: "Value | float") -> "Value":
        builder = self.code.builder
        write = builder.fcmp_ordered if _is_float(self.type) else builder.icmp_signed
        return Value(self.code, write(sign, self.raw, self._other(other)))

    def __lt__(self, other: "Value | float") -> "Value":
        return self._compare("<", other)

    def __gt__(self, other: "Value | float") -> "Value":
        return self._compare(">", other)

    def __ge__(self, other: "Value | float") -> "Value":
        return self._compare(">=", other)


def _is_float(kind: Any) -> bool:
    return isinstance(getattr(kind, "element", kind), ir.FloatType | ir.HalfType)


def _like(kind: Any, element: Any) -> Any:
    """Return a vector type of other elements, or for a single value the element's type."""
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def constant(value: float, kind: Any) -> ir.Constant:
    """Return a constant; a vector has the value in all lanes."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [value] * kind.count)
    return ir.Constant(kind, value)


class Variable:
    """A place for a value that code changes, in a register where that is possible."""

    def __init__(self, code: "Code", start: Value) -> None:
        self._code = code
        with code.builder.goto_entry_block():
            self._slot = code.builder.alloca(start.type)
        self.set(start)

    def set(self, value: Value) -> None:
        self._code.builder.store(value.raw, self._slot)

    def get(self) -> Value:
        return Value(self._code, self._code.builder.load(self._slot))


class Code:
    """Writes the code of one kernel. Addresses and offsets are in bytes, as 64-bit numbers."""

    def __init__(
        self, builder: ir.IRBuilder, arguments: Sequence[Any], task: type[Task] | None = None
    ) -> None:
        """`arguments` are those of the function: task, header and unit, or an address alone."""
        self.builder = builder
        self.address = Value(self, arguments[0])
        self.step, self.unit = (Value(self, arguments[place % len(arguments)]) for place in (1, 2))
        self.task = _Fields(self, task)

    # Numbers

    def whole(self, value: int) -> Value:
        return Value(self, ir.Constant(I64, value))

    def single(self, value: float) -> Value:
        return Value(self, ir.Constant(F32, ctypes.c_float(value).value))

    def floats(self, value: float, count: int = LANES) -> Value:
        """Return a vector with the value in all lanes."""
        return Value(self, constant(ctypes.c_float(value).value, ir.VectorType(F32, count)))

    def variable(self, start: Value) -> Variable:
        return Variable(self, start)

    def least(self, one: Value, other: Value | float) -> Value:
        return self.select(one < other, one, Value(self, one._other(other)))

    def greatest(self, one: Value, other: Value | float) -> Value:
        return self.select(one > other, one, Value(self, one._other(other)))

    def select(self, condition: Value, one: Value, other: Value) -> Value:
        return Value(self, self.builder.select(condition.raw, one.raw, other.raw))

    def convert(self, instruction: str, value: Value, kind: Any) -> Value:
        """Write one of LLVM's conversions, such as `sext` or `sitofp`."""
        if instruction in _OF_HALVES and _has_no_halves():
            return getattr(self, _OF_HALVES[instruction])(value)
        return Value(self, getattr(self.builder, instruction)(value.raw, kind))

    def _halves_as_floats(self, value: Value) -> Value:
        """Return float16 as float32, by arithmetic on their bits."""
        ints = _like(value.type, I32)
        bits = self.convert("zext", self.as_bits(value, _like(value.type, I16)), ints)
        shifted = (bits & 0x7FFF) << 13
        # Exponents are 112 less in float16. This is exact, for numbers below the least normal too.
        scaled = self.as_bits(self.as_bits(shifted, _like(value.type, F32)) * 2.0**112, ints)
        is_finite = (bits & 0x7FFF) < 0x7C00
        result = self.select(is_finite, scaled, shifted | 0x7F800000) | ((bits & 0x8000) << 16)
        return self.as_bits(result, _like(value.type, F32))

    def _floats_as_halves(self, value: Value) -> Value:
        """Return float32 rounded to float16, ties to even, by arithmetic on their bits."""
        ints = _like(value.type, I32)
        bits = self.as_bits(value, ints)
        size = bits & 0x7FFFFFFF
        normal = (size - (112 << 23) + 0xFFF + ((size >> 13) & 1)) >> 13
        # Below the least normal number the sum with 0.5 has the bits wanted at its end.
        small = self.as_bits(self.as_bits(size, value.type) + 0.5, ints) - (126 << 23)
        result = self.select(size < 113 << 23, small, normal)
        infinite = Value(self, constant(0x7C00, ints))
        result = self.select(size < 143 << 23, result, infinite)
        result = self.select(size > 0x7F800000, infinite | 0x200, result) | ((bits >> 16) & 0x8000)
        shorts = self.convert("trunc", result, _like(value.type, I16))
        return self.as_bits(shorts, _like(value.type, F16))

    def call(
        self, name: str, kind: Any, *arguments: Value, fastmath: tuple[str, ...] = ()
    ) -> Value:
        """Call one of LLVM's own functions."""
        raw = [argument.raw for argument in arguments]
        function = self.builder.module.globals.get(name)
        if function is None:
            signature = ir.FunctionType(kind, [argument.type for argument in raw])
            function = ir.Function(self.builder.module, signature, name)
        return Value(self, self.builder.call(function, raw, fastmath=fastmath))

    def run_kernel(self, address: Value, task: Value, header: Value, unit: Value) -> None:
        """Run the kernel at an address."""
        kind = ir.FunctionType(ir.VoidType(), [I64] * 3).as_pointer()
        function = self.builder.inttoptr(address.raw, kind)
        self.builder.call(function, [task.raw, header.raw, unit.raw])

    # Memory

    def header(self, place: Place) -> Value:
        """Read a number of the step's header."""
        return self.load(self.step, 8 * place, I64)

    def load(self, address: Value, offset: "Value | int", kind: Any) -> Value:
        """Load a value, aligned or not."""
        loaded = self.builder.load(self._pointer(address, offset, kind))
        loaded.align = 1
        return Value(self, loaded)

    def store(self, value: Value, address: Value, offset: "Value | int") -> None:
        pointer = self._pointer(address, offset, value.type)
        self.builder.store(value.raw, pointer).align = 1

    def prefetch(self, address: Value, offset: "Value | int", *, to_second: bool = False) -> None:
        """Ask for the cache line at an address, which need not be one of ours.

        `to_second`: it comes to the second cache, and not to the first.
        """
        pointer = self._pointer(address, offset, I8)
        # to read, which cache, data
        hints = [constant(hint, I32) for hint in (0, 2 if to_second else 3, 1)]
        self.call("llvm.prefetch.p0", ir.VoidType(), *(Value(self, v) for v in (pointer, *hints)))

    def room(self, num_bytes: int) -> Value:
        """Return the address of memory on the stack, aligned to 64 bytes."""
        with self.builder.goto_entry_block():
            slot = self.builder.alloca(I8, num_bytes)
            slot.align = 64
            return Value(self, self.builder.ptrtoint(slot, I64))

    def _pointer(self, address: Value, offset: "Value | int", kind: Any) -> Any:
        return self.builder.inttoptr((address + offset).raw, kind.as_pointer())

    # Vectors

    def spread(self, value: Value, count: int = LANES) -> Value:
        """Return a vector with the value in all lanes."""
        undefined = ir.Constant(ir.VectorType(value.type, count), ir.Undefined)
        single = self.builder.insert_element(undefined, value.raw, ir.Constant(I32, 0))
        lanes = constant(0, ir.VectorType(I32, count))
        return Value(self, self.builder.shuffle_vector(single, undefined, lanes))

    def gathered(self, values: Sequence[Value]) -> Value:
        """Return a vector of single values."""
        kind = ir.VectorType(values[0].type, len(values))
        vector: Any = ir.Constant(kind, ir.Undefined)
        for lane, value in enumerate(values):
            vector = self.builder.insert_element(vector, value.raw, ir.Constant(I32, lane))
        return Value(self, vector)

    def picked(self, vector: Value, lanes: Sequence[int]) -> Value:
        """Return a vector of some lanes of another; of a single value, it in all lanes."""
        if not isinstance(vector.type, ir.VectorType):
            return self.spread(vector, len(lanes))
        order = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        return Value(self, self.builder.shuffle_vector(vector.raw, vector.raw, order))

    def shuffled(self, one: Value, other: Value, lanes: Sequence[int]) -> Value:
        """Return a vector of lanes of two: those of `other` count on from those of `one`."""
        order = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        return Value(self, self.builder.shuffle_vector(one.raw, other.raw, order))

    def joined(self, one: Value, other: Value | None = None) -> Value:
        """Return the lanes of one vector, then those of another; single values make two lanes."""
        if other is None:
            return one
        if not isinstance(one.type, ir.VectorType):
            return self.gathered((one, other))
        return self.shuffled(one, other, range(2 * one.type.count))

    def chain(self, vectors: Sequence[Value]) -> Value:
        """Return the lanes of all vectors, one after another; these are a power of two."""
        if len(vectors) == 1:
            return vectors[0]
        half = len(vectors) // 2
        return self.joined(self.chain(vectors[:half]), self.chain(vectors[half:]))

    def halves(self, vector: Value) -> list[Value]:
        """Return the vectors that `joined` has joined."""
        half = vector.type.count // 2
        if half == 1:
            return [self.lane(vector, number) for number in (0, 1)]
        return [self.picked(vector, range(first, first + half)) for first in (0, half)]

    def counting(self, count: int = LANES) -> Value:
        """Return the whole numbers from 0 on, 32 bits each."""
        return Value(self, ir.Constant(ir.VectorType(I32, count), list(range(count))))

    def widened(self, value: Value) -> Value:
        """Return a vector of 8 floats: those of a vector of up to 8, or a single one, and zeros."""
        if not isinstance(value.type, ir.VectorType):
            zeros = constant(0.0, F32S)
            return Value(self, self.builder.insert_element(zeros, value.raw, ir.Constant(I32, 0)))
        count = value.type.count
        order = ir.Constant(I32S, [min(lane, count) for lane in range(LANES)])
        zeros = constant(0.0, value.type)
        return Value(self, self.builder.shuffle_vector(value.raw, zeros, order))

    def neighbours(self, vector: Value) -> Value:
        """Return the sums of the lanes 0 and 1, 2 and 3, and so on."""
        even, odd = (self.picked(vector, range(first, vector.type.count, 2)) for first in (0, 1))
        return even + odd

    def lane(self, vector: Value, number: int) -> Value:
        return Value(self, self.builder.extract_element(vector.raw, ir.Constant(I32, number)))

    def total(self, vector: Value) -> Value:
        """Return the sum of a vector of 8 floats, added as a tree."""
        zero = self.single(0.0)
        return self.call("llvm.vector.reduce.fadd.v8f32", F32, zero, vector, fastmath=("reassoc",))

    def tree_total(self, vector: Value) -> Value:
        """Return the sum of a vector: its halves are added, then the halves of that, and so on."""
        while isinstance(vector.type, ir.VectorType):
            one, other = self.halves(vector)
            vector = one + other
        return vector

    def tree_totals(self, vectors: Sequence[Value], run: int) -> Value:
        """Return the sums of runs of lanes of vectors, added as `tree_total` adds, side by side.

        All are powers of two: the vectors, their lanes, and the `run`, which are no fewer than the
        vectors. Of a single run it is no vector.
        """
        rest = list(vectors)
        while len(rest) > 1:
            run //= 2
            pairs = zip(rest[::2], rest[1::2], strict=True)
            rest = [self._halves_added(one, other, run) for one, other in pairs]
        (sums,) = rest
        if sums.type.count == run:
            return self.tree_total(sums)
        while run > 1:
            run //= 2
            sums = self._halves_added(sums, None, run)
        return sums

    def _halves_added(self, one: Value, other: Value | None, half: int) -> Value:
        """Return the sums of the halves of all runs of 2 * `half` lanes of one or two vectors."""
        lanes = range(one.type.count if other is None else 2 * one.type.count)
        second = one if other is None else other
        lower, upper = ([lane for lane in lanes if lane // half % 2 == number] for number in (0, 1))
        return self.shuffled(one, second, lower) + self.shuffled(one, second, upper)

    def maximum(self, vector: Value) -> Value:
        """Return the largest of a vector's floats."""
        name = f"llvm.vector.reduce.fmax.v{vector.type.count}f32"
        return self.call(name, F32, vector, fastmath=("nnan", "nsz"))

    def as_bits(self, vector: Value, kind: Any) -> Value:
        return Value(self, self.builder.bitcast(vector.raw, kind))

    # Control

    @contextmanager
    def loop(self, start: "Value | int", end: "Value | int", step: int = 1) -> Iterator[Value]:
        """Write a loop; the body gets the index."""
        first, last = (
            value if isinstance(value, Value) else self.whole(value) for value in (start, end)
        )
        builder = self.builder
        before = builder.block
        head, body, after = (builder.append_basic_block() for _ in range(3))
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(I64)
        index.add_incoming(first.raw, before)
        builder.cbranch(builder.icmp_signed("<", index, last.raw), body, after)
        builder.position_at_end(body)
        yield Value(self, index)
        index.add_incoming(builder.add(index, ir.Constant(I64, step)), builder.block)
        builder.branch(head)
        builder.position_at_end(after)

    def chunk(self, count: Value) -> tuple[Value, Value]:
        """Return the run of `count` rows, or lines, that the unit computes: `chunk` of the task."""
        start = self.unit * self.task.chunk
        return start, self.least(start + self.task.chunk, count)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Write code that runs only where the condition holds."""
        with self.builder.if_then(condition.raw):
            yield


class _Fields:
    """The numbers of a kernel's task, as code reads them."""

    def __init__(self, code: Code, task: type[Task] | None) -> None:
        self._code = code
        self._task = task
        self._read: dict[str, Value] = {}

    def __getattr__(self, name: str) -> Value:
        """Read a field: a float32 here, a whole number once and at the kernel's beginning.

        Within a loop LLVM would read it again, with all that is computed of it, after every store.
        """
        assert self._task is not None, "a function without a task"
        code, offset = self._code, 8 * self._task.place_of(name)
        if self._task.is_float(name):
            return code.load(code.address, offset, F32)
        if name not in self._read:
            with code.builder.goto_entry_block():
                self._read[name] = code.load(code.address, offset, I64)
        return self._read[name]


OfTask = TypeVar("OfTask", bound=Task)


class Kernel(Generic[OfTask]):
    """A compiled function `(task address, header address, unit)`, which lives with this object.

    `forms` are the values that its code depends on beside `name`.
    """

    def __init__(
        self,
        name: str,
        task: type[OfTask],
        forms: tuple[object, ...],
        write: Callable[[Code], None],
    ) -> None:
        self.name = name
        self.task = task
        self._function = compiled(name, forms, task, write)

    @property
    def address(self) -> int:
        """The address of the function; waits until it is compiled. Raises RuntimeError."""
        return self._function.address


Forms = ParamSpec("Forms")


def kernel(
    name: str, task: type[OfTask]
) -> Callable[[Callable[Concatenate[Code, Forms], None]], Callable[Forms, Kernel[OfTask]]]:
    """Make of a function that writes a kernel's code one that returns the kernel.

    Its arguments behind the code are the kernel's forms. A kernel is made once for each.
    """

    def made_of(
        write: Callable[Concatenate[Code, Forms], None],
    ) -> Callable[Forms, Kernel[OfTask]]:
        @cache
        @wraps(write)
        def made(*forms: Forms.args, **named: Forms.kwargs) -> Kernel[OfTask]:
            all_forms = (*forms, *named.values())
            return Kernel(name, task, all_forms, lambda code: write(code, *forms, **named))

        return made  # type: ignore[return-value]  # it has lost its parameters' types

    return made_of


def compiled(
    name: str, forms: tuple[object, ...], task: type[Task] | None, write: Callable[[Code], None]
) -> Function:
    """Return a function that `write` writes; it is being compiled until its address is wanted.

    It takes the numbers of a kernel, or without a `task` a single address.
    """
    processor = _processor()
    target = Target(processor.name, processor.flags)
    return Function(f"{file_name_of(name, forms)}.o", target, lambda: written(task, write))


def file_name_of(name: str, forms: tuple[object, ...]) -> str:
    """Return a name that stands for a kernel's code on this processor, of these sources."""
    version = hashlib.sha256(repr(_version()).encode()).hexdigest()[:16]
    digest = hashlib.sha256(repr((_version(), name, forms)).encode()).hexdigest()[:32]
    return file_name(version, name, digest)


def written(task: type[Task] | None, write: Callable[[Code], None]) -> str:
    """Return the code of a function as LLVM's text."""
    module = ir.Module()
    kind = ir.FunctionType(ir.VoidType(), [I64] * (1 if task is None else 3))
    function = ir.Function(module, kind, "run")
    builder = ir.IRBuilder(function.append_basic_block())
    with _no_garbage_collection():
        write(Code(builder, function.args, task))
        builder.ret_void()
        return str(module)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Look for no garbage among many new objects: that took half of the time of writing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class _Processor:
    """What code is compiled for, by LLVM's names; `flags` are features beside those of `name`."""

    name: str
    flags: str
    features: frozenset[str]


@cache
def _processor() -> _Processor:
    """Return this processor, or the level that the environment names. Raises RuntimeError."""
    features = llvm.get_host_cpu_features()
    present = frozenset(feature for feature, is_there in features.items() if is_there)
    if name := os.environ.get(CPU_VARIABLE):
        chosen = level(name, present)
        flags = ",".join(f"+{flag}" for flag in chosen.flags)
        return _Processor(chosen.processor, flags, chosen.usable)
    return _Processor(llvm.get_host_cpu_name(), features.flatten(), present)


def processor_name() -> str:
    """Return LLVM's name of what kernels are compiled for. Raises RuntimeError."""
    return _processor().name


@cache
def _version() -> tuple[str, ...]:
    """Return what all compiled code depends on: the processor, LLVM, and the sources here."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    processor = _processor()
    return (processor.name, processor.flags, llvmlite.__version__, digest)


def has_feature(name: str) -> bool:
    """Return whether the processor has a feature, by LLVM's name for it."""
    return name in _processor().features


def _has_no_halves() -> bool:
    """Return whether LLVM would call functions for float16 that are not there: x86 before F16C."""
    return has_feature("sse2") and not has_feature("f16c")


def has_vnni() -> bool:
    """Return whether instructions multiply whole numbers and add up neighbours, in 256 bits."""
    return has_feature("avxvnni") or (has_feature("avx512vnni") and has_feature("avx512vl"))

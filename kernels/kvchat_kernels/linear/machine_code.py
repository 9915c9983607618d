"""Machine code for products with block weights, made by LLVM (llvmlite) when a model is loaded.

The code is written in LLVM's vector instructions, which LLVM turns into those of the processor.
Making it takes some 50 ms, so nothing compiled is kept on the disk.

An activation is 16 bits with a scale for each 32 columns: 2^-16 of the block's largest value, which
is below what bfloat16 keeps of it. The products of a block are whole numbers, so nothing is lost
in their sums; the blocks' results are added in float32.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from kvchat_kernels.linear.blocks import COLUMNS
from kvchat_kernels.linear.task import Place

# Rows of a matrix that a thread takes at once.
_CHUNK = 16
# Activation rows that share one reading of a row of weights.
_TILE_ROWS = 4
# Blocks whose scales are read together.
_GROUP = 8
# The largest level of an activation, and the least that a block's largest value counts as.
MOST, LEAST = 32767.0, 1e-30

_i8, _i16, _i32, _i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_f16, _f32 = ir.HalfType(), ir.FloatType()
_V8F, _V16F, _V32F = (ir.VectorType(_f32, count) for count in (_GROUP, 16, COLUMNS))
_V8I = ir.VectorType(_i32, 8)
_V16B, _V16S = ir.VectorType(_i8, 16), ir.VectorType(_i16, 16)
_CONTRACT = ("contract",)

Body = Callable[[ir.IRBuilder, "_Task"], None]
Code = Any  # a ctypes function that takes the address of a task


@cache
def product_code(bits: int, block: int, is_half: bool) -> Code:
    """Return the code that multiplies few rows with a matrix of this layout."""
    return _compiled(lambda builder, task: _write_products(builder, task, bits, block, is_half))


@cache
def unpacking_code(bits: int, block: int, is_half: bool) -> Code:
    """Return the code that writes rows of a matrix of this layout as float32."""
    return _compiled(lambda builder, task: _write_unpacking(builder, task, bits, block, is_half))


@cache
def rounding_code() -> Code:
    """Return the code that rounds activation rows to 16 bits."""
    return _compiled(_write_rounding)


# Compiling


def _compiled(write: Body) -> Code:
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_i64]), "run")
    builder = ir.IRBuilder(function.append_basic_block())
    write(builder, _Task(builder, function.args[0]))
    builder.ret_void()
    address, engine = _machine_code(str(module))
    code = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
    code.engine = engine  # type: ignore[attr-defined]  # the code lives as long as its engine
    return code


def _machine_code(text: str) -> tuple[int, Any]:
    """Compile a module with a function `run`; return its address and what owns the code."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True
    )
    module = llvm.parse_assembly(text)
    module.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(3))
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine.get_function_address("run"), engine


def _has_avx2() -> bool:
    return bool(llvm.get_host_cpu_features().get("avx2", False))


class _Task:
    """Reads the numbers of a task (`task.py`) in code that is being written."""

    def __init__(self, builder: ir.IRBuilder, address: Any) -> None:
        self._builder = builder
        self._address = address

    def __getitem__(self, place: Place) -> Any:
        return self._builder.load(self.pointer(place))

    def pointer(self, place: Place) -> Any:
        at = self._builder.add(self._address, _int(8 * place))
        return self._builder.inttoptr(at, _i64.as_pointer())


def _int(value: int) -> ir.Constant:
    return ir.Constant(_i64, value)


def _const(value: float, kind: ir.VectorType) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


@contextmanager
def _loop(builder: ir.IRBuilder, start: Any, end: Any, step: int = 1) -> Iterator[Any]:
    """Write a loop; the body gets the index."""
    before = builder.block
    head, body, after = (builder.append_basic_block() for _ in range(3))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(_i64)
    index.add_incoming(start, before)
    builder.cbranch(builder.icmp_signed("<", index, end), body, after)
    builder.position_at_end(body)
    yield index
    index.add_incoming(builder.add(index, _int(step)), builder.block)
    builder.branch(head)
    builder.position_at_end(after)


@contextmanager
def _rows_of_threads(builder: ir.IRBuilder, task: _Task) -> Iterator[Any]:
    """Write loops over chunks of rows that threads take from a counter; the body gets the row."""
    head, body, after = (builder.append_basic_block() for _ in range(3))
    end = task[Place.NUM_OUT]
    builder.branch(head)
    builder.position_at_end(head)
    start = builder.atomic_rmw("add", task.pointer(Place.NEXT), _int(_CHUNK), "monotonic")
    builder.cbranch(builder.icmp_signed("<", start, end), body, after)
    builder.position_at_end(body)
    last = builder.add(start, _int(_CHUNK))
    last = builder.select(builder.icmp_signed("<", last, end), last, end)
    with _loop(builder, start, last) as row:
        yield row
    builder.branch(head)
    builder.position_at_end(after)


def _load(builder: ir.IRBuilder, address: Any, offset: Any, kind: Any) -> Any:
    """Load a value from an address and an offset in bytes, aligned or not."""
    loaded = builder.load(builder.inttoptr(builder.add(address, offset), kind.as_pointer()))
    loaded.align = 1
    return loaded


def _store(builder: ir.IRBuilder, value: Any, address: Any, offset: Any) -> None:
    pointer = builder.inttoptr(builder.add(address, offset), value.type.as_pointer())
    builder.store(value, pointer).align = 1


def _splat(builder: ir.IRBuilder, value: Any, count: int) -> Any:
    undefined = ir.Constant(ir.VectorType(value.type, count), ir.Undefined)
    single = builder.insert_element(undefined, value, ir.Constant(_i32, 0))
    return builder.shuffle_vector(single, undefined, _const(0, ir.VectorType(_i32, count)))


def _call(
    builder: ir.IRBuilder, name: str, kind: Any, *arguments: Any, fastmath: tuple[str, ...] = ()
) -> Any:
    """Call one of LLVM's own functions."""
    signature = ir.FunctionType(kind, [argument.type for argument in arguments])
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, signature, name)
    return builder.call(function, arguments, fastmath=fastmath)


# Reading weights


def _levels(builder: ir.IRBuilder, address: Any, index: Any, bits: int) -> list[Any]:
    """Load the levels of 32 columns: two vectors of 16 x 16 bits."""
    if bits == 8:
        start = builder.mul(index, _int(COLUMNS))
        places = (start, builder.add(start, _int(16)))
        return [builder.sext(_load(builder, address, place, _V16B), _V16S) for place in places]
    packed = _load(builder, address, builder.mul(index, _int(COLUMNS // 2)), _V16B)
    low, high = builder.and_(packed, _const(15, _V16B)), builder.lshr(packed, _const(4, _V16B))
    return [builder.zext(low, _V16S), builder.zext(high, _V16S)]


def _scale(builder: ir.IRBuilder, address: Any, index: Any, is_half: bool, count: int = 1) -> Any:
    """Load one scale, or a vector of `count` from `index` on, as float32."""
    kind, size = (_f16, 2) if is_half else (_f32, 4)
    wide: Any = _f32
    if count > 1:
        kind, wide = ir.VectorType(kind, count), ir.VectorType(_f32, count)
    loaded = _load(builder, address, builder.mul(index, _int(size)), kind)
    return builder.fpext(loaded, wide) if is_half else loaded


def _row_addresses(
    builder: ir.IRBuilder, task: _Task, row: Any, bits: int, block: int, is_half: bool
) -> tuple[Any, Any, Any]:
    """Return the addresses of a row's levels, scales and minimums."""
    count = task[Place.NUM_BLOCKS]
    scale_bytes = (2 if is_half else 4) * (COLUMNS // block)
    blocks = builder.mul(row, count)
    levels = builder.add(task[Place.LEVELS], builder.mul(blocks, _int(COLUMNS * bits // 8)))
    offset = builder.mul(blocks, _int(scale_bytes))
    scales = builder.add(task[Place.SCALES], offset)
    return levels, scales, builder.add(task[Place.MINIMUMS], offset)


# Products


def _pair_sums(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """Return the products of two vectors of 16 x 16 bits, neighbours added: 8 x 32 bits."""
    if _has_avx2():
        return _call(builder, "llvm.x86.avx2.pmadd.wd", _V8I, a, b)
    wide = ir.VectorType(_i32, 16)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    undefined = ir.Constant(wide, ir.Undefined)
    even, odd = (
        builder.shuffle_vector(products, undefined, ir.Constant(_V8I, list(range(start, 16, 2))))
        for start in (0, 1)
    )
    return builder.add(even, odd)


class _RowSum:
    """One activation row in code that is being written: its addresses and its sums so far."""

    def __init__(self, builder: ir.IRBuilder, task: _Task, row: Any) -> None:
        blocks = builder.mul(row, task[Place.NUM_BLOCKS])
        self._builder = builder
        self._x = builder.add(task[Place.X], builder.mul(blocks, _int(2 * COLUMNS)))
        self._scales = builder.add(task[Place.X_SCALES], builder.mul(blocks, _int(4)))
        self._sums = builder.add(task[Place.X_SUMS], builder.mul(blocks, _int(4)))
        with builder.goto_entry_block():
            self._total, self._offset = builder.alloca(_V8F), builder.alloca(_V8F)
        for place in (self._total, self._offset):
            builder.store(_const(0.0, _V8F), place)

    def scales(self, index: Any, count: int = 1) -> Any:
        return _scale(self._builder, self._scales, index, False, count)

    def add_products(self, index: Any, levels: list[Any], factors: list[Any]) -> None:
        """Add the products of 32 columns: with one factor for all, or one for each half."""
        builder = self._builder
        start = builder.mul(index, _int(2 * COLUMNS))
        sums = [
            _pair_sums(builder, half, _load(builder, self._x, builder.add(start, at), _V16S))
            for half, at in zip(levels, (_int(0), _int(32)), strict=True)
        ]
        if len(factors) == 1:
            sums = [builder.add(*sums)]
        value = builder.load(self._total)
        for part, factor in zip(sums, factors, strict=True):
            product = builder.fmul(builder.sitofp(part, _V8F), factor, flags=_CONTRACT)
            value = builder.fadd(value, product, flags=_CONTRACT)
        builder.store(value, self._total)

    def add_minimums(self, index: Any, minimums: Any, count: int = 1) -> None:
        """Add minimums times the sums of their blocks."""
        builder = self._builder
        shift = builder.fmul(minimums, _scale(builder, self._sums, index, False, count))
        if count == 1:
            shift = builder.insert_element(_const(0.0, _V8F), shift, ir.Constant(_i32, 0))
        builder.store(builder.fadd(builder.load(self._offset), shift), self._offset)

    def result(self) -> Any:
        builder = self._builder
        sums = builder.fadd(builder.load(self._total), builder.load(self._offset))
        zero = ir.Constant(_f32, 0.0)
        # reassoc: a tree of additions instead of eight one after another
        name = "llvm.vector.reduce.fadd.v8f32"
        return _call(builder, name, _f32, zero, sums, fastmath=("reassoc",))


def _write_products(
    builder: ir.IRBuilder, task: _Task, bits: int, block: int, is_half: bool
) -> None:
    """Write: for each row of the matrix, its products with all activation rows."""
    num_rows, num_out = task[Place.NUM_ROWS], task[Place.NUM_OUT]
    tiled = builder.sub(num_rows, builder.srem(num_rows, _int(_TILE_ROWS)))
    with _rows_of_threads(builder, task) as row:
        weights = _row_addresses(builder, task, row, bits, block, is_half)
        parts = ((_int(0), tiled, _TILE_ROWS), (tiled, num_rows, 1))
        for start, end, count in parts:
            with _loop(builder, start, end, count) as first:
                places = [builder.add(first, _int(number)) for number in range(count)]
                sums = [_RowSum(builder, task, place) for place in places]
                _write_row(builder, task, weights, sums, bits, block, is_half)
                for place, row_sum in zip(places, sums, strict=True):
                    index = builder.add(builder.mul(place, num_out), row)
                    offset = builder.mul(index, _int(4))
                    _store(builder, row_sum.result(), task[Place.OUT], offset)


def _write_row(
    builder: ir.IRBuilder,
    task: _Task,
    weights: tuple[Any, Any, Any],
    rows: list[_RowSum],
    bits: int,
    block: int,
    is_half: bool,
) -> None:
    """Write the products of one row of weights: groups of 8 blocks, and blocks that are left."""
    levels_at, scales_at, minimums_at = weights
    count = task[Place.NUM_BLOCKS]
    grouped: Any = _int(0)
    if block == COLUMNS:
        grouped = builder.sub(count, builder.srem(count, _int(_GROUP)))
        with _loop(builder, _int(0), grouped, _GROUP) as first:
            scales = _scale(builder, scales_at, first, is_half, _GROUP)
            factors = [builder.fmul(scales, row.scales(first, _GROUP)) for row in rows]
            if bits == 4:
                minimums = _scale(builder, minimums_at, first, is_half, _GROUP)
                for row in rows:
                    row.add_minimums(first, minimums, _GROUP)
            for place in range(_GROUP):
                index = builder.add(first, _int(place))
                levels = _levels(builder, levels_at, index, bits)
                for row, factor in zip(rows, factors, strict=True):
                    spread = builder.shuffle_vector(factor, factor, _const(place, _V8I))
                    row.add_products(index, levels, [spread])
    with _loop(builder, grouped, count) as index:
        levels = _levels(builder, levels_at, index, bits)
        per_32 = COLUMNS // block
        first = builder.mul(index, _int(per_32))
        places = [builder.add(first, _int(number)) for number in range(per_32)]
        single = [_scale(builder, scales_at, place, is_half) for place in places]
        for row in rows:
            x_scale = row.scales(index)
            row.add_products(
                index, levels, [_splat(builder, builder.fmul(s, x_scale), 8) for s in single]
            )
            if bits == 4:
                row.add_minimums(index, _scale(builder, minimums_at, index, is_half))


def _write_unpacking(
    builder: ir.IRBuilder, task: _Task, bits: int, block: int, is_half: bool
) -> None:
    """Write: each row of the matrix as float32, at its place counted from row 0."""
    count = task[Place.NUM_BLOCKS]
    with _rows_of_threads(builder, task) as row:
        levels_at, scales_at, minimums_at = _row_addresses(builder, task, row, bits, block, is_half)
        row_bytes = builder.mul(count, _int(4 * COLUMNS))
        out = builder.add(task[Place.OUT], builder.mul(row, row_bytes))
        with _loop(builder, _int(0), count) as index:
            first = builder.mul(index, _int(COLUMNS // block))
            for half, levels in enumerate(_levels(builder, levels_at, index, bits)):
                place = builder.add(first, _int(half if block == 16 else 0))
                scale = _splat(builder, _scale(builder, scales_at, place, is_half), 16)
                values = builder.fmul(builder.sitofp(levels, _V16F), scale)
                if bits == 4:
                    minimum = _scale(builder, minimums_at, place, is_half)
                    values = builder.fadd(values, _splat(builder, minimum, 16))
                start = builder.mul(index, _int(4 * COLUMNS))
                _store(builder, values, out, builder.add(start, _int(64 * half)))


# Activations


def _write_rounding(builder: ir.IRBuilder, task: _Task) -> None:
    """Write: each block of 32 values in 16 bits, its scale, and its sum."""
    with _loop(builder, _int(0), task[Place.NUM_BLOCKS]) as index:
        values = _load(builder, task[Place.OUT], builder.mul(index, _int(4 * COLUMNS)), _V32F)
        magnitudes = _call(builder, "llvm.fabs.v32f32", _V32F, values)
        # nnan: a tree of comparisons
        name = "llvm.vector.reduce.fmax.v32f32"
        largest = _call(builder, name, _f32, magnitudes, fastmath=("nnan", "nsz"))
        least = ir.Constant(_f32, ctypes.c_float(LEAST).value)
        is_more = builder.fcmp_ordered(">", largest, least)
        largest = builder.select(is_more, largest, least)
        most = ir.Constant(_f32, MOST)
        inverse = _splat(builder, builder.fdiv(most, largest), COLUMNS)
        rounded = _call(builder, "llvm.rint.v32f32", _V32F, builder.fmul(values, inverse))
        levels = builder.fptosi(rounded, ir.VectorType(_i32, COLUMNS))
        total = _call(builder, "llvm.vector.reduce.add.v32i32", _i32, levels)
        short = builder.trunc(levels, ir.VectorType(_i16, COLUMNS))
        _store(builder, short, task[Place.X], builder.mul(index, _int(2 * COLUMNS)))
        scale = builder.fdiv(largest, most)
        offset = builder.mul(index, _int(4))
        _store(builder, scale, task[Place.X_SCALES], offset)
        sum_ = builder.fmul(builder.sitofp(total, _f32), scale)
        _store(builder, sum_, task[Place.X_SUMS], offset)

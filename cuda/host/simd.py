"""The vector layer: what a Numba function of this back end may do with raw memory, 16 floats at a time.

`F32x16` is LLVM's generic vector type: one register with AVX-512, two with AVX2, four with NEON or SSE; LLVM does the
splitting, so that no function here knows the processor. Every instruction is one Python function that builds its LLVM
code; inside compiled functions it is called by its name with integer addresses (in bytes) and vectors, which also take
`+ - * /`. Arithmetic is IEEE float32 with nothing reordered or contracted, hence the same bits on every processor.
"""
from __future__ import annotations

import inspect
import math
import operator
import platform
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_builtin
from numba.core.registry import cpu_target
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

LANES = 16
VECTOR_BYTES = 64

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_F32, _F64 = ir.FloatType(), ir.DoubleType()
_VECTOR = ir.VectorType(_F32, LANES)
_INTEGERS = ir.VectorType(_I32, LANES)


class F32x16Type(types.Type):                   # 16 float32
    def __init__(self) -> None:
        super().__init__(name="F32x16")


class I32x16Type(types.Type):                   # 16 int32
    def __init__(self) -> None:
        super().__init__(name="I32x16")


F32x16, I32x16 = F32x16Type(), I32x16Type()


@register_model(F32x16Type)
class _F32x16Model(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: types.Type) -> None:
        super().__init__(manager, numba_type, _VECTOR)


@register_model(I32x16Type)
class _I32x16Model(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: types.Type) -> None:
        super().__init__(manager, numba_type, _INTEGERS)


def instruction(result: types.Type, *parameters: types.Type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes `build(builder, *values) -> value` an instruction of the given Numba types; None stands for no value."""
    def decorate(build: Callable[..., Any]) -> Callable[..., Any]:
        def generate(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
            value = build(builder, *arguments)
            return context.get_dummy_value() if value is None else value

        def define(context: Any, *_arguments: Any) -> Any:
            return result(*parameters), generate

        names = ["context", *list(inspect.signature(build).parameters)[1:]]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        setattr(define, "__signature__", inspect.Signature([inspect.Parameter(name, kind) for name in names]))
        define.__name__ = define.__qualname__ = build.__name__
        define.__doc__ = build.__doc__
        made: Callable[..., Any] = intrinsic(define)
        return made
    return decorate


# ---- Building blocks of the instructions

def _pointer(builder: ir.IRBuilder, address: ir.Value, element: ir.Type) -> ir.Value:
    return builder.inttoptr(address, element.as_pointer())


def _load(builder: ir.IRBuilder, address: ir.Value, element: ir.Type, align: int) -> ir.Value:
    value = builder.load(_pointer(builder, address, element), typ=element)
    value.align = align                         # NOTE: what a caller's array guarantees, not the vector's own size
    return value


def _store(builder: ir.IRBuilder, address: ir.Value, value: ir.Value, align: int) -> None:
    builder.store(value, _pointer(builder, address, value.type)).align = align


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
    declared = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, declared, name), arguments)


def _constant(value: float) -> ir.Constant:
    """The same float32 in all lanes."""
    return ir.Constant(_VECTOR, [_F32(value)] * LANES)


def _integers(value: int) -> ir.Constant:
    return ir.Constant(_INTEGERS, [_I32(value)] * LANES)


def _splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    vector = ir.VectorType(scalar.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _I32(0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), ir.Constant(_INTEGERS, [_I32(0)] * LANES))


def _fma(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    return _call(builder, "llvm.fma.v16f32", _VECTOR, x, y, z)


def _copy_floats(builder: ir.IRBuilder, source: ir.Value, destination: ir.Value, count: ir.Value) -> None:
    """One by one. NOTE: LLVM's masked loads and stores changed their arguments between versions."""
    with cgutils.for_range(builder, count) as loop:
        offset = builder.mul(loop.index, _I64(4))
        value = _load(builder, builder.add(source, offset), _F32, 4)
        _store(builder, builder.add(destination, offset), value, 4)


def _select(builder: ir.IRBuilder, comparison: str, x: ir.Value, y: ir.Value, then: ir.Value, other: ir.Value
            ) -> ir.Value:
    """Per lane: x COMPARISON y ? then : other; a comparison with NaN is false."""
    return builder.select(builder.fcmp_ordered(comparison, x, y), then, other)


def _codes(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.zext(_load(builder, address, ir.VectorType(_I8, LANES), 1), _INTEGERS)


def _code_floats(builder: ir.IRBuilder, codes: ir.Value, bits: int, nibble: int) -> ir.Value:
    """Bytes, or their low (0) or high (1) nibbles, as floats."""
    if bits == 4:
        codes = builder.lshr(codes, _integers(4)) if nibble else builder.and_(codes, _integers(15))
    return builder.sitofp(codes, _VECTOR)


def _exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    lowest, highest = _constant(-87.3), _constant(88.3)
    clamped = _select(builder, "<", x, lowest, lowest, x)           # a NaN stays: its comparisons are false
    clamped = _select(builder, ">", clamped, highest, highest, clamped)
    # Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    magic = _constant(1.5 * 2.0 ** 23)
    shifted = _fma(builder, clamped, _constant(1 / math.log(2)), magic)
    n = builder.fsub(shifted, magic)
    r = _fma(builder, n, _constant(-0.693359375), clamped)          # ln 2 in two parts, the first exact in n * part
    r = _fma(builder, n, _constant(0.693359375 - math.log(2)), r)
    p = _constant(0.0013813142)
    for coefficient in (0.008369419, 0.041668456, 0.16666515, 0.49999994):
        p = _fma(builder, p, r, _constant(coefficient))
    p = _fma(builder, p, builder.fmul(r, r), builder.fadd(r, _constant(1.0)))
    exponent = builder.shl(builder.add(builder.bitcast(shifted, _INTEGERS), _integers(127)), _integers(23))
    value = builder.fmul(p, builder.bitcast(exponent, _VECTOR))
    value = _select(builder, "<", x, lowest, _constant(0.0), value)
    return _select(builder, ">", x, highest, _constant(math.inf), value)


def _fold(builder: ir.IRBuilder, vector: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Lanes combined in one fixed tree: i with i + 8, then i + 4, i + 2, i + 1."""
    width = LANES
    while width > 1:
        width //= 2
        halves = [builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_I32, width), [
            _I32(lane) for lane in range(start, start + width)])) for start in (0, width)]
        vector = combine(*halves)
    return builder.extract_element(vector, _I32(0))


# ---- Scalars in memory

@instruction(types.int64, types.int64)
def load_i64(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return _load(builder, address, _I64, 8)


@instruction(types.int64, types.int64, types.int64)
def word(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
    """The int64 number `index` of a table."""
    return _load(builder, builder.add(address, builder.mul(index, _I64(8))), _I64, 8)


@instruction(types.float32, types.int64, types.int64)
def real(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
    """The float64 number `index` of a table, as float32."""
    return builder.fptrunc(_load(builder, builder.add(address, builder.mul(index, _I64(8))), _F64, 8), _F32)


@instruction(types.int64, types.int64)
def load_i32(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.sext(_load(builder, address, _I32, 4), _I64)


@instruction(types.int64, types.int64)
def load_u16(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.zext(_load(builder, address, _I16, 2), _I64)


@instruction(types.int64, types.int64)
def load_u8(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.zext(_load(builder, address, _I8, 1), _I64)


@instruction(types.float32, types.int64)
def load_f32(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return _load(builder, address, _F32, 4)


@instruction(types.void, types.int64, types.float32)
def store_f32(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    _store(builder, address, value, 4)


# ---- Vectors in memory

@instruction(F32x16, types.int64)
def load(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """16 floats."""
    return _load(builder, address, _VECTOR, 4)


@instruction(F32x16, types.int64, types.int64)
def load_first(builder: ir.IRBuilder, address: ir.Value, count: ir.Value) -> ir.Value:
    """The first `count` (0..16) floats, zeros in the other lanes; memory behind them is not touched."""
    lanes = cgutils.alloca_once_value(builder, _constant(0.0))
    builder.store(_constant(0.0), lanes)        # the slot is the function's, not the call's
    _copy_floats(builder, address, builder.ptrtoint(lanes, _I64), count)
    return builder.load(lanes, typ=_VECTOR)


@instruction(types.void, types.int64, F32x16)
def store(builder: ir.IRBuilder, address: ir.Value, vector: ir.Value) -> None:
    _store(builder, address, vector, 4)


@instruction(types.void, types.int64, F32x16, types.int64)
def store_first(builder: ir.IRBuilder, address: ir.Value, vector: ir.Value, count: ir.Value) -> None:
    """The first `count` (0..16) lanes; memory behind them is not touched."""
    lanes = cgutils.alloca_once(builder, _VECTOR)
    builder.store(vector, lanes)
    _copy_floats(builder, builder.ptrtoint(lanes, _I64), address, count)


@instruction(I32x16, types.int64)
def load_codes(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """16 bytes as integers 0..255."""
    return _codes(builder, address)


@instruction(F32x16, types.int64)
def load_f16(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """16 IEEE halves, exactly, subnormals, infinities and NaN too. By integers: not every processor converts them."""
    bits = builder.zext(_load(builder, address, ir.VectorType(_I16, LANES), 2), _INTEGERS)
    magnitude = builder.shl(builder.and_(bits, _integers(0x7FFF)), _integers(13))
    value = builder.fmul(builder.bitcast(magnitude, _VECTOR), _constant(2.0 ** 112))    # exponent bias 15 -> 127
    special = builder.icmp_unsigned(">=", magnitude, _integers(0x7C00 << 13))           # infinity, NaN
    widened = builder.bitcast(builder.or_(magnitude, _integers(0x7F800000)), _VECTOR)
    value = builder.bitcast(builder.select(special, widened, value), _INTEGERS)
    sign = builder.shl(builder.and_(bits, _integers(0x8000)), _integers(16))
    return builder.bitcast(builder.or_(value, sign), _VECTOR)


@instruction(F32x16, types.int64)
def load_bf16(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """16 bfloat16: the upper halves of float32."""
    bits = builder.zext(_load(builder, address, ir.VectorType(_I16, LANES), 2), _INTEGERS)
    return builder.bitcast(builder.shl(bits, _integers(16)), _VECTOR)


# ---- Arithmetic

for _operator, _method in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"),
                           (operator.truediv, "fdiv")):
    infer_global(_operator)(type("F32x16Operator", (ConcreteTemplate,), {
        "cases": [signature(F32x16, F32x16, F32x16)]}))

    @lower_builtin(_operator, F32x16, F32x16)
    def _lower(_context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any, method: str = _method) -> Any:
        return getattr(builder, method)(*arguments)


@instruction(F32x16, types.float32)
def splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """The scalar in every lane."""
    return _splat(builder, scalar)


@instruction(F32x16, I32x16)
def to_float(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    return _code_floats(builder, codes, 8, 0)


@instruction(F32x16, I32x16)
def low_nibble(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    """Bits 0..3 of each byte, as floats."""
    return _code_floats(builder, codes, 4, 0)


@instruction(F32x16, I32x16)
def high_nibble(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    """Bits 4..7 of each byte, as floats."""
    return _code_floats(builder, codes, 4, 1)


@instruction(F32x16, F32x16, F32x16, F32x16)
def fma(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x * y + z, rounded once."""
    return _fma(builder, x, y, z)


@instruction(types.float32, types.float32, types.float32, types.float32)
def scalar_fma(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x * y + z, rounded once."""
    return _call(builder, "llvm.fma.f32", _F32, x, y, z)


@instruction(F32x16, F32x16, F32x16)
def maximum(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """x > y ? x : y. A NaN in x is lost; callers let it come through elsewhere."""
    return _select(builder, ">", x, y, x, y)


@instruction(F32x16, F32x16, types.int64, types.int64, types.float32)
def keep_lanes(builder: ir.IRBuilder, vector: ir.Value, first: ir.Value, last: ir.Value, other: ir.Value) -> ir.Value:
    """Lanes first <= i < last of the vector, `other` elsewhere. Any int64 bounds."""
    lane_ids = ir.Constant(ir.VectorType(_I64, LANES), [_I64(lane) for lane in range(LANES)])
    inside = builder.and_(builder.icmp_signed(">=", lane_ids, _splat(builder, first)),
                          builder.icmp_signed("<", lane_ids, _splat(builder, last)))
    return builder.select(inside, vector, _splat(builder, other))


@instruction(types.float32, F32x16, types.int64)
def lane(builder: ir.IRBuilder, vector: ir.Value, index: ir.Value) -> ir.Value:
    """The number in one lane."""
    return builder.extract_element(vector, index)


@instruction(types.float32, F32x16)
def lane_sum(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """Sum of the lanes in a fixed tree."""
    return _fold(builder, vector, builder.fadd)


@instruction(types.float32, F32x16)
def lane_max(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """Largest lane; see `maximum` for NaN."""
    def larger(x: ir.Value, y: ir.Value) -> ir.Value:
        return _select(builder, ">", x, y, x, y)
    return _fold(builder, vector, larger)




@instruction(F32x16, F32x16)
def exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e^x, relative error below 2e-7; 0 below -87.3, infinity above 88.3, NaN for NaN.

    x = n ln 2 + r with |r| <= ln 2 / 2: a minimax polynomial in r, scaled by 2^n in the exponent bits.
    """
    return _exp(builder, x)


@instruction(F32x16, F32x16)
def tanh(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Relative error below 3e-7; NaN for NaN. An odd minimax polynomial near 0, by `exp` elsewhere."""
    square = builder.fmul(x, x)
    p = _constant(-0.005681279)
    for coefficient in (0.020618621, -0.053733695, 0.13331373, -0.3333328):
        p = _fma(builder, p, square, _constant(coefficient))
    near = _fma(builder, builder.fmul(p, square), x, x)
    size = _call(builder, "llvm.fabs.v16f32", _VECTOR, x)
    denominator = builder.fadd(_exp(builder, builder.fadd(size, size)), _constant(1.0))
    far = builder.fsub(_constant(1.0), builder.fdiv(_constant(2.0), denominator))
    far = _call(builder, "llvm.copysign.v16f32", _VECTOR, far, x)
    return _select(builder, "<", size, _constant(0.625), near, far)


# ---- Threads

@instruction(types.int64, types.int64, types.int64)
def atomic_add(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> ir.Value:
    """Adds to an int64 in memory, sequentially consistent; returns what was there before."""
    return builder.atomic_rmw("add", _pointer(builder, address, _I64), value, "seq_cst")


@instruction(types.int64, types.int64)
def atomic_load(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """An int64, together with all that its writer wrote before it."""
    return builder.load_atomic(_pointer(builder, address, _I64), "acquire", 8, typ=_I64)


@instruction(types.void)
def pause(builder: ir.IRBuilder) -> None:
    """Tells the processor that this is a waiting loop."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64", "i686"):
        _call(builder, "llvm.x86.sse2.pause", ir.VoidType())
    elif machine in ("arm64", "aarch64"):
        _call(builder, "llvm.aarch64.hint", ir.VoidType(), _I32(1))


@instruction(types.void)
def yield_thread(builder: ir.IRBuilder) -> None:
    """Lets another thread have this core."""
    _call(builder, "SwitchToThread" if sys.platform == "win32" else "sched_yield", _I32)


@instruction(types.void, types.int64, types.int64, types.int64, types.int64, types.int64)
def call(builder: ir.IRBuilder, function: ir.Value, a: ir.Value, b: ir.Value, c: ir.Value, d: ir.Value) -> None:
    """Calls the C function at address `function` with four int64."""
    declared = ir.FunctionType(ir.VoidType(), [_I64] * 4)
    builder.call(builder.inttoptr(function, declared.as_pointer()), [a, b, c, d])


# ---- The register tile: the one inner loop of matrix products and of attention

HAS_AVX512 = "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2].split(",")
# As many sums as fit the registers, beside the weights and the input in use: up to MAX_ROWS rows with one vector of
# outputs, up to PAIR_ROWS rows with two.
MAX_ROWS = 12 if HAS_AVX512 else 6
PAIR_ROWS = 12 if HAS_AVX512 else 2

_Accumulate = Callable[[list[ir.Value], ir.Value], None]    # see _tile_of


def _tile(builder: ir.IRBuilder, name: str, rows: ir.Value, arguments: list[ir.Value],
          build: Callable[..., None]) -> None:
    """`build(builder, num_rows, *arguments)` for the number of rows at hand.

    Each number has a function of its own: inlined into a large one, the loop would lose its registers.
    """
    done = builder.append_basic_block("tile_done")
    switch = builder.switch(rows, done)
    for num_rows in range(1, MAX_ROWS + 1):
        function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [_I64] * len(arguments)),
                               builder.module.get_unique_name(f"{name}_{num_rows}"))
        function.linkage = "internal"
        function.attributes.add("noinline")
        inside = ir.IRBuilder(function.append_basic_block("entry"))
        build(inside, num_rows, *function.args)
        inside.ret_void()
        case = builder.append_basic_block(function.name)
        switch.add_case(_I64(num_rows), case)
        builder.position_at_end(case)
        builder.call(function, arguments)
        builder.branch(done)
    builder.position_at_end(done)


def _tile_of(builder: ir.IRBuilder, num_rows: int, strips: list[ir.Value], x: ir.Value, x_stride: ir.Value,
             start: ir.Value, start_stride: ir.Value, y: ir.Value, y_stride: ir.Value,
             multiply: Callable[[list[ir.Value], _Accumulate], None]) -> None:
    """Sums in registers from start to y. `multiply(strips, accumulate)` builds the loop over k; `accumulate(weights,
    offset)` adds to every row's sums weights[v] times the float at offset in the row of x."""
    def row_addresses(base: ir.Value, stride: ir.Value) -> list[ir.Value]:
        return [builder.add(base, builder.mul(_I64(row), stride)) for row in range(num_rows)]

    def accumulate(sums: list[list[ir.Value]], weights: list[ir.Value], offset: ir.Value) -> None:
        for address, row_sums in zip(inputs, sums, strict=True):
            value = _splat(builder, _load(builder, builder.add(address, offset), _F32, 4))
            for weight, total in zip(weights, row_sums, strict=True):
                builder.store(_fma(builder, weight, value, builder.load(total, typ=_VECTOR)), total)

    inputs = row_addresses(x, x_stride)
    vectors = list(range(len(strips)))
    for together in [vectors] if num_rows <= PAIR_ROWS else [[v] for v in vectors]:
        offsets = [_I64(v * VECTOR_BYTES) for v in together]
        sums = [[cgutils.alloca_once_value(builder, _load(builder, builder.add(address, offset), _VECTOR, 4))
                 for offset in offsets] for address in row_addresses(start, start_stride)]
        multiply([strips[v] for v in together], partial(accumulate, sums))
        for address, row_sums in zip(row_addresses(y, y_stride), sums, strict=True):
            for offset, total in zip(offsets, row_sums, strict=True):
                _store(builder, builder.add(address, offset), builder.load(total, typ=_VECTOR), 4)


@instruction(types.void, *[types.int64] * 11)
def tile(builder: ir.IRBuilder, rows: ir.Value, first: ir.Value, second: ir.Value, w_step: ir.Value, x: ir.Value,
         x_stride: ir.Value, count: ir.Value, start: ir.Value, start_stride: ir.Value, y: ir.Value, y_stride: ir.Value
         ) -> None:
    """y[row] = start[row] + sum over k < count of w[k] * x[row][k], for 1 to MAX_ROWS rows and 32 outputs.

    w[k] is two vectors, at `first` + k w_step and `second` + k w_step; x[row][k] a float at `x` + row x_stride + 4 k;
    start and y have two vectors a row, one after the other. Every sum is one chain of fused multiply-adds in ascending
    k, whatever `rows` is: that is why a row's bits depend on nothing but the row.
    """
    _tile(builder, "tile", rows, [first, second, w_step, x, x_stride, count, start, start_stride, y, y_stride],
          _build_tile)


def _build_tile(builder: ir.IRBuilder, num_rows: int, first: ir.Value, second: ir.Value, w_step: ir.Value, x: ir.Value,
                x_stride: ir.Value, count: ir.Value, start: ir.Value, start_stride: ir.Value, y: ir.Value,
                y_stride: ir.Value) -> None:
    def multiply(strips: list[ir.Value], accumulate: _Accumulate) -> None:
        with cgutils.for_range(builder, count) as loop:
            offset = builder.mul(loop.index, w_step)
            weights = [_load(builder, builder.add(strip, offset), _VECTOR, 4) for strip in strips]
            accumulate(weights, builder.mul(loop.index, _I64(4)))

    _tile_of(builder, num_rows, [first, second], x, x_stride, start, start_stride, y, y_stride, multiply)


@instruction(types.void, *[types.int64] * 10)
def tile_affine4(builder: ir.IRBuilder, rows: ir.Value, first: ir.Value, second: ir.Value, num_groups: ir.Value,
                 group: ir.Value, x: ir.Value, x_stride: ir.Value, start: ir.Value, y: ir.Value, y_stride: ir.Value
                 ) -> None:
    """`tile` with two packed strips of 4-bit codes, unpacked on the way; one start for all rows. The same bits as
    unpacking first."""
    _tile(builder, "tile_affine4", rows, [first, second, num_groups, group, x, x_stride, start, y, y_stride],
          partial(_build_affine_tile, bits=4))


@instruction(types.void, *[types.int64] * 10)
def tile_affine8(builder: ir.IRBuilder, rows: ir.Value, first: ir.Value, second: ir.Value, num_groups: ir.Value,
                 group: ir.Value, x: ir.Value, x_stride: ir.Value, start: ir.Value, y: ir.Value, y_stride: ir.Value
                 ) -> None:
    """`tile_affine4` for 8-bit codes."""
    _tile(builder, "tile_affine8", rows, [first, second, num_groups, group, x, x_stride, start, y, y_stride],
          partial(_build_affine_tile, bits=8))


def _build_affine_tile(builder: ir.IRBuilder, num_rows: int, first: ir.Value, second: ir.Value, num_groups: ir.Value,
                       group: ir.Value, x: ir.Value, x_stride: ir.Value, start: ir.Value, y: ir.Value,
                       y_stride: ir.Value, bits: int) -> None:
    """Strips as `pack.py` describes them: a group's scales, its offsets, its rows of codes."""
    codes_per_byte = 8 // bits
    code_rows = builder.sdiv(group, _I64(codes_per_byte))
    group_bytes = builder.add(builder.mul(code_rows, _I64(LANES)), _I64(2 * VECTOR_BYTES))

    def multiply(strips: list[ir.Value], accumulate: _Accumulate) -> None:
        with cgutils.for_range(builder, num_groups) as outer:
            groups = [builder.add(strip, builder.mul(outer.index, group_bytes)) for strip in strips]
            scales = [_load(builder, head, _VECTOR, 4) for head in groups]
            offsets = [_load(builder, builder.add(head, _I64(VECTOR_BYTES)), _VECTOR, 4) for head in groups]
            with cgutils.for_range(builder, code_rows) as inner:
                row = builder.add(builder.mul(inner.index, _I64(LANES)), _I64(2 * VECTOR_BYTES))
                codes = [_codes(builder, builder.add(head, row)) for head in groups]
                k = builder.add(builder.mul(outer.index, group), builder.mul(inner.index, _I64(codes_per_byte)))
                for nibble in range(codes_per_byte):
                    weights = [_fma(builder, _code_floats(builder, code, bits, nibble), scale, offset)
                               for code, scale, offset in zip(codes, scales, offsets, strict=True)]
                    accumulate(weights, builder.mul(builder.add(k, _I64(nibble)), _I64(4)))

    _tile_of(builder, num_rows, [first, second], x, x_stride, start, _I64(0), y, y_stride, multiply)

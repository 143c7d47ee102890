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
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

LANES = 16
VECTOR_BYTES = 64

_I8, _I16, _I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32, _F64 = ir.FloatType(), ir.DoubleType()
VECTOR = ir.VectorType(F32, LANES)
INTEGERS = ir.VectorType(_I32, LANES)


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
        super().__init__(manager, numba_type, VECTOR)


@register_model(I32x16Type)
class _I32x16Model(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: types.Type) -> None:
        super().__init__(manager, numba_type, INTEGERS)


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
        parameters_by_name = [inspect.Parameter(name, kind) for name in names]
        define.__signature__ = inspect.Signature(parameters_by_name)  # type: ignore[attr-defined]
        define.__name__ = define.__qualname__ = build.__name__
        made: Callable[..., Any] = intrinsic(define)
        return made
    return decorate


# ---- Building blocks of the instructions

def _pointer(builder: ir.IRBuilder, address: ir.Value, element: ir.Type) -> ir.Value:
    return builder.inttoptr(address, element.as_pointer())


def emit_load(builder: ir.IRBuilder, address: ir.Value, element: ir.Type, align: int) -> ir.Value:
    value = builder.load(_pointer(builder, address, element), typ=element)
    value.align = align                         # NOTE: what a caller's array guarantees, not the vector's own size
    return value


def emit_store(builder: ir.IRBuilder, address: ir.Value, value: ir.Value, align: int) -> None:
    builder.store(value, _pointer(builder, address, value.type)).align = align


def emit_call(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
    declared = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, declared, name), arguments)


def emit_constant(value: float) -> ir.Constant:
    """The same float32 in all lanes."""
    return ir.Constant(VECTOR, [F32(value)] * LANES)


def _integers(value: int) -> ir.Constant:
    return ir.Constant(INTEGERS, [_I32(value)] * LANES)


def emit_prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Into all caches, for reading."""
    pointer = _pointer(builder, address, _I8)
    emit_call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, _I32(0), _I32(3), _I32(1))


def emit_splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    vector = ir.VectorType(scalar.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _I32(0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), ir.Constant(INTEGERS, [_I32(0)] * LANES))


def emit_fma(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    return emit_call(builder, "llvm.fma.v16f32", VECTOR, x, y, z)


def _copy_floats(builder: ir.IRBuilder, source: ir.Value, destination: ir.Value, count: ir.Value) -> None:
    """One by one. NOTE: LLVM's masked loads and stores changed their arguments between versions."""
    with cgutils.for_range(builder, count) as loop:
        offset = builder.mul(loop.index, I64(4))
        value = emit_load(builder, builder.add(source, offset), F32, 4)
        emit_store(builder, builder.add(destination, offset), value, 4)


def _select(builder: ir.IRBuilder, comparison: str, x: ir.Value, y: ir.Value, then: ir.Value, other: ir.Value
            ) -> ir.Value:
    """Per lane: x COMPARISON y ? then : other; a comparison with NaN is false."""
    return builder.select(builder.fcmp_ordered(comparison, x, y), then, other)


def emit_words(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """16 words of 32 bits."""
    return emit_load(builder, address, INTEGERS, 4)


def emit_floats(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """16 float32."""
    return emit_load(builder, address, VECTOR, 4)


def emit_bf16_floats(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """16 bfloat16, the upper halves of float32."""
    bits = builder.zext(emit_load(builder, address, ir.VectorType(_I16, LANES), 2), INTEGERS)
    return builder.bitcast(builder.shl(bits, _integers(16)), VECTOR)


def emit_int8_floats(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """16 signed bytes."""
    return builder.sitofp(builder.sext(emit_load(builder, address, ir.VectorType(_I8, LANES), 1), INTEGERS), VECTOR)


def emit_code_floats(builder: ir.IRBuilder, words: ir.Value, bits: int, index: ir.Value) -> ir.Value:
    """Bits `bits` * index and following of each word, as floats."""
    shift = builder.mul(builder.trunc(index, _I32), _I32(bits))
    codes = builder.and_(builder.lshr(words, emit_splat(builder, shift)), _integers((1 << bits) - 1))
    return builder.sitofp(codes, VECTOR)


def _exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    lowest, highest = emit_constant(-87.3), emit_constant(88.3)
    clamped = _select(builder, "<", x, lowest, lowest, x)           # a NaN stays: its comparisons are false
    clamped = _select(builder, ">", clamped, highest, highest, clamped)
    # Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    magic = emit_constant(1.5 * 2.0 ** 23)
    shifted = emit_fma(builder, clamped, emit_constant(1 / math.log(2)), magic)
    n = builder.fsub(shifted, magic)
    r = emit_fma(builder, n, emit_constant(-0.693359375), clamped)      # ln 2 in two parts, the first exact in n * part
    r = emit_fma(builder, n, emit_constant(0.693359375 - math.log(2)), r)
    p = emit_constant(0.0013813142)
    for coefficient in (0.008369419, 0.041668456, 0.16666515, 0.49999994):
        p = emit_fma(builder, p, r, emit_constant(coefficient))
    p = emit_fma(builder, p, builder.fmul(r, r), builder.fadd(r, emit_constant(1.0)))
    exponent = builder.shl(builder.add(builder.bitcast(shifted, INTEGERS), _integers(127)), _integers(23))
    value = builder.fmul(p, builder.bitcast(exponent, VECTOR))
    value = _select(builder, "<", x, lowest, emit_constant(0.0), value)
    return _select(builder, ">", x, highest, emit_constant(math.inf), value)


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
    return emit_load(builder, address, I64, 8)


@instruction(types.int64, types.int64, types.int64)
def word(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
    """The int64 number `index` of a table."""
    return emit_load(builder, builder.add(address, builder.mul(index, I64(8))), I64, 8)


@instruction(types.float32, types.int64, types.int64)
def real(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
    """The float64 number `index` of a table, as float32."""
    return builder.fptrunc(emit_load(builder, builder.add(address, builder.mul(index, I64(8))), _F64, 8), F32)


@instruction(types.int64, types.int64)
def load_i32(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.sext(emit_load(builder, address, _I32, 4), I64)


@instruction(types.int64, types.int64)
def load_u8(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.zext(emit_load(builder, address, _I8, 1), I64)


@instruction(types.void, types.int64, types.int64)
def store_u8(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    emit_store(builder, address, builder.trunc(value, _I8), 1)


@instruction(types.int64, types.int64)
def load_u16(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.zext(emit_load(builder, address, _I16, 2), I64)


@instruction(types.void, types.int64, types.int64)
def store_u16(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    emit_store(builder, address, builder.trunc(value, _I16), 2)


@instruction(types.float32, types.int64)
def load_f32(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return emit_load(builder, address, F32, 4)


@instruction(types.void, types.int64, types.float32)
def store_f32(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    emit_store(builder, address, value, 4)


@instruction(types.void, types.int64)
def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """The cache line at an address is wanted soon; any address will do."""
    emit_prefetch(builder, address)


# ---- Vectors in memory

@instruction(F32x16, types.int64)
def load(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """16 floats."""
    return emit_floats(builder, address)


@instruction(F32x16, types.int64, types.int64)
def load_first(builder: ir.IRBuilder, address: ir.Value, count: ir.Value) -> ir.Value:
    """The first `count` (0..16) floats, zeros in the other lanes; memory behind them is not touched."""
    lanes = cgutils.alloca_once_value(builder, emit_constant(0.0))
    builder.store(emit_constant(0.0), lanes)        # the slot is the function's, not the call's
    _copy_floats(builder, address, builder.ptrtoint(lanes, I64), count)
    return builder.load(lanes, typ=VECTOR)


@instruction(types.void, types.int64, F32x16)
def store(builder: ir.IRBuilder, address: ir.Value, vector: ir.Value) -> None:
    emit_store(builder, address, vector, 4)


@instruction(types.void, types.int64, F32x16, types.int64)
def store_first(builder: ir.IRBuilder, address: ir.Value, vector: ir.Value, count: ir.Value) -> None:
    """The first `count` (0..16) lanes; memory behind them is not touched."""
    lanes = cgutils.alloca_once(builder, VECTOR)
    builder.store(vector, lanes)
    _copy_floats(builder, builder.ptrtoint(lanes, I64), address, count)


@instruction(I32x16, types.int64)
def load_words(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """16 words of 32 bits."""
    return emit_words(builder, address)


@instruction(F32x16, types.int64)
def load_f16(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """16 IEEE halves, exactly, subnormals, infinities and NaN too. By integers: not every processor converts them."""
    bits = builder.zext(emit_load(builder, address, ir.VectorType(_I16, LANES), 2), INTEGERS)
    magnitude = builder.shl(builder.and_(bits, _integers(0x7FFF)), _integers(13))
    value = builder.fmul(builder.bitcast(magnitude, VECTOR), emit_constant(2.0 ** 112))    # exponent bias 15 -> 127
    special = builder.icmp_unsigned(">=", magnitude, _integers(0x7C00 << 13))           # infinity, NaN
    widened = builder.bitcast(builder.or_(magnitude, _integers(0x7F800000)), VECTOR)
    value = builder.bitcast(builder.select(special, widened, value), INTEGERS)
    sign = builder.shl(builder.and_(bits, _integers(0x8000)), _integers(16))
    return builder.bitcast(builder.or_(value, sign), VECTOR)


@instruction(F32x16, types.int64)
def load_bf16(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return emit_bf16_floats(builder, address)


@instruction(types.void, types.int64, F32x16)
def store_bf16(builder: ir.IRBuilder, address: ir.Value, vector: ir.Value) -> None:
    """As bfloat16, rounded to nearest, ties to even; a NaN stays one."""
    bits = builder.bitcast(vector, INTEGERS)
    is_odd = builder.and_(builder.lshr(bits, _integers(16)), _integers(1))
    rounded = builder.lshr(builder.add(builder.add(bits, _integers(0x7FFF)), is_odd), _integers(16))
    quiet = builder.or_(builder.lshr(bits, _integers(16)), _integers(0x40))
    halves = builder.select(builder.fcmp_unordered("uno", vector, vector), quiet, rounded)
    emit_store(builder, address, builder.trunc(halves, ir.VectorType(_I16, LANES)), 2)


@instruction(types.void, types.int64, F32x16)
def store_int8(builder: ir.IRBuilder, address: ir.Value, vector: ir.Value) -> None:
    """As signed bytes -127..127, rounded to nearest, ties to even. No NaN."""
    low, high = emit_constant(-127.0), emit_constant(127.0)
    clamped = _select(builder, "<", vector, low, low, vector)
    clamped = _select(builder, ">", clamped, high, high, clamped)
    # Adding 1.5 * 2^23 rounds to an integer and leaves it, in two's complement, in the low bits.
    shifted = builder.bitcast(builder.fadd(clamped, emit_constant(1.5 * 2.0 ** 23)), INTEGERS)
    emit_store(builder, address, builder.trunc(shifted, ir.VectorType(_I8, LANES)), 1)


# ---- Arithmetic

def _define_operator(symbol: Callable[..., Any], method: str) -> None:
    """`symbol` between two F32x16 is the IRBuilder's `method`."""
    def lower(_context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        return getattr(builder, method)(*arguments)

    template = type("F32x16Operator", (ConcreteTemplate,), {"cases": [signature(F32x16, F32x16, F32x16)]})
    infer_global(symbol)(template)
    lower_builtin(symbol, F32x16, F32x16)(lower)


_define_operator(operator.add, "fadd")
_define_operator(operator.sub, "fsub")
_define_operator(operator.mul, "fmul")
_define_operator(operator.truediv, "fdiv")


@instruction(F32x16, types.float32)
def splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """The scalar in every lane."""
    return emit_splat(builder, scalar)


@instruction(F32x16, I32x16, types.int64)
def nibble(builder: ir.IRBuilder, words: ir.Value, index: ir.Value) -> ir.Value:
    """Bits 4 index .. 4 index + 3 of each word, as floats."""
    return emit_code_floats(builder, words, 4, index)


@instruction(F32x16, I32x16, types.int64)
def byte(builder: ir.IRBuilder, words: ir.Value, index: ir.Value) -> ir.Value:
    """Bits 8 index .. 8 index + 7 of each word, as floats."""
    return emit_code_floats(builder, words, 8, index)


@instruction(F32x16, F32x16, F32x16, F32x16)
def fma(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x * y + z, rounded once."""
    return emit_fma(builder, x, y, z)


@instruction(types.float32, types.float32, types.float32, types.float32)
def scalar_fma(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x * y + z, rounded once."""
    return emit_call(builder, "llvm.fma.f32", F32, x, y, z)


@instruction(F32x16, F32x16)
def absolute(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return emit_call(builder, "llvm.fabs.v16f32", VECTOR, x)


@instruction(F32x16, F32x16, F32x16)
def maximum(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """x > y ? x : y. A NaN in x is lost; callers let it come through elsewhere."""
    return _select(builder, ">", x, y, x, y)


@instruction(F32x16, F32x16, types.int64, types.int64, types.float32)
def keep_lanes(builder: ir.IRBuilder, vector: ir.Value, first: ir.Value, last: ir.Value, other: ir.Value) -> ir.Value:
    """Lanes first <= i < last of the vector, `other` elsewhere. Any int64 bounds."""
    lane_ids = ir.Constant(ir.VectorType(I64, LANES), [I64(lane) for lane in range(LANES)])
    inside = builder.and_(builder.icmp_signed(">=", lane_ids, emit_splat(builder, first)),
                          builder.icmp_signed("<", lane_ids, emit_splat(builder, last)))
    return builder.select(inside, vector, emit_splat(builder, other))


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
    p = emit_constant(-0.005681279)
    for coefficient in (0.020618621, -0.053733695, 0.13331373, -0.3333328):
        p = emit_fma(builder, p, square, emit_constant(coefficient))
    near = emit_fma(builder, builder.fmul(p, square), x, x)
    size = emit_call(builder, "llvm.fabs.v16f32", VECTOR, x)
    denominator = builder.fadd(_exp(builder, builder.fadd(size, size)), emit_constant(1.0))
    far = builder.fsub(emit_constant(1.0), builder.fdiv(emit_constant(2.0), denominator))
    far = emit_call(builder, "llvm.copysign.v16f32", VECTOR, far, x)
    return _select(builder, "<", size, emit_constant(0.625), near, far)


# ---- Threads

@instruction(types.int64, types.int64, types.int64)
def atomic_add(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> ir.Value:
    """Adds to an int64 in memory, sequentially consistent; returns what was there before."""
    return builder.atomic_rmw("add", _pointer(builder, address, I64), value, "seq_cst")


@instruction(types.int64, types.int64)
def atomic_load(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """An int64, together with all that its writer wrote before it."""
    return builder.load_atomic(_pointer(builder, address, I64), "acquire", 8, typ=I64)


@instruction(types.void)
def pause(builder: ir.IRBuilder) -> None:
    """Tells the processor that this is a waiting loop."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64", "i686"):
        emit_call(builder, "llvm.x86.sse2.pause", ir.VoidType())
    elif machine in ("arm64", "aarch64"):
        emit_call(builder, "llvm.aarch64.hint", ir.VoidType(), _I32(1))


@instruction(types.int64)
def cycles(builder: ir.IRBuilder) -> ir.Value:
    """A clock that ticks evenly and costs next to nothing; where the processor has none that may be read, 0."""
    return emit_call(builder, "llvm.readcyclecounter", I64)


@instruction(types.void)
def yield_thread(builder: ir.IRBuilder) -> None:
    """Lets another thread have this core."""
    emit_call(builder, "SwitchToThread" if sys.platform == "win32" else "sched_yield", _I32)


@instruction(types.void, types.int64, types.int64, types.int64, types.int64, types.int64)
def call(builder: ir.IRBuilder, function: ir.Value, a: ir.Value, b: ir.Value, c: ir.Value, d: ir.Value) -> None:
    """Calls the C function at address `function` with four int64."""
    declared = ir.FunctionType(ir.VoidType(), [I64] * 4)
    builder.call(builder.inttoptr(function, declared.as_pointer()), [a, b, c, d])

"""Products of small codes with 16-bit integers: what arithmetic of `--host-math int16` adds to the vector layer.

A word of 32 bits holds a pair of 16-bit numbers. One instruction multiplies 32 of them with 32 others and adds the
products of each pair to a 32-bit sum. Integer sums are exact in any order, hence the same bits on every processor that
has the instruction: AVX2 (in halves), AVX-512 BW, and with VNNI, where LLVM joins it with the addition.
"""
from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target

from cuda.host.pack import STRIP_BYTES
from cuda.host.simd import (
    I64,
    INTEGERS,
    LANES,
    F32x16,
    emit_call,
    emit_constant,
    emit_load,
    emit_splat,
    emit_store,
    instruction,
)

_I16, _I32 = ir.IntType(16), ir.IntType(32)
PAIRS = ir.VectorType(_I16, 2 * LANES)
_HALF_PAIRS, _HALF_INTEGERS = ir.VectorType(_I16, LANES), ir.VectorType(_I32, LANES // 2)

_FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
HAS_AVX512_PAIRS, HAS_PAIRS = "+avx512bw" in _FEATURES, "+avx2" in _FEATURES
PAIRS_BY = ("AVX-512 VNNI" if "+avx512vnni" in _FEATURES else "AVX-512" if HAS_AVX512_PAIRS else
            "AVX-VNNI" if "+avxvnni" in _FEATURES else "AVX2" if HAS_PAIRS else "")

LARGEST = 32767.0                               # of an activation's codes, either sign


def _same(value: int) -> ir.Constant:
    return ir.Constant(PAIRS, [_I16(value)] * (2 * LANES))


def emit_code_pairs(builder: ir.IRBuilder, row: ir.Value, bits: int) -> list[ir.Value]:
    """The codes of 8 inputs (`pack.py`): four times 16 pairs, of inputs i and i + 4 of 16 outputs."""
    width = 16 // bits                          # codes in half of a word
    pairs = []
    for word in range(4 // width):
        halves = emit_load(builder, builder.add(row, I64(word * STRIP_BYTES)), PAIRS, 4)
        for i in range(width):
            shifted = builder.lshr(halves, _same(bits * i)) if i else halves
            pairs.append(shifted if i == width - 1 else builder.and_(shifted, _same((1 << bits) - 1)))
    return pairs


def emit_pair(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """The pair at an address, 16 times."""
    return builder.bitcast(emit_splat(builder, emit_load(builder, address, _I32, 4)), PAIRS)


def emit_add_products(builder: ir.IRBuilder, sums: ir.Value, x: ir.Value, y: ir.Value, whole: bool = HAS_AVX512_PAIRS
                      ) -> ir.Value:
    """sums + x[2i] y[2i] + x[2i + 1] y[2i + 1]; whole: by one instruction of 512 bits."""
    if whole:
        return builder.add(sums, emit_call(builder, "llvm.x86.avx512.pmaddw.d.512", INTEGERS, x, y))

    def half(vector: ir.Value, start: int) -> ir.Value:
        lanes = ir.Constant(INTEGERS, [_I32(lane) for lane in range(start, start + LANES)])
        return builder.shuffle_vector(vector, vector, lanes)

    products = [emit_call(builder, "llvm.x86.avx2.pmadd.wd", _HALF_INTEGERS, half(x, start), half(y, start))
                for start in (0, LANES)]
    both = builder.shuffle_vector(*products, ir.Constant(INTEGERS, [_I32(lane) for lane in range(LANES)]))
    return builder.add(sums, both)


@instruction(F32x16, F32x16)
def nearest(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """Rounded to integers, ties to even; sizes up to 2^22."""
    magic = emit_constant(1.5 * 2.0 ** 23)      # beside it floats have no fraction
    return builder.fsub(builder.fadd(vector, magic), magic)


@instruction(types.void, types.int64, F32x16)
def store_int16(builder: ir.IRBuilder, address: ir.Value, vector: ir.Value) -> None:
    """Integers -32768..32767 as int16, each 8 in the order 0, 4, 1, 5, 2, 6, 3, 7: pairs that packed codes stand in."""
    lanes = [8 * half + i + place for half in range(2) for i in range(4) for place in (0, 4)]
    # Adding 1.5 * 2^23 leaves an integer, in two's complement, in the low bits.
    bits = builder.bitcast(builder.fadd(vector, emit_constant(1.5 * 2.0 ** 23)), INTEGERS)
    ordered = builder.shuffle_vector(bits, bits, ir.Constant(INTEGERS, [_I32(lane) for lane in lanes]))
    emit_store(builder, address, builder.trunc(ordered, _HALF_PAIRS), 2)

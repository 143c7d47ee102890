"""From the layouts that files have to strips (`pack.py`): one pass over the stored bytes, on all threads.

An item of each kernel is a strip. Rows may be stored in any order: a table has their addresses. A weight may begin and
end inside of a strip, where other parts of its projection go on. `weights/ggml.py` describes the blocks of formats;
scales and offsets have the bits that its conversions give.
"""
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from cuda.host.compilation import Kernel, inner
from cuda.host.pack import GROUP_HEAD_BYTES, ROW_INPUTS, STRIP, STRIP_BYTES
from cuda.host.simd import (
    F32,
    I64,
    atomic_add,
    emit_load,
    emit_store,
    instruction,
    load_f32,
    load_i32,
    load_u8,
    load_u16,
    store_f32,
    store_u16,
    word,
)

_I16, _I32 = ir.IntType(16), ir.IntType(32)
_TURN = 64                                      # inputs of a row that are copied before the next row's

# Formats by their names in `weights.ggml`.
FORMATS = {name: kind for kind, name in enumerate(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"))}
_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0, _Q4_K, _Q5_K, _Q6_K = FORMATS.values()

# Bytes side by side in an int64.
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F
_ONES = 0x0101010101010101
_SEVENS = 0x7F7F7F7F7F7F7F7F
_TOP_BITS = -0x7F7F7F7F7F7F7F80                 # 0x80 in each
_DIAGONAL = 0x0040201008040201                  # bit i of byte i, but for the last


@instruction(types.int64, types.int64)
def eight(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """8 bytes at any address."""
    return emit_load(builder, address, I64, 1)


@instruction(types.void, types.int64, types.int64)
def store_i32(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    emit_store(builder, address, builder.trunc(value, _I32), 4)


@instruction(types.float32, types.int64)
def half(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """An IEEE half at any address: see `simd.load_f16`."""
    bits = builder.zext(emit_load(builder, address, _I16, 1), _I32)
    magnitude = builder.shl(builder.and_(bits, _I32(0x7FFF)), _I32(13))
    value = builder.bitcast(builder.fmul(builder.bitcast(magnitude, F32), F32(2.0 ** 112)), _I32)
    special = builder.icmp_unsigned(">=", magnitude, _I32(0x7C00 << 13))                # infinity, NaN
    value = builder.select(special, builder.or_(magnitude, _I32(0x7F800000)), value)
    return builder.bitcast(builder.or_(value, builder.shl(builder.and_(bits, _I32(0x8000)), _I32(16))), F32)


@instruction(types.float32, types.int64)
def number(builder: ir.IRBuilder, integer: ir.Value) -> ir.Value:
    return builder.sitofp(integer, F32)


# ---- Of a block

@inner
def _head(kind: int, block: int, group: int) -> tuple[float, float]:
    """Scale and offset of a group."""
    if kind == _Q4_1 or kind == _Q5_1:
        return half(block), half(block + 2)
    if kind == _Q4_K or kind == _Q5_K:
        low, high = load_u8(block + 4 + group % 4), load_u8(block + 8 + group % 4)
        factor, minimum = low & 63, high & 63
        if group >= 4:
            both = load_u8(block + 8 + group)
            factor, minimum = (both & 15) | (low >> 6 << 4), (both >> 4) | (high >> 6 << 4)
        return half(block) * number(factor), -half(block + 2) * number(minimum)
    if kind == _Q6_K:
        scale = half(block + 208) * number(((load_u8(block + 192 + group) + 128) & 255) - 128)
        return scale, number(-32) * scale
    scale = half(block)
    return scale, number(-8 if kind == _Q4_0 else -16 if kind == _Q5_0 else -128) * scale


@inner
def _codes(kind: int, block: int, k: int) -> Any:
    """Eight codes from number `k` of the block on, a byte each."""
    if kind == _Q8_0:
        return eight(block + 2 + k) ^ _TOP_BITS
    if kind == _Q6_K:
        pairs = (eight(block + 128 + k // 128 * 32 + k % 32) >> (k % 128 // 32 * 2)) & (3 * _ONES)
        return _nibbles(block + k // 128 * 64, k % 128, 64) | (pairs << 4)
    if kind == _Q4_K:
        return _nibbles(block + 16 + k // 64 * 32, k % 64, 32)
    if kind == _Q5_K:
        fifth = (eight(block + 16 + k % 32) >> (k // 32)) & _ONES
        return _nibbles(block + 48 + k // 64 * 32, k % 64, 32) | (fifth << 4)
    if kind == _Q5_0:
        return _nibbles(block + 6, k, 16) | _fifth(load_u8(block + 2 + k // 8))
    if kind == _Q5_1:
        return _nibbles(block + 8, k, 16) | _fifth(load_u8(block + 4 + k // 8))
    return _nibbles(block + (2 if kind == _Q4_0 else 4), k, 16)


@inner
def _nibbles(packed: int, k: int, width: int) -> Any:
    """From number `k` on, where `width` bytes hold as many low nibbles and then as many high ones."""
    return (eight(packed + k % width) >> (k // width * 4)) & _LOW_NIBBLES


@inner
def _fifth(bits: int) -> Any:
    """Bit i of a byte as 16 in byte i."""
    # NOTE: sums and products of integers must not reach bit 63: the compiler takes it that they do not.
    return (((((bits & 127) * _ONES) & _DIAGONAL) + _SEVENS) >> 3) & (_ONES << 4) | (bits >> 7 << 60)


# ---- Kernels

@inner
def _store_codes(codes: int, bits: int, place: int) -> None:
    """Codes of eight inputs of one output, a byte each, into the output's column of rows of words."""
    if bits == 4:
        codes = (codes | (codes >> 4)) & 0x00FF00FF00FF00FF
        codes = (codes | (codes >> 8)) & 0x0000FFFF0000FFFF
        store_i32(place, codes | (codes >> 16))
    else:
        store_i32(place, (codes & 0xFFFF) | ((codes >> 16) & 0xFFFF0000))
        store_i32(place + STRIP_BYTES, ((codes >> 16) & 0xFFFF) | ((codes >> 32) & 0xFFFF0000))


def repack_blocks(arguments: int, first: int, last: int, scratch: int) -> None:
    """Rows of blocks, each of `num_groups` groups. They are outputs `start` .. `start + num_rows - 1` of the strips.
    `flaws` counts groups whose scale or offset is not finite."""
    rows, num_rows, start, strips = word(arguments, 0), word(arguments, 1), word(arguments, 2), word(arguments, 3)
    strip_bytes, kind, num_blocks, block_bytes = (word(arguments, 4), word(arguments, 5), word(arguments, 6),
                                                  word(arguments, 7))
    num_groups, bits, group, flaws = word(arguments, 8), word(arguments, 9), word(arguments, 10), word(arguments, 11)
    row_bytes, num_flaws = STRIP_BYTES * bits // 4, 0
    for item in range(first, last):
        strip = start // STRIP + item
        for b in range(num_blocks):
            for output in range(max(start, strip * STRIP), min(start + num_rows, strip * STRIP + STRIP)):
                block = word(rows, output - start) + b * block_bytes
                place = strips + strip * strip_bytes + output % STRIP * 4
                place += b * num_groups * (GROUP_HEAD_BYTES + group // ROW_INPUTS * row_bytes)
                for g in range(num_groups):
                    scale, offset = _head(kind, block, g)
                    if (scale - scale) + (offset - offset) != number(0):
                        num_flaws += 1
                    store_f32(place, scale)
                    store_f32(place + STRIP_BYTES, offset)
                    place += GROUP_HEAD_BYTES
                    for k in range(g * group, (g + 1) * group, ROW_INPUTS):
                        _store_codes(_codes(kind, block, k), bits, place)
                        place += row_bytes
    if num_flaws:
        atomic_add(flaws, num_flaws)


REPACK_BLOCKS = Kernel(repack_blocks, "qqqqqqqqqqqq")


def repack_affine(arguments: int, first: int, last: int, scratch: int) -> None:
    """An `Affine` weight, whose rows lie one after the other."""
    codes, scales, offsets, num_rows = (word(arguments, 0), word(arguments, 1), word(arguments, 2), word(arguments, 3))
    start, strips, strip_bytes = word(arguments, 4), word(arguments, 5), word(arguments, 6)
    num_groups, bits, group = word(arguments, 7), word(arguments, 8), word(arguments, 9)
    row_bytes = STRIP_BYTES * bits // 4
    for item in range(first, last):
        strip = start // STRIP + item
        for g in range(num_groups):
            for output in range(max(start, strip * STRIP), min(start + num_rows, strip * STRIP + STRIP)):
                index = (output - start) * num_groups + g
                source = codes + index * (group * bits // 8)
                place = strips + strip * strip_bytes + output % STRIP * 4
                place += g * (GROUP_HEAD_BYTES + group // ROW_INPUTS * row_bytes)
                store_f32(place, load_f32(scales + 4 * index))
                store_f32(place + STRIP_BYTES, load_f32(offsets + 4 * index))
                place += GROUP_HEAD_BYTES
                for _ in range(group // ROW_INPUTS):
                    if bits == 4:
                        store_i32(place, load_i32(source))
                    else:
                        _store_codes(eight(source), 8, place)
                    source += bits
                    place += row_bytes


REPACK_AFFINE = Kernel(repack_affine, "qqqqqqqqqq")


def repack_dense(arguments: int, first: int, last: int, scratch: int) -> None:
    """Numbers of `size` bytes, 2 or 4."""
    rows, num_rows, start, strips = word(arguments, 0), word(arguments, 1), word(arguments, 2), word(arguments, 3)
    strip_bytes, in_features, size = word(arguments, 4), word(arguments, 5), word(arguments, 6)
    for item in range(first, last):
        strip = start // STRIP + item
        for turn in range(0, in_features, _TURN):
            end = min(turn + _TURN, in_features)
            for output in range(max(start, strip * STRIP), min(start + num_rows, strip * STRIP + STRIP)):
                row, column = word(rows, output - start), strips + strip * strip_bytes + output % STRIP * size
                if size == 4:
                    for k in range(turn, end):
                        store_f32(column + k * 4 * STRIP, load_f32(row + 4 * k))
                else:
                    for k in range(turn, end):
                        store_u16(column + k * 2 * STRIP, load_u16(row + 2 * k))


REPACK_DENSE = Kernel(repack_dense, "qqqqqqq")

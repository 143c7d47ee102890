"""Matrix products with packed weights, for any number of rows.

An item is a pair of strips (32 outputs) for all rows: it is unpacked to float32 once, into the thread's scratch, and
multiplied with all rows in register tiles. Few rows multiply while they unpack. Both do, for every output, the same
chain of fused multiply-adds over k, so that a row has the same bits alone and in any company.
"""
from __future__ import annotations

from cuda.host.compilation import Kernel, inner
from cuda.host.pack import AFFINE4, AFFINE8, BFLOAT16, FLOAT16, FLOAT32, GROUP_HEAD_BYTES
from cuda.host.register_tile import MAX_ROWS, tile_affine4, tile_affine8, tile_float32
from cuda.host.simd import (
    LANES,
    VECTOR_BYTES,
    fma,
    high_nibble,
    load,
    load_bf16,
    load_codes,
    load_f16,
    low_nibble,
    store,
    to_float,
    word,
)

PAIR_BYTES = 2 * VECTOR_BYTES


def linear_scratch_bytes(in_features: int) -> int:
    """An unpacked pair of strips."""
    return in_features * PAIR_BYTES


@inner
def unpack_affine4(codes: int, num_groups: int, group: int, w: int) -> None:
    for _ in range(num_groups):
        scale, offset = load(codes), load(codes + VECTOR_BYTES)
        codes += GROUP_HEAD_BYTES
        for _ in range(group // 2):
            row = load_codes(codes)
            store(w, fma(low_nibble(row), scale, offset))
            store(w + VECTOR_BYTES, fma(high_nibble(row), scale, offset))
            codes += LANES
            w += 2 * VECTOR_BYTES


@inner
def unpack_affine8(codes: int, num_groups: int, group: int, w: int) -> None:
    for _ in range(num_groups):
        scale, offset = load(codes), load(codes + VECTOR_BYTES)
        codes += GROUP_HEAD_BYTES
        for _ in range(group):
            store(w, fma(to_float(load_codes(codes)), scale, offset))
            codes += LANES
            w += VECTOR_BYTES


@inner
def unpack(kind: int, strip: int, in_features: int, group: int, w: int) -> None:
    """A strip as float32 [K, 16] at w."""
    if kind == AFFINE4:
        unpack_affine4(strip, in_features // group, group, w)
    elif kind == AFFINE8:
        unpack_affine8(strip, in_features // group, group, w)
    elif kind == FLOAT16:
        for k in range(in_features):
            store(w + k * VECTOR_BYTES, load_f16(strip + k * 2 * LANES))
    elif kind == BFLOAT16:
        for k in range(in_features):
            store(w + k * VECTOR_BYTES, load_bf16(strip + k * 2 * LANES))


def linear(arguments: int, first: int, last: int, scratch: int) -> None:
    """Item: a pair of strips. y [T, N] = x [T, K] W^T + bias.

    NOTE: writes whole pairs: rows of y have room for N rounded up to 32, zeros come behind the last output.
    """
    x, x_stride, y, y_stride = word(arguments, 0), word(arguments, 1), word(arguments, 2), word(arguments, 3)
    num_rows, in_features, kind, group = word(arguments, 4), word(arguments, 5), word(arguments, 6), word(arguments, 7)
    weight, strip_bytes, bias = word(arguments, 8), word(arguments, 9), word(arguments, 10)
    num_tiles = (num_rows + MAX_ROWS - 1) // MAX_ROWS
    for pair in range(first, last):
        strip = weight + 2 * pair * strip_bytes
        second_strip = strip + strip_bytes
        start, outputs = bias + pair * PAIR_BYTES, y + pair * PAIR_BYTES
        if num_tiles == 1 and kind == AFFINE4:
            tile_affine4(num_rows, strip, second_strip, in_features // group, group, x, x_stride, start, outputs,
                         y_stride)
        elif num_tiles == 1 and kind == AFFINE8:
            tile_affine8(num_rows, strip, second_strip, in_features // group, group, x, x_stride, start, outputs,
                         y_stride)
        else:
            w, second_w = strip, second_strip
            if kind != FLOAT32:
                w, second_w = scratch, scratch + in_features * VECTOR_BYTES
                unpack(kind, strip, in_features, group, w)
                unpack(kind, second_strip, in_features, group, second_w)
            for t in range(num_tiles):
                row, end = num_rows * t // num_tiles, num_rows * (t + 1) // num_tiles
                tile_float32(end - row, w, second_w, VECTOR_BYTES, x + row * x_stride, x_stride, in_features, start, 0,
                             outputs + row * y_stride, y_stride)


LINEAR = Kernel(linear, "qqqqqqqqqqq")

"""Matrix products with packed weights, for any number of rows.

An item is a strip of 32 outputs for all rows: it is unpacked to float32 once, into the thread's scratch, and
multiplied with all rows in register tiles. Few rows multiply while they unpack. Both do, for every output, the same
chain of fused multiply-adds over k, so that a row has the same bits alone and in any company.

With 16-bit activations packed codes are multiplied as they are, for any number of rows.
"""
from __future__ import annotations

from cuda.host.compilation import Kernel, inner
from cuda.host.pack import (
    AFFINE4,
    AFFINE8,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    GROUP_HEAD_BYTES,
    ROW_INPUTS,
    STRIP,
    STRIP_BYTES,
)
from cuda.host.register_tile import (
    AHEAD_BYTES,
    MAX_INT16_ROWS,
    MAX_ROWS,
    PACKED_TILES,
    tile_affine4,
    tile_affine8,
    tile_float32,
    tile_int16_affine4,
    tile_int16_affine8,
)
from cuda.host.simd import (
    LANES,
    VECTOR_BYTES,
    byte,
    fma,
    load,
    load_bf16,
    load_f16,
    load_words,
    nibble,
    prefetch,
    store,
    word,
)


def linear_scratch_bytes(in_features: int) -> int:
    """An unpacked strip."""
    return in_features * STRIP_BYTES


@inner
def unpack_affine4(codes: int, num_groups: int, group: int, w: int) -> None:
    for _ in range(num_groups):
        scale, offset = load(codes), load(codes + STRIP_BYTES)
        codes += GROUP_HEAD_BYTES
        for _ in range(group // ROW_INPUTS):
            words = load_words(codes)
            for k in range(ROW_INPUTS):
                store(w + k * VECTOR_BYTES, fma(nibble(words, k), scale, offset))
            prefetch(codes + AHEAD_BYTES)
            codes += STRIP_BYTES
            w += ROW_INPUTS * VECTOR_BYTES


@inner
def unpack_affine8(codes: int, num_groups: int, group: int, w: int) -> None:
    for _ in range(num_groups):
        scale, offset = load(codes), load(codes + STRIP_BYTES)
        codes += GROUP_HEAD_BYTES
        for _ in range(group // ROW_INPUTS):
            for half in range(2):
                words = load_words(codes)
                for k in range(4):
                    store(w + (k // 2 * 4 + half * 2 + k % 2) * VECTOR_BYTES, fma(byte(words, k), scale, offset))
                prefetch(codes + AHEAD_BYTES)
                codes += STRIP_BYTES
            w += ROW_INPUTS * VECTOR_BYTES


@inner
def unpack_half(kind: int, strip: int, column: int, in_features: int, group: int, w: int) -> None:
    """16 outputs of a strip, from output `column` on, as float32 [K, 16] at w."""
    if kind == AFFINE4:
        unpack_affine4(strip + 4 * column, in_features // group, group, w)
    elif kind == AFFINE8:
        unpack_affine8(strip + 4 * column, in_features // group, group, w)
    else:
        for k in range(in_features):
            place, target = k * STRIP + column, w + k * VECTOR_BYTES
            if kind == FLOAT16:
                store(target, load_f16(strip + 2 * place))
            elif kind == BFLOAT16:
                store(target, load_bf16(strip + 2 * place))
            else:
                store(target, load(strip + 4 * place))


def linear(arguments: int, first: int, last: int, scratch: int) -> None:
    """Item: a strip. y [T, N] = x [T, K] W^T + bias.

    NOTE: writes whole strips: rows of y have room for N rounded up to 32, zeros come behind the last output.
    """
    x, x_stride, y, y_stride = word(arguments, 0), word(arguments, 1), word(arguments, 2), word(arguments, 3)
    num_rows, in_features, kind, group = word(arguments, 4), word(arguments, 5), word(arguments, 6), word(arguments, 7)
    weight, strip_bytes, bias = word(arguments, 8), word(arguments, 9), word(arguments, 10)
    num_groups = in_features // max(group, 1)
    num_tiles = (num_rows + MAX_ROWS - 1) // MAX_ROWS
    for item in range(first, last):
        strip, start, outputs = weight + item * strip_bytes, bias + item * STRIP_BYTES, y + item * STRIP_BYTES
        w, second_w, w_step = strip, strip + VECTOR_BYTES, STRIP_BYTES
        is_packed = kind != FLOAT32
        if num_tiles > PACKED_TILES or kind == FLOAT16 or kind == BFLOAT16:
            w, second_w, w_step = scratch, scratch + in_features * VECTOR_BYTES, VECTOR_BYTES
            unpack_half(kind, strip, 0, in_features, group, w)
            unpack_half(kind, strip, LANES, in_features, group, second_w)
            is_packed = False
        for t in range(num_tiles):
            row, end = num_rows * t // num_tiles, num_rows * (t + 1) // num_tiles
            rows, target = x + row * x_stride, outputs + row * y_stride
            if not is_packed:
                tile_float32(end - row, w, second_w, w_step, rows, x_stride, in_features, start, 0, target, y_stride)
            elif kind == AFFINE4:
                tile_affine4(end - row, strip, num_groups, group, rows, x_stride, start, target, y_stride)
            else:
                tile_affine8(end - row, strip, num_groups, group, rows, x_stride, start, target, y_stride)


LINEAR = Kernel(linear, "qqqqqqqqqqq")


def linear_int16(arguments: int, first: int, last: int, scratch: int) -> None:
    """Item: a strip of an affine weight. `linear` for quantized rows."""
    x, x_stride, y, y_stride = word(arguments, 0), word(arguments, 1), word(arguments, 2), word(arguments, 3)
    num_rows, in_features, kind, group = word(arguments, 4), word(arguments, 5), word(arguments, 6), word(arguments, 7)
    weight, strip_bytes, bias, block = word(arguments, 8), word(arguments, 9), word(arguments, 10), word(arguments, 11)
    num_groups = in_features // group
    num_tiles = (num_rows + MAX_INT16_ROWS - 1) // MAX_INT16_ROWS
    for item in range(first, last):
        strip, start, outputs = weight + item * strip_bytes, bias + item * STRIP_BYTES, y + item * STRIP_BYTES
        for t in range(num_tiles):
            row, end = num_rows * t // num_tiles, num_rows * (t + 1) // num_tiles
            rows, target = x + row * x_stride, outputs + row * y_stride
            if kind == AFFINE4:
                tile_int16_affine4(end - row, strip, num_groups, group, block, rows, x_stride, start, target, y_stride)
            else:
                tile_int16_affine8(end - row, strip, num_groups, group, block, rows, x_stride, start, target, y_stride)


LINEAR_INT16 = Kernel(linear_int16, "qqqqqqqqqqqq")

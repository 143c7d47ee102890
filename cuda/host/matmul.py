"""Matrix products with packed weights, for any number of rows.

An item is a pair of strips (32 outputs) for all rows: it is unpacked to float32 once, into the thread's scratch, and
multiplied with all rows in register tiles. A single row multiplies while it unpacks. Both do, for every output, the same
chain of fused multiply-adds over k, so that a row has the same bits alone and in any company.
"""
from __future__ import annotations

from cuda.host.compilation import Kernel, inner
from cuda.host.pack import AFFINE4, AFFINE8, BFLOAT16, FLOAT16, FLOAT32, GROUP_HEAD_BYTES, PAIR
from cuda.host.simd import (
    LANES,
    MAX_ROWS,
    PAIR_ROWS,
    VECTOR_BYTES,
    fma,
    high_nibble,
    load,
    load_bf16,
    load_codes,
    load_f16,
    load_i64,
    low_nibble,
    store,
    store_first,
    tile,
    tile_affine4,
    tile_affine8,
    tile_pair,
    to_float,
)

PAIR_BYTES = 2 * VECTOR_BYTES
EDGE_BYTES = MAX_ROWS * PAIR_BYTES              # scratch: a tile whose last outputs do not exist


def matmul_scratch_bytes(in_features: int) -> int:
    """Scratch of a thread: the edge tile, then an unpacked pair of strips."""
    return EDGE_BYTES + in_features * PAIR_BYTES


@inner
def multiply_pair(rows, first, second, w_step, x, x_stride, count, start, start_stride, y, y_stride):
    """`simd.tile_pair` for 1 to MAX_ROWS rows."""
    if rows <= PAIR_ROWS:
        tile_pair(rows, first, second, w_step, x, x_stride, count, start, start_stride, y, y_stride)
    else:
        tile(rows, first, w_step, x, x_stride, count, start, start_stride, y, y_stride)
        tile(rows, second, w_step, x, x_stride, count, start + VECTOR_BYTES, start_stride, y + VECTOR_BYTES, y_stride)


@inner
def unpack_affine4(strip, num_groups, group, w):
    for _ in range(num_groups):
        scale, offset = load(strip), load(strip + VECTOR_BYTES)
        strip += GROUP_HEAD_BYTES
        for _ in range(group // 2):
            codes = load_codes(strip)
            store(w, fma(low_nibble(codes), scale, offset))
            store(w + VECTOR_BYTES, fma(high_nibble(codes), scale, offset))
            strip += LANES
            w += 2 * VECTOR_BYTES


@inner
def unpack_affine8(strip, num_groups, group, w):
    for _ in range(num_groups):
        scale, offset = load(strip), load(strip + VECTOR_BYTES)
        strip += GROUP_HEAD_BYTES
        for _ in range(group):
            store(w, fma(to_float(load_codes(strip)), scale, offset))
            strip += LANES
            w += VECTOR_BYTES


@inner
def unpack(kind, strip, in_features, group, w):
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


def linear(arguments, first, last, scratch):
    """y [T, N] = x [T, K] W^T + bias; an item is a pair of strips."""
    x, x_stride = load_i64(arguments), load_i64(arguments + 8)
    y, y_stride = load_i64(arguments + 16), load_i64(arguments + 24)
    num_rows, in_features, out_features = load_i64(arguments + 32), load_i64(arguments + 40), load_i64(arguments + 48)
    kind, group = load_i64(arguments + 56), load_i64(arguments + 64)
    weight, strip_bytes, bias = load_i64(arguments + 72), load_i64(arguments + 80), load_i64(arguments + 88)
    num_tiles = (num_rows + MAX_ROWS - 1) // MAX_ROWS
    unpacked = scratch + EDGE_BYTES
    fused = num_rows <= PAIR_ROWS and (kind == AFFINE4 or kind == AFFINE8)
    for pair in range(first, last):
        strip = weight + 2 * pair * strip_bytes
        second_strip = strip + strip_bytes
        start = bias + pair * PAIR_BYTES
        outputs = min(PAIR, out_features - pair * PAIR)
        w, second_w = strip, second_strip
        if kind != FLOAT32 and not fused:
            w = unpacked
            second_w = unpacked + in_features * VECTOR_BYTES
            unpack(kind, strip, in_features, group, w)
            unpack(kind, second_strip, in_features, group, second_w)
        for t in range(num_tiles):
            row = num_rows * t // num_tiles
            rows = num_rows * (t + 1) // num_tiles - row
            inputs, outs, out_stride = x + row * x_stride, y + row * y_stride + pair * PAIR_BYTES, y_stride
            if outputs < PAIR:
                outs, out_stride = scratch, PAIR_BYTES
            if not fused:
                multiply_pair(rows, w, second_w, VECTOR_BYTES, inputs, x_stride, in_features, start, 0, outs,
                              out_stride)
            elif kind == AFFINE4:
                tile_affine4(rows, strip, second_strip, in_features // group, group, inputs, x_stride, start, outs,
                             out_stride)
            else:
                tile_affine8(rows, strip, second_strip, in_features // group, group, inputs, x_stride, start, outs,
                             out_stride)
            if outputs < PAIR:
                for r in range(rows):
                    edge, target = scratch + r * PAIR_BYTES, y + (row + r) * y_stride + pair * PAIR_BYTES
                    store_first(target, load(edge), min(outputs, LANES))
                    if outputs > LANES:
                        store_first(target + VECTOR_BYTES, load(edge + VECTOR_BYTES), outputs - LANES)


LINEAR = Kernel(linear, "qqqqqqqqqqqq")

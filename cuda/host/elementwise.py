"""Operations that take each row by itself: embedding, norms, rotation, gates, gathers.

Sums over a row run in 16 partial sums, one a lane, joined in a fixed tree at the end.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from cuda.host.compilation import Kernel, inner
from cuda.host.pack import AFFINE4, AFFINE8, BFLOAT16, FLOAT16, GROUP_HEAD_BYTES, STRIP, STRIP_BYTES
from cuda.host.simd import (
    LANES,
    VECTOR_BYTES,
    absolute,
    exp,
    fma,
    lane,
    lane_max,
    lane_sum,
    load,
    load_bf16,
    load_f16,
    load_f32,
    load_first,
    load_i32,
    load_u8,
    maximum,
    real,
    scalar_fma,
    splat,
    store,
    store_f32,
    store_first,
    tanh,
    word,
)
from cuda.host.simd_int16 import LARGEST, nearest, store_int16

SMALLEST = np.float32(1e-30)                    # a block without a larger number becomes zeros
COLUMNS = 256                                   # of a row in one item, where rows may be split
SILU, GELU_TANH = 0, 1


@inner
def load_up_to(address: int, count: int) -> Any:
    """A vector of the first `count` floats, at most 16, zeros behind them."""
    if count >= LANES:
        return load(address)
    return load_first(address, count)


@inner
def store_up_to(address: int, vector: Any, count: int) -> None:
    if count >= LANES:
        store(address, vector)
    else:
        store_first(address, vector, count)


@inner
def normalize(x: int, weight: int, y: int, count: int, eps: Any) -> None:
    """y = x / rms(x) * weight over `count` floats; y may be x."""
    squares = splat(np.float32(0.0))
    for i in range(0, count, LANES):
        v = load_up_to(x + 4 * i, count - i)
        squares = fma(v, v, squares)
    factor = splat(np.float32(1.0) / np.sqrt(lane_sum(squares) / np.float32(count) + eps))
    for i in range(0, count, LANES):
        v = load_up_to(x + 4 * i, count - i) * factor * load_up_to(weight + 4 * i, count - i)
        store_up_to(y + 4 * i, v, count - i)


def rms_norm(arguments: int, first: int, last: int, scratch: int) -> None:
    """Item: a row. y = norm(x += add) * weight; `add` 0 where there is none."""
    x, x_stride, add, add_stride = word(arguments, 0), word(arguments, 1), word(arguments, 2), word(arguments, 3)
    y, y_stride = word(arguments, 4), word(arguments, 5)
    weight, columns, eps = word(arguments, 6), word(arguments, 7), real(arguments, 8)
    for row in range(first, last):
        source = x + row * x_stride
        if add != 0:
            for i in range(0, columns, LANES):
                count = columns - i
                v = load_up_to(source + 4 * i, count) + load_up_to(add + row * add_stride + 4 * i, count)
                store_up_to(source + 4 * i, v, count)
        normalize(source, weight, y + row * y_stride, columns, eps)


RMS_NORM = Kernel(rms_norm, "qqqqqqqqd")


def rope(arguments: int, first: int, last: int, scratch: int) -> None:
    """Item: a row of qkv. Heads of q and k are normed where there is a weight (address not 0), then turned by the
    angles of the row's position; `half` is 0 where nothing turns. A table row: `padded` cosines, then as many sines."""
    qkv, stride, positions = word(arguments, 0), word(arguments, 1), word(arguments, 2)
    table, half, padded = word(arguments, 3), word(arguments, 4), word(arguments, 5)
    q_norm, k_norm, num_heads = word(arguments, 6), word(arguments, 7), word(arguments, 8)
    num_kv_heads, head_dim, eps = word(arguments, 9), word(arguments, 10), real(arguments, 11)
    for row in range(first, last):
        cosines = table + load_i32(positions + 4 * row) * padded * 8
        sines = cosines + padded * 4
        for index in range(num_heads + num_kv_heads):
            head = qkv + row * stride + index * head_dim * 4
            weight = q_norm if index < num_heads else k_norm
            if weight != 0:
                normalize(head, weight, head, head_dim, eps)
            for i in range(0, half, LANES):
                count = half - i
                low, high = load_up_to(head + 4 * i, count), load_up_to(head + 4 * (half + i), count)
                c, s = load(cosines + 4 * i), load(sines + 4 * i)
                store_up_to(head + 4 * i, low * c - high * s, count)
                store_up_to(head + 4 * (half + i), high * c + low * s, count)


ROPE = Kernel(rope, "qqqqqqqqqqqd")


@inner
def quantize_block(x: int, y: int, wide: bool) -> None:
    """32 inputs where `wide`, else 16: scale, scale times the sum of the codes, codes.

    NOTE: a number that is not finite makes the sum NaN, and the sum all outputs of the row.
    """
    first, second = load(x), splat(np.float32(0.0))
    if wide:
        second = load(x + VECTOR_BYTES)
    largest = lane_max(maximum(absolute(first), absolute(second)))
    scale, inverse = np.float32(0.0), np.float32(0.0)
    if largest > SMALLEST:
        scale, inverse = largest / np.float32(LARGEST), np.float32(LARGEST) / largest
    factor = splat(inverse)
    first, second = nearest(first * factor), nearest(second * factor)
    store_f32(y, scale)
    store_f32(y + 4, scale * lane_sum(first + second))
    store_int16(y + 8, first)
    if wide:
        store_int16(y + 8 + VECTOR_BYTES // 2, second)


def quantize(arguments: int, first: int, last: int, scratch: int) -> None:
    """Item: a row, in blocks of `block` inputs."""
    x, x_stride, y, y_stride = word(arguments, 0), word(arguments, 1), word(arguments, 2), word(arguments, 3)
    columns, block = word(arguments, 4), word(arguments, 5)
    for row in range(first, last):
        source, target = x + row * x_stride, y + row * y_stride
        if block == 32:
            for i in range(columns // 32):
                quantize_block(source + i * 128, target + i * 72, True)
        else:
            for i in range(columns // 16):
                quantize_block(source + i * 64, target + i * 40, False)


QUANTIZE = Kernel(quantize, "qqqqqq")


def gated(arguments: int, first: int, last: int, scratch: int) -> None:
    """Item: COLUMNS columns of a row. y = activation(gate) * up.

    gelu_tanh(g) = g / 2 (1 + tanh(u)) is computed as g / (1 + e^-2u), silu as g / (1 + e^-g).
    """
    gate_up, stride, y, y_stride = word(arguments, 0), word(arguments, 1), word(arguments, 2), word(arguments, 3)
    columns, activation = word(arguments, 4), word(arguments, 5)
    blocks = (columns + COLUMNS - 1) // COLUMNS
    one, zero = splat(np.float32(1.0)), splat(np.float32(0.0))
    slope, cubic = splat(np.float32(2.0 * np.sqrt(2.0 / np.pi))), splat(np.float32(0.044715))
    for item in range(first, last):
        row, begin = item // blocks, item % blocks * COLUMNS
        for i in range(begin, min(columns, begin + COLUMNS), LANES):
            gate = load_up_to(gate_up + row * stride + 4 * i, columns - i)
            up = load_up_to(gate_up + row * stride + 4 * (columns + i), columns - i)
            steep = gate
            if activation == GELU_TANH:
                steep = slope * fma(cubic, gate * gate * gate, gate)
            store_up_to(y + row * y_stride + 4 * i, gate / (one + exp(zero - steep)) * up, columns - i)


GATED = Kernel(gated, "qqqqqq")


def softcap(arguments: int, first: int, last: int, scratch: int) -> None:
    """Item: COLUMNS columns of a row. x = cap * tanh(x / cap), in place."""
    x, stride, columns = word(arguments, 0), word(arguments, 1), word(arguments, 2)
    cap = splat(real(arguments, 3))
    blocks = (columns + COLUMNS - 1) // COLUMNS
    for item in range(first, last):
        row, begin = item // blocks, item % blocks * COLUMNS
        for i in range(begin, min(columns, begin + COLUMNS), LANES):
            address = x + row * stride + 4 * i
            store_up_to(address, cap * tanh(load_up_to(address, columns - i) / cap), columns - i)


SOFTCAP = Kernel(softcap, "qqqd")


def take_rows(arguments: int, first: int, last: int, scratch: int) -> None:
    """Item: a row. y[i] = x[rows[i]]."""
    x, x_stride, rows = word(arguments, 0), word(arguments, 1), word(arguments, 2)
    y, y_stride, columns = word(arguments, 3), word(arguments, 4), word(arguments, 5)
    for row in range(first, last):
        source, target = x + load_i32(rows + 4 * row) * x_stride, y + row * y_stride
        for i in range(0, columns, LANES):
            store_up_to(target + 4 * i, load_up_to(source + 4 * i, columns - i), columns - i)


TAKE_ROWS = Kernel(take_rows, "qqqqqq")


def embed(arguments: int, first: int, last: int, scratch: int) -> None:
    """Item: a row. y[i] = factor * the packed table's row ids[i], one column of its strip."""
    ids, kind, group = word(arguments, 0), word(arguments, 1), word(arguments, 2)
    table, strip_bytes, columns = word(arguments, 3), word(arguments, 4), word(arguments, 5)
    y, y_stride, factor = word(arguments, 6), word(arguments, 7), real(arguments, 8)
    for row in range(first, last):
        token = load_i32(ids + 4 * row)
        strip, column = table + token // STRIP * strip_bytes, token % STRIP
        target = y + row * y_stride
        if kind == AFFINE4 or kind == AFFINE8:
            for begin in range(0, columns, group):
                scale, offset = load_f32(strip + 4 * column), load_f32(strip + STRIP_BYTES + 4 * column)
                strip += GROUP_HEAD_BYTES
                for k in range(group):
                    if kind == AFFINE8:
                        words = strip + (k // 8 * 2 + k // 2 % 2) * STRIP_BYTES + 4 * column
                        code = load_u8(words + k // 4 % 2 * 2 + k % 2)
                    else:
                        code = load_u8(strip + k // 8 * STRIP_BYTES + 4 * column + k // 2 % 4) >> (4 * (k % 2)) & 15
                    value = scalar_fma(np.float32(code), scale, offset) * factor
                    store_f32(target + 4 * (begin + k), value)
                strip += group * STRIP if kind == AFFINE8 else group // 2 * STRIP
        else:
            half, place = column // LANES * LANES, column % LANES
            for k in range(columns):
                if kind == FLOAT16:
                    value = lane(load_f16(strip + 2 * (STRIP * k + half)), place)
                elif kind == BFLOAT16:
                    value = lane(load_bf16(strip + 2 * (STRIP * k + half)), place)
                else:
                    value = load_f32(strip + STRIP_BYTES * k + 4 * column)
                store_f32(target + 4 * k, value * factor)


EMBED = Kernel(embed, "qqqqqqqqd")

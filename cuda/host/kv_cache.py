"""KV blocks in the host's memory: their layout, and how a step's keys and values get into them.

A block of a layer and kv head is two runs of bytes: its keys, transposed, [D, B], so that 16 scores are one vector, and
its values, [B, D rounded up to 16], each in the numbers of the cache's type. With int8 a vector of 16 float32 follows
in either: the scales of the block's tokens.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.host.compilation import Kernel, inner
from cuda.host.elementwise import load_up_to
from cuda.host.simd import (
    LANES,
    VECTOR_BYTES,
    absolute,
    lane_max,
    lane_sum,
    load_f32,
    load_i32,
    load_u8,
    load_u16,
    maximum,
    splat,
    store,
    store_bf16,
    store_f32,
    store_int8,
    store_u8,
    store_u16,
    word,
)
from cuda.host.workspace import address_of, allocate
from cuda.ops import BLOCK_SIZE, KVDtype, KVGroupSpec

assert BLOCK_SIZE == LANES, "a block of transposed keys is one vector wide"

FLOAT32, BF16, INT8 = 4, 2, 1                   # a kind is the bytes of a number
KINDS: dict[KVDtype, int] = {"float32": FLOAT32, "bf16": BF16, "int8": INT8}
POISON = 0xFF                                   # as all bytes of a float32, a bfloat16 or an int8's scale it is NaN


@dataclass(frozen=True, slots=True, eq=False)
class HostKVCache:
    """Of a group."""
    group: KVGroupSpec
    kind: int
    keys: NDArray[np.uint8]                     # [layers, N, G, bytes]
    values: NDArray[np.uint8]                   # [layers, N, G, bytes]
    num_blocks: int
    key_addresses: tuple[int, ...]              # of each layer
    value_addresses: tuple[int, ...]


def allocate_kv_cache(group: KVGroupSpec, num_blocks: int, dtype: KVDtype) -> HostKVCache:
    kind = KINDS[dtype]

    def blocks(num_bytes: int) -> NDArray[np.uint8]:
        shape = (len(group.layers), num_blocks, group.kv_heads, num_bytes)
        return np.frombuffer(allocate(int(np.prod(shape))), np.uint8, int(np.prod(shape))).reshape(shape)

    keys, values = blocks(_key_bytes(group.k_dim, kind)), blocks(_value_bytes(group.v_dim, kind))
    return HostKVCache(group, kind, keys, values, num_blocks, tuple(address_of(layer) for layer in keys),
                       tuple(address_of(layer) for layer in values))


def kv_block_bytes(group: KVGroupSpec, dtype: KVDtype) -> int:
    """See `cuda.ops.Ops.kv_block_bytes`."""
    kind = KINDS[dtype]
    return len(group.layers) * group.kv_heads * (_key_bytes(group.k_dim, kind) + _value_bytes(group.v_dim, kind))


def _key_bytes(k_dim: int, kind: int) -> int:
    return k_dim * BLOCK_SIZE * kind + (VECTOR_BYTES if kind == INT8 else 0)


def _value_bytes(v_dim: int, kind: int) -> int:
    return _key_bytes(-(-v_dim // LANES) * LANES, kind)


def store_kv_scratch_bytes(head_dim: int) -> int:
    """A head's numbers."""
    return -(-head_dim // LANES) * LANES * FLOAT32


@inner
def int8_scale(x: int, count: int) -> Any:
    """The largest size of `count` floats / 127; NaN where one of them is not finite."""
    top = not_finite = zero = splat(np.float32(0.0))
    for i in range(0, count, LANES):
        v = load_up_to(x + 4 * i, count - i)
        top = maximum(absolute(v), top)
        not_finite = not_finite + v * zero
    return lane_max(top) / np.float32(127.0) + lane_sum(not_finite)


@inner
def convert(x: int, count: int, kind: int, y: int) -> Any:
    """`count` floats as numbers of the kind, zeros up to whole vectors behind them; returns their scale if int8."""
    scale = np.float32(1.0)
    if kind == INT8:
        scale = int8_scale(x, count)
        # All zeros, or so small that the scale is zero, or not finite: what is read is then scale times zero.
        divisor = splat(scale if scale > np.float32(0.0) else np.float32(np.inf))
        for i in range(0, count, LANES):
            v = load_up_to(x + 4 * i, count - i)
            store_int8(y + i, v / divisor)
    else:
        for i in range(0, count, LANES):
            v = load_up_to(x + 4 * i, count - i)
            if kind == BF16:
                store_bf16(y + BF16 * i, v)
            else:
                store(y + FLOAT32 * i, v)
    return scale


@inner
def spread(x: int, count: int, kind: int, y: int) -> None:
    """`count` numbers of the kind, each to the same place of a vector of its own."""
    if kind == INT8:
        for i in range(count):
            store_u8(y + i * LANES, load_u8(x + i))
    elif kind == BF16:
        for i in range(count):
            store_u16(y + i * BF16 * LANES, load_u16(x + BF16 * i))
    else:
        for i in range(count):
            store_f32(y + i * FLOAT32 * LANES, load_f32(x + FLOAT32 * i))


def store_kv(arguments: int, first: int, last: int, scratch: int) -> None:
    """Item: a row. Of each kv head, k becomes a column of its block's keys and v a row of its values."""
    qkv, stride, slots = word(arguments, 0), word(arguments, 1), word(arguments, 2)
    keys, values, kind = word(arguments, 3), word(arguments, 4), word(arguments, 5)
    num_heads, num_kv_heads, head_dim = word(arguments, 6), word(arguments, 7), word(arguments, 8)
    key_bytes, value_bytes = word(arguments, 9), word(arguments, 10)
    row_bytes = (head_dim + LANES - 1) // LANES * LANES * kind
    for row in range(first, last):
        slot = load_i32(slots + 4 * row)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        for g in range(num_kv_heads):
            k = qkv + row * stride + (num_heads + g) * head_dim * 4
            target = keys + (block * num_kv_heads + g) * key_bytes
            scale = convert(k, head_dim, kind, scratch)
            spread(scratch, head_dim, kind, target + kind * offset)
            if kind == INT8:
                store_f32(target + key_bytes - VECTOR_BYTES + 4 * offset, scale)
            v = k + num_kv_heads * head_dim * 4
            target = values + (block * num_kv_heads + g) * value_bytes
            scale = convert(v, head_dim, kind, target + offset * row_bytes)
            if kind == INT8:
                store_f32(target + value_bytes - VECTOR_BYTES + 4 * offset, scale)


STORE_KV = Kernel(store_kv, "qqqqqqqqqqq")

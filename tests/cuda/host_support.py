"""What the host back end's tests share: a back end around single weights, random weights, comparison by bits."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cuda.host.commands import Team
from cuda.host.kv_cache import BF16, INT8, HostKVCache
from cuda.host.ops import HostOps
from cuda.host.pack import PackedLinear
from cuda.host.packer import Packer
from cuda.host.simd_int16 import HAS_PAIRS
from cuda.ops import BLOCK_SIZE, Batch, HostMath, KVGroupSpec
from cuda.reference import to_bf16
from weights.load import ModelWeights
from weights.quant import Affine, Dense, Linear, Weight
from weights.spec import ModelSpec

Floats = NDArray[np.float32]

MAX_POSITION = 512
GUARD = np.float32(-1234.5)

needs_pairs = pytest.mark.skipif(not HAS_PAIRS, reason="16-bit products need AVX2")


def make_spec(inputs: int = 16, heads: int = 2, kv_heads: int = 1, head_dim: int = 16) -> ModelSpec:
    """A model without layers: its head is the projection under test."""
    return ModelSpec("test", hidden_size=inputs, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, ffn_size=16,
                     vocab_size=64, max_position=MAX_POSITION, norm_eps=1e-6, layers=(), attention_scale=head_dim**-0.5)


def prepare(ops: Any, spec: ModelSpec, head: Linear | None = None, embed: Weight | None = None) -> ModelWeights:
    table = embed or Dense(np.zeros((32, spec.hidden_size), np.float32))
    weights = ModelWeights(table, (), np.ones(spec.hidden_size, np.float32), head or Linear((table,)))
    prepared: ModelWeights = ops.prepare(spec, weights, 160, MAX_POSITION)
    return prepared


@contextmanager
def host_ops(num_threads: int = 2, math: HostMath = "exact") -> Iterator[HostOps]:
    ops = HostOps(num_threads, math)
    try:
        yield ops
    finally:
        ops.close()


def pack(linear: Linear, num_threads: int = 1) -> PackedLinear:
    packer, team = Packer(), Team(num_threads)
    try:
        packed = packer.linear(linear)
        packer.run(team)
    finally:
        team.close()
    return packed


def random_floats(seed: int, *shape: int) -> Floats:
    """Normal, with a few values 30 times as large."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape).astype(np.float32)
    return np.where(rng.random(shape) < 0.02, values * np.float32(30), values)


def random_affine(seed: int, outputs: int, inputs: int, bits: int, group: int) -> Affine:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (outputs, inputs * bits // 8), dtype=np.uint8)
    scale = rng.standard_normal((outputs, inputs // group)).astype(np.float32) / np.float32(2**bits)
    offset = rng.standard_normal((outputs, inputs // group)).astype(np.float32)
    return Affine(codes, scale, offset, bits, group)


def random_dense(seed: int, outputs: int, inputs: int, kind: str) -> Dense:
    values = random_floats(seed, outputs, inputs)
    if kind == "bf16":
        return Dense((values.view(np.uint32) >> 16).astype(np.uint16), is_bf16=True)
    return Dense(values.astype(np.dtype(kind)))


def make_batch(pieces: list[tuple[int, int]], tables: NDArray[np.int32]) -> Batch:
    """pieces: (start, end) of each sequence's tokens in this step; tables [S, M]."""
    lengths = [end - start for start, end in pieces]
    positions = np.concatenate([np.arange(start, end) for start, end in pieces]).astype(np.int32)
    rows = np.repeat(np.arange(len(pieces)), lengths)
    slots = tables[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return Batch(np.zeros(len(positions), np.int32), positions, np.cumsum([0, *lengths]).astype(np.int32),
                 np.array([end for _, end in pieces], np.int32), (tables,), (slots.astype(np.int32),))


def kv_group(num_layers: int, kv_heads: int, head_dim: int, window: int | None = None) -> KVGroupSpec:
    return KVGroupSpec(tuple(range(num_layers)), kv_heads, head_dim, head_dim, window)


def stored(cache: HostKVCache) -> dict[str, NDArray[Any]]:
    """Views of what the cache holds: keys [layers, N, G, D, B], values [layers, N, G, B, D rounded up to 16], and with
    int8 key_scales and value_scales [layers, N, G, B]."""
    views: dict[str, NDArray[Any]] = {}
    for name, memory, row_shape in (("key", cache.keys, (-1, BLOCK_SIZE)), ("value", cache.values, (BLOCK_SIZE, -1))):
        numbers = memory
        if cache.kind == INT8:
            numbers, scales = memory[..., :-4 * BLOCK_SIZE], memory[..., -4 * BLOCK_SIZE:]
            views[f"{name}_scales"] = scales.view(np.float32)
        dtype = {BF16: np.uint16, INT8: np.int8}.get(cache.kind, np.float32)
        views[f"{name}s"] = numbers.view(dtype).reshape(*numbers.shape[:-1], *row_shape)
        assert np.shares_memory(views[f"{name}s"], memory)
    return views


def fill(cache: HostKVCache, index: Any, value: float) -> None:
    """All that is read of [layers, N] at `index` becomes `value`, or with int8 a multiple of it."""
    for view in stored(cache).values():
        if view.dtype == np.int8:
            view[index] = 1
        else:
            view[index] = to_bf16(np.full(1, value, np.float32)) if view.dtype == np.uint16 else value


def memory_of(result: Floats) -> Floats:
    """All of the memory of an op's result, its rows' surroundings too."""
    base: Any = result.base
    return np.frombuffer(base, np.float32)


def assert_same_bits(result: Floats, expected: Floats) -> None:
    np.testing.assert_array_equal(np.ascontiguousarray(result).view(np.uint32),
                                  np.ascontiguousarray(expected).view(np.uint32))


def assert_writes_its_rows_alone(ops: HostOps, head: Linear, num_rows: int) -> None:
    """Of a product: behind a row lies room for the rest of a pair of strips; all other memory stays as it was."""
    prepared = prepare(ops, make_spec(head.in_features), head)
    x = random_floats(4, num_rows, head.in_features)
    before = x.copy()
    y = ops.linear(x, prepared.head)
    memory = memory_of(y)
    memory[:] = GUARD
    ops.finish()
    written = np.zeros(len(memory), np.bool_)
    for row in range(num_rows):
        first = row * y.strides[0] // 4
        written[first:first + head.out_features + 31] = True
    assert (memory[~written] == GUARD).all()
    assert (y != GUARD).all()
    assert_same_bits(x, before)

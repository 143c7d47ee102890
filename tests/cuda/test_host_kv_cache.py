"""KV blocks in every type: what is stored, on the host bit by bit what the reference stores, and where."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from cuda.host.kv_cache import HostKVCache
from cuda.host.ops import HostOps
from cuda.ops import BLOCK_SIZE, KVDtype, Ops
from cuda.reference import ReferenceOps, to_bf16, to_int8
from tests.cuda.host_support import (
    Floats,
    assert_same_bits,
    fill,
    host_ops,
    kv_group,
    make_batch,
    make_spec,
    prepare,
    random_floats,
    stored,
)

GUARD = 0x80                                    # as a byte of int8 -128, which is no code; else next to nothing
dtypes = pytest.mark.parametrize("dtype", HostOps.kv_dtypes)
geometries = pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 16), (3, 24), (3, 64), (2, 256), (2, 8)])


@pytest.fixture(params=["reference", "host"])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    back_end: Ops = ReferenceOps() if request.param == "reference" else HostOps(2)
    yield back_end
    back_end.close()


def awkward_rows(head_dim: int) -> Floats:
    """Random ones, with outliers; zeros; ties between two codes; the smallest and largest numbers; not finite ones."""
    rows = [*random_floats(0, 8, head_dim)]
    ties = (np.arange(head_dim) % 128).astype(np.float32) - np.float32(0.5)
    ties[0] = 127
    tiny, huge = np.float32(1e-45), np.float32(1e38)
    rows += [np.zeros(head_dim), -np.zeros(head_dim), ties, -ties, ties * tiny, ties * np.float32(3) * tiny,
             np.full(head_dim, tiny), np.full(head_dim, huge), rows[0] * np.float32(1e-42)]
    outlier = rows[1].copy()
    outlier[3] = 1e6
    rows.append(outlier)
    for bad in (np.nan, np.inf, -np.inf):
        broken = rows[2].copy()
        broken[-1] = bad
        rows.append(broken)
    return np.array(rows, np.float32)                                                           # [rows, D]


def stored_rows(ops: Ops, dtype: KVDtype, kv_heads: int, x: Floats) -> list[NDArray[np.uint8]]:
    """Rows x [T, D] stored by an op as k, and turned round as v, of every kv head. -> the bytes of what lies in the
    cache then: keys [T, G, D], values [T, G, D], and with int8 their scales [T, G]"""
    num_rows, head_dim = x.shape
    spec = make_spec(16, kv_heads, kv_heads, head_dim)
    prepare(ops, spec)
    cache = ops.allocate_kv(kv_group(2, kv_heads, head_dim), 5, dtype)
    slots = np.random.default_rng(1).permutation(5 * BLOCK_SIZE)[:num_rows].astype(np.int32)
    k = np.repeat(x[:, None], kv_heads, axis=1)                                                 # [T, G, D]
    qkv = np.concatenate([k, k, k[::-1]], axis=1).reshape(num_rows, -1)
    ops.store_kv(qkv, cache, 1, slots)
    ops.finish()
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    if isinstance(cache, HostKVCache):
        views = stored(cache)
        parts = [views["keys"][1, block, :, :, offset], views["values"][1, block, :, offset, :head_dim]]
        if dtype == "int8":
            parts += [views[name][1, block, :, offset] for name in ("key_scales", "value_scales")]
    else:
        parts = [cache.data[1, kv, block, :, offset] for kv in (0, 1)]
        if dtype == "int8":
            parts += [cache.scales[1, kv, block, :, offset] for kv in (0, 1)]
    return parts


@dtypes
@geometries
def test_the_host_stores_what_the_reference_stores(kv_heads: int, head_dim: int, dtype: KVDtype) -> None:
    x = awkward_rows(head_dim)
    expected = stored_rows(ReferenceOps(), dtype, kv_heads, x)
    with host_ops() as host:
        results = stored_rows(host, dtype, kv_heads, x)
    assert len(results) == len(expected) == (4 if dtype == "int8" else 2)
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype == wanted.dtype
        np.testing.assert_array_equal(result, wanted)           # NaN is NaN, whatever its bits


def test_bf16_is_the_nearest_one() -> None:
    """Against all neighbours: every bfloat16, its middle to the next, and what lies beside both."""
    bits = np.arange(0x7F80, dtype=np.uint32) << 16             # finite, not negative
    low = bits.view(np.float32)
    middle = bits | 0x8000
    np.testing.assert_array_equal(to_bf16(low), bits >> 16)
    for sign in (0, 0x8000):
        for pattern, up in ((bits | 1, 0), (middle - 1, 0), (middle, bits >> 16 & 1), (middle + 1, 1),
                            (bits | 0xFFFF, 1)):
            x = (pattern | sign << 16).astype(np.uint32).view(np.float32)
            np.testing.assert_array_equal(to_bf16(x), (bits >> 16) + up | sign)
    assert to_bf16(np.array([np.inf, -np.inf], np.float32)).tolist() == [0x7F80, 0xFF80]
    quiet, loud = np.array([0x7FC00000, 0x7F800001], np.uint32).view(np.float32)
    assert to_bf16(np.array([quiet, loud, -quiet], np.float32)).tolist() == [0x7FC0, 0x7FC0, 0xFFC0]


def test_int8_is_as_near_as_its_scale_allows() -> None:
    x = awkward_rows(64)[:-3]
    codes, scale = to_int8(x)
    assert codes.min() >= -127
    error = np.abs(codes * scale[:, None].astype(np.float64) - x)
    # Half a step; of numbers so small that the scale itself is rounded coarsely, a part of the smallest step more.
    assert (error <= scale[:, None] * (0.5 + 1e-5) + 127 * 1e-45).all()
    whole = np.abs(x).max(axis=1) > 1e-35
    assert (np.abs(codes).max(axis=1)[whole] == 127).all()
    codes, scale = to_int8(np.array([[127, 0.5, 1.5, -0.5, -1.5, 2.5]], np.float32))
    assert codes.tolist() == [[127, 0, 2, 0, -2, 2]]
    assert scale.tolist() == [1]
    for zeros in (np.zeros((1, 4), np.float32), np.full((1, 4), 1e-45, np.float32)):
        codes, scale = to_int8(zeros)
        assert not codes.any()
        assert not scale.any()


@dtypes
@geometries
def test_store_kv_writes_its_slots_and_nothing_else(kv_heads: int, head_dim: int, dtype: KVDtype) -> None:
    slots = np.array([0, 15, 16, 79, 33], np.int32)
    qkv = random_floats(0, len(slots), 4 * kv_heads * head_dim)
    with host_ops() as host:
        prepare(host, make_spec(16, 2 * kv_heads, kv_heads, head_dim))
        cache = host.allocate_kv(kv_group(2, kv_heads, head_dim), 5, dtype)
        assert not cache.keys.any()
        assert not cache.values.any()
        cache.keys[:] = cache.values[:] = GUARD
        host.store_kv(qkv, cache, 1, slots)
        host.finish()
        views = stored(cache)
        for slot in slots:
            block, offset = divmod(int(slot), BLOCK_SIZE)
            written = [views["keys"][1, block, :, :, offset], views["values"][1, block, :, offset]]
            if dtype == "int8":
                written += [views["key_scales"][1, block, :, offset], views["value_scales"][1, block, :, offset]]
            for numbers in written:
                guard = np.full(numbers.dtype.itemsize, GUARD, np.uint8).view(numbers.dtype)
                assert (numbers != guard).all()
                numbers[...] = guard
        assert (cache.keys == GUARD).all()
        assert (cache.values == GUARD).all()
        with pytest.raises(AssertionError, match="slots outside"):
            host.store_kv(qkv, cache, 1, slots + 1)


@dtypes
@geometries
def test_a_block_takes_the_bytes_that_are_said(ops: Ops, kv_heads: int, head_dim: int, dtype: KVDtype) -> None:
    group = kv_group(3, kv_heads, head_dim)
    prepare(ops, make_spec(16, kv_heads, kv_heads, head_dim))
    cache = ops.allocate_kv(group, 7, dtype)
    if isinstance(cache, HostKVCache):
        num_bytes = cache.keys.nbytes + cache.values.nbytes
        values = -(-head_dim // 16) * 16
    else:
        num_bytes = cache.data.nbytes + cache.scales.nbytes
        values = head_dim
    assert num_bytes == 7 * ops.kv_block_bytes(group, dtype)
    number, scales = {"float32": (4, 0), "bf16": (2, 0), "int8": (1, 8)}[dtype]
    assert ops.kv_block_bytes(group, dtype) == 3 * kv_heads * BLOCK_SIZE * ((head_dim + values) * number + scales)


def attended(ops: Ops, cache: object, block: int, qkv: Floats) -> Floats:
    """What a row sees that has position 15 of a sequence of one block."""
    batch = make_batch([(BLOCK_SIZE - 1, BLOCK_SIZE)], np.full((1, 1), block, np.int32))
    ops.begin(batch)
    out = ops.attend(qkv, cache, 1, batch.block_tables[0], 0.25, None, None, None)
    ops.finish()
    return np.array(out)


@dtypes
def test_blocks_are_copied_whole_and_one_by_one(ops: Ops, dtype: KVDtype) -> None:
    """A destination may be a later pair's source. To the tier and back they keep their bits."""
    group = kv_group(2, 2, 24)
    prepare(ops, make_spec(16, 4, 2, 24))
    cache, tier = ops.allocate_kv(group, 6, dtype), ops.allocate_tier(group, 3, dtype)
    slots = np.arange(6 * BLOCK_SIZE, dtype=np.int32)
    for layer in (0, 1):
        ops.begin(make_batch([(0, len(slots))], np.arange(6, dtype=np.int32)[None]))
        ops.store_kv(random_floats(layer, len(slots), 8 * 24), cache, layer, slots)
        ops.finish()
    query = random_floats(5, 1, 8 * 24)
    before = [attended(ops, cache, block, query) for block in range(6)]
    assert len({result.tobytes() for result in before}) == 6

    ops.copy_blocks(cache, cache, np.array([[1, 4], [4, 2], [3, 4]], np.int32))
    for block, was in enumerate([0, 1, 1, 3, 3, 5]):
        assert_same_bits(attended(ops, cache, block, query), before[was])

    ops.copy_blocks(cache, tier, np.array([[5, 2], [0, 1]], np.int32))
    ops.poison_blocks(cache, np.array([0, 5, 2], np.int32))
    for block in (0, 5, 2):
        assert np.isnan(attended(ops, cache, block, query)).all()
    ops.copy_blocks(tier, cache, np.array([[2, 5], [1, 0]], np.int32))
    for block, was in ((0, 0), (1, 1), (3, 3), (4, 3), (5, 5)):
        assert_same_bits(attended(ops, cache, block, query), before[was])


@dtypes
def test_copies_are_whole_blocks_of_all_layers(dtype: KVDtype) -> None:
    with host_ops() as host:
        prepare(host, make_spec(16, 2, 1, 16))
        cache = host.allocate_kv(kv_group(3, 1, 16), 6, dtype)
        for layer in range(3):
            for block in range(6):
                fill(cache, (layer, block), 10 * layer + block)
        expected = [0, 4, 2, 3, 4, 5]
        reference = [cache.keys[:, expected].copy(), cache.values[:, expected].copy()]
        host.copy_blocks(cache, cache, np.array([[4, 1]], np.int32))
        np.testing.assert_array_equal(cache.keys, reference[0])
        np.testing.assert_array_equal(cache.values, reference[1])
        host.store_kv(random_floats(0, 1, 64), cache, 0, np.zeros(1, np.int32))
        with pytest.raises(AssertionError, match="before a step's operations"):
            host.copy_blocks(cache, cache, np.array([[0, 1]], np.int32))


@dtypes
def test_a_row_of_zeros_is_attended_to_as_zeros(ops: Ops, dtype: KVDtype) -> None:
    prepare(ops, make_spec(16, 4, 2, 16))
    cache = ops.allocate_kv(kv_group(2, 2, 16), 2, dtype)
    qkv = random_floats(0, BLOCK_SIZE, 8 * 16)
    qkv[:, 4 * 16:] = 0
    ops.begin(make_batch([(0, BLOCK_SIZE)], np.zeros((1, 1), np.int32)))
    ops.store_kv(qkv, cache, 1, np.arange(BLOCK_SIZE, dtype=np.int32))
    ops.finish()
    assert_same_bits(attended(ops, cache, 0, random_floats(1, 1, 8 * 16)), np.zeros((1, 4 * 16), np.float32))

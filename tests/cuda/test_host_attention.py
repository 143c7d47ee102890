"""Paged attention of the host back end: against the reference, and a row's bits against everything around it."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cuda.host.attention import SPLIT_KEYS
from cuda.host.ops import HostOps
from cuda.host.register_tile import MAX_ROWS
from cuda.ops import BLOCK_SIZE, KVDtype
from cuda.reference import ReferenceOps
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
)

NUM_BLOCKS = 40
LENGTHS = (1, 15, 16, 17, 33, 70)
Pieces = Sequence[tuple[int, int, int]]         # sequence, start, end


def tables(seed: int, num_sequences: int = len(LENGTHS), width: int = 5) -> NDArray[np.int32]:
    """Blocks strewn over the cache; block 0 belongs to nobody."""
    order = 1 + np.random.default_rng(seed).permutation(NUM_BLOCKS - 1)
    return order[:num_sequences * width].reshape(num_sequences, width).astype(np.int32)


class Attention:
    """One layer's attention over sequences whose q, k and v are given."""

    def __init__(self, ops: Any, heads: int, kv_heads: int, head_dim: int, window: int | None = None,
                 softcap: float | None = None, dtype: KVDtype = "float32", seed: int = 0,
                 sinks: Floats | None = None) -> None:
        self.ops = ops
        self.spec = make_spec(16, heads, kv_heads, head_dim)
        prepare(ops, self.spec)
        self.window, self.softcap, self.sinks = window, softcap, sinks
        self.cache = ops.allocate_kv(kv_group(2, kv_heads, head_dim, window), NUM_BLOCKS, dtype)
        width = (heads + 2 * kv_heads) * head_dim
        self.qkv = [random_floats(seed + i, length, width) for i, length in enumerate(LENGTHS)]
        self.tables = tables(seed)

    def run(self, pieces: Pieces, tables: NDArray[np.int32] | None = None) -> list[Floats]:
        table = np.ascontiguousarray((self.tables if tables is None else tables)[[s for s, _, _ in pieces]])
        batch = make_batch([(start, end) for _, start, end in pieces], table)
        qkv = np.concatenate([self.qkv[s][start:end] for s, start, end in pieces])
        self.ops.begin(batch)
        self.ops.store_kv(qkv, self.cache, 1, batch.slot_mapping[0])
        out = self.ops.attend(qkv, self.cache, 1, batch.block_tables[0], self.spec.attention_scale, self.window,
                              self.softcap, self.sinks)
        self.ops.finish()
        return np.split(np.array(out), batch.query_start_loc[1:-1])

    def whole(self) -> list[Floats]:
        return self.run([(s, 0, length) for s, length in enumerate(LENGTHS)])


def assert_all_same_bits(results: Sequence[Floats], expected: Sequence[Floats]) -> None:
    for result, wanted in zip(results, expected, strict=True):
        assert_same_bits(result, wanted)


dtypes = pytest.mark.parametrize("dtype", HostOps.kv_dtypes)
GEOMETRIES = [(1, 1, 16), (4, 2, 16), (3, 1, 24), (6, 2, 32), (9, 3, 64), (2, 1, 256), (MAX_ROWS + 1, 1, 16),
              (2 * MAX_ROWS + 4, 2, 8), (5, 1, 40)]


@dtypes
@pytest.mark.parametrize("window", [None, 1, 4, 12, 16, 17])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), GEOMETRIES)
def test_against_the_reference(heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: KVDtype) -> None:
    """Both round to the same numbers, so that they are as near to each other with few bits as with many."""
    expected = Attention(ReferenceOps(), heads, kv_heads, head_dim, window, dtype=dtype).whole()
    with host_ops() as ops:
        results = Attention(ops, heads, kv_heads, head_dim, window, dtype=dtype).whole()
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)


@dtypes
@pytest.mark.parametrize("softcap", [2.0, 50.0])
def test_softcap(softcap: float, dtype: KVDtype) -> None:
    expected = Attention(ReferenceOps(), 4, 2, 32, None, softcap, dtype).whole()
    with host_ops() as ops:
        results = Attention(ops, 4, 2, 32, None, softcap, dtype).whole()
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=2e-5)


def test_scores_so_large_that_one_key_wins() -> None:
    """Scores of several thousand: the largest is subtracted before the exponential."""
    results = []
    with host_ops() as ops:
        for back_end in (ReferenceOps(), ops):
            attention = Attention(back_end, 2, 1, 16)
            attention.qkv = [qkv * np.float32(100) for qkv in attention.qkv]
            results.append(attention.whole())
    for result, wanted in zip(results[1], results[0], strict=True):
        assert np.isfinite(result).all()
        np.testing.assert_allclose(result, wanted, rtol=1e-2, atol=1e-2)


BIT_CASES = [(9, 3, 64, None, None), (4, 2, 16, 12, None), (3, 1, 24, 1, None), (1, 1, 32, 16, 5.0),
             (MAX_ROWS + 2, 1, 16, 17, None)]


@dtypes
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window", "softcap"), BIT_CASES)
def test_bits_for_any_chunks_company_and_blocks(heads: int, kv_heads: int, head_dim: int, window: int | None,
                                                softcap: float | None, dtype: KVDtype) -> None:
    with host_ops() as ops:
        expected = Attention(ops, heads, kv_heads, head_dim, window, softcap, dtype).whole()

        for step in (1, 2, 5, 16):              # each sequence alone, in chunks
            attention = Attention(ops, heads, kv_heads, head_dim, window, softcap, dtype)
            alone = []
            for s, length in enumerate(LENGTHS):
                chunks = [attention.run([(s, start, min(length, start + step))])[0]
                          for start in range(0, length, step)]
                alone.append(np.concatenate(chunks))
            assert_all_same_bits(alone, expected)

        attention = Attention(ops, heads, kv_heads, head_dim, window, softcap, dtype)   # mixed, in other blocks
        elsewhere = tables(99)
        done = [0] * len(LENGTHS)
        parts: list[list[Floats]] = [[] for _ in LENGTHS]
        rng = np.random.default_rng(0)
        while any(count < length for count, length in zip(done, LENGTHS, strict=True)):
            running = [int(s) for s in rng.permutation(len(LENGTHS)) if done[s] < LENGTHS[s]]
            pieces = [(s, done[s], min(LENGTHS[s], done[s] + int(rng.integers(1, 20)))) for s in running]
            for (s, _, end), part in zip(pieces, attention.run(pieces, elsewhere), strict=True):
                done[s] = end
                parts[s].append(part)
        assert_all_same_bits([np.concatenate(part) for part in parts], expected)


def test_bits_for_any_number_of_threads() -> None:
    results = []
    for num_threads in (1, 2, 3):
        with host_ops(num_threads) as ops:
            results.append(Attention(ops, 9, 3, 64).whole())
    assert_all_same_bits(results[1], results[0])
    assert_all_same_bits(results[2], results[0])


@dtypes
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("window", [None, 5])
def test_slots_that_a_row_does_not_see_cannot_reach_it(window: int | None, poison: float, dtype: KVDtype) -> None:
    """Unwritten slots, blocks of others and, for earlier rows of the same chunk, later keys."""
    with host_ops() as ops:
        expected = Attention(ops, 4, 2, 16, window, dtype=dtype).whole()
        attention = Attention(ops, 4, 2, 16, window, dtype=dtype)
        fill(attention.cache, ..., poison)
        assert_all_same_bits(attention.whole(), expected)

        attention = Attention(ops, 4, 2, 16, window, dtype=dtype)
        attention.qkv[5] = attention.qkv[5].copy()
        attention.qkv[5][40, 64:] = poison                      # k and v of position 40
        results = attention.whole()
        assert_all_same_bits(results[:5], expected[:5])
        assert_same_bits(results[5][:40], expected[5][:40])
        assert not np.isfinite(results[5][40:45]).all(axis=1).any()
        if window is not None:                                  # and out of the window again
            assert_same_bits(results[5][45:], expected[5][45:])


@dtypes
def test_blocks_that_left_the_window_are_not_read(dtype: KVDtype) -> None:
    """Their table entries may name any block by then."""
    with host_ops() as ops:
        expected = Attention(ops, 4, 2, 16, 12, dtype=dtype).whole()[5]
        attention = Attention(ops, 4, 2, 16, 12, dtype=dtype)
        ops.poison_blocks(attention.cache, np.zeros(1, np.int32))
        rows = []
        for position in range(LENGTHS[5]):
            table = attention.tables.copy()
            table[5, :max(0, position - 11) // BLOCK_SIZE] = 0
            rows.append(attention.run([(5, position, position + 1)], table)[0])
        assert_same_bits(np.concatenate(rows), expected)


@dtypes
def test_layers_do_not_mix(dtype: KVDtype) -> None:
    with host_ops() as ops:
        attention = Attention(ops, 4, 2, 16, dtype=dtype)
        fill(attention.cache, 0, np.nan)
        assert all(np.isfinite(result).all() for result in attention.whole())


def test_numbers_are_checked_before_native_code_sees_them() -> None:
    with host_ops() as ops:
        attention = Attention(ops, 4, 2, 16)
        outside = attention.tables.copy()
        outside[5, 4] = NUM_BLOCKS
        batch = make_batch([(0, 70)], attention.tables[5:6])
        ops.begin(batch)
        qkv = attention.qkv[5]
        with pytest.raises(AssertionError, match="block ids outside"):
            ops.attend(qkv, attention.cache, 0, outside[5:6], 1.0, None, None, None)
        with pytest.raises(AssertionError, match="70 keys in 4 blocks"):
            ops.attend(qkv, attention.cache, 0, np.ascontiguousarray(outside[5:6, :4]), 1.0, None, None, None)


@dtypes
def test_inputs_are_left_alone(dtype: KVDtype) -> None:
    with host_ops() as ops:
        attention = Attention(ops, 9, 3, 64, dtype=dtype)
        before = [qkv.copy() for qkv in attention.qkv]
        attention.whole()
        keys, values = attention.cache.keys.copy(), attention.cache.values.copy()
        qkv = np.concatenate(attention.qkv)
        batch = make_batch([(0, length) for length in LENGTHS], attention.tables)
        ops.begin(batch)
        ops.attend(qkv, attention.cache, 1, batch.block_tables[0], 1.0, None, None, None)
        ops.finish()
        np.testing.assert_array_equal(attention.cache.keys, keys)
        np.testing.assert_array_equal(attention.cache.values, values)
        assert_same_bits(qkv, np.concatenate(before))


def test_many_threads_on_few_items() -> None:
    with host_ops(1) as one, host_ops(6) as many:
        for piece in ((0, 0, 1), (3, 0, 17)):
            assert_all_same_bits(Attention(many, 1, 1, 16).run([piece]), Attention(one, 1, 1, 16).run([piece]))


class LongAttention(Attention):
    """One sequence of more keys than two splits hold."""
    LENGTH = 2 * SPLIT_KEYS + 70

    def __init__(self, ops: Any, heads: int, kv_heads: int, head_dim: int, window: int | None = None,
                 dtype: KVDtype = "float32", sinks: Floats | None = None) -> None:
        super().__init__(ops, heads, kv_heads, head_dim, window, dtype=dtype, sinks=sinks)
        self.qkv = [random_floats(1, self.LENGTH, (heads + 2 * kv_heads) * head_dim)]
        self.tables = tables(1, 1, NUM_BLOCKS - 1)


LONG = pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window"), [
    (3, 1, 24, None), (4, 2, 16, None), (MAX_ROWS + 1, 1, 16, None), (3, 1, 16, SPLIT_KEYS + 30), (2, 1, 16, 40),
    (3, 1, 16, SPLIT_KEYS)])


@dtypes
@LONG
def test_long_contexts_against_the_reference(heads: int, kv_heads: int, head_dim: int, window: int | None,
                                             dtype: KVDtype) -> None:
    pieces = [(0, 0, 200), (0, 200, 520), (0, 520, LongAttention.LENGTH)]
    with host_ops() as ops:
        attention, expected = (LongAttention(back_end, heads, kv_heads, head_dim, window, dtype)
                               for back_end in (ops, ReferenceOps()))
        for piece in pieces:
            [result], [wanted] = attention.run([piece]), expected.run([piece])
            np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)


@dtypes
@LONG
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_splits_of_their_own_and_folded_splits_give_the_same_bits(
        heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: KVDtype, num_threads: int,
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, by rows about the edges of splits and windows, and in odd chunks; items of a split and items of all."""
    length = LongAttention.LENGTH
    with host_ops(1) as ops:
        [expected] = LongAttention(ops, heads, kv_heads, head_dim, window, dtype).run([(0, 0, length)])
    for items_a_thread in (0, 1 << 20):
        monkeypatch.setattr("cuda.host.ops.ITEMS_A_THREAD", items_a_thread)
        with host_ops(num_threads) as ops:
            attention = LongAttention(ops, heads, kv_heads, head_dim, window, dtype)
            assert_same_bits(attention.run([(0, 0, length)])[0], expected)
            for start, end in ((length - 1, length), (SPLIT_KEYS - 1, SPLIT_KEYS), (SPLIT_KEYS, SPLIT_KEYS + 1),
                               (2 * SPLIT_KEYS - 2, 2 * SPLIT_KEYS + 3), (300, 337), (2 * SPLIT_KEYS + 29, length)):
                [result] = attention.run([(0, start, end)])
                assert_same_bits(result, expected[start:end])


def test_what_is_not_a_number_stays_so_over_splits() -> None:
    with host_ops(2) as ops:
        attention = LongAttention(ops, 2, 1, 16)
        attention.qkv[0][300, 2 * 16:] = np.nan             # a key and a value of the second split
        [result] = attention.run([(0, 0, attention.LENGTH)])
        assert np.isfinite(result[:300]).all()
        assert np.isnan(result[300:]).all()

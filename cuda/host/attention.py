"""Causal attention over the paged KV cache, ragged rows, grouped queries, window, soft cap and sinks.

An item is a run of positions of one sequence for the query heads of one kv head: together at most MAX_ROWS rows, which
read each key and value once, as they are stored: the codes of int8 go into the sums as they are, and a token's scales
to its score and to its weight. A row touches exactly its own keys, in ascending order, whatever the run: neither other
rows' keys nor what lies in unused slots can reach it, not even as zero times NaN.

Keys are taken in splits of SPLIT_KEYS, cut at absolute positions: scores of a split's keys in the thread's scratch, the
softmax over them, the weighted sum of values. What is known of a row is folded split by split, in their order. Either
one item does that, or, where there are too few of them for the threads, an item is one split, its results go to memory
and a second command folds them: the same sums in the same order, so that a row's bits do not depend on which it was.
A head's sink, a score without a value, joins when a row is written, after its last split.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from cuda.host.compilation import Kernel, inner
from cuda.host.elementwise import load_up_to, store_up_to
from cuda.host.kv_cache import BF16, FLOAT32, INT8
from cuda.host.register_tile import MAX_ROWS, tile_bf16, tile_float32, tile_int8
from cuda.host.simd import (
    LANES,
    VECTOR_BYTES,
    exp,
    keep_lanes,
    lane_max,
    lane_sum,
    load,
    load_f32,
    load_i32,
    maximum,
    real,
    splat,
    store,
    store_f32,
    tanh,
    word,
)
from cuda.ops import BLOCK_SIZE

NO_WINDOW = 1 << 40                             # wider than any context
SPLIT_KEYS = 256                                # whole pairs of blocks
RUN_BYTES = 16                                  # a run in int32: first row, rows, position of the first, sequence


def positions_per_run(group_size: int) -> int:
    """Positions whose query heads of one kv head fill a register tile."""
    return max(1, MAX_ROWS // group_size)


def score_stride() -> int:
    """Bytes between rows of scores: a split's, and a vector so that rows do not share cache sets."""
    return (SPLIT_KEYS + LANES) * 4


def attention_scratch_bytes(head_dim: int) -> int:
    """Zeros, MAX_ROWS rows of queries and of scores, and of two splits what is known of the rows."""
    return 2 * VECTOR_BYTES + MAX_ROWS * (_row_bytes(head_dim) + score_stride()) + 2 * split_bytes(head_dim)


def split_bytes(head_dim: int) -> int:
    """What is known of MAX_ROWS rows: their largest scores, totals and sums of values."""
    return 2 * VECTOR_BYTES + MAX_ROWS * _row_bytes(head_dim)


def _row_bytes(head_dim: int) -> int:
    """A row of queries or sums, in whole pairs of vectors."""
    return -(-head_dim // 32) * 32 * 4


@inner
def block_of(cache: int, table: int, index: int, num_kv_heads: int, kv_head: int, num_bytes: int) -> Any:
    """Address of a kv head's part of the block that stands at `index` in the table."""
    return cache + (load_i32(table + 4 * index) * num_kv_heads + kv_head) * num_bytes


@inner
def scale_by_token(rows: int, scores: int, score_bytes: int, cache: int, table: int, num_blocks: int, num_kv_heads: int,
                   kv_head: int, num_bytes: int) -> None:
    """Scores of int8 keys, or weights of int8 values, times their tokens' scales: the last vector of a block."""
    for b in range(num_blocks):
        scales = load(block_of(cache, table, b, num_kv_heads, kv_head, num_bytes) + num_bytes - VECTOR_BYTES)
        for row in range(rows):
            address = scores + row * score_bytes + b * VECTOR_BYTES
            store(address, load(address) * scales)


@inner
def softmax(scores: int, begin: int, end: int, scale: Any, softcap: Any, top_address: int) -> Any:
    """Scores begin .. end - 1 become e^(s - max s), their neighbours up to whole vectors 0; stores max s and returns
    the sum."""
    first_vector = begin // LANES * LANES
    factor, cap = splat(scale), splat(softcap)
    lowest = np.float32(-np.inf)
    top = splat(lowest)
    for j in range(first_vector, end, LANES):
        s = load(scores + 4 * j) * factor
        if softcap != np.float32(0.0):
            s = cap * tanh(s / cap)
        s = keep_lanes(s, begin - j, end - j, lowest)
        store(scores + 4 * j, s)
        top = maximum(s, top)
    largest = lane_max(top)
    store_f32(top_address, largest)
    top = splat(largest)
    total = splat(np.float32(0.0))
    for j in range(first_vector, end, LANES):
        e = exp(load(scores + 4 * j) - top)
        store(scores + 4 * j, e)
        total = total + e
    return lane_sum(total)


@inner
def add_values(tile: Any, kind: int, rows: int, block: int, begin: int, end: int, columns: int, scores: int,
               score_bytes: int, sums: int, sum_bytes: int) -> None:
    """sums [rows, columns] += scores[:, begin:end] V[begin:end]: keys of one block, `columns` in whole vectors."""
    if begin >= end:
        return
    for column in range(0, columns, 2 * LANES):
        w = block + (begin % BLOCK_SIZE * columns + column) * kind
        # The last vector may be single: its partner is computed twice, into the padding of the row.
        partner = w + LANES * kind if column + LANES < columns else w
        y = sums + 4 * column
        tile(rows, w, partner, columns * kind, scores + 4 * begin, score_bytes, end - begin, y, sum_bytes, y, sum_bytes)


@inner
def fold(rows: int, head_dim: int, row_bytes: int, known: int, split: int) -> None:
    """What is `known` of the rows gets what one more split says; a total of 0: nothing. Both as `split_bytes` says."""
    for row in range(rows):
        old_top, new_top = known + 4 * row, split + 4 * row
        old_total, new_total = old_top + VECTOR_BYTES, new_top + VECTOR_BYTES
        old, new = known + 2 * VECTOR_BYTES + row * row_bytes, split + 2 * VECTOR_BYTES + row * row_bytes
        if load_f32(new_total) == np.float32(0.0):
            continue
        if load_f32(old_total) == np.float32(0.0):
            store_f32(old_top, load_f32(new_top))
            store_f32(old_total, load_f32(new_total))
            for d in range(0, head_dim, LANES):
                store(old + 4 * d, load(new + 4 * d))
            continue
        a, b = splat(load_f32(old_top)), splat(load_f32(new_top))
        top = maximum(b, a)
        a, b = exp(a - top), exp(b - top)
        total = splat(load_f32(old_total)) * a + splat(load_f32(new_total)) * b
        store_f32(old_top, lane_max(top))
        # NOTE: not lane_max, which loses a NaN; all lanes are equal.
        store_f32(old_total, lane_sum(total) / np.float32(LANES))
        for d in range(0, head_dim, LANES):
            store(old + 4 * d, load(old + 4 * d) * a + load(new + 4 * d) * b)


@inner
def clear(known: int) -> None:
    store(known, splat(np.float32(0.0)))
    store(known + VECTOR_BYTES, splat(np.float32(0.0)))


@inner
def write_rows(out: int, out_stride: int, first_row: int, first_head: int, heads: int, rows: int, head_dim: int,
               row_bytes: int, known: int, sinks: int) -> None:
    """What is known of the rows is all: sums over totals. sinks: float32 of each query head; 0: none."""
    for row in range(rows):
        head = first_head + row % heads
        target = out + (first_row + row // heads) * out_stride + head * head_dim * 4
        total = splat(load_f32(known + VECTOR_BYTES + 4 * row))
        sums = known + 2 * VECTOR_BYTES + row * row_bytes
        if sinks != 0:
            # Where this is infinite, what the keys weigh beside it rounds to 0 as well.
            total = total + exp(splat(load_f32(sinks + 4 * head)) - splat(load_f32(known + 4 * row)))
        for d in range(0, head_dim, LANES):
            store_up_to(target + 4 * d, load(sums + 4 * d) / total, head_dim - d)


@inner
def attend(tile: Any, kind: int, arguments: int, first: int, last: int, scratch: int) -> None:
    """Item: a run of positions, a kv head, and a part of its query heads where they are more than MAX_ROWS; where
    `partials` is given, one of their `max_splits` splits, which goes there.

    tile: the register tile for numbers of the cache's kind.
    """
    qkv, qkv_stride, out, out_stride = word(arguments, 0), word(arguments, 1), word(arguments, 2), word(arguments, 3)
    keys, values = word(arguments, 4), word(arguments, 5)
    block_tables, table_bytes, runs = word(arguments, 6), word(arguments, 7), word(arguments, 8)
    num_kv_heads, group_size, head_dim = word(arguments, 9), word(arguments, 10), word(arguments, 11)
    window, score_bytes = word(arguments, 12), word(arguments, 13)
    key_bytes, value_bytes = word(arguments, 14), word(arguments, 15)
    partials, max_splits = word(arguments, 16), word(arguments, 17)
    sinks = word(arguments, 18)
    scale, softcap = real(arguments, 19), real(arguments, 20)

    columns = (head_dim + LANES - 1) // LANES * LANES
    row_bytes = (head_dim + 31) // 32 * 32 * 4
    known_bytes = 2 * VECTOR_BYTES + MAX_ROWS * row_bytes
    zeros = scratch
    queries = scratch + 2 * VECTOR_BYTES
    scores = queries + MAX_ROWS * row_bytes
    own = scores + MAX_ROWS * score_bytes
    folded = own + known_bytes
    store(zeros, splat(np.float32(0.0)))
    store(zeros + VECTOR_BYTES, splat(np.float32(0.0)))

    num_parts = (group_size + MAX_ROWS - 1) // MAX_ROWS
    for index in range(first, last):
        item = index // max_splits
        run = runs + item // (num_kv_heads * num_parts) * RUN_BYTES
        first_row, num_positions = load_i32(run), load_i32(run + 4)
        position, block_table = load_i32(run + 8), block_tables + load_i32(run + 12) * table_bytes
        kv_head, part = item // num_parts % num_kv_heads, item % num_parts
        first_head = kv_head * group_size + group_size * part // num_parts
        heads = kv_head * group_size + group_size * (part + 1) // num_parts - first_head
        rows = num_positions * heads                            # in the order of positions, then heads

        # The first block that any row sees, and the splits.
        first_seen = max(0, position + 1 - window) // BLOCK_SIZE * BLOCK_SIZE
        first_split, end_split = first_seen // SPLIT_KEYS, (position + num_positions - 1) // SPLIT_KEYS + 1
        if partials != 0:
            first_split += index % max_splits
            end_split = min(end_split, first_split + 1)
            if first_split >= end_split:
                continue

        for row in range(rows):
            source = qkv + (first_row + row // heads) * qkv_stride + (first_head + row % heads) * head_dim * 4
            for d in range(0, head_dim, LANES):
                store(queries + row * row_bytes + 4 * d, load_up_to(source + 4 * d, head_dim - d))
        clear(folded)

        for split in range(first_split, end_split):
            # From here on keys are counted from `origin`. Position p of the run sees keys max(0, seen + p - window) ..
            # seen + p - 1, as far as they are in the split: below `limit`, whole blocks.
            origin = max(first_seen, split * SPLIT_KEYS)
            limit = (split + 1) * SPLIT_KEYS - origin
            table = block_table + origin // BLOCK_SIZE * 4
            seen = position + 1 - origin
            num_blocks = (min(seen + num_positions - 1, limit) + BLOCK_SIZE - 1) // BLOCK_SIZE
            known = partials + index * known_bytes if partials != 0 else own
            sums = known + 2 * VECTOR_BYTES
            clear(known)

            for b in range(0, num_blocks, 2):
                w = block_of(keys, table, b, num_kv_heads, kv_head, key_bytes)
                partner = block_of(keys, table, min(b + 1, num_blocks - 1), num_kv_heads, kv_head, key_bytes)
                tile(rows, w, partner, LANES * kind, queries, row_bytes, head_dim, zeros, 0, scores + b * VECTOR_BYTES,
                     score_bytes)
            if kind == INT8:
                scale_by_token(rows, scores, score_bytes, keys, table, num_blocks, num_kv_heads, kv_head, key_bytes)

            for row in range(rows):
                end = min(seen + row // heads, limit)
                begin = max(0, seen + row // heads - window)
                if begin < end:
                    total = softmax(scores + row * score_bytes, begin, end, scale, softcap, known + 4 * row)
                    store_f32(known + VECTOR_BYTES + 4 * row, total)
                for d in range(0, head_dim, LANES):
                    store(sums + row * row_bytes + 4 * d, splat(np.float32(0.0)))
            if kind == INT8:
                scale_by_token(rows, scores, score_bytes, values, table, num_blocks, num_kv_heads, kv_head, value_bytes)

            # Keys that all rows see go through one tile; before and after them each position has some of its own.
            all_begin, all_end = max(0, seen + num_positions - 1 - window), max(0, seen)
            for b in range(num_blocks):
                block = block_of(values, table, b, num_kv_heads, kv_head, value_bytes)
                begin, end = b * BLOCK_SIZE, (b + 1) * BLOCK_SIZE
                for p in range(num_positions):
                    left, left_end = max(begin, seen + p - window), min(end, seen + p, all_begin)
                    add_values(tile, kind, heads, block, left, left_end, columns, scores + p * heads * score_bytes,
                               score_bytes, sums + p * heads * row_bytes, row_bytes)
                add_values(tile, kind, rows, block, max(begin, all_begin), min(end, all_end), columns, scores,
                           score_bytes, sums, row_bytes)
                for p in range(num_positions):
                    right, right_end = max(begin, all_begin, all_end), min(end, seen + p)
                    add_values(tile, kind, heads, block, right, right_end, columns, scores + p * heads * score_bytes,
                               score_bytes, sums + p * heads * row_bytes, row_bytes)
            if partials == 0:
                fold(rows, head_dim, row_bytes, folded, own)

        if partials == 0:
            write_rows(out, out_stride, first_row, first_head, heads, rows, head_dim, row_bytes, folded, sinks)


def merge_splits(arguments: int, first: int, last: int, scratch: int) -> None:
    """Item: as of `attend` without `partials`. Folds what its splits left there."""
    out, out_stride, runs = word(arguments, 0), word(arguments, 1), word(arguments, 2)
    num_kv_heads, group_size, head_dim = word(arguments, 3), word(arguments, 4), word(arguments, 5)
    window, partials = word(arguments, 6), word(arguments, 7)
    max_splits, sinks = word(arguments, 8), word(arguments, 9)
    row_bytes = (head_dim + 31) // 32 * 32 * 4
    known_bytes = 2 * VECTOR_BYTES + MAX_ROWS * row_bytes
    num_parts = (group_size + MAX_ROWS - 1) // MAX_ROWS
    for item in range(first, last):
        run = runs + item // (num_kv_heads * num_parts) * RUN_BYTES
        first_row, num_positions, position = load_i32(run), load_i32(run + 4), load_i32(run + 8)
        kv_head, part = item // num_parts % num_kv_heads, item % num_parts
        first_head = kv_head * group_size + group_size * part // num_parts
        heads = kv_head * group_size + group_size * (part + 1) // num_parts - first_head
        rows = num_positions * heads
        first_split = max(0, position + 1 - window) // BLOCK_SIZE * BLOCK_SIZE // SPLIT_KEYS
        num_splits = (position + num_positions - 1) // SPLIT_KEYS + 1 - first_split
        clear(scratch)
        for split in range(num_splits):
            fold(rows, head_dim, row_bytes, scratch, partials + (item * max_splits + split) * known_bytes)
        write_rows(out, out_stride, first_row, first_head, heads, rows, head_dim, row_bytes, scratch, sinks)


def attend_float32(arguments: int, first: int, last: int, scratch: int) -> None:
    attend(tile_float32, FLOAT32, arguments, first, last, scratch)


def attend_bf16(arguments: int, first: int, last: int, scratch: int) -> None:
    attend(tile_bf16, BF16, arguments, first, last, scratch)


def attend_int8(arguments: int, first: int, last: int, scratch: int) -> None:
    attend(tile_int8, INT8, arguments, first, last, scratch)


# By the cache's kind. One each, because tiles take long to compile and an engine uses those of one kind.
ATTEND = {kind: Kernel(function, "qqqqqqqqqqqqqqqqqqqdd")
          for kind, function in ((FLOAT32, attend_float32), (BF16, attend_bf16), (INT8, attend_int8))}
MERGE_SPLITS = Kernel(merge_splits, "qqqqqqqqqq")

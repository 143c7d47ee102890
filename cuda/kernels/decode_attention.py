"""Attention of a few rows a sequence over the paged KV cache: decoding, verification of drafts, and whatever must have
the same bits in any company."""
from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.kernels.kernel_spec import Instance, KernelSpec, launch
from cuda.kernels.paged_kv import CODES, Array, attend, attention_case, check_array, check_cache
from cuda.kernels.types import ACTIVATION_TYPES, BF16, C_TYPES, FP16
from cuda.launcher import DeviceArray, Launcher
from cuda.ops import BLOCK_SIZE

SOURCE = "decode_attention.cu"
WARPS = 4
TILE_ROWS = 16                              # of rows and query heads together
MAX_ROWS = 8                                # of an item
SPLIT_KEYS = 512
HEAD_DIMS = (64, 128, 256)                  # that are compiled; others run as the next larger one
SMALL_HEAD_DIM = 32                         # beside them, for bfloat16 throughout: what tests of whole models use
REGISTERS = {32: 96, 64: 128, 128: 168, 256: 255}
NO_WINDOW = 1 << 30                         # wider than any context
LOG2_E = math.log2(math.e)


def decode_attention(launcher: Launcher, out: DeviceArray, qkv: DeviceArray, k_cache: DeviceArray, v_cache: DeviceArray,
                     k_scale: DeviceArray | None, v_scale: DeviceArray | None, block_table: DeviceArray,
                     work: DeviceArray, partials: DeviceArray, counters: DeviceArray, num_heads: int, scale: float,
                     window: int | None = None, softcap: float | None = None, sinks: DeviceArray | None = None) -> None:
    """Causal attention of the rows of `work` over the keys of their sequences. -> out [T, H D]; other rows stay.

    qkv [T, (H + 2G) D] and out are bfloat16 or float16; k_cache, v_cache [N, G, 16, D] of that type, int8 or uint8
    (fp8), then with k_scale, v_scale float32 [N, G, 16]. block_table int32 [rows, M].
    work: int32 [W, 8] as `plan` made it, padded with rows of 0 at will. partials float32 of at least `partials_size`,
    counters int32 of at least `counters_size`, zero at the first call and left so.
    Row at position i sees keys j with 0 <= i - j (< window). softcap: cap * tanh(score / cap). sinks float32 [H]: a
    score of each head that takes part in the softmax and has no value.

    Raises: ValueError naming what does not fit.
    """
    num_kv_heads, head_dim = check_cache(qkv, k_cache, v_cache, k_scale, v_scale, num_heads, HEAD_DIMS[-1])
    if head_dim % 8:
        raise ValueError(f"heads of {head_dim} are not supported: no multiple of 8")
    check_array("out", out, qkv.dtype, (qkv.shape[0], num_heads * head_dim))
    check_array("block_table", block_table, np.int32, (None, None))
    check_array("work", work, np.int32, (None, 8))
    check_array("partials", partials, np.float32, (None,))
    check_array("counters", counters, np.int32, (None,))
    if sinks is not None:
        check_array("sinks", sinks, np.float32, (num_heads,))
    num_items, grid_heads = work.shape[0], num_kv_heads * tiles_of_group(num_heads // num_kv_heads)
    if partials.shape[0] < partials_size(num_items, num_heads, num_kv_heads, head_dim):
        raise ValueError(f"partials of {partials.shape[0]} are too small for {num_items} items")
    if counters.shape[0] < counters_size(num_items, num_heads, num_kv_heads):
        raise ValueError(f"counters of {counters.shape[0]} are too small for {num_items} items")
    instance = next(size for size in _head_dims(qkv.dtype, k_cache.dtype) if size >= head_dim)
    score_scale, cap = score_factors(scale, softcap)
    launch(launcher, SOURCE, _entry(qkv.dtype, k_cache.dtype, instance), (num_items, grid_heads), WARPS * 32,
           (out, qkv, k_cache, v_cache, k_scale, v_scale, block_table, work, partials, counters, sinks,
            np.int32(num_heads), np.int32(num_kv_heads), np.int32(head_dim), np.int32(block_table.shape[1]),
            np.int32(NO_WINDOW if window is None else window), score_scale, cap),
           _shared_bytes(instance, k_cache.dtype))


def tiles_of_group(group_size: int) -> int:
    return -(-group_size // TILE_ROWS)


def score_factors(scale: float, softcap: float | None) -> tuple[np.float32, np.float32]:
    """What the kernels multiply a score with, in powers of two, and the soft cap in them (0: none)."""
    if softcap is None:
        return np.float32(scale * LOG2_E), np.float32(0)
    return np.float32(2 * scale * LOG2_E / softcap), np.float32(softcap * LOG2_E)


def partials_size(num_items: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Numbers that `num_items` items of a work list may leave behind for the merge."""
    return counters_size(num_items, num_heads, num_kv_heads) * TILE_ROWS * (head_dim + 2)


def counters_size(num_items: int, num_heads: int, num_kv_heads: int) -> int:
    return num_items * num_kv_heads * tiles_of_group(num_heads // num_kv_heads)


def rows_of_item(group_size: int) -> int:
    """Rows of a sequence whose query heads of a kv head fill one tile."""
    return max(1, min(MAX_ROWS, TILE_ROWS // group_size))


def plan(runs: NDArray[np.int32], group_size: int, window: int | None = None) -> NDArray[np.int32]:
    """The work list [W, 8] of runs [n, 4]: first row, length, position of the first row, row of the block table.

    An item is at most 8 rows of a run, such that they and their query heads of a kv head fill one tile, and 512 keys.
    """
    num_together = rows_of_item(group_size)
    first_row, length, start, table_row = runs.T
    pieces = -(-length // num_together)
    run, piece = _numbered(pieces)
    position = start[run] + piece * num_together
    num_rows = np.minimum(num_together, start[run] + length[run] - position)
    first_key = np.zeros_like(position) if window is None else np.maximum(0, position - window + 1)
    first_split = first_key // SPLIT_KEYS
    num_splits = (position + num_rows - 1) // SPLIT_KEYS - first_split + 1
    item, split = _numbered(num_splits)
    work = np.zeros((len(item), 8), np.int32)
    work[:, 0] = (first_row[run] + piece * num_together)[item]
    work[:, 1] = num_rows[item]
    work[:, 2] = position[item]
    work[:, 3] = table_row[run][item]
    work[:, 4] = np.maximum(first_key[item], (first_split[item] + split) * SPLIT_KEYS)
    work[:, 5] = split
    work[:, 6] = num_splits[item]
    work[:, 7] = np.arange(len(item)) - split
    return work


def cut(work: NDArray[np.int32], max_items: int) -> list[NDArray[np.int32]]:
    """`work` in parts of at most `max_items`, for a launch each; the splits of a run stay together."""
    parts, start = [], 0
    while len(work) - start > max_items:
        end = start + max_items
        end -= int(work[end, 5])            # back to the first split of the run that would be torn
        assert end > start, f"{work[start, 6]} splits of a run, at most {max_items}"
        parts.append(work[start:end])
        start = end
    parts.append(work[start:])
    moved = [part.copy() for part in parts]
    for part, start in zip(moved, np.cumsum([0, *map(len, parts[:-1])]), strict=True):
        part[:, 7] -= start
    return moved


def _numbered(counts: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """[2, 3] -> [0, 0, 1, 1, 1], [0, 1, 0, 1, 2]"""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - (np.cumsum(counts) - counts)[which]


def _head_dims(dtype: Any, kv_dtype: Any) -> tuple[int, ...]:
    return (SMALL_HEAD_DIM, *HEAD_DIMS) if dtype == kv_dtype == BF16 else HEAD_DIMS


def _entry(dtype: Any, kv_dtype: Any, head_dim: int) -> str:
    return f"decode_attention<{C_TYPES[np.dtype(dtype)]}, {C_TYPES[np.dtype(kv_dtype)]}, {head_dim}>"


def _shared_bytes(head_dim: int, kv_dtype: Any) -> int:
    """Of the copy rings or of the merge, which come one after the other."""
    itemsize: int = np.dtype(kv_dtype).itemsize
    data = BLOCK_SIZE * head_dim * itemsize
    halves, scales = 3 if data > 4096 else 4, 2 * BLOCK_SIZE * 4 if itemsize == 1 else 0
    return max(WARPS * halves * (data + scales), WARPS * TILE_ROWS * (head_dim + 2) * 4)


# ---- What it promises


def _run(launcher: Launcher, out: DeviceArray, qkv: DeviceArray, k_cache: DeviceArray, v_cache: DeviceArray,
         k_scale: DeviceArray | None, v_scale: DeviceArray | None, block_table: DeviceArray, work: DeviceArray,
         num_heads: int, scale: float, window: int | None, softcap: float | None, sinks: DeviceArray | None) -> None:
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    partials = launcher.empty(partials_size(work.shape[0], num_heads, num_kv_heads, head_dim), np.float32)
    counters = launcher.zeros(counters_size(work.shape[0], num_heads, num_kv_heads), np.int32)
    decode_attention(launcher, out, qkv, k_cache, v_cache, k_scale, v_scale, block_table, work, partials, counters,
                     num_heads, scale, window, softcap, sinks)


def _reference(out: Array, qkv: Array, k_cache: Array, v_cache: Array, k_scale: NDArray[np.float32] | None,
               v_scale: NDArray[np.float32] | None, block_table: NDArray[np.int32], work: NDArray[np.int32],
               num_heads: int, scale: float, window: int | None, softcap: float | None,
               sinks: NDArray[np.float32] | None) -> dict[str, Array]:
    rows = ((row + i, position + i, table_row) for row, num_rows, position, table_row, _, split, _, _ in work.tolist()
            for i in range(num_rows) if split == 0)
    attend(out, qkv, k_cache, v_cache, k_scale, v_scale, block_table, rows, num_heads, scale, window, softcap, sinks)
    return {"out": out}


case = partial(attention_case, plan)
INT8, FP8 = CODES

SPEC = KernelSpec(
    name="decode_attention",
    source=SOURCE,
    instances=tuple(Instance(_entry(dtype, kv_dtype, head_dim), WARPS * 32, REGISTERS[head_dim],
                             _shared_bytes(head_dim, kv_dtype) + 128)
                    for dtype in ACTIVATION_TYPES for kv_dtype in (dtype, *CODES)
                    for head_dim in _head_dims(dtype, kv_dtype)),
    run=_run,
    reference=_reference,
    outputs=("out",),
    cases=(
        case("ragged", [(0, 1), (16, 17), (36, 37)], 4, 2, 16),
        case("several rows", [(45, 48), (0, 8)], 2, 1, 64),
        case("group of 8", [(70, 72)], 8, 1, 128),
        case("head of 24, group of 3", [(20, 22)], 3, 1, 24),
        case("head of 256", [(33, 34)], 2, 1, 256),
        case("group of 20", [(18, 20)], 20, 1, 32),
        case("two splits", [(509, 516)], 2, 1, 32),
        case("window", [(530, 532), (3, 4)], 2, 1, 32, window=40),
        case("soft cap and sinks", [(25, 27)], 2, 2, 64, softcap=5.0, sinks=True),
        case("two splits, sinks", [(520, 521)], 2, 1, 32, sinks=True),
        case("fp16", [(40, 41), (7, 8)], 4, 1, 96, FP16),
        case("int8", [(37, 39)], 4, 2, 64, kv_dtype=INT8),
        case("int8, head of 256", [(21, 22)], 1, 1, 256, kv_dtype=INT8),
        case("int8, head of 24", [(20, 21)], 2, 1, 24, kv_dtype=INT8, window=9),
        case("fp8", [(37, 39)], 4, 2, 128, kv_dtype=FP8),
        case("fp16, int8", [(37, 38)], 2, 1, 64, FP16, INT8),
        case("fp16, fp8", [(37, 38)], 2, 1, 32, FP16, FP8),
        case("decode step", [(1000 + 7 * i, 1001 + 7 * i) for i in range(16)], 32, 8, 128, large=True),
        case("one long sequence", [(8190, 8194)], 32, 8, 128, large=True),
        case("decode step, int8", [(1000 + 7 * i, 1001 + 7 * i) for i in range(16)], 32, 8, 128, kv_dtype=INT8,
             large=True),
        case("decode step, fp8", [(1000 + 7 * i, 1001 + 7 * i) for i in range(16)], 32, 8, 128, kv_dtype=FP8,
             large=True),
        case("decode step, window, head of 256", [(1500 + i, 1501 + i) for i in range(8)], 8, 4, 256, window=1024,
             softcap=50.0, large=True),
    ),
    tolerance=0.01,                         # weights and results are rounded to 8 bits
)

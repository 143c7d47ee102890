"""Attention of long runs of rows over the paged KV cache: prompts and their chunks."""
from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.kernels.decode_attention import NO_WINDOW, score_factors
from cuda.kernels.kernel_spec import Instance, KernelSpec, launch
from cuda.kernels.paged_kv import CODES, Array, attend, attention_case, check_array, check_cache
from cuda.kernels.types import ACTIVATION_TYPES, BF16, C_TYPES, FP16
from cuda.launcher import DeviceArray, Launcher

SOURCE = "prefill_attention.cu"
WARPS = 4
ITEM_ROWS = 128                             # rows of an item times query heads of a kv head
KEYS = 32                                   # of a tile
HALVES = 4                                  # tiles of keys or values on their way
HEAD_DIMS = (64, 128, 256)                  # that are compiled; others run as the next larger one
REGISTERS = {32: 96, 64: 184, 128: 255, 256: 255}
SMALL_HEAD_DIM = 32                         # beside them, for bfloat16 throughout: what tests of whole models use


def prefill_attention(launcher: Launcher, out: DeviceArray, qkv: DeviceArray, k_cache: DeviceArray,
                      v_cache: DeviceArray, k_scale: DeviceArray | None, v_scale: DeviceArray | None,
                      block_table: DeviceArray, work: DeviceArray, num_heads: int, scale: float,
                      window: int | None = None, softcap: float | None = None,
                      sinks: DeviceArray | None = None) -> None:
    """Causal attention of the rows of `work` over the keys of their sequences. -> out [T, H D]; other rows stay.

    qkv [T, (H + 2G) D] and out are bfloat16 or float16; k_cache, v_cache [N, G, 16, D] of that type, int8 or uint8
    (fp8), then with k_scale, v_scale float32 [N, G, 16]. block_table int32 [rows, M].
    work: int32 [W, 4] as `plan` made it, padded with rows of 0 at will.
    Row at position i sees keys j with 0 <= i - j (< window). softcap: cap * tanh(score / cap). sinks float32 [H]: a
    score of each head that takes part in the softmax and has no value.

    Raises: ValueError naming what does not fit.
    """
    num_kv_heads, head_dim = check_cache(qkv, k_cache, v_cache, k_scale, v_scale, num_heads, HEAD_DIMS[-1])
    if head_dim % 8:
        raise ValueError(f"heads of {head_dim} are not supported: no multiple of 8")
    if num_heads // num_kv_heads > ITEM_ROWS:
        raise ValueError(f"{num_heads // num_kv_heads} query heads a kv head are not supported: at most {ITEM_ROWS}")
    check_array("out", out, qkv.dtype, (qkv.shape[0], num_heads * head_dim))
    check_array("block_table", block_table, np.int32, (None, None))
    check_array("work", work, np.int32, (None, 4))
    if sinks is not None:
        check_array("sinks", sinks, np.float32, (num_heads,))
    coded = k_cache.dtype in CODES
    instance = next(size for size in _head_dims(qkv.dtype, coded) if size >= head_dim)
    score_scale, cap = score_factors(scale, softcap)
    launch(launcher, SOURCE, _entry(qkv.dtype, coded, instance),
           (num_kv_heads * (ITEM_ROWS // _block_rows(instance)), work.shape[0]), WARPS * 32,
           (out, qkv, k_cache, v_cache, k_scale, v_scale, block_table, work, sinks, np.int32(num_heads),
            np.int32(num_kv_heads), np.int32(head_dim), np.int32(block_table.shape[1]),
            np.int32(k_cache.dtype == np.uint8), np.int32(NO_WINDOW if window is None else window), score_scale, cap),
           _shared_bytes(instance, coded))


def plan(runs: NDArray[np.int32], group_size: int) -> NDArray[np.int32]:
    """The work list [W, 4] of runs [n, 4]: first row, length, position of the first row, row of the block table.

    Items with many keys come first, so that the last ones to end are short.
    """
    rows_of_item = max(1, ITEM_ROWS // group_size)
    first_row, length, start, table_row = runs.T
    pieces = -(-length // rows_of_item)
    run = np.repeat(np.arange(len(runs)), pieces)
    offset = (np.arange(len(run)) - (np.cumsum(pieces) - pieces)[run]) * rows_of_item
    work = np.stack([first_row[run] + offset, np.minimum(rows_of_item, length[run] - offset), start[run] + offset,
                     table_row[run]], axis=1).astype(np.int32)
    return np.ascontiguousarray(work[np.argsort(-work[:, 2], kind="stable")])


def _head_dims(dtype: Any, coded: bool) -> tuple[int, ...]:
    return (SMALL_HEAD_DIM, *HEAD_DIMS) if dtype == BF16 and not coded else HEAD_DIMS


def _entry(dtype: Any, coded: bool, head_dim: int) -> str:
    return f"prefill_attention<{C_TYPES[np.dtype(dtype)]}, {str(coded).lower()}, {head_dim}>"


def _block_rows(head_dim: int) -> int:
    return ITEM_ROWS if head_dim in (64, 128) else ITEM_ROWS // 2


def _shared_bytes(head_dim: int, coded: bool) -> int:
    """Queries, the ring of keys and values, and where they are codes, two tiles of what they mean."""
    tile = KEYS * head_dim * 2
    ring = HALVES * (tile // 2 + 2 * KEYS * 4) + 2 * tile if coded else HALVES * tile
    return _block_rows(head_dim) * head_dim * 2 + ring


# ---- What it promises


def _reference(out: Array, qkv: Array, k_cache: Array, v_cache: Array, k_scale: NDArray[np.float32] | None,
               v_scale: NDArray[np.float32] | None, block_table: NDArray[np.int32], work: NDArray[np.int32],
               num_heads: int, scale: float, window: int | None, softcap: float | None,
               sinks: NDArray[np.float32] | None) -> dict[str, Array]:
    rows = ((row + i, position + i, table_row) for row, num_rows, position, table_row in work.tolist()
            for i in range(num_rows))
    attend(out, qkv, k_cache, v_cache, k_scale, v_scale, block_table, rows, num_heads, scale, window, softcap, sinks)
    return {"out": out}


case = partial(attention_case, lambda runs, group_size, window: plan(runs, group_size))
INT8, FP8 = CODES

SPEC = KernelSpec(
    name="prefill_attention",
    source=SOURCE,
    instances=tuple(Instance(_entry(dtype, coded, head_dim), WARPS * 32, REGISTERS[head_dim],
                             _shared_bytes(head_dim, coded))
                    for dtype in ACTIVATION_TYPES for coded in (False, True) for head_dim in _head_dims(dtype, coded)),
    run=prefill_attention,
    reference=_reference,
    outputs=("out",),
    cases=(
        case("ragged chunks", [(0, 9), (40, 57), (3, 4)], 4, 2, 16),
        case("two items", [(5, 80)], 2, 1, 64),
        case("head of 128", [(10, 30)], 2, 1, 128),
        case("head of 24, group of 3", [(0, 50)], 3, 1, 24),
        case("head of 256", [(20, 45)], 4, 1, 256),
        case("window", [(100, 140)], 2, 1, 32, window=20),
        case("soft cap and sinks", [(0, 33)], 2, 2, 64, softcap=5.0, sinks=True),
        case("fp16", [(0, 20)], 2, 1, 96, FP16),
        case("int8", [(20, 50)], 2, 1, 64, kv_dtype=INT8),
        case("int8, head of 24", [(0, 40)], 2, 1, 24, kv_dtype=INT8, window=9),
        case("int8, head of 256", [(0, 20)], 1, 1, 256, kv_dtype=INT8),
        case("fp8", [(20, 50)], 2, 1, 128, kv_dtype=FP8),
        case("fp16, fp8", [(0, 20)], 1, 1, 64, FP16, FP8),
        case("prompts", [(0, 512), (1000, 1300), (0, 77)], 32, 8, 128, large=True),
        case("prompts, int8", [(0, 512), (1000, 1300)], 32, 8, 128, kv_dtype=INT8, large=True),
        case("prompts, fp8", [(0, 512), (1000, 1300)], 32, 8, 128, kv_dtype=FP8, large=True),
        case("prompts, window, head of 256", [(0, 400), (2000, 2200)], 8, 4, 256, window=512, softcap=50.0, large=True),
    ),
    tolerance=0.01,                         # weights and results are rounded to 8 bits
)

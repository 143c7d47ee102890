"""What the kernels that touch the paged KV cache share: checks of its arrays, and its numbers in NumPy.

Of a layer: keys and values [N, G, 16, D], of the activations' type or codes: int8, or uint8, which is fp8 (e4m3). Codes
have a float32 scale for each token and kv head, [N, G, 16].
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cuda.kernels.kernel_spec import Case
from cuda.kernels.types import ACTIVATION_TYPES, BF16
from cuda.launcher import DeviceArray
from cuda.ops import BLOCK_SIZE
from cuda.reference import to_int8

CODES = (np.dtype(np.int8), np.dtype(np.uint8))
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST_E4M3 = np.float32(448)

Array = NDArray[Any]
Plan: TypeAlias = Callable[[NDArray[np.int32], int, int | None], NDArray[np.int32]]


def check_array(name: str, array: DeviceArray, dtype: Any, shape: tuple[int | None, ...]) -> None:
    """None in `shape`: any size. Raises: ValueError naming the array."""
    wanted = np.dtype(dtype)
    if array.dtype != wanted or array.ndim != len(shape) or \
            any(size is not None and size != given for size, given in zip(shape, array.shape, strict=True)):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must be {wanted}[{sizes}], not {array.dtype}{list(array.shape)}")


def check_cache(qkv: DeviceArray, k_cache: DeviceArray, v_cache: DeviceArray, k_scale: DeviceArray | None,
                v_scale: DeviceArray | None, num_heads: int, largest_head_dim: int) -> tuple[int, int]:
    """-> G, D. Raises: ValueError naming what does not fit."""
    if qkv.dtype not in ACTIVATION_TYPES:
        raise ValueError(f"qkv must be bfloat16 or float16, not {qkv.dtype}")
    if k_cache.dtype != qkv.dtype and k_cache.dtype not in CODES:
        raise ValueError(f"the KV cache must be {qkv.dtype}, int8 or uint8 (fp8), not {k_cache.dtype}")
    check_array("k_cache", k_cache, k_cache.dtype, (None, None, BLOCK_SIZE, None))
    check_array("v_cache", v_cache, k_cache.dtype, k_cache.shape)
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    check_array("qkv", qkv, qkv.dtype, (None, (num_heads + 2 * num_kv_heads) * head_dim))
    if head_dim > largest_head_dim:
        raise ValueError(f"heads of {head_dim} are not supported: at most {largest_head_dim}")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are no multiple of {num_kv_heads} kv heads")
    coded = k_cache.dtype in CODES
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (scale is None) == coded:
            raise ValueError(f"{name} is {'needed' if coded else 'not used'} with a KV cache of {k_cache.dtype}")
        if scale is not None:
            check_array(name, scale, np.float32, k_cache.shape[:3])
    return num_kv_heads, head_dim


def store(x: NDArray[np.float32], dtype: np.dtype[Any]) -> tuple[Array, NDArray[np.float32] | None]:
    """Rows x [..., D] as the cache holds them, and their scales."""
    if dtype == np.int8:
        return to_int8(x)
    if dtype != np.uint8:
        return x.astype(dtype), None
    largest = np.abs(x).max(axis=-1)
    scale = np.where(np.isfinite(largest), largest / LARGEST_E4M3, np.float32(np.nan))
    usable = scale > 0
    quotients = np.where(usable[..., None], x, 0) / np.where(usable, scale, 1)[..., None]
    return quotients.astype(E4M3).view(np.uint8), scale


def load(data: Array, scale: NDArray[np.float32] | None) -> NDArray[np.float64]:
    """What rows [..., D] of the cache mean."""
    wide = (data.view(E4M3) if data.dtype == np.uint8 else data).astype(np.float64)
    return wide if scale is None else wide * scale[..., None]


def attend(out: Array, qkv: Array, k_cache: Array, v_cache: Array, k_scale: NDArray[np.float32] | None,
           v_scale: NDArray[np.float32] | None, block_table: NDArray[np.int32], rows: Iterable[tuple[int, int, int]],
           num_heads: int, scale: float, window: int | None, softcap: float | None,
           sinks: NDArray[np.float32] | None) -> None:
    """Causal attention of `rows`, each its number, its position and its row of the table, into their rows of `out`.

    A sink is a score of each head that takes part in the softmax and has no value.
    """
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    group_size = num_heads // num_kv_heads
    queries = qkv.reshape(len(qkv), -1, head_dim)[:, :num_heads].astype(np.float64)                 # [T, H, D]
    results = out.reshape(len(out), num_heads, head_dim)
    for row, position, table_row in rows:
        keys = np.arange(0 if window is None else max(0, position - window + 1), position + 1)
        blocks, places = block_table[table_row, keys // BLOCK_SIZE], keys % BLOCK_SIZE
        k, v = (load(cache[blocks, :, places], None if scales is None else scales[blocks, :, places])
                for cache, scales in ((k_cache, k_scale), (v_cache, v_scale)))                      # [keys, G, D]
        for head in range(num_heads):
            scores = k[:, head // group_size] @ queries[row, head] * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            if sinks is not None:
                scores = np.append(scores, sinks[head])
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            results[row, head] = weights[:len(keys)] @ v[:, head // group_size]


def random_cache(rng: np.random.Generator, dtype: np.dtype[Any], kv_dtype: np.dtype[Any], runs: NDArray[np.int32],
                 num_heads: int, num_kv_heads: int, head_dim: int, window: int | None = None) -> dict[str, Any]:
    """qkv, a cache and a table for the runs [n, 4] of `plan`: blocks strewn over the cache; what no row sees is NaN."""
    num_tokens, lengths = int((runs[:, 0] + runs[:, 1]).max()), runs[:, 2] + runs[:, 1]
    blocks = -(-lengths // BLOCK_SIZE)
    num_blocks = int(blocks.sum()) + 3
    order = 1 + rng.permutation(num_blocks - 1)
    table = np.zeros((int(runs[:, 3].max()) + 1, int(blocks.max()) + 1), np.int32)
    used = np.zeros((num_blocks, BLOCK_SIZE), np.bool_)
    for (_, _, start, row), length, count in zip(runs, lengths, blocks, strict=True):
        first_key = 0 if window is None else max(0, start - window + 1)
        left = first_key // BLOCK_SIZE                          # blocks that left the window are somebody else's
        table[row, left:count], order = order[left:count], order[count:]
        keys = np.arange(first_key, length)
        used[table[row, keys // BLOCK_SIZE], keys % BLOCK_SIZE] = True
    qkv = rng.standard_normal((num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)).astype(np.float32)
    qkv[rng.random(qkv.shape) < 0.01] *= 8
    result: dict[str, Any] = {"qkv": qkv.astype(dtype), "block_table": table}
    for name in "kv":
        rows = rng.standard_normal((num_blocks, num_kv_heads, BLOCK_SIZE, head_dim)).astype(np.float32)
        rows[rng.random(rows.shape) < 0.01] *= 8
        rows = np.where(used[:, None, :, None], rows, np.float32(np.nan))
        result[f"{name}_cache"], result[f"{name}_scale"] = store(rows, kv_dtype)
    return result


def attention_case(plan: Plan, name: str, lengths: Sequence[tuple[int, int]], num_heads: int, num_kv_heads: int,
                   head_dim: int, dtype: np.dtype[Any] = BF16, kv_dtype: np.dtype[Any] | None = None,
                   window: int | None = None, softcap: float | None = None, sinks: bool = False,
                   large: bool = False) -> Case:
    """A case of either attention kernel. plan: makes its work list of runs, group size and window. lengths: (start,
    end) of each sequence's new rows."""
    def make(rng: np.random.Generator) -> dict[str, Any]:
        counts = [end - start for start, end in lengths]
        runs = np.array([(first, count, start, row) for row, (first, count, (start, _)) in enumerate(
            zip(np.cumsum([0, *counts[:-1]]), counts, lengths, strict=True))], np.int32)
        inputs = random_cache(rng, dtype, dtype if kv_dtype is None else kv_dtype, runs, num_heads, num_kv_heads,
                              head_dim, window)
        return {"out": np.zeros((sum(counts), num_heads * head_dim), dtype), **inputs,
                "work": plan(runs, num_heads // num_kv_heads, window), "num_heads": num_heads,
                "scale": head_dim**-0.5, "window": window, "softcap": softcap,
                "sinks": rng.standard_normal(num_heads).astype(np.float32) * 4 if sinks else None}
    return Case(name, make, large)

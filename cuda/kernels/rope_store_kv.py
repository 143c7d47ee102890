"""RMSNorm of q and k heads, RoPE, and k and v into the paged cache: one launch between the projection and attention."""
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.kernels.kernel_spec import Case, Instance, KernelSpec, launch
from cuda.kernels.paged_kv import CODES, Array, check_array, check_cache, store
from cuda.kernels.types import ACTIVATION_TYPES, BF16, C_TYPES, FP16
from cuda.launcher import DeviceArray, Launcher
from cuda.ops import BLOCK_SIZE

SOURCE = "rope_store_kv.cu"
WARPS = 8
LARGEST_HEAD_DIM = 256


def rope_store_kv(launcher: Launcher, qkv: DeviceArray, k_cache: DeviceArray, v_cache: DeviceArray,
                  k_scale: DeviceArray | None, v_scale: DeviceArray | None, positions: DeviceArray,
                  slot_mapping: DeviceArray, cos_sin: DeviceArray | None, q_norm: DeviceArray | None,
                  k_norm: DeviceArray | None, eps: float, num_heads: int, num_kv_heads: int) -> None:
    """Queries of qkv [T, (H + 2G) D] are normed and rotated in place; keys, normed and rotated, and values are stored.

    k_cache, v_cache [N, G, 16, D] of qkv's type, int8 or uint8 (fp8), then with k_scale, v_scale float32 [N, G, 16].
    positions, slot_mapping int32 [T]; rows whose slot is below 0 are padding and stay as they are.
    cos_sin float32 [P, rotary_dim]: cosines, then sines, of every position; None: no rotation.
    q_norm, k_norm float32 [D], None: no norm.

    Raises: ValueError naming the array that does not fit.
    """
    found_kv_heads, head_dim = check_cache(qkv, k_cache, v_cache, k_scale, v_scale, num_heads, LARGEST_HEAD_DIM)
    if found_kv_heads != num_kv_heads:
        raise ValueError(f"the KV cache has {found_kv_heads} heads, not {num_kv_heads}")
    num_tokens = qkv.shape[0]
    check_array("positions", positions, np.int32, (num_tokens,))
    check_array("slot_mapping", slot_mapping, np.int32, (num_tokens,))
    rotary_dim = 0
    if cos_sin is not None:
        check_array("cos_sin", cos_sin, np.float32, (None, None))
        rotary_dim = cos_sin.shape[1]
        if rotary_dim % 2 or rotary_dim > head_dim:
            raise ValueError(f"{rotary_dim} of a head's {head_dim} dimensions cannot rotate")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            check_array(name, norm, np.float32, (head_dim,))
    grid = num_tokens, -(-(num_heads + 2 * num_kv_heads) // WARPS)
    launch(launcher, SOURCE, _entry(qkv.dtype, k_cache.dtype), grid, WARPS * 32,
           (qkv, k_cache, v_cache, k_scale, v_scale, positions, slot_mapping, cos_sin, q_norm, k_norm, np.float32(eps),
            np.int32(num_heads), np.int32(num_kv_heads), np.int32(head_dim), np.int32(rotary_dim)))


def _entry(dtype: Any, kv_dtype: Any) -> str:
    return f"rope_store_kv<{C_TYPES[np.dtype(dtype)]}, {C_TYPES[np.dtype(kv_dtype)]}>"


def reference(qkv: Array, k_cache: Array, v_cache: Array, k_scale: NDArray[np.float32] | None,
              v_scale: NDArray[np.float32] | None, positions: NDArray[np.int32], slot_mapping: NDArray[np.int32],
              cos_sin: NDArray[np.float32] | None, q_norm: NDArray[np.float32] | None,
              k_norm: NDArray[np.float32] | None, eps: float, num_heads: int, num_kv_heads: int) -> dict[str, Array]:
    heads = qkv.reshape(len(qkv), -1, k_cache.shape[-1])                                            # [T, H + 2G, D]
    for row in np.flatnonzero(slot_mapping >= 0):
        q, k, v = np.split(heads[row].astype(np.float32), [num_heads, num_heads + num_kv_heads])    # [heads, D]
        q, k = _normed(q, q_norm, eps), _normed(k, k_norm, eps)
        if cos_sin is not None:
            cosine, sine = np.split(cos_sin[positions[row]], 2)
            q, k = _rotated(q, cosine, sine), _rotated(k, cosine, sine)
        heads[row, :num_heads] = q.astype(qkv.dtype)
        block, place = divmod(int(slot_mapping[row]), BLOCK_SIZE)
        for x, cache, scales in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
            cache[block, :, place], scale = store(x, cache.dtype)
            if scales is not None:
                scales[block, :, place] = scale
    outputs: dict[str, Any] = {"qkv": qkv, "k_cache": k_cache, "v_cache": v_cache, "k_scale": k_scale,
                               "v_scale": v_scale}
    return {name: value for name, value in outputs.items() if value is not None}


def _normed(x: NDArray[np.float32], weight: NDArray[np.float32] | None, eps: float) -> NDArray[np.float32]:
    if weight is None:
        return x
    mean_square = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
    normed: NDArray[np.float32] = (x / np.sqrt(mean_square + eps) * weight).astype(np.float32)
    return normed


def _rotated(x: NDArray[np.float32], cosine: NDArray[np.float32], sine: NDArray[np.float32]) -> NDArray[np.float32]:
    half, rotated = len(cosine), x.copy()
    low, high = x[:, :half], x[:, half:2 * half]
    rotated[:, :half] = low * cosine - high * sine
    rotated[:, half:2 * half] = high * cosine + low * sine
    return rotated


def case(name: str, dtype: np.dtype[Any], kv_dtype: np.dtype[Any], num_tokens: int, num_heads: int, num_kv_heads: int,
         head_dim: int, rotary_dim: int | None, norm: bool = False, padding: int = 0, large: bool = False) -> Case:
    """rotary_dim None: no rotation. The last `padding` tokens are padding."""
    def make(rng: np.random.Generator) -> dict[str, Any]:
        num_blocks, max_position = -(-num_tokens // BLOCK_SIZE) + 2, 64
        qkv = rng.standard_normal((num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)).astype(np.float32)
        qkv[rng.random(qkv.shape) < 0.02] *= 30
        cache = (num_blocks, num_kv_heads, BLOCK_SIZE, head_dim)
        k, v = (store(rng.standard_normal(cache).astype(np.float32), kv_dtype) for _ in range(2))
        positions = rng.integers(0, max_position, num_tokens).astype(np.int32)
        slots = rng.permutation(num_blocks * BLOCK_SIZE)[:num_tokens].astype(np.int32)
        slots[num_tokens - padding:] = -1
        positions[num_tokens - padding:] = -1
        angles = rng.random((max_position, (rotary_dim or 0) // 2)) * 2 * np.pi
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        norms = [rng.standard_normal(head_dim).astype(np.float32) if norm else None for _ in range(2)]
        return {"qkv": qkv.astype(dtype), "k_cache": k[0], "v_cache": v[0], "k_scale": k[1], "v_scale": v[1],
                "positions": positions, "slot_mapping": slots, "cos_sin": None if rotary_dim is None else table,
                "q_norm": norms[0], "k_norm": norms[1], "eps": 1e-6, "num_heads": num_heads,
                "num_kv_heads": num_kv_heads}
    return Case(name, make, large)


INT8, FP8 = CODES

SPEC = KernelSpec(
    name="rope_store_kv",
    source=SOURCE,
    instances=tuple(Instance(_entry(dtype, kv_dtype), WARPS * 32, 40, WARPS * LARGEST_HEAD_DIM * 4)
                    for dtype in ACTIVATION_TYPES for kv_dtype in (dtype, *CODES)),
    run=rope_store_kv,
    reference=reference,
    outputs=("qkv", "k_cache", "v_cache", "k_scale", "v_scale"),
    in_place=("qkv", "k_cache", "v_cache", "k_scale", "v_scale"),
    cases=(
        case("bf16", BF16, BF16, 3, 4, 2, 64, 64),
        case("bf16, partial rotation, padding", BF16, BF16, 4, 3, 1, 24, 16, padding=2),
        case("bf16, norms", BF16, BF16, 2, 2, 1, 128, 128, norm=True),
        case("bf16, no rotation", BF16, BF16, 2, 2, 1, 16, None),
        case("fp16", FP16, FP16, 2, 2, 2, 96, 96, norm=True),
        case("bf16 to int8", BF16, INT8, 3, 2, 2, 64, 64, padding=1),
        case("bf16 to fp8", BF16, FP8, 3, 2, 2, 64, 64, norm=True),
        case("fp16 to int8", FP16, INT8, 2, 1, 1, 256, 256),
        case("fp16 to fp8", FP16, FP8, 2, 1, 1, 8, 8),
        case("bf16, decode step", BF16, BF16, 128, 32, 8, 128, 128, large=True),
        case("bf16 to int8, prefill", BF16, INT8, 4096, 32, 8, 128, 128, norm=True, large=True),
        case("bf16 to fp8, prefill", BF16, FP8, 4096, 32, 8, 128, 128, large=True),
    ),
    # A sum that is rounded otherwise moves a code by one: of int8 1/127 of the largest.
    tolerance=0.01,
)

"""RMSNorm of rows, and before it the addition to the residual stream."""
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.kernels.kernel_spec import Case, Instance, KernelSpec, launch
from cuda.kernels.types import BF16, C_TYPES
from cuda.launcher import DeviceArray, Launcher

FLOAT32 = np.dtype(np.float32)
ACTIVATIONS = (BF16, np.dtype(np.float16))
MAX_THREADS = 1024
ELEMENTS = 16                               # a thread's, at most
MAX_COLUMNS = ELEMENTS * MAX_THREADS


def rms_norm(launcher: Launcher, out: DeviceArray, x: DeviceArray, weight: DeviceArray, eps: float,
             add: DeviceArray | None = None, post: DeviceArray | None = None) -> None:
    """out [T, C] = x [T, C] * weight [C] / rms(x); with `add` [T, C], x += add comes first and stays in x; with `post`
    [C] too, what is added is add * post / rms(add).

    out and add: of one 16-bit type; x: of that type or float32, with `add` float32; weight and post: float32.

    Raises: ValueError naming shapes or types.
    """
    num_rows, columns = x.shape
    if out.dtype not in ACTIVATIONS or x.dtype not in (FLOAT32, out.dtype) or weight.dtype != FLOAT32:
        raise ValueError(f"out {out.dtype}, x {x.dtype}, weight {weight.dtype}: wanted are a 16-bit type, that one or "
                         "float32, float32")
    if add is not None and (x.dtype != FLOAT32 or add.dtype != out.dtype or add.shape != x.shape):
        raise ValueError(f"add {add.dtype}{list(add.shape)} is not of {out.dtype} and the shape of a float32 x, "
                         f"which is {x.dtype}{list(x.shape)}")
    if post is not None and (add is None or post.dtype != FLOAT32 or post.shape != weight.shape):
        raise ValueError(f"post {post.dtype}{list(post.shape)} is not float32 of weight's {list(weight.shape)}, or has "
                         "nothing to norm")
    if out.shape != x.shape or weight.shape != (columns,):
        raise ValueError(f"out {list(out.shape)}, x {list(x.shape)}, weight {list(weight.shape)}: they do not belong "
                         "together")
    if columns > MAX_COLUMNS:
        raise ValueError(f"{columns} columns, at most {MAX_COLUMNS}")
    vector = 8 if columns % 8 == 0 else 1
    # NOTE: of the columns alone: the order of the sum must not depend on anything else.
    threads = min(MAX_THREADS, max(32, 1 << (columns // vector - 1).bit_length()))
    launch(launcher, "rms_norm.cu", _entry(out.dtype, x.dtype, vector), (num_rows,), threads,
           (out, x, add, post, weight, np.int32(columns), np.float32(eps)))


def _entry(out: np.dtype[Any], x: np.dtype[Any], vector: int) -> str:
    return f"rms_norm<{C_TYPES[out]}, {C_TYPES[x]}, {vector}>"


def _reference(out: NDArray[Any], x: NDArray[Any], weight: NDArray[np.float32], eps: float,
               add: NDArray[Any] | None = None,
              post: NDArray[np.float32] | None = None) -> dict[str, NDArray[Any]]:
    def normed(rows: NDArray[Any], by: NDArray[np.float32]) -> NDArray[Any]:
        wide = rows.astype(np.float64)
        scaled = wide / np.sqrt(np.mean(np.square(wide), axis=1, keepdims=True) + eps) * by
        rounded: NDArray[Any] = scaled.astype(np.float32).astype(out.dtype)
        return rounded

    if add is not None:
        x = x + (add if post is None else normed(add, post)).astype(np.float32)
    return {"out": normed(x, weight), "x": x}


def _case(rows: int, columns: int, dtype: Any, x_dtype: Any, add: bool, large: bool = False,
          post: bool = False) -> Case:
    def make(random: np.random.Generator) -> dict[str, Any]:
        x = random.standard_normal((rows, columns), np.float32) * 3
        x[:, random.integers(0, columns)] = 300.0          # an outlier, as models have
        return {"out": np.zeros((rows, columns), dtype), "x": x.astype(x_dtype),
                "weight": random.standard_normal(columns, np.float32), "eps": 1e-5,
                "add": random.standard_normal((rows, columns), np.float32).astype(dtype) if add else None,
                "post": random.standard_normal(columns, np.float32) if post else None}

    name = (f"{rows} x {columns}, {np.dtype(x_dtype)} -> {np.dtype(dtype)}{' with add' if add else ''}"
            f"{' normed' if post else ''}")
    return Case(name, make, large)


SPEC = KernelSpec(
    name="rms_norm",
    source="rms_norm.cu",
    instances=tuple(Instance(_entry(dtype, x_dtype, vector), MAX_THREADS, 64, 128)
                    for dtype in ACTIVATIONS for x_dtype in (FLOAT32, dtype) for vector in (8, 1)),
    run=rms_norm,
    reference=_reference,
    outputs=("out", "x"),
    in_place=("x",),
    cases=(
        _case(3, 512, BF16, np.float32, True),
        _case(2, 896, np.float16, np.float32, True),
        _case(2, 64, BF16, np.float32, False),
        _case(1, 2048, np.float16, np.float16, False),
        _case(2, 104, BF16, BF16, False),
        _case(2, 33, BF16, np.float32, True),
        _case(1, 1, np.float16, np.float16, False),
        _case(1, 1100, np.float16, np.float16, False),
        _case(3, 640, BF16, np.float32, True, post=True),
        _case(2, 41, np.float16, np.float32, True, post=True),
        _case(5, 5376, BF16, np.float32, True, large=True, post=True),
        _case(1, 16384, BF16, np.float32, True, large=True),
        _case(7, 16383, BF16, np.float32, True, large=True),
        _case(300, 4096, BF16, np.float32, True, large=True),
    ),
    tolerance=4e-3,                         # one step of bfloat16 at the largest element
)

"""Rows of a matrix by number."""
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.kernels.kernel_spec import Case, Instance, KernelSpec, launch
from cuda.kernels.types import BF16
from cuda.launcher import DeviceArray, Launcher

MAX_THREADS = 256


def take_rows(launcher: Launcher, out: DeviceArray, x: DeviceArray, rows: DeviceArray) -> None:
    """out [R, C] = x [T, C] at rows int32 [R]; zeros where a row is negative. out and x: of one type.

    Raises: ValueError naming shapes or types.
    """
    if out.dtype != x.dtype or x.dtype.itemsize % 2 or rows.dtype != np.int32:
        raise ValueError(f"out {out.dtype}, x {x.dtype}, rows {rows.dtype}: wanted are one type of 2 bytes or more "
                         "twice, and int32")
    if out.shape != (rows.shape[0], x.shape[1]):
        raise ValueError(f"out {list(out.shape)} is not rows {list(rows.shape)} of x {list(x.shape)}")
    row_bytes = x.shape[1] * x.dtype.itemsize
    unit, name = (16, "uint4") if row_bytes % 16 == 0 else (2, "uint16_t")
    units = row_bytes // unit
    launch(launcher, "take_rows.cu", f"take_rows<{name}>", (rows.shape[0],), min(MAX_THREADS, -(-units // 32) * 32),
           (out, x, rows, np.int32(units)))


def _reference(out: NDArray[Any], x: NDArray[Any], rows: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
    return {"out": np.where(rows[:, None] < 0, np.zeros((), x.dtype), x[rows])}


def _case(num_taken: int, num_rows: int, columns: int, dtype: Any, large: bool = False) -> Case:
    def make(random: np.random.Generator) -> dict[str, Any]:
        return {"out": np.zeros((num_taken, columns), dtype),
                "x": random.standard_normal((num_rows, columns), np.float32).astype(dtype),
                "rows": random.integers(-1, num_rows, num_taken).astype(np.int32)}

    return Case(f"{num_taken} of {num_rows} x {columns} {np.dtype(dtype)}", make, large)


SPEC = KernelSpec(
    name="take_rows",
    source="take_rows.cu",
    instances=(Instance("take_rows<uint4>", MAX_THREADS, 32), Instance("take_rows<uint16_t>", MAX_THREADS, 32)),
    run=take_rows,
    reference=_reference,
    outputs=("out",),
    cases=(
        _case(5, 9, 96, np.float32), _case(7, 3, 1160, BF16), _case(3, 3, 33, np.float16), _case(3, 4, 7, np.float32),
        _case(1, 1, 8, BF16), _case(128, 2048, 4096, np.float32, large=True),
    ),
)

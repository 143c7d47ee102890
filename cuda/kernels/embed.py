"""Rows of the embedding, dense or quantized."""
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.kernels.kernel_spec import Case, Instance, KernelSpec, launch
from cuda.kernels.packing import (
    SCALE_CHUNK,
    DeviceAffine,
    DeviceDense,
    DeviceWeight,
    pack_codes,
    units_and_chunks,
    unpack_weight,
)
from cuda.kernels.types import ACTIVATION_TYPES, BF16, C_TYPES, FP16
from cuda.launcher import DeviceArray, Launcher

SOURCE = "embed.cu"
MAX_THREADS = 256


def embed(launcher: Launcher, out: DeviceArray, token_ids: DeviceArray, weight: DeviceWeight, scale: float) -> None:
    """out float32 [T, C] = scale * the rows of `weight` [V, C] at token_ids int32 [T]; zeros where an id is negative.

    Raises: ValueError naming shapes or types.
    """
    if isinstance(weight, DeviceDense):
        embed_rows(launcher, out, token_ids, weight.data, scale=scale)
    else:
        embed_rows(launcher, out, token_ids, weight.codes, weight.scales, weight.offsets, bits=weight.bits,
                   group=weight.group, scale=scale * weight.scale_unit)


def embed_rows(launcher: Launcher, out: DeviceArray, token_ids: DeviceArray, table: DeviceArray,
               scales: DeviceArray | None = None, offsets: DeviceArray | None = None, *, bits: int = 16, group: int = 0,
               scale: float = 1.0) -> None:
    """`embed` from the arrays of a DeviceDense (bits 16) or a DeviceAffine, whose scale_unit is a factor of `scale`."""
    num_tokens, columns = out.shape
    if out.dtype != np.float32 or token_ids.dtype != np.int32 or tuple(token_ids.shape) != (num_tokens,) or columns % 4:
        raise ValueError(f"out {out.dtype}{list(out.shape)} and ids {token_ids.dtype}{list(token_ids.shape)} are not "
                         "float32[T, multiple of 4] and int32[T]")
    threads = min(MAX_THREADS, -(-columns // 128) * 32)
    grid = (num_tokens, -(-columns // (4 * threads)))
    if bits == 16:
        if table.dtype not in ACTIVATION_TYPES or table.shape[1] != columns:
            raise ValueError(f"table {table.dtype}{list(table.shape)} is no 16-bit type[V, {columns}]")
        launch(launcher, SOURCE, f"embed_dense<{C_TYPES[table.dtype]}>", grid, threads,
               (out, token_ids, table, np.int32(columns), np.float32(scale)))
        return
    units, chunks = units_and_chunks(columns, bits, group)
    if table.dtype != np.uint8 or table.shape[1] != units * 64:
        raise ValueError(f"codes {table.dtype}{list(table.shape)} are not uint8[V, {units * 64}]")
    for name, array in (("scales", scales), ("offsets", offsets)):
        if (array is None and name == "scales") or (array is not None and (
                array.dtype != np.float16 or tuple(array.shape) != (table.shape[0], chunks * SCALE_CHUNK))):
            raise ValueError(f"{name} are not float16[{table.shape[0]}, {chunks * SCALE_CHUNK}]")
    launch(launcher, SOURCE, f"embed_codes<{bits}>", grid, threads,
           (out, token_ids, table.view(np.uint32), scales, offsets, np.int32(columns), np.int32(units * 16),
            np.int32(chunks * SCALE_CHUNK), np.int32(group.bit_length() - 1), np.float32(scale)))


def _reference(out: NDArray[Any], token_ids: NDArray[np.int32], table: NDArray[Any], scales: NDArray[Any] | None = None,
               offsets: NDArray[Any] | None = None, *, bits: int = 16, group: int = 0,
               scale: float = 1.0) -> dict[str, NDArray[Any]]:
    of_scales, of_offsets = (None if array is None else array[token_ids] for array in (scales, offsets))
    rows = unpack_weight(DeviceDense(table[token_ids]) if bits == 16 else DeviceAffine(
        table[token_ids], of_scales, of_offsets, (len(out), out.shape[1]), bits, group, 1.0))
    taken = np.where(token_ids[:, None] < 0, 0.0, rows)
    return {"out": (taken.astype(np.float32) * np.float32(scale)).astype(np.float32)}


def _case(num_tokens: int, num_rows: int, columns: int, dtype: Any = BF16, bits: int = 16, group: int = 0,
          offsets: bool = False, scale: float = 1.0, large: bool = False) -> Case:
    def make(random: np.random.Generator) -> dict[str, Any]:
        ids = random.integers(0, num_rows, num_tokens).astype(np.int32)
        ids[num_tokens // 2] = -1
        arguments = {"out": np.zeros((num_tokens, columns), np.float32), "token_ids": ids, "scale": scale}
        if bits == 16:
            return arguments | {"table": random.standard_normal((num_rows, columns), np.float32).astype(dtype)}
        _, chunks = units_and_chunks(columns, bits, group)
        halves = random.standard_normal((2, num_rows, chunks * SCALE_CHUNK), np.float32).astype(np.float16)
        codes = random.integers(0, 256, (num_rows, columns * bits // 8), np.uint8)
        return arguments | {"table": pack_codes(codes, bits, group), "scales": halves[0],
                            "offsets": halves[1] if offsets else None, "bits": bits, "group": group}

    kind = str(np.dtype(dtype)) if bits == 16 else f"{bits} bits in {group}{' with offsets' if offsets else ''}"
    return Case(f"{num_tokens} of {num_rows} x {columns}, {kind}", make, large)


SPEC = KernelSpec(
    name="embed",
    source=SOURCE,
    instances=(
        *(Instance(f"embed_dense<{C_TYPES[dtype]}>", MAX_THREADS, 32) for dtype in ACTIVATION_TYPES),
        *(Instance(f"embed_codes<{bits}>", MAX_THREADS, 40) for bits in (4, 8)),
    ),
    run=embed_rows,
    reference=_reference,
    outputs=("out",),
    cases=(
        _case(4, 10, 96, scale=9.75), _case(3, 7, 1160, FP16), _case(3, 20, 576, bits=4, group=32, offsets=True),
        _case(5, 9, 64, bits=4, group=16, scale=0.125), _case(3, 9, 80, bits=8, group=16, offsets=True, scale=3.5),
        _case(2, 5, 1280, bits=8, group=128), _case(1, 4, 128, bits=8, group=32), _case(2, 3, 256, bits=4, group=128),
        _case(4096, 128256, 4096, large=True), _case(4096, 128256, 2048, bits=8, group=16, large=True),
    ),
    tolerance=1e-6,                             # float32, rounded at one step more or less
)

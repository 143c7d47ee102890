"""The gated activation by itself, after a product by cuBLAS; elsewhere it is the product's epilogue."""
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.kernels.kernel_spec import Case, Instance, KernelSpec, launch
from cuda.kernels.packing import ACTIVATIONS, GATE_TURN
from cuda.kernels.types import ACTIVATION_TYPES, BF16, C_TYPES, FP16
from cuda.launcher import DeviceArray, Launcher
from cuda.reference import ReferenceOps

SOURCE = "gated.cu"
THREADS = 256


def gated(launcher: Launcher, out: DeviceArray, x: DeviceArray, activation: str) -> None:
    """out [M, F] = activation(gate) * up, of x [M, 2F] with gates and ups in turns of eight; both bfloat16 or float16.

    Raises: ValueError naming shapes, types or the activation.
    """
    rows, columns = x.shape
    if x.dtype not in ACTIVATION_TYPES or out.dtype != x.dtype:
        raise ValueError(f"out {out.dtype}, x {x.dtype}: one 16-bit type twice")
    if tuple(out.shape) != (rows, columns // 2) or columns % (2 * GATE_TURN):
        raise ValueError(f"out {list(out.shape)} is not half of x {list(x.shape)}, in turns of {GATE_TURN}")
    num_turns = rows * columns // (2 * GATE_TURN)
    launch(launcher, SOURCE, _entry(x.dtype, activation), (-(-num_turns // THREADS),), THREADS,
           (out, x, np.int64(num_turns)))


def _entry(dtype: Any, activation: str) -> str:
    if activation not in ACTIVATIONS[1:]:
        raise ValueError(f"{activation!r}: no such activation ({', '.join(map(str, ACTIVATIONS[1:]))})")
    return f"gated<{C_TYPES[np.dtype(dtype)]}, {ACTIVATIONS.index(activation)}>"


def _reference(out: NDArray[Any], x: NDArray[Any], activation: str) -> dict[str, NDArray[Any]]:
    turns = x.astype(np.float32).reshape(len(x), -1, 2, GATE_TURN)                                  # [M, F / 8, 2, 8]
    halves = turns.swapaxes(1, 2).reshape(len(x), -1)                                               # [M, 2F]
    return {"out": ReferenceOps().gated(halves, activation).astype(x.dtype)}


def _case(rows: int, width: int, dtype: np.dtype[Any], activation: str, large: bool = False) -> Case:
    def make(random: np.random.Generator) -> dict[str, Any]:
        x = random.standard_normal((rows, 2 * width), np.float32) * 3
        x[random.random(x.shape) < 0.01] *= 30
        return {"out": np.zeros((rows, width), dtype), "x": x.astype(dtype), "activation": activation}

    return Case(f"{rows} x {width} {dtype}, {activation}", make, large)


SPEC = KernelSpec(
    name="gated", source=SOURCE, run=gated, reference=_reference, outputs=("out",), tolerance=0.005,
    instances=tuple(Instance(_entry(dtype, activation), THREADS, 40)
                    for dtype in ACTIVATION_TYPES for activation in ("silu", "gelu_tanh")),
    cases=(_case(3, 104, BF16, "silu"), _case(5, 8, FP16, "silu"), _case(2, 1040, BF16, "gelu_tanh"),
           _case(1, 24, FP16, "gelu_tanh"), _case(512, 14336, BF16, "silu", large=True)))

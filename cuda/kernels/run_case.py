"""Runs a kernel's case and holds the results to the reference: on a device as in the emulator."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.kernels.kernel_spec import Case, KernelSpec
from cuda.launcher import Launcher

POISON = 0xFF                               # NaN as float32, float16 and bfloat16, -1 as an integer


class Mismatch(AssertionError):
    """A kernel's result is not what its reference says."""


@dataclass(frozen=True, slots=True, eq=False)
class CaseResult:
    outputs: dict[str, NDArray[Any]]
    error: float                            # the largest of the outputs, as `KernelSpec.tolerance` counts it


def run_case(spec: KernelSpec, case: Case, launcher: Launcher, seed: int = 1) -> CaseResult:
    """Outputs are poisoned before the run, inputs must be as they were after it.

    Raises: Mismatch naming kernel, case and output.
    """
    arguments = case.make(np.random.default_rng(seed))
    expected = spec.reference(**{name: _copy(value) for name, value in arguments.items()})
    given = {name: _on_device(launcher, value, name in spec.outputs and name not in spec.in_place)
             for name, value in arguments.items()}
    spec.run(launcher, **given)
    results = {name: launcher.download(given[name]) for name, value in arguments.items()
               if isinstance(value, np.ndarray)}
    outputs, error = {}, 0.0
    for name, result in results.items():
        what = f"{spec.name} {case.name} {name}"
        if name in spec.outputs:
            outputs[name] = result
            error = max(error, compare(what, result, expected[name], spec.tolerance))
        elif result.tobytes() != arguments[name].tobytes():
            raise Mismatch(f"{what}: an input was written")
    return CaseResult(outputs, error)


def compare(what: str, result: NDArray[Any], expected: NDArray[Any], tolerance: float) -> float:
    """The largest difference over the largest expected number. Raises: Mismatch"""
    if result.shape != expected.shape:
        raise Mismatch(f"{what}: {result.shape}, not {expected.shape}")
    if tolerance == 0:
        if result.dtype != expected.dtype:
            raise Mismatch(f"{what}: {result.dtype}, not {expected.dtype}")
        same = np.ascontiguousarray(result).view(np.uint8) == np.ascontiguousarray(expected).view(np.uint8)
        if not same.all():
            raise Mismatch(f"{what}: {np.count_nonzero(~same)} of {same.size} bytes differ")
        return 0.0
    got, want = result.astype(np.float64), expected.astype(np.float64)
    error = float(np.abs(got - want).max(initial=0) / max(np.abs(want).max(initial=0), 1e-30))
    if not error <= tolerance:              # NaN is no error that is small enough
        raise Mismatch(f"{what}: relative error {error:.3g}, tolerance {tolerance:.3g}")
    return error


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _on_device(launcher: Launcher, value: Any, poisoned: bool) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    if poisoned:
        value = np.full(value.nbytes, POISON, np.uint8).view(value.dtype).reshape(value.shape)
    return launcher.upload(value)

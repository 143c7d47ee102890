"""Runs a kernel's case on a launcher and compares with the reference; used by every kernel test and family."""
from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from cuda.kernels import run_case as cases
from cuda.kernels.kernel_spec import Case, KernelSpec
from cuda.kernels.run_case import compare as compare
from cuda.launcher import Launcher

Arrays = dict[str, NDArray[Any]]


def run_case(spec: KernelSpec, case: Case, launcher: Launcher, seed: int = 1) -> Arrays:
    """Runs `case` with poisoned outputs and holds the result to the reference; returns the outputs.

    Raises: AssertionError naming case and output.
    """
    return cases.run_case(spec, case, launcher, seed).outputs

"""What a kernel promises: its instances with their budgets, its reference in NumPy, and the cases that prove it.

The emulator tests, the compile checks and `tools.gpu_check` all run from these; none of them knows a kernel by name.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cuda.launcher import Launcher

# By parameter name of `KernelSpec.run`: NumPy arrays (on a device: its own) and plain numbers or None.
Arguments: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Instance:
    """One compiled function and what it may cost; a compile check holds it to that on every architecture."""
    entry: str                              # a name expression: "rms_norm<__nv_bfloat16>"
    threads: int                            # of a block, at most
    registers: int                          # of a thread, at most
    shared_bytes: int = 0                   # static and dynamic together, at most


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Inputs for one run. `make` is called with a seeded generator and returns `run`'s arguments."""
    name: str
    make: Callable[[np.random.Generator], dict[str, Any]]
    large: bool = False                     # for a device, and for the slow run of the emulator


@dataclass(frozen=True, slots=True, eq=False)
class KernelSpec:
    """A kernel family: one `.cu` beside its wrapper."""
    name: str
    source: str                             # "rms_norm.cu"
    instances: tuple[Instance, ...]         # all that the wrapper may ask for
    run: Callable[..., None]                # run(launcher, **arguments): the wrapper; launches, never waits
    reference: Callable[..., dict[str, NDArray[Any]]]   # reference(**arguments) -> {output: what it must be}
    outputs: tuple[str, ...]                # arguments that `run` writes
    in_place: tuple[str, ...] = ()          # those of them that it reads too: not poisoned before a run
    cases: tuple[Case, ...] = field(default=())
    tolerance: float = 0.0                  # of |got - expected| / max(|expected|) over an output; 0: bit-equal


@cache
def source_text(name: str) -> str:
    """A `.cu` of this folder with `common.cuh` in its place.

    NOTE: CuPy's disk cache does not look into included files: a changed header would run as it was.
    """
    folder = Path(__file__).parent
    text = (folder / name).read_text()
    include = '#include "common.cuh"\n'
    assert text.count(include) == 1, f"{name} includes common.cuh once and nothing else"
    return text.replace(include, (folder / "common.cuh").read_text())


def launch(launcher: Launcher, source: str, entry: str, grid: tuple[int, ...], block: int, arguments: tuple[Any, ...],
           shared_bytes: int = 0) -> None:
    """Arrays and NumPy scalars of exactly the kernel's parameter types. An empty grid launches nothing."""
    if min(grid) > 0:
        launcher.launch(source, entry, grid, (block, 1, 1), arguments, shared_bytes)

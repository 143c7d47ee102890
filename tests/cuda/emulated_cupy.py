"""The fake CuPy with the emulator behind its kernels."""
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.kernels.registry import KERNELS
from cuda.kernels.signature import signature
from tests.cuda.fake_cupy import FakeCupy
from tests.cuda_emulator.launcher import EmulatorLauncher

SOURCES = {instance.entry: spec.source for spec in KERNELS for instance in spec.instances}


class EmulatedCupy(FakeCupy):
    def __init__(self) -> None:
        super().__init__()
        self.emulator = EmulatorLauncher()

    def run_kernel(self, entry: str, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int,
                   values: list[Any]) -> None:
        source = SOURCES[entry]
        arguments = [self._array_at(int(value), parameter.dtype)
                     if parameter.is_pointer and isinstance(value, np.generic) else value
                     for value, parameter in zip(values, signature(source, entry), strict=True)]
        self.emulator.launch(source, entry, grid, block, tuple(arguments), shared_bytes)

    def _array_at(self, address: int, dtype: Any) -> NDArray[Any] | None:
        """Pinned memory, which is given by its address; None for a null pointer."""
        if address == 0:
            return None
        begin = self.memory_at(address)
        assert begin is not None, "a kernel reads host memory that the device does not reach"
        storage = self._live[begin][address - begin:]
        return storage if dtype is None else storage[:len(storage) // dtype.itemsize * dtype.itemsize].view(dtype)

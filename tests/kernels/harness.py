"""Running kernels' cases in the emulator: launchers that watch, and what a case launches."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.kernels.kernel_spec import Case, KernelSpec
from cuda.kernels.run_case import run_case
from cuda.kernels.signature import check_arguments
from tests.cuda_emulator.launcher import EmulatorLauncher

_GUARD = 256                                # bytes before and after every array
_GUARD_BYTE = 0xA5

# (order of threads and blocks, asynchronous copies as late as may be): what no result may depend on
MODES = ((0, True), (1, False), (2, True), (3, False))


class GuardedLauncher(EmulatorLauncher):
    """Keeps guard bytes round every array it gives out."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._guarded: list[NDArray[np.uint8]] = []

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        memory = super().empty(num_bytes + 2 * _GUARD, np.uint8)
        inside = memory[_GUARD:_GUARD + num_bytes]
        memory[:_GUARD] = memory[_GUARD + num_bytes:] = _GUARD_BYTE
        self._guarded.append(memory)
        array: NDArray[Any] = inside.view(dtype)
        return array.reshape(shape)

    def check_guards(self) -> None:
        for memory in self._guarded:
            what = f"an array of {memory.size - 2 * _GUARD} bytes"
            assert (memory[:_GUARD] == _GUARD_BYTE).all(), f"written before {what}"
            assert (memory[-_GUARD:] == _GUARD_BYTE).all(), f"written behind {what}"


class InstanceRecorder(EmulatorLauncher):
    """Runs nothing; notes which instances are asked for."""

    def __init__(self, specs: Iterable[KernelSpec]) -> None:
        super().__init__(specs=specs)
        self.launched: set[tuple[str, str]] = set()

    def launch(self, source: str, entry: str, grid: tuple[int, ...], block: tuple[int, ...],
               arguments: tuple[Any, ...], shared_bytes: int = 0) -> None:
        check_arguments(source, entry, arguments, (np.ndarray,))
        self.launched.add((source, entry))


def instances_of(spec: KernelSpec, cases: Iterable[Case]) -> set[tuple[str, str]]:
    """(source, entry) of all that the cases launch."""
    recorder = InstanceRecorder([spec])
    for case in cases:
        arguments = case.make(np.random.default_rng(1))
        spec.run(recorder, **{name: recorder.upload(value) if isinstance(value, np.ndarray) else value
                              for name, value in arguments.items()})
    return recorder.launched


def run_guarded(spec: KernelSpec, case: Case, order: int, lazy: bool) -> dict[str, NDArray[Any]]:
    """The outputs, held to the reference. Raises: AssertionError, also where a byte beside an array was written."""
    launcher = GuardedLauncher(order, lazy, specs=[spec])
    outputs = run_case(spec, case, launcher).outputs
    launcher.check_guards()
    return outputs

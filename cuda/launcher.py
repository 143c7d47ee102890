"""The device as the kernels see it: memory, copies, launches, cuBLAS, graphs, events. Thin on purpose.

`CupyLauncher` drives a GPU. The tests bring an emulator with the same methods over NumPy arrays, so that all above this
file runs without a GPU as it runs with one.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

DeviceArray: TypeAlias = Any                # cupy.ndarray, or numpy.ndarray under the emulator


class DeviceLost(RuntimeError):
    """The device's context is broken (an illegal access, a fault of the hardware): nothing on it can go on."""


class Graph(Protocol):
    """Recorded launches and copies, queued together at the cost of one. Scalars are as they were at the capture."""

    def launch(self) -> None: ...


class Event(Protocol):
    """A place in the queue. Used by any thread."""

    @property
    def done(self) -> bool:
        """Whether the device has passed it."""
        ...

    def wait(self) -> None:
        """Until the device has passed it; other threads run meanwhile."""
        ...


class Download(Protocol):
    """A copy to the host under way. Used by any thread."""

    @property
    def done(self) -> bool: ...

    def get(self) -> NDArray[Any]:
        """Waits for the copy, not for what was queued after it. The array is the caller's own."""
        ...


class Launcher(Protocol):
    """Used by the thread that made it. Work is queued in order on one stream; only `download`, `synchronize` and the
    waits of events and downloads wait for the device. Raises: DeviceLost from wherever it shows first."""

    name: str                               # "cuda:0 NVIDIA H200" or "emulator"
    num_multiprocessors: int

    def free_bytes(self) -> int:
        """Device memory that may still be allocated."""
        ...

    def compile(self, source: str, entries: Sequence[str]) -> None:
        """Name expressions of `source`, ahead of their first launches."""
        ...

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> DeviceArray:
        """Uninitialised, aligned to 256 bytes. bfloat16 is ml_dtypes', 8-bit floats are uint8.
        Raises: MemoryError with the size."""
        ...

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> DeviceArray: ...

    def empty_pinned(self, shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Host memory that kernels reach too, across the bus: it, or a contiguous part of it, may be an argument of
        `launch` and either side of `copy`. The host reads or writes it only where an event says that the device is
        done with it. It stays until `close`."""
        ...

    def upload(self, array: NDArray[Any]) -> DeviceArray:
        """A new array on the device; the host's may be reused at once."""
        ...

    def write(self, destination: DeviceArray, array: NDArray[Any]) -> None:
        """Host to device, in the order of the stream; both contiguous, of one type and size. The host's array may be
        reused at once."""
        ...

    def copy(self, destination: DeviceArray, source: DeviceArray) -> None:
        """Device to device, or to and from pinned memory, in the order of the stream; contiguous, of one type and
        size."""
        ...

    def download(self, array: DeviceArray) -> NDArray[Any]:
        """Waits for all that is queued."""
        ...

    def download_async(self, array: DeviceArray) -> Download:
        """The array as it is at this place in the queue, for whoever asks later."""
        ...

    def record(self) -> Event:
        """This place in the queue."""
        ...

    def launch(self, source: str, entry: str, grid: tuple[int, ...], block: tuple[int, ...],
               arguments: tuple[Any, ...], shared_bytes: int = 0) -> None:
        """Queues one kernel: `entry` is a name expression of `source`, a file of cuda/kernels.

        Arguments are contiguous arrays on the device or in pinned memory, None for a null pointer, or NumPy scalars.
        Raises: TypeError where their number or a type differs from the kernel's parameters."""
        ...

    def matmul(self, x: DeviceArray, weight: DeviceArray, out: DeviceArray) -> None:
        """out [M, N] = x [M, K] weight [N, K]^T by cuBLAS, float32 sums, all of one 16-bit type. Not in a capture."""
        ...

    def synchronize(self) -> None: ...

    def begin_capture(self) -> None:
        """From here to `end_capture`, `launch` and `copy` are recorded and not run. All other methods that touch the
        device raise RuntimeError: allocations, host copies, matmul, waits."""
        ...

    def end_capture(self) -> Graph:
        """What was recorded. It keeps the arrays alive; what varies from run to run is read from device memory."""
        ...

    def close(self) -> None:
        """Waits, and gives the memory back that no array holds; nothing may be queued after it."""
        ...

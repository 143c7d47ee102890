"""cuda/launcher.py's Launcher on a GPU, through CuPy.

CuPy is imported here alone, when a launcher is made: all else runs without it.
"""
from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.kernels.kernel_spec import source_text
from cuda.kernels.signature import check_arguments
from cuda.launcher import DeviceArray, DeviceLost

log = logging.getLogger("troupe.cuda")

OPTIONS = ("-std=c++17",)                   # CuPy adds the architecture and -ftz=true
STAGING_BYTES = 4 << 20                     # of a staging buffer: small next to weights, large next to a step's changes
NUM_STAGING = 4
SHARED_BYTES = 48 << 10                     # what a block gets unasked

# CUDA's errors after which no call of the process's context succeeds. Source: cudaError_t in the CUDA runtime API.
_LOST = {214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999}
_NO_MEMORY = 2                              # of the device or, pinned, of the host


class _DeviceErrors:
    """Makes DeviceLost and MemoryError of CuPy's errors of runtime and driver, which bring their number."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        status = getattr(error, "status", None) if isinstance(error, RuntimeError) else None
        if status in _LOST:
            raise DeviceLost(f"{error}") from error
        if status == _NO_MEMORY:
            raise MemoryError(f"{error}") from error


_device_errors = _DeviceErrors()


class CupyEvent:
    def __init__(self, launcher: CupyLauncher) -> None:
        self._launcher = launcher
        with _device_errors:
            self._event = launcher.cupy.cuda.Event(block=True, disable_timing=True)
            self._event.record(launcher.stream)

    @property
    def done(self) -> bool:
        with _device_errors:
            return bool(self._event.done)

    def wait(self) -> None:
        # NOTE: a thread that CUDA does not know yet would open a context on device 0.
        with _device_errors, self._launcher.device:
            self._event.synchronize()


class CupyDownload:
    """Holds a part of CuPy's pinned pool until `get`."""

    _pinned: NDArray[Any] | None = None

    def __init__(self, launcher: CupyLauncher, array: DeviceArray) -> None:
        pinned = launcher.pinned(array.shape, array.dtype)
        launcher.copy(pinned, array)
        self._event = launcher.record()
        self._pinned, self._result = pinned, np.empty(array.shape, array.dtype)

    @property
    def done(self) -> bool:
        return self._event.done

    def get(self) -> NDArray[Any]:
        if self._pinned is not None:
            self._event.wait()
            self._result[...] = self._pinned
            self._pinned = None
        return self._result

    def __del__(self) -> None:
        # Who drops it unread must not give memory back that the device still writes to.
        if self._pinned is not None:
            with suppress(RuntimeError):
                self._event.wait()


class CupyGraph:
    def __init__(self, graph: Any, launcher: CupyLauncher, arrays: list[Any]) -> None:
        """arrays: what the graph's launches point to."""
        self._graph, self._launcher, self._arrays = graph, launcher, arrays

    def launch(self) -> None:
        self._launcher.not_in_capture("launch of a graph")
        with _device_errors:
            self._graph.launch(self._launcher.stream)


class CupyLauncher:
    """See `cuda.launcher.Launcher`. Source: CUDA C++ Programming Guide, 3.2 (streams, pinned memory, graphs)."""

    def __init__(self, device_id: int = 0) -> None:
        """Raises: ModuleNotFoundError without CuPy; `cuda.devices` says beforehand what else is missing."""
        self.cupy: Any = importlib.import_module("cupy")
        self._runtime = self.cupy.cuda.runtime
        self.device = self.cupy.cuda.Device(device_id)
        self.device.use()
        # NOTE: not the default stream: that one cannot be captured, and waits for all others.
        self.stream = self.cupy.cuda.Stream(non_blocking=True)
        properties = self._runtime.getDeviceProperties(device_id)
        self.name = f"cuda:{device_id} {properties['name'].decode()}"
        self.num_multiprocessors = int(properties["multiProcessorCount"])
        self._array_types = (self.cupy.ndarray, np.ndarray)
        self._kernels: dict[tuple[str, str], Any] = {}
        self._shared_bytes: dict[tuple[str, str], int] = {}
        self._pinned: list[NDArray[np.uint8]] = []
        self._staging: list[NDArray[np.uint8]] = []
        self._staging_events: list[CupyEvent | None] = [None] * NUM_STAGING
        self._staging_turn = self._staging_used = 0
        self._captured: list[Any] | None = None

    # ---- Memory

    def free_bytes(self) -> int:
        free, _ = self._runtime.memGetInfo()
        return int(free) + int(self.cupy.get_default_memory_pool().free_bytes())

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> DeviceArray:
        return self._allocate(self.cupy.empty, shape, dtype)

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> DeviceArray:
        return self._allocate(self.cupy.zeros, shape, dtype)

    def _allocate(self, new: Callable[..., DeviceArray], shape: int | tuple[int, ...], dtype: Any) -> DeviceArray:
        self.not_in_capture("allocation")
        # The pool keeps memory by stream: what is freed here is reused by later work of this stream alone.
        with _device_errors, self.device, self.stream:
            return new(shape, dtype)

    def pinned(self, shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Host memory that goes back to the pool with its last view."""
        return self._allocate_pinned(self.cupy.cuda.alloc_pinned_memory, shape, dtype)

    def empty_pinned(self, shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
        # NOTE: not of the pool, which rounds up to a power of two: the tier could take twice what was asked for.
        cuda = self.cupy.cuda
        array = self._allocate_pinned(lambda size: cuda.PinnedMemoryPointer(cuda.PinnedMemory(size), 0), shape, dtype)
        self._pinned.append(array.reshape(-1).view(np.uint8))
        return array

    def _allocate_pinned(self, new: Callable[[int], Any], shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
        self.not_in_capture("allocation")
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        with _device_errors:
            memory = new(max(size, 1))
        array: NDArray[Any] = np.frombuffer(memory, np.uint8, size).view(dtype).reshape(shape)
        return array

    # ---- Copies

    def upload(self, array: NDArray[Any]) -> DeviceArray:
        destination = self.empty(array.shape, array.dtype)
        self.write(destination, np.ascontiguousarray(array))
        return destination

    def write(self, destination: DeviceArray, array: NDArray[Any]) -> None:
        self.not_in_capture("copy from the host")
        _check_copy(destination, array)
        data, start = array.reshape(-1).view(np.uint8), 0
        while start < len(data):
            stage = self._stage(len(data) - start)
            stage[:] = data[start:start + len(stage)]
            self._copy_bytes(destination.data.ptr + start, stage.ctypes.data, len(stage))
            start += len(stage)

    def _stage(self, size: int) -> NDArray[np.uint8]:
        """Up to `size` bytes of pinned memory that no copy under way reads."""
        if not self._staging:
            self._staging = [self.pinned(STAGING_BYTES, np.uint8) for _ in range(NUM_STAGING)]
        if self._staging_used == STAGING_BYTES:
            self._staging_events[self._staging_turn] = self.record()
            self._staging_turn, self._staging_used = (self._staging_turn + 1) % NUM_STAGING, 0
            event = self._staging_events[self._staging_turn]
            if event is not None:
                event.wait()
        begin = self._staging_used
        self._staging_used = min(begin + size, STAGING_BYTES)
        return self._staging[self._staging_turn][begin:self._staging_used]

    def copy(self, destination: DeviceArray | NDArray[Any], source: DeviceArray | NDArray[Any]) -> None:
        _check_copy(destination, source)
        if self._captured is not None:
            self._captured += (destination, source)
        self._copy_bytes(self._address(destination), self._address(source), source.nbytes)

    def _address(self, array: DeviceArray | NDArray[Any]) -> int:
        return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)

    def _copy_bytes(self, destination: int, source: int, size: int) -> None:
        # NOTE: not by ndarray's methods: in a capture they refuse, and elsewhere they may wait.
        if size:
            with _device_errors:
                self._runtime.memcpyAsync(destination, source, size, self._runtime.memcpyDefault, self.stream.ptr)

    def download(self, array: DeviceArray) -> NDArray[Any]:
        self.not_in_capture("copy to the host")
        result = np.empty(array.shape, array.dtype)
        _check_copy(result, array)
        self._copy_bytes(result.ctypes.data, array.data.ptr, array.nbytes)
        self.synchronize()
        return result

    def download_async(self, array: DeviceArray) -> CupyDownload:
        self.not_in_capture("copy to the host")
        return CupyDownload(self, array)

    def record(self) -> CupyEvent:
        self.not_in_capture("event")
        return CupyEvent(self)

    def synchronize(self) -> None:
        self.not_in_capture("wait")
        with _device_errors:
            self.stream.synchronize()

    # ---- Kernels

    def compile(self, source: str, entries: Sequence[str]) -> None:
        # NOTE: a program each: CuPy's disk cache knows whole programs, and who wants one instance more would find none.
        for entry in entries:
            if (source, entry) not in self._kernels:
                begin_s = time.perf_counter()
                with _device_errors, self.device:
                    module = self.cupy.RawModule(code=source_text(source), options=OPTIONS, name_expressions=[entry])
                    self._kernels[source, entry] = module.get_function(entry)
                log.info("kernel %s: ready after %.2f s", entry, time.perf_counter() - begin_s)

    def launch(self, source: str, entry: str, grid: tuple[int, ...], block: tuple[int, ...],
               arguments: tuple[Any, ...], shared_bytes: int = 0) -> None:
        check_arguments(source, entry, arguments, self._array_types)
        key = source, entry
        if key not in self._kernels:
            self.compile(source, [entry])
        kernel = self._kernels[key]
        with _device_errors:
            if shared_bytes > max(SHARED_BYTES, self._shared_bytes.get(key, 0)):
                kernel.max_dynamic_shared_size_bytes = self._shared_bytes[key] = shared_bytes
            kernel(grid, block, tuple(map(self._argument, arguments)), shared_mem=shared_bytes, stream=self.stream)
        if self._captured is not None:
            self._captured += (argument for argument in arguments if isinstance(argument, self._array_types))

    def _argument(self, argument: Any) -> Any:
        if argument is None:
            # NOTE: CuPy takes None for no argument at all, and the driver would read the next one's place.
            return np.uint64(0)
        if isinstance(argument, np.ndarray):
            return np.uint64(self._pinned_address(argument))
        return argument

    def _pinned_address(self, array: NDArray[Any]) -> int:
        """Which is the device's too, as all pinned memory is mapped."""
        begin = array.ctypes.data
        for block in self._pinned:
            if block.ctypes.data <= begin and begin + array.nbytes <= block.ctypes.data + block.nbytes:
                return begin
        raise TypeError(f"{array.dtype}{list(array.shape)} is in host memory that the device does not reach")

    def matmul(self, x: DeviceArray, weight: DeviceArray, out: DeviceArray) -> None:
        self.not_in_capture("cuBLAS")
        (rows, depth), (columns, _) = x.shape, weight.shape
        # NOTE: with another type, rank or layout CuPy would convert and copy, or use a kernel many times slower.
        if (weight.shape, out.shape) != ((columns, depth), (rows, columns)):
            raise ValueError(f"shapes {x.shape} x {weight.shape}^T -> {out.shape} do not fit")
        if not (x.dtype == weight.dtype == out.dtype and x.dtype.itemsize == 2):
            raise TypeError(f"{x.dtype} x {weight.dtype} -> {out.dtype}: all must be one 16-bit type")
        if not (x.flags.c_contiguous and weight.flags.c_contiguous and out.flags.c_contiguous):
            raise TypeError("a product is of contiguous arrays")
        with _device_errors, self.device, self.stream:
            self.cupy.matmul(x, weight.T, out=out)

    # ---- Graphs

    def begin_capture(self) -> None:
        self.not_in_capture("capture")
        with _device_errors:
            self.stream.begin_capture()
        self._captured = []

    def end_capture(self) -> CupyGraph:
        assert self._captured is not None, "no capture is under way"
        arrays, self._captured = self._captured, None
        with _device_errors:
            return CupyGraph(self.stream.end_capture(), self, arrays)

    def not_in_capture(self, what: str) -> None:
        """Raises: RuntimeError in a capture."""
        if self._captured is not None:
            raise RuntimeError(f"{what} during a capture")

    def close(self) -> None:
        self.synchronize()
        self._staging, self._pinned, self._kernels = [], [], {}
        self.cupy.get_default_memory_pool().free_all_blocks()
        self.cupy.get_default_pinned_memory_pool().free_all_blocks()


def _check_copy(destination: DeviceArray | NDArray[Any], source: DeviceArray | NDArray[Any]) -> None:
    """Raises: TypeError"""
    if (destination.dtype, destination.nbytes) != (source.dtype, source.nbytes):
        raise TypeError(f"copy of {source.dtype}{list(source.shape)} into {destination.dtype}{list(destination.shape)}")
    if not (destination.flags.c_contiguous and source.flags.c_contiguous):
        raise TypeError("a copy is of contiguous arrays")

"""A CuPy without a GPU, stricter than the real one: what would go wrong silently there raises here.

Work is queued as on a stream and runs only when somebody waits for it, so that memory which is reused or freed too
early shows. Device memory is NumPy's, found by its address; freed memory is overwritten. Kernels are Python functions.
"""
from __future__ import annotations

import ctypes
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUMBERS = {np.dtype(name) for name in "?bBhHiIqQefd"}
SHARED_BYTES = 48 << 10                         # what a block gets unasked
FREED = 0xDD

Work = Callable[[], object]


class StatusError(RuntimeError):
    """As CUDARuntimeError and CUDADriverError: with the error's number."""

    def __init__(self, status: int, name: str) -> None:
        super().__init__(f"{name}: as the driver puts it")
        self.status = status


class Owner:
    """Its memory is freed with it."""


class FakeArray:
    """cupy.ndarray, as far as a launcher may use it."""

    def __init__(self, host: NDArray[Any], owner: object) -> None:
        self.host, self._owner = host, owner
        self.shape, self.dtype, self.nbytes, self.strides = host.shape, host.dtype, host.nbytes, host.strides
        self.flags, self.size, self.ndim = host.flags, host.size, host.ndim
        self.data = types.SimpleNamespace(ptr=host.ctypes.data)

    def __getitem__(self, index: Any) -> FakeArray:
        return FakeArray(self.host[index], self._owner)

    def reshape(self, *shape: Any) -> FakeArray:
        return FakeArray(self.host.reshape(*shape), self._owner)

    def view(self, dtype: Any) -> FakeArray:
        return FakeArray(self.host.view(dtype), self._owner)

    @property
    def T(self) -> FakeArray:
        return FakeArray(self.host.T, self._owner)


class FakeDevice:
    def __init__(self, cupy: FakeCupy, device_id: int) -> None:
        self.cupy, self.id = cupy, device_id

    def use(self) -> None:
        self.cupy.current_device = self.id

    def __enter__(self) -> None:
        self._before, self.cupy.current_device = self.cupy.current_device, self.id

    def __exit__(self, *error: object) -> None:
        self.cupy.current_device = self._before


class FakeStream:
    ptr = 4711

    def __init__(self, cupy: FakeCupy, non_blocking: bool) -> None:
        assert non_blocking, "a stream that waits for the default one"
        self.cupy = cupy
        self.queue: list[Work] = []
        self.num_queued = self.num_done = 0
        self.captured: list[tuple[Work, list[int]]] | None = None

    def add(self, work: Work, addresses: list[int]) -> None:
        """addresses: of memory that must be there when the work runs in a graph."""
        self.cupy.check_status()
        if self.captured is not None:
            self.captured.append((work, addresses))
        else:
            self.queue.append(work)
            self.num_queued += 1

    def run(self, until: int | None = None) -> None:
        assert self.captured is None, "a wait breaks a capture"
        while self.queue and (until is None or self.num_done < until):
            self.queue.pop(0)()
            self.num_done += 1
        self.cupy.check_status()

    def synchronize(self) -> None:
        self.run()

    def __enter__(self) -> None:
        self._before, self.cupy.current_stream = self.cupy.current_stream, self

    def __exit__(self, *error: object) -> None:
        self.cupy.current_stream = self._before

    def begin_capture(self) -> None:
        assert self.captured is None
        self.captured = []

    def end_capture(self) -> FakeGraph:
        assert self.captured is not None
        nodes, self.captured = self.captured, None
        return FakeGraph(self.cupy, nodes)


class FakeGraph:
    def __init__(self, cupy: FakeCupy, nodes: list[tuple[Work, list[int]]]) -> None:
        self.cupy, self.nodes = cupy, nodes

    def launch(self, stream: FakeStream) -> None:
        for work, addresses in self.nodes:
            for address in addresses:
                assert self.cupy.memory_at(address) is not None, "a graph reads memory that is freed"
            stream.add(work, addresses)


class FakeEvent:
    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        assert block, "a wait that spins takes a core"
        assert disable_timing

    def record(self, stream: FakeStream) -> None:
        assert stream.captured is None
        stream.cupy.check_status()
        self.stream, self.place = stream, stream.num_queued

    @property
    def done(self) -> bool:
        return self.stream.num_done >= self.place

    def synchronize(self) -> None:
        self.stream.run(self.place)


class FakeKernel:
    def __init__(self, cupy: FakeCupy, entry: str) -> None:
        self.cupy, self.entry = cupy, entry
        self.max_dynamic_shared_size_bytes = SHARED_BYTES

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "max_dynamic_shared_size_bytes" and value != SHARED_BYTES:
            self.cupy.shared_requests.append((self.entry, value))

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], *, shared_mem: int = 0,
                 stream: FakeStream | None = None) -> None:
        assert stream is not None, "CuPy would take the thread's current stream"
        assert all(type(size) is int and size > 0 for size in (*grid, *block)), (grid, block)
        assert shared_mem <= self.max_dynamic_shared_size_bytes, f"{shared_mem} bytes of shared memory"
        addresses, values = [], []
        for argument in args:
            if isinstance(argument, FakeArray):
                assert argument.flags.c_contiguous, "CuPy ignores strides"
                addresses.append(argument.data.ptr)
                values.append(argument.host)
            else:
                assert isinstance(argument, np.generic), f"CuPy picks a type for {argument!r} as it likes"
                assert argument.dtype in NUMBERS
                values.append(argument)
        stream.add(lambda: self.cupy.run_kernel(self.entry, grid, block, shared_mem, values), addresses)


class FakeModule:
    def __init__(self, cupy: FakeCupy, code: str, options: tuple[str, ...], name_expressions: list[str]) -> None:
        assert options == ("-std=c++17",)
        assert '#include "common.cuh"' not in code, "CuPy's cache does not see what is included"
        self.cupy, self.entries = cupy, list(name_expressions)
        cupy.modules.append(self.entries)

    def get_function(self, entry: str) -> FakeKernel:
        assert entry in self.entries
        return FakeKernel(self.cupy, entry)


class FakeCupy(types.ModuleType):
    """For sys.modules["cupy"]."""

    ndarray = FakeArray

    def __init__(self) -> None:
        super().__init__("cupy")
        self.status: tuple[int, str] | None = None      # set: all that reaches the device fails with it
        self.room_bytes = 1 << 30
        self.kernels: dict[str, Callable[..., object]] = {}
        self.modules: list[list[str]] = []
        self.shared_requests: list[tuple[str, int]] = []
        self.num_pinned_bytes = 0
        self.current_device: int | None = None
        self.current_stream: FakeStream | None = None
        self.stream: FakeStream | None = None
        self._live: dict[int, NDArray[np.uint8]] = {}   # by address
        self._pinned: set[int] = set()
        pool = types.SimpleNamespace(free_bytes=lambda: 100, free_all_blocks=lambda: None)
        self.get_default_memory_pool = self.get_default_pinned_memory_pool = lambda: pool
        self.cuda = types.SimpleNamespace(
            runtime=types.SimpleNamespace(
                memcpyAsync=self._memcpy_async, memcpyDefault=4, memGetInfo=lambda: (1000, 2000),
                getDeviceProperties=lambda device_id: {"name": b"Fake GPU", "multiProcessorCount": 16}),
            Device=lambda device_id: FakeDevice(self, device_id), Stream=self._new_stream, Event=FakeEvent,
            alloc_pinned_memory=lambda size: self._alloc_pinned(1 << (size - 1).bit_length()),  # a pool of such sizes
            PinnedMemory=self._alloc_pinned, PinnedMemoryPointer=lambda memory, offset: memory)

    def run_kernel(self, entry: str, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int,
                   values: list[Any]) -> None:
        self.kernels[entry](*values)

    def check_status(self) -> None:
        if self.status is not None:
            raise StatusError(*self.status)

    def _new_stream(self, non_blocking: bool) -> FakeStream:
        assert self.current_device is not None
        self.stream = FakeStream(self, non_blocking)
        return self.stream

    # ---- Memory

    def memory_at(self, address: int) -> int | None:
        """Where the memory begins that `address` lies in."""
        return next((begin for begin, storage in self._live.items() if begin <= address < begin + max(storage.size, 1)),
                    None)

    def _free_device(self, begin: int) -> None:
        storage = self._live.pop(begin)
        assert self.stream is not None
        # The pool gives it to what is queued on the stream from now on.
        self.stream.queue.append(lambda: storage.fill(FREED))
        self.stream.num_queued += 1

    def _free_pinned(self, begin: int) -> None:
        self._pinned.discard(begin)
        storage = self._live.pop(begin)
        self.num_pinned_bytes -= storage.size
        storage.fill(FREED)                             # the pool gives it to whoever asks next, who writes at once

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> FakeArray:
        stream = self.current_stream
        assert stream is not None, "memory of another stream may be given away while ours works on it"
        assert stream.captured is None
        self.check_status()
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if size > self.room_bytes:
            raise MemoryError(f"Out of memory allocating {size:,} bytes")
        storage = np.full(max(size, 1), 0xFF, np.uint8)
        owner = Owner()
        self._live[storage.ctypes.data] = storage
        weakref.finalize(owner, self._free_device, storage.ctypes.data)
        return FakeArray(storage[:size].view(dtype).reshape(shape), owner)

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> FakeArray:
        array = self.empty(shape, dtype)
        array.host[...] = 0
        return array

    def _alloc_pinned(self, size: int) -> Any:
        assert size > 0
        assert self.stream is None or self.stream.captured is None
        self.check_status()
        storage = np.full(size, 0xEE, np.uint8)
        lent = (ctypes.c_ubyte * size).from_buffer(storage)
        self._live[storage.ctypes.data] = storage
        self._pinned.add(storage.ctypes.data)
        self.num_pinned_bytes += size
        weakref.finalize(lent, self._free_pinned, storage.ctypes.data)
        return lent

    def _memcpy_async(self, destination: int, source: int, size: int, kind: int, stream: int) -> None:
        queue = self.stream
        assert queue is not None
        assert (kind, stream) == (4, queue.ptr)
        ends = [begin for address in (destination, source) if (begin := self.memory_at(address)) is not None]
        assert self.memory_at(source) is not None, "the host may change this memory before it is read"
        assert len(ends) == 2 or queue.captured is None
        # The device's memory is given away in the order of the stream, so it stays as it is until the copy; pinned
        # memory is not.
        storages = [self._live[begin] for begin in ends]
        pinned = self._pinned.intersection(ends)

        def run() -> int:
            assert pinned <= self._live.keys(), "pinned memory is given back before its copy is done"
            ctypes.memmove(destination, source, size)
            return len(storages)

        queue.add(run, ends)

    def matmul(self, x: FakeArray, weight: FakeArray, out: FakeArray) -> None:
        stream = self.current_stream
        assert stream is not None, "cuBLAS works on the thread's current stream"
        assert stream.captured is None, "CuPy refuses cuBLAS in a capture"
        assert weight.host.T.flags.c_contiguous, "a weight that would be copied first"

        def run() -> None:
            out.host[...] = (x.host.astype(np.float32) @ weight.host.astype(np.float32)).astype(out.dtype)

        stream.add(run, [])

    def RawModule(self, code: str, options: tuple[str, ...], name_expressions: list[str]) -> FakeModule:
        assert self.current_device is not None
        return FakeModule(self, code, options, name_expressions)

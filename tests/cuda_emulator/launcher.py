"""cuda/launcher.py's Launcher over NumPy arrays: the kernels themselves, run by this machine's processor.

Every launch and copy has happened when its call returns. What is checked besides the results stands in cuda_on_host.h
and race_checker.cpp.
"""
from __future__ import annotations

import ctypes
import re
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cuda.kernels.kernel_spec import Instance, KernelSpec
from cuda.memory import available_host_bytes
from tests.cuda_emulator import build

ALIGNMENT = 256
POISON = 0xFF                               # of new memory: NaN as a float of 8, 16 or 32 bits, -1 as an integer

_one_launch_at_a_time = threading.Lock()    # the scheduler is one for the whole process
_libc = ctypes.CDLL(None)
_libc.free.argtypes = [ctypes.c_void_p]


class EmulatorError(RuntimeError):
    """A kernel did what CUDA leaves undefined, or would never end."""


class _Array(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("bytes", ctypes.c_uint64), ("element_bytes", ctypes.c_uint32),
                ("is_constant", ctypes.c_uint32), ("argument", ctypes.c_uint32)]


class _LaunchOptions(ctypes.Structure):
    """emu::Launch."""
    _fields_ = [("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared_bytes", ctypes.c_uint32),
                ("order", ctypes.c_uint32), ("seed", ctypes.c_uint32), ("lazy_copies", ctypes.c_uint32),
                ("race_checked", ctypes.c_uint32), ("num_arrays", ctypes.c_uint32), ("arrays", ctypes.c_void_p)]


@dataclass(frozen=True, slots=True)
class _Parameter:
    text: str                               # "const*bfloat16", "int32"
    is_pointer: bool
    is_constant: bool
    dtype: np.dtype[Any] | None             # of the value or of what it points to; None: any
    alignment: int

    @staticmethod
    def parse(text: str) -> _Parameter:
        name = text.rpartition("*")[2]
        dtype, alignment = None, 1
        if name.startswith("align"):        # a struct such as uint4
            alignment = int(name.removeprefix("align"))
        elif name != "void":
            dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
            alignment = dtype.itemsize
        return _Parameter(text, "*" in text, text.startswith("const*"), dtype, alignment)


class _Function:
    """An instance in memory, with its parameters' types and room for its arguments."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        library.emu_signature.restype = ctypes.c_char_p
        self.parameters = [_Parameter.parse(text) for text in library.emu_signature().decode().split()]
        self.start = library.emu_start
        count = max(len(self.parameters), 1)
        self.values = (ctypes.c_uint64 * count)()
        self.pointers = (ctypes.c_void_p * count)(*(ctypes.addressof(self.values) + 8 * i for i in range(count)))
        self.options = _LaunchOptions()
        self.options_pointer = ctypes.byref(self.options)


@cache
def _runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build.runtime()), ctypes.RTLD_GLOBAL)
    library.emu_last_error.restype = ctypes.c_char_p
    library.emu_shared_bytes.restype = ctypes.c_size_t
    return library


@cache
def _function(source: Path, entry: str, sanitize: str) -> _Function:
    _runtime()
    return _Function(build.library(source, entry, sanitize))


def parameter_types(source: Path, entry: str) -> list[tuple[bool, np.dtype[Any] | None]]:
    """As the compiler sees them: (is a pointer, type of the value or of what it points to, None for any)."""
    return [(parameter.is_pointer, parameter.dtype) for parameter in _function(source, entry, build.PLAIN).parameters]


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launch with its arguments checked: `values` are addresses and bits of scalars."""
    function: _Function
    instance: Instance
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    values: list[int]
    arguments: tuple[Any, ...]              # keeps the arrays alive


class EmulatorGraph:
    """The launches and copies of a capture: arrays by reference, scalars by value."""

    def __init__(self, launcher: EmulatorLauncher,
                 records: Sequence[_Launch | tuple[NDArray[Any], NDArray[Any]]]) -> None:
        self._launcher, self._records = launcher, records

    def launch(self) -> None:
        for record in self._records:
            if isinstance(record, _Launch):
                self._launcher._run(record)
            else:
                _copy(*record)


class EmulatorEvent:
    """Of work that is over, as everything here is."""
    done = True

    def wait(self) -> None:
        """Nothing to wait for."""


class EmulatorDownload:
    done = True

    def __init__(self, array: NDArray[Any]) -> None:
        self._result = array.copy()

    def get(self) -> NDArray[Any]:
        return self._result


class EmulatorLauncher:
    """order: of threads and blocks: 0 forward, 1 reverse, from 2 at random, another one for each `seed`.
    lazy: asynchronous copies happen as late as the waits allow, else at once.
    sanitize: `build.PLAIN`; `build.RACE`: unordered accesses, reads of shared memory that nobody wrote, accesses
    outside the arrays given; `build.MEMORY`: ASan and UBSan, in a process with `build.asan_library()` preloaded.
    specs: whose instances may be launched; those of cuda/kernels/registry.py where None.
    memory_bytes: of the device that this one stands for; what the host has free where None.
    """

    def __init__(self, order: int = 0, lazy: bool = True, seed: int = 1, sanitize: str = build.PLAIN,
                 specs: Iterable[KernelSpec] | None = None, memory_bytes: int | None = None) -> None:
        if specs is None:
            from cuda.kernels.registry import KERNELS
            specs = KERNELS
        self.name = "emulator"
        self.num_multiprocessors = 4
        self.num_launches = 0
        self._order, self._lazy, self._seed, self._sanitize = order, lazy, seed, sanitize
        self._specs = {spec.source: spec for spec in specs}
        self._instances: dict[tuple[str, str], tuple[_Function, Instance]] = {}
        self._records: list[_Launch | tuple[NDArray[Any], NDArray[Any]]] | None = None
        self._memory = _Memory(memory_bytes)

    # ---- memory
    def free_bytes(self) -> int:
        return available_host_bytes() if self._memory.free_bytes is None else self._memory.free_bytes

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
        self._not_in_capture("empty")
        dtype = np.dtype(dtype)
        array: NDArray[Any] = self._memory.allocate(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize).view(dtype)
        return array.reshape(shape)

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
        array = self.empty(shape, dtype)
        array.reshape(-1).view(np.uint8).fill(0)
        return array

    def empty_pinned(self, shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
        return self.empty(shape, dtype)

    def upload(self, array: NDArray[Any]) -> NDArray[Any]:
        self._not_in_capture("upload")
        result = self.empty(array.shape, array.dtype)
        result[...] = array
        return result

    def write(self, destination: NDArray[Any], array: NDArray[Any]) -> None:
        self._not_in_capture("write")
        _check_copy(destination, array)
        _copy(destination, array)

    def copy(self, destination: NDArray[Any], source: NDArray[Any]) -> None:
        _check_copy(destination, source)
        if self._records is None:
            _copy(destination, source)
        else:
            self._records.append((destination, source))

    def download(self, array: NDArray[Any]) -> NDArray[Any]:
        self._not_in_capture("download")
        return array.copy()

    def download_async(self, array: NDArray[Any]) -> EmulatorDownload:
        self._not_in_capture("download")
        return EmulatorDownload(array)

    def record(self) -> EmulatorEvent:
        self._not_in_capture("event")
        return EmulatorEvent()

    def synchronize(self) -> None:
        self._not_in_capture("synchronize")

    # ---- work
    def matmul(self, x: NDArray[Any], weight: NDArray[Any], out: NDArray[Any]) -> None:
        self._not_in_capture("matmul")
        if not x.dtype == weight.dtype == out.dtype or x.dtype.itemsize != 2:
            raise TypeError(f"{x.dtype} x {weight.dtype} -> {out.dtype}: all must be one 16-bit type")
        if not (x.flags.c_contiguous and weight.flags.c_contiguous and out.flags.c_contiguous):
            raise TypeError("a product is of contiguous arrays")
        if x.shape[1] != weight.shape[1] or out.shape != (len(x), len(weight)):
            raise ValueError(f"shapes {x.shape} x {weight.shape}^T -> {out.shape} do not fit")
        columns, rows = x.astype(np.float32), weight.astype(np.float32)
        total = np.zeros(out.shape, np.float32)
        for k in range(x.shape[1]):         # one order for any number of rows; a BLAS has more
            total += columns[:, k, None] * rows[:, k]
        out[...] = total

    def launch(self, source: str, entry: str, grid: tuple[int, ...], block: tuple[int, ...],
               arguments: tuple[Any, ...], shared_bytes: int = 0) -> None:
        function, instance = self._instances.get((source, entry)) or self._find(source, entry)
        launch = _Launch(function, instance, _three(grid), _three(block), shared_bytes,
                         _check_arguments(entry, function.parameters, arguments), arguments)
        if self._records is None:
            self._run(launch)
        else:
            self._records.append(launch)

    def compile(self, source: str, entries: Sequence[str]) -> None:
        for entry in entries:
            self._find(source, entry)

    def _find(self, source: str, entry: str) -> tuple[_Function, Instance]:
        spec = self._specs.get(source)
        if spec is None:
            raise KeyError(f"{source} belongs to no KernelSpec of this launcher, which knows {sorted(self._specs)}")
        for instance in spec.instances:
            if instance.entry == entry:
                known = _function(build.KERNELS_FOLDER / source, entry, self._sanitize), instance
                self._instances[source, entry] = known
                return known
        raise KeyError(f"{entry} is not among the instances of the KernelSpec {spec.name}: "
                       f"{[instance.entry for instance in spec.instances]}")

    def _run(self, launch: _Launch) -> None:
        function, instance = launch.function, launch.instance
        num_threads = launch.block[0] * launch.block[1] * launch.block[2]
        if num_threads > instance.threads:
            raise ValueError(f"{instance.entry}: {num_threads} threads a block, its instance says {instance.threads}")
        self.num_launches += 1
        with _one_launch_at_a_time:
            for index, value in enumerate(launch.values):
                function.values[index] = value
            options = function.options
            options.grid[:], options.block[:] = launch.grid, launch.block
            options.shared_bytes, options.order, options.seed = launch.shared_bytes, self._order, self._seed
            options.lazy_copies, options.race_checked = self._lazy, self._sanitize == build.RACE
            if self._sanitize == build.RACE:
                arrays = _arrays(function.parameters, launch.arguments)
                options.num_arrays, options.arrays = len(arrays), ctypes.addressof(arrays)
            failed = function.start(function.options_pointer, function.pointers)
            shared_bytes = _runtime().emu_shared_bytes()
            error = _runtime().emu_last_error() if failed else b""
        if failed:
            raise EmulatorError(f"{instance.entry}: {_with_source_lines(error.decode(errors='replace'))}")
        if shared_bytes > instance.shared_bytes:
            raise ValueError(f"{instance.entry}: {shared_bytes} bytes of shared memory, its instance says "
                             f"{instance.shared_bytes}")

    # ---- graphs
    def begin_capture(self) -> None:
        assert self._records is None, "a capture is under way"
        self._records = []

    def end_capture(self) -> EmulatorGraph:
        assert self._records is not None, "no capture is under way"
        records, self._records = self._records, None
        return EmulatorGraph(self, records)

    def close(self) -> None:
        self.synchronize()

    def _not_in_capture(self, what: str) -> None:
        if self._records is not None:
            raise RuntimeError(f"{what} during a capture")


class _Memory:
    """Of the C library, so that ASan knows every array's exact end."""

    def __init__(self, free_bytes: int | None) -> None:
        self.free_bytes = free_bytes        # None: no bound of its own

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Poisoned. Raises: MemoryError"""
        pointer = ctypes.c_void_p()
        size = ctypes.c_size_t(max(num_bytes, 1))
        if self.free_bytes is not None and num_bytes > self.free_bytes:
            raise MemoryError(f"{num_bytes} bytes, {self.free_bytes} are free")
        if _libc.posix_memalign(ctypes.byref(pointer), ctypes.c_size_t(ALIGNMENT), size):
            raise MemoryError(f"{num_bytes} bytes")
        assert pointer.value is not None
        buffer = (ctypes.c_uint8 * size.value).from_address(pointer.value)
        weakref.finalize(buffer, self._free, pointer.value, num_bytes).atexit = False
        self._take(num_bytes)
        memory: NDArray[np.uint8] = np.frombuffer(memoryview(buffer), np.uint8)[:num_bytes]
        memory.fill(POISON)
        return memory

    def _free(self, address: int, num_bytes: int) -> None:
        _libc.free(address)
        self._take(-num_bytes)

    def _take(self, num_bytes: int) -> None:
        if self.free_bytes is not None:
            self.free_bytes -= num_bytes


def _check_copy(destination: NDArray[Any], source: NDArray[Any]) -> None:
    """Raises: TypeError"""
    if (destination.dtype, destination.nbytes) != (source.dtype, source.nbytes):
        raise TypeError(f"copy of {source.dtype}{list(source.shape)} into {destination.dtype}{list(destination.shape)}")
    if not (destination.flags.c_contiguous and source.flags.c_contiguous):
        raise TypeError(f"copy of arrays that are not contiguous: strides {source.strides}, {destination.strides}")


def _copy(destination: NDArray[Any], source: NDArray[Any]) -> None:
    destination.reshape(-1)[...] = source.reshape(-1)


def _three(sizes: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _check_arguments(entry: str, parameters: list[_Parameter], arguments: tuple[Any, ...]) -> list[int]:
    """The values to pass. Raises: TypeError."""
    if len(arguments) != len(parameters):
        raise TypeError(f"{entry} takes {len(parameters)} arguments, {len(arguments)} given")
    values = []
    for index, (argument, parameter) in enumerate(zip(arguments, parameters, strict=True)):
        if parameter.is_pointer:
            value = 0 if argument is None else _address(entry, index, parameter, argument)
        else:
            if not isinstance(argument, np.generic) or argument.dtype != parameter.dtype:
                raise TypeError(f"{entry} argument {index} is {parameter.text}, {_describe(argument)} given")
            value = int.from_bytes(argument.tobytes(), "little")
        values.append(value)
    return values


def _address(entry: str, index: int, parameter: _Parameter, argument: Any) -> int:
    if not isinstance(argument, np.ndarray) or (parameter.dtype is not None and argument.dtype != parameter.dtype):
        raise TypeError(f"{entry} argument {index} is {parameter.text}, {_describe(argument)} given")
    if not argument.flags.c_contiguous:
        raise TypeError(f"{entry} argument {index}: {_describe(argument)} with strides {argument.strides} given")
    if not parameter.is_constant and not argument.flags.writeable:
        raise TypeError(f"{entry} argument {index} is {parameter.text}, a read-only {_describe(argument)} given")
    address: int = argument.__array_interface__["data"][0]
    if address % parameter.alignment:
        raise TypeError(f"{entry} argument {index} is {parameter.text}, the {_describe(argument)} given is not aligned "
                        f"to {parameter.alignment} bytes")
    return address


def _arrays(parameters: list[_Parameter], arguments: tuple[Any, ...]) -> ctypes.Array[_Array]:
    given = [(index, parameter, argument) for index, (parameter, argument) in
             enumerate(zip(parameters, arguments, strict=True)) if isinstance(argument, np.ndarray)]
    return (_Array * len(given))(*(
        _Array(argument.__array_interface__["data"][0], argument.nbytes,
               min(argument.itemsize, parameter.alignment), parameter.is_constant, index)
        for index, parameter, argument in given))


def _with_source_lines(error: str) -> str:
    """The emulator's places "@library+0xoffset" and ASan's "(library+0xoffset)" as function and line of the source."""
    text = error.partition("\n\nSUMMARY:")[0]
    return re.sub(r"[@(](/[^\s+]+\.so)\+(0x[0-9a-f]+)\)?", lambda found: build.source_line(found[1], found[2]), text)


def _describe(argument: Any) -> str:
    return f"{argument.dtype}{list(argument.shape)}" if isinstance(argument, np.ndarray) else \
        f"{type(argument).__name__} {argument!r}"

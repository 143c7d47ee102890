"""Is there a GPU that the CUDA back end can use, and if not, which one thing is missing?

The driver is asked first, by ctypes: what is installed in Python does not help a machine without one.
"""
from __future__ import annotations

import ctypes
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

OLDEST_ARCHITECTURE = 80                    # bfloat16 in mma.sync, and cp.async, came with it
OLDEST_DRIVER = 12000                       # of CUDA 12.0: CuPy 14 needs it
LIBRARIES = ("nvrtc", "cublas")             # compiler, matrix products

# What cuInit may answer. Source: CUresult in the CUDA driver API.
_NO_DEVICE, _SYSTEM_NOT_READY, _DRIVER_MISMATCH = 100, 802, 803
_MAJOR, _MINOR = 75, 76                     # CUdevice_attribute: of the compute capability


class NoGpu(RuntimeError):
    """One line that says what is missing."""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    architecture: int                       # 90 is sm_90
    driver: int                             # the newest CUDA that it knows: 12080 is 12.8

    def __str__(self) -> str:
        return f"{self.name}, sm_{self.architecture}, driver of CUDA {_version(self.driver)}"


def usable_gpu(load_driver: Callable[[], Any] | None = None,
               import_module: Callable[[str], Any] = importlib.import_module) -> Gpu:
    """The first GPU, found usable: driver, architecture, CuPy and what it loads.

    Raises: NoGpu
    """
    gpu = _ask_driver(load_driver or _load_driver)
    if gpu.architecture < OLDEST_ARCHITECTURE:
        raise NoGpu(f"{gpu.name} is sm_{gpu.architecture}, sm_{OLDEST_ARCHITECTURE} or newer is needed")
    extra = f'pip install "troupe[cuda{min(gpu.driver // 1000, 13)}]"'
    for package in ("cupy", "ml_dtypes"):
        try:
            with warnings.catch_warnings():             # of CuPy, about paths that it does not find
                warnings.simplefilter("ignore")
                import_module(package)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise NoGpu(f"{package} cannot be imported: {_one_line(error)}") from error
            raise NoGpu(f"{package} is not installed: {extra}") from error
        except Exception as error:                      # NOTE: a package built for another NumPy raises ValueError
            raise NoGpu(f"{package} cannot be imported: {_one_line(error)}") from error
    built_for = int(import_module("cupy").cuda.runtime.runtimeGetVersion())
    if built_for // 1000 > gpu.driver // 1000:
        raise NoGpu(f"the installed CuPy is for CUDA {built_for // 1000}, the driver knows CUDA "
                    f"{_version(gpu.driver)}: update the driver, or {extra}")
    for library in LIBRARIES:
        try:
            getattr(import_module("cupy_backends.cuda.libs"), library)
        except ImportError as error:
            raise NoGpu(f"CUDA's {library} cannot be loaded: {extra}") from error
    return gpu


def _load_driver() -> Any:
    """Raises: OSError"""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _ask_driver(load: Callable[[], Any]) -> Gpu:
    try:
        driver = load()
    except OSError as error:
        raise NoGpu("no NVIDIA driver is installed") from error
    status = driver.cuInit(0)
    if status == _NO_DEVICE:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise NoGpu("the driver sees no GPU" + ("" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"))
    if status == _DRIVER_MISMATCH:
        raise NoGpu("the driver's library and its kernel module are of different versions: restart the machine")
    if status == _SYSTEM_NOT_READY:
        raise NoGpu("the GPUs are not ready yet (is nvidia-fabricmanager running?)")
    if status:
        raise NoGpu(f"the driver does not start: cuInit returns {status}")
    version, device, major, minor = (ctypes.c_int() for _ in range(4))
    name = ctypes.create_string_buffer(256)
    for status in (driver.cuDriverGetVersion(ctypes.byref(version)),
                   driver.cuDeviceGet(ctypes.byref(device), 0),
                   driver.cuDeviceGetName(name, len(name), device),
                   driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device),
                   driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)):
        if status:
            raise NoGpu(f"the driver does not describe its GPU: error {status}")
    if version.value < OLDEST_DRIVER:
        raise NoGpu(f"the driver knows CUDA {_version(version.value)}, {_version(OLDEST_DRIVER)} or newer is needed: "
                    f"update the driver")
    return Gpu(name.value.decode(), major.value * 10 + minor.value, version.value)


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _one_line(error: Exception) -> str:
    return " ".join(f"{error}".split())

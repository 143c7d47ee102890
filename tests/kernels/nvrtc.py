"""NVRTC from NVIDIA's wheels, by ctypes: what a kernel costs on an architecture, without a GPU, a driver or CuPy.

Answers are kept on disk under a digest of all that they depend on.
"""
from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from cuda.kernels.kernel_spec import source_text

# As CuPy compiles, and ptxas tells what it did.
OPTIONS = ("-std=c++17", "-ftz=true", "--device-as-default-execution-space", "--ptxas-options=-v")
WHEELS = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12", "nvidia-cuda-nvcc-cu12")


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one compiled function, as ptxas reports it."""
    registers: int                          # of a thread
    shared_bytes: int                       # static
    spill_bytes: int                        # stores and loads
    stack_bytes: int


@cache
def unavailable() -> str | None:
    """Why nothing can be compiled here, None where it can."""
    for wheel in WHEELS:
        try:
            importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            return f"compile checks need {wheel}, which is not installed"
    return None


def _folder(package: str, name: str) -> Path:
    spec = importlib.util.find_spec(f"nvidia.{package}")
    assert spec is not None, package
    return Path(next(iter(spec.submodule_search_locations or ()))) / name


@cache
def _library() -> ctypes.CDLL:
    folder, pattern = ("bin", "nvrtc64_???_0.dll") if sys.platform == "win32" else ("lib", "libnvrtc.so.*")
    return ctypes.CDLL(str(next(_folder("cuda_nvrtc", folder).glob(pattern))))


@cache
def version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def compile_kernels(source: str, entries: Sequence[str], arch: str) -> dict[str, Usage]:
    """What each instance of a file of cuda/kernels costs on `arch`, such as sm_90a; from the disk where it is known.

    Raises: RuntimeError with the compiler's messages.
    """
    text = source_text(source)
    versions = [importlib.metadata.version(wheel) for wheel in WHEELS]
    key = json.dumps([text, list(entries), arch, OPTIONS, versions])
    known = _cache_folder() / f"{Path(source).stem}-{arch}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    if known.exists():
        return {entry: Usage(**usage) for entry, usage in json.loads(known.read_text()).items()}
    usages = _compile(text, source, entries, arch)
    with tempfile.NamedTemporaryFile("w", dir=known.parent, delete=False) as file:
        json.dump({entry: asdict(usage) for entry, usage in usages.items()}, file)
    os.replace(file.name, known)
    return usages


def _cache_folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "troupe" / "nvrtc"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _compile(text: str, name: str, entries: Sequence[str], arch: str) -> dict[str, Usage]:
    library, program = _library(), ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None))
    try:
        for entry in entries:
            _check(library.nvrtcAddNameExpression(program, entry.encode()), program)
        options = [f"--gpu-architecture={arch}", *OPTIONS,
                   *(f"-I{_folder(package, 'include')}" for package in ("cuda_runtime", "cuda_nvcc"))]
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        _check(library.nvrtcCompileProgram(program, len(options), given), program)
        usages = parse_report(_log(program))
        lowered = ctypes.c_char_p()
        result = {}
        for entry in entries:
            _check(library.nvrtcGetLoweredName(program, entry.encode(), ctypes.byref(lowered)), program)
            assert lowered.value is not None
            result[entry] = usages[lowered.value.decode()]
        return result
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def parse_report(log: str) -> dict[str, Usage]:
    """By mangled name."""
    usages = {}
    for function, report in re.findall(r"Compiling entry function '(\w+)'(.*?Used[^\n]*)", log, re.DOTALL):
        def number(pattern: str, report: str = report) -> int:
            return sum(int(value) for value in re.findall(pattern, report))

        usages[function] = Usage(number(r"Used (\d+) registers"), number(r"(\d+) bytes smem"),
                                 number(r"(\d+) bytes spill"), number(r"(\d+) bytes stack frame"))
    return usages


def _log(program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    _library().nvrtcGetProgramLogSize(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _library().nvrtcGetProgramLog(program, buffer)
    return buffer.value.decode()


def _check(status: int, program: ctypes.c_void_p | None = None) -> None:
    if status:
        library = _library()
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        message = library.nvrtcGetErrorString(status).decode()
        raise RuntimeError(f"{message}\n{_log(program) if program is not None else ''}")

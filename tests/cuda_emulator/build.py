"""Kernels built for this machine by g++: a shared library for each instance of a `.cu`, kept on disk.

A library's name is a digest of all that goes into it, so that a changed source, header, flag or compiler is another
library; builders beside each other write the same file under names of their own and move it into place.
"""
from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
KERNELS_FOLDER = HERE.parent.parent / "cuda" / "kernels"

PLAIN, RACE, MEMORY = "", "race", "memory"

_UNUSED_FOR_S = 14 * 86400                  # libraries of older sources are dropped after this time

_FLAGS = ("-std=c++17", "-g1", "-gdwarf-4", "-fPIC", "-shared", "-fno-strict-aliasing", "-ffp-contract=off")
_RUNTIME_FLAGS = (*_FLAGS, "-O3", "-Wall", "-Wextra", "-Werror", "-fno-semantic-interposition", "-Wl,-Bsymbolic")
# Warnings of g++ that say nothing of a kernel.
_STYLE = ("unknown-pragmas", "unused-variable", "unused-but-set-variable", "unused-function", "maybe-uninitialized",
          "parentheses", "sign-compare", "comment")
# Compilation, then linking: the compiler's calls go to hooks of our own, libtsan and libubsan are not linked.
# MEMORY without optimisation: the small cases run for less time than it would cost.
_SANITIZE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    PLAIN: (("-O2", "-Wall", "-Werror", *(f"-Wno-{warning}" for warning in _STYLE)), ()),
    RACE: (("-O1", "-fsanitize=thread"), ()),
    MEMORY: (("-O0", "-fno-omit-frame-pointer", "-fsanitize=address,undefined",
              "-fsanitize-recover=address,undefined"), ("-fsanitize=address",)),
}


@cache
def unavailable() -> str | None:
    """Why kernels cannot be emulated here, None where they can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the CUDA emulator needs Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    if shutil.which("g++") is None:
        return "the CUDA emulator needs g++, which is not on the PATH"
    return None


@cache
def asan_library() -> Path | None:
    """The libasan to preload into a process that runs kernels built for MEMORY, None where there is none."""
    if unavailable() is not None:
        return None
    path = Path(_output(["g++", "-print-file-name=libasan.so"]).strip())
    return path.resolve() if path.is_absolute() else None


def library(source: Path, entry: str, sanitize: str = PLAIN) -> Path:
    """The shared library with `entry`, a name expression of `source`: its functions are emu_start and emu_signature.

    Raises: RuntimeError with the compiler's messages, or with the reason why there is no emulator here.
    """
    reason = unavailable()
    if reason is not None:
        raise RuntimeError(reason)
    compile_flags, link_flags = _SANITIZE[sanitize]
    wrapper = f'#include "{source}"\nEMU_EXPORT({entry})\n'
    name = "".join(c if c.isalnum() else "-" for c in entry)[:60]
    digest = _digest(wrapper, *_FLAGS, *compile_flags, *link_flags, source.read_bytes(),
                     (KERNELS_FOLDER / "common.cuh").read_bytes(), *_headers())
    path = cache_folder() / f"{name}.{sanitize or 'plain'}.{digest}.so"
    if not _in_use(path):
        with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
            text, compiled, built = (Path(scratch) / name for name in ("wrapper.cpp", "kernel.o", "library.so"))
            text.write_text(wrapper)
            _output(["g++", *_FLAGS, *compile_flags, "-I", str(HERE), "-I", str(KERNELS_FOLDER), "-c", str(text), "-o",
                     str(compiled)])
            _output(["g++", *_FLAGS, *link_flags, str(compiled), "-o", str(built)])
            os.replace(built, path)
    return path


def build_all(wanted: Iterable[tuple[Path, str, str]]) -> None:
    """`library` for each (source, entry, sanitize), on all processors."""
    runtime()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda what: library(*what), wanted))


@cache
def runtime() -> Path:
    """The scheduler and the checkers, which every kernel's library calls: to be loaded first, its names for all."""
    sources = sorted(HERE.glob("*.cpp"))
    digest = _digest(*_RUNTIME_FLAGS, *(source.read_bytes() for source in sources), *_headers())
    path = cache_folder() / f"runtime.{digest}.so"
    if not _in_use(path):
        _drop_old()
        with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
            built = Path(scratch) / "runtime.so"
            _output(["g++", *_RUNTIME_FLAGS, *map(str, sources), "-o", str(built), "-ldl"])
            os.replace(built, path)
    return path


@cache
def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "troupe" / "cuda-emulator"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def source_line(path: str, offset: str) -> str:
    """Function, file and line of an offset in a library, innermost first, kernel sources only where there are any."""
    found = subprocess.run(["addr2line", "-Cfpie", path, offset], capture_output=True, text=True, check=False).stdout
    places = re.findall(r"(?m)^(?: \(inlined by\) )?(?:void )?(.*) at (?:.*/)?([^/]+:\d+)", found)
    kernels = [place for place in places if not place[1].startswith(("cuda_on_host.h", "host_numbers.h"))]
    return " in ".join(f"{line} ({function.split('(')[0]})" for function, line in (kernels or places)[:3]) or "?"


def _in_use(path: Path) -> bool:
    """Whether it exists; marks it as used."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _drop_old() -> None:
    for path in cache_folder().iterdir():
        try:
            if path.stat().st_mtime > time.time() - _UNUSED_FOR_S:
                continue
            if path.is_dir():               # of a builder that was killed
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        except FileNotFoundError:
            pass                            # another builder was quicker


@cache
def _headers() -> tuple[bytes, ...]:
    return (_output(["g++", "--version"]).encode(), *(path.read_bytes() for path in sorted(HERE.glob("*.h"))))


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:20]


def _output(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")
    return result.stdout

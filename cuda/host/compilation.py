"""Compiling this back end's functions, once per machine: machine code is kept on disk.

`inner` functions are compiled into whatever calls them. A `Kernel` is what one command of the command list runs:
`function(arguments, first, last, scratch)` computes items first .. last - 1 of an operation; `arguments` is the address
of its command's argument words, `scratch` that of memory of the calling thread alone. All four are int64.
"""
from __future__ import annotations

import hashlib
import logging
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.misc.appdirs import AppDirs

log = logging.getLogger("troupe.host")

F = TypeVar("F", bound=Callable[..., Any])

# Division as IEEE has it; no Python exceptions.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "boundscheck": False}


def inner(function: F) -> F:
    """Compiled into its callers, without a form that Python can call."""
    compiled: F = numba.njit(nogil=True, no_cpython_wrapper=True, **_OPTIONS)(function)
    return compiled


class Kernel:
    """One operation of the command list.

    format: the argument words in `struct`'s letters, 8 bytes each: q an integer or an address, d a float.
    """

    def __init__(self, function: Callable[[Any, Any, Any, Any], None], format: str) -> None:
        self.name = function.__name__
        self.function = function
        self.arguments = struct.Struct("=" + format)
        assert self.arguments.size == 8 * len(format), f"{self.name}: an argument is one word"

    @cached_property
    def compiled(self) -> Any:
        """The compiled C function; the first use compiles it or reads it from disk."""
        with caching() as cached:
            return numba.cfunc("void(int64, int64, int64, int64)", cache=cached, **_OPTIONS)(self.function)

    @cached_property
    def address(self) -> int:
        """Of the machine code."""
        address: int = self.compiled.address
        return address


def entry_point(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compiled at once for Python to call, which other threads run beside."""
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        with caching() as cached:
            compiled: Callable[..., Any] = numba.njit(signature, nogil=True, cache=cached, **_OPTIONS)(function)
        return compiled
    return decorate


@contextmanager
def caching() -> Iterator[bool]:
    """Numba's cache folder set to ours; False where no folder can be written."""
    folder = _cache_folder()
    previous = numba.config.CACHE_DIR
    if folder is not None:
        numba.config.CACHE_DIR = str(folder)
    try:
        yield folder is not None
    finally:
        numba.config.CACHE_DIR = previous


@cache
def _cache_folder() -> Path | None:
    """A folder for the machine code of exactly these sources.

    NOTE: Numba looks only at the file of the function itself, not at the instructions and inner functions that are
    compiled into it; without the digest a changed `simd.py` would not be noticed.
    """
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for source in sorted(here.glob("*.py")):
        digest.update(source.read_bytes())
    name = f"kernels-{digest.hexdigest()[:16]}"
    in_tree = here / "__pycache__"
    user_wide = Path(AppDirs("numba", appauthor=False).user_cache_dir)
    for parent in [Path(numba.config.CACHE_DIR)] if numba.config.CACHE_DIR else [in_tree, user_wide]:
        try:
            (parent / name).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(parent / name, os.W_OK):
            if parent == in_tree:               # nobody else's: drop what older sources left
                for stale in parent.glob("kernels-*"):
                    if stale.name != name:
                        shutil.rmtree(stale, ignore_errors=True)
            return parent / name
    log.warning("compiled code cannot be kept: every start compiles anew; set NUMBA_CACHE_DIR to a writable folder")
    return None

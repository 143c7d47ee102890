"""Memory, and the arrays that ops return: reused as soon as the caller has let go of them."""
from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

HUGE_PAGE_BYTES = 1 << 21


def allocate(num_bytes: int) -> mmap.mmap:
    """Zeroed memory that starts on a page; the system provides a page when it is first touched."""
    if sys.platform == "win32":
        return mmap.mmap(-1, max(num_bytes, 1))
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and num_bytes >= HUGE_PAGE_BYTES:
        memory.madvise(mmap.MADV_HUGEPAGE)      # weights and KV blocks are read once a step: address look-ups count
    return memory


def address_of(memory: Any) -> int:
    """Where the buffer of an object begins."""
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def row_bytes(columns: int) -> int:
    """Bytes between rows: with room for 31 columns more, because products write whole pairs of vectors, and never a
    multiple of 1 KiB, or rows that are read side by side would displace one another in the first-level cache."""
    num_bytes = -(-(columns + 31) // 16) * 64
    return num_bytes + 64 if num_bytes % 1024 == 0 else num_bytes


@dataclass(slots=True, eq=False)
class Buffer:
    memory: mmap.mmap
    address: int
    stride: int                                 # bytes between rows
    view: Floats                                # what the caller gets

    def in_use(self) -> bool:
        """Whether somebody beside this object refers to the view or a slice of it."""
        return sys.getrefcount(self.view) > _UNUSED

    def resize(self, rows: int, columns: int) -> None:
        """A view of that shape; needs `rows * stride` bytes of memory."""
        self.view = np.ndarray((rows, columns), np.float32, self.memory, 0, (self.stride, 4))


def new_buffer(rows: int, columns: int) -> Buffer:
    """With room for `rows` rounded up to a power of two."""
    stride = row_bytes(columns)
    memory = allocate(stride << max(0, rows - 1).bit_length())
    buffer = Buffer(memory, address_of(memory), stride, np.empty((0, 0), np.float32))
    buffer.resize(rows, columns)
    return buffer


def _references() -> int:
    buffer = new_buffer(1, 1)
    return sys.getrefcount(buffer.view)


_UNUSED = _references()


class Workspace:
    """The arrays that ops return, and where they are."""

    def __init__(self) -> None:
        self.places: dict[int, tuple[int, int]] = {}            # by `id` of a view: address, bytes between rows
        self.replaced: list[Buffer] = []                        # by larger ones; recorded commands may still use them
        self._buffers: dict[int, list[Buffer]] = {}             # by columns

    def new(self, rows: int, columns: int) -> Buffer:
        """One that nobody uses, its view [rows, columns]."""
        buffers = self._buffers.setdefault(columns, [])
        for index, buffer in enumerate(buffers):
            if not buffer.in_use():
                if rows * buffer.stride <= len(buffer.memory):
                    return self.reshape(buffer, rows, columns)
                del self.places[id(buffer.view)]
                self.replaced.append(buffer)
                del buffers[index]
                break
        buffer = new_buffer(rows, columns)
        buffers.append(buffer)
        self.places[id(buffer.view)] = buffer.address, buffer.stride
        return buffer

    def reshape(self, buffer: Buffer, rows: int, columns: int) -> Buffer:
        """The same buffer, its view [rows, columns]."""
        if buffer.view.shape != (rows, columns):
            del self.places[id(buffer.view)]
            buffer.resize(rows, columns)
            self.places[id(buffer.view)] = buffer.address, buffer.stride
        return buffer

    def buffer_of(self, view: Floats) -> Buffer:
        """Whose view this is."""
        return next(buffer for buffers in self._buffers.values() for buffer in buffers if buffer.view is view)

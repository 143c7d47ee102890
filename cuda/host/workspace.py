"""Arrays that ops return: memory reused as soon as the caller has let go of it."""
from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.host.commands import address_of, allocate

Floats = NDArray[np.float32]


def row_bytes(columns: int) -> int:
    """Bytes between rows: with room for 31 columns more, because products write whole pairs of vectors, and never a
    multiple of 1 KiB, or rows that are read side by side would displace one another in the first-level cache."""
    num_bytes = -(-(columns + 31) // 16) * 64
    return num_bytes + 64 if num_bytes % 1024 == 0 else num_bytes


@dataclass(slots=True, eq=False)
class Buffer:
    memory: Any
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

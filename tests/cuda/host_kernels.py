"""Kernels for the tests of the command list.

NOTE: in a module of their own, because kept machine code names its module, and pytest imports test files by another
name than everybody else.
"""
from __future__ import annotations

from cuda.host.compilation import Kernel
from cuda.host.simd import atomic_add, load_i64, pause, word


def count_items(arguments: int, first: int, last: int, scratch: int) -> None:
    """Adds a step to each item's counter."""
    for item in range(first, last):
        atomic_add(word(arguments, 0) + 8 * item, word(arguments, 1))


def sum_into_next(arguments: int, first: int, last: int, scratch: int) -> None:
    """Adds to the items of one row the sum of the row before: wrong unless that is complete."""
    before, row, columns = word(arguments, 0), word(arguments, 1), word(arguments, 2)
    for item in range(first, last):
        total = 1
        for i in range(columns):
            total += load_i64(before + 8 * i)
        atomic_add(row + 8 * item, total)


def use_scratch(arguments: int, first: int, last: int, scratch: int) -> None:
    """Counts the items during which the thread's scratch did not stay its own."""
    for item in range(first, last):
        atomic_add(scratch, item - load_i64(scratch))
        for _ in range(100):
            pause()
        if load_i64(scratch) != item:
            atomic_add(word(arguments, 0), 1)


COUNT = Kernel(count_items, "qq")
CHAIN = Kernel(sum_into_next, "qqq")
USE_SCRATCH = Kernel(use_scratch, "q")

"""The command list of a step and the threads that run it together.

Ops append commands while the model calls them; `Team.run` executes all of them, in order, without the interpreter
lock. The items of a command are handed out to the threads by an atomic counter, a few at a time, and the next command
begins when all items of this one are done. Which thread computes an item has no influence on its bits.

NOTE: nobody waits for a thread, only for items: one that the system put to sleep, or that has not woken up yet, delays
a command only if it holds items of it. A busy machine thus slows a step down by its share, not by a time slice a
command.
"""
from __future__ import annotations

import mmap
import struct
import threading
import time
import weakref
from queue import SimpleQueue

import numpy as np

from cuda.host.compilation import Kernel, entry_point, inner
from cuda.host.simd import atomic_add, atomic_load, call, cycles, load_i64, pause, yield_thread
from cuda.host.workspace import address_of, allocate

COMMAND_BYTES = 256                             # a header and up to 29 argument words
_HEADER = struct.Struct("=qqq")                 # function, items, items handed out at a time
_HEADER_BYTES = _HEADER.size
_COUNTER_WORDS = 16                             # two cache lines a command: items handed out; items done, end
_SPINS = 2000                                   # waiting turns before a thread offers its core to others

# The team's state, in words: the door, and on another cache line the job.
_DOOR, _COMMANDS, _COUNT, _COUNTERS, _SCRATCH, _SCRATCH_BYTES, _BEGIN = 0, 8, 9, 10, 11, 12, 13
_CLOSED = -(1 << 32)                            # the door counts the threads inside; below zero nobody enters


@inner
def _wait_until(address: int, goal: int) -> None:
    spins = 0
    while atomic_load(address) != goal:
        spins += 1
        pause()
        if spins > _SPINS:
            yield_thread()


@inner
def _run(team: int, thread: int) -> None:
    command = load_i64(team + 8 * _COMMANDS)
    counter = load_i64(team + 8 * _COUNTERS)
    scratch = load_i64(team + 8 * _SCRATCH) + thread * load_i64(team + 8 * _SCRATCH_BYTES)
    if thread == 0:
        atomic_add(team + 8 * _BEGIN, cycles())
    for _ in range(load_i64(team + 8 * _COUNT)):
        function, items, share = load_i64(command), load_i64(command + 8), load_i64(command + 16)
        done = counter + 4 * _COUNTER_WORDS
        first = atomic_add(counter, share)
        while first < items:
            last = min(first + share, items)
            call(function, command + _HEADER_BYTES, first, last, scratch)
            atomic_add(done, last - first)
            first = atomic_add(counter, share)
        _wait_until(done, items)
        if thread == 0:
            atomic_add(done + 8, cycles())
        command += COMMAND_BYTES
        counter += 8 * _COUNTER_WORDS


@entry_point("void(int64)")
def _lead(team: int) -> None:
    """The caller's part: open the door, work, close it, and wait for those inside."""
    atomic_add(team + 8 * _DOOR, -_CLOSED)
    _run(team, 0)
    atomic_add(team + 8 * _DOOR, _CLOSED)
    _wait_until(team + 8 * _DOOR, _CLOSED)


@entry_point("void(int64, int64)")
def _join(team: int, thread: int) -> None:
    """A worker's part, if it comes in time."""
    if atomic_add(team + 8 * _DOOR, 1) >= 0:
        _run(team, thread)
    atomic_add(team + 8 * _DOOR, -1)


def _work(calls: SimpleQueue[bool], team: int, thread: int) -> None:
    while calls.get():
        _join(team, thread)


class CommandList:
    """Commands in the order that they run in; a `Team` runs them as often as it is asked to."""

    def __init__(self, capacity: int = 512) -> None:
        """capacity: of commands, for a start."""
        self.names: list[str] = []              # of the commands' kernels
        self._table, self._capacity = allocate(capacity * COMMAND_BYTES), capacity
        self.address = address_of(self._table)  # of the first command, until the next `add`

    def __len__(self) -> int:
        return len(self.names)

    def add(self, kernel: Kernel, items: int, share: int, *arguments: float) -> None:
        """Items 0 .. items - 1 of `kernel`, handed out `share` at a time."""
        count = len(self.names)
        if count == self._capacity:
            self._grow()
        offset = count * COMMAND_BYTES
        _HEADER.pack_into(self._table, offset, kernel.address, items, share)
        kernel.arguments.pack_into(self._table, offset + _HEADER_BYTES, *arguments)
        self.names.append(kernel.name)

    def _grow(self) -> None:
        table, used = allocate(2 * self._capacity * COMMAND_BYTES), self._capacity * COMMAND_BYTES
        table[:used] = self._table[:used]
        self._table, self._capacity = table, 2 * self._capacity
        self.address = address_of(table)

    def clear(self) -> None:
        """Forgets what was recorded."""
        self.names.clear()


class Team:
    """Threads that run a command list together with the caller, which is one thread at a time."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.trace: list[tuple[str, float]] | None = None       # set to a list: (kernel, seconds) of every command
        self._scratch, self._scratch_bytes = allocate(0), 0
        self._want_counters(1024)
        memory = allocate(8 * 16)
        self._state = np.frombuffer(memory, np.int64)
        self._state[_DOOR] = _CLOSED
        self._address = address_of(memory)
        self._calls: list[SimpleQueue[bool]] = [SimpleQueue() for _ in range(1, num_threads)]
        threads = [threading.Thread(target=_work, args=(calls, self._address, i), name=f"host-{i}", daemon=True)
                   for i, calls in enumerate(self._calls, 1)]
        for thread in threads:
            thread.start()
        self.close = weakref.finalize(self, _dismiss, self._calls, threads, memory)     # ends the threads

    def want_scratch(self, num_bytes: int) -> None:
        """Each thread has at least `num_bytes` of its own at the next run."""
        if num_bytes > self._scratch_bytes:
            self._scratch_bytes = -(-num_bytes // 4096) * 4096
            self._scratch = allocate(self._scratch_bytes * self.num_threads)

    def _want_counters(self, num_commands: int) -> None:
        self._counters = np.frombuffer(allocate(num_commands * 8 * _COUNTER_WORDS), np.int64).reshape(num_commands, -1)

    def run(self, commands: CommandList) -> None:
        """Executes all of them; they stay recorded."""
        count = len(commands)
        if not count:
            return
        if count > len(self._counters):
            self._want_counters(2 * count)
        self._counters[:count] = 0
        self._state[_COMMANDS:_BEGIN + 1] = (commands.address, count, address_of(self._counters),
                                             address_of(self._scratch), self._scratch_bytes, 0)
        for calls in self._calls:
            calls.put(True)
        begin_s = time.perf_counter()
        _lead(self._address)
        if self.trace is not None:
            self.trace += self._times(commands.names, time.perf_counter() - begin_s)

    def _times(self, names: list[str], elapsed_s: float) -> list[tuple[str, float]]:
        """Of the commands just run, by the first thread's clock of cycles, which took `elapsed_s` for all of them."""
        ends = self._counters[:len(names), 9]
        ticks = np.diff(ends, prepend=self._state[_BEGIN])
        seconds = ticks * (elapsed_s / max(int(ticks.sum()), 1))
        return list(zip(names, seconds.tolist(), strict=True))


def _dismiss(calls: list[SimpleQueue[bool]], threads: list[threading.Thread], _memory: mmap.mmap) -> None:
    for queue in calls:
        queue.put(False)
    for thread in threads:
        thread.join()

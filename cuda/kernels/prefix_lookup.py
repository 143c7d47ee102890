"""Which blocks of the KV cache hold the beginning of whose prompt, asked of the device for all arrivals of a step.

The pool's own map stays the truth: answers come back with a step's results and are hints.
"""
from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.kernels.kernel_spec import Case, Instance, KernelSpec, launch
from cuda.launcher import DeviceArray, Download, Launcher
from cuda.ops import BLOCK_SIZE, Ints

SOURCE = "prefix_lookup.cu"
THREADS = 256
KEY_BYTES = 16
KEY_WORDS = KEY_BYTES // 4
BLOCK_WORDS = 2 * KEY_WORDS + BLOCK_SIZE    # key, key of the block before, token ids
CHANGE_WORDS = 4 + BLOCK_WORDS              # block id, whether it can be found, 0, 0
QUERY_WORDS = KEY_WORDS + BLOCK_SIZE        # key, token ids
CLEAR_BLOCKS = 256
assert BLOCK_SIZE == 16, "prefix_lookup.cu counts on blocks of 16"


def capacity_for(num_blocks: int) -> int:
    """Entries of a table of so many blocks, a power of two. With as many removed entries it is half full at most."""
    return 1 << (4 * num_blocks - 1).bit_length()


def clear_table(launcher: Launcher, table: DeviceArray) -> None:
    """table int32 [capacity]: nothing is in it."""
    _check_table(table)
    capacity = table.shape[0]
    launch(launcher, SOURCE, "clear_table", (min(CLEAR_BLOCKS, -(-capacity // THREADS)),), THREADS,
           (table, np.int32(capacity)))


def insert_all(launcher: Launcher, table: DeviceArray, places: DeviceArray, blocks: DeviceArray, secret: int) -> None:
    """Into a cleared table, every block that has a place. places int32 [N] (below 0: none), blocks int32 [N, 24].

    Raises: ValueError naming shapes or types.
    """
    mask = _check_state(table, places, blocks)
    num_blocks = places.shape[0]
    launch(launcher, SOURCE, "insert_all", (-(-num_blocks // THREADS),), THREADS,
           (table, places, blocks, np.int32(num_blocks), mask, np.uint64(secret)))


def apply_changes(launcher: Launcher, table: DeviceArray, places: DeviceArray, blocks: DeviceArray,
                  changes: DeviceArray, secret: int) -> None:
    """changes int32 [P, 28]: block id, 1 if it can be found from now on else 0, 0, 0, and its row of `blocks`. A block
    may be known before; none has two changes.

    Raises: ValueError naming shapes or types.
    """
    mask = _check_state(table, places, blocks)
    if changes.dtype != np.int32 or changes.shape[1:] != (CHANGE_WORDS,):
        raise ValueError(f"changes {changes.dtype}{list(changes.shape)} are not int32 [P, {CHANGE_WORDS}]")
    count = changes.shape[0]
    launch(launcher, SOURCE, "apply_changes", (-(-count // THREADS),), THREADS,
           (table, places, blocks, changes, np.int32(count), mask, np.uint64(secret)))


def look_up(launcher: Launcher, hits: DeviceArray, found: DeviceArray, table: DeviceArray, blocks: DeviceArray,
            starts: DeviceArray, roots: DeviceArray, queries: DeviceArray, secret: int) -> None:
    """hits [R]: how many leading blocks of each request are found; found [P]: their ids, -1 for those from the first
    miss on. Of equal blocks the lowest id.

    starts [R + 1]: request r asks for queries starts[r] .. starts[r + 1]; roots [R, 4]: the key before its first
    block; queries [P, 20]: key and token ids of a block; all int32.

    Raises: ValueError naming shapes or types.
    """
    mask = _check_table(table)
    num_requests, num_queries = hits.shape[0], found.shape[0]
    wanted = {"hits": (hits, (num_requests,)), "found": (found, (num_queries,)),
              "blocks": (blocks, (blocks.shape[0], BLOCK_WORDS)), "starts": (starts, (num_requests + 1,)),
              "roots": (roots, (num_requests, KEY_WORDS)), "queries": (queries, (num_queries, QUERY_WORDS))}
    for name, (array, shape) in wanted.items():
        if array.dtype != np.int32 or array.shape != shape:
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, not int32 {list(shape)}")
    launch(launcher, SOURCE, "look_up", (num_requests,), THREADS,
           (hits, found, table, blocks, starts, roots, queries, mask, np.uint64(secret)))


def _check_table(table: DeviceArray) -> np.uint32:
    """Raises: ValueError. Returns the mask of places."""
    capacity = table.shape[0]
    if table.dtype != np.int32 or len(table.shape) != 1 or capacity & (capacity - 1):
        raise ValueError(f"table {table.dtype}{list(table.shape)} is not int32 of a power of two")
    return np.uint32(capacity - 1)


def _check_state(table: DeviceArray, places: DeviceArray, blocks: DeviceArray) -> np.uint32:
    mask = _check_table(table)
    num_blocks = places.shape[0]
    if places.dtype != np.int32 or blocks.dtype != np.int32 or blocks.shape != (num_blocks, BLOCK_WORDS):
        raise ValueError(f"places {places.dtype}{list(places.shape)} and blocks {blocks.dtype}{list(blocks.shape)} are "
                         f"not int32 [N] and int32 [N, {BLOCK_WORDS}]")
    if table.shape[0] < capacity_for(num_blocks):
        raise ValueError(f"a table of {table.shape[0]} is too small for {num_blocks} blocks")
    return mask


@dataclass(frozen=True, slots=True)
class Query:
    """What is looked up of a prompt: its full blocks, in order."""
    root: bytes                             # the key before the first block
    keys: tuple[bytes, ...]                 # one a block
    token_ids: Sequence[int]                # at least BLOCK_SIZE for each key


class PrefixTable:
    """Blocks of one KV group that can be found, kept on the device. Used by one thread; what `look_up` returns may be
    called on another."""

    def __init__(self, launcher: Launcher, num_blocks: int) -> None:
        self.launcher, self.num_blocks = launcher, num_blocks
        self.capacity = capacity_for(num_blocks)
        self.num_rebuilds = 0
        self._secret = secrets.randbits(64)
        self._table = launcher.empty(self.capacity, np.int32)
        self._places = launcher.upload(np.full(num_blocks, -1, np.int32))
        self._blocks = launcher.zeros((num_blocks, BLOCK_WORDS), np.int32)
        clear_table(launcher, self._table)
        self._findable: set[int] = set()                        # blocks that the device has in its table
        self._num_taken = 0                                     # entries that are not empty, at most
        self._changes: dict[int, tuple[bytes, Sequence[int]] | None] = {}   # id -> both keys, tokens; None: removed

    def insert(self, keys: Sequence[bytes], parents: Sequence[bytes], block_ids: Sequence[int],
               token_ids: Sequence[Sequence[int]]) -> None:
        """Full blocks: their keys, the keys before them, their ids in the pool, the BLOCK_SIZE tokens of each."""
        for key, parent, block_id, ids in zip(keys, parents, block_ids, token_ids, strict=True):
            assert 0 <= block_id < self.num_blocks, f"block {block_id} of {self.num_blocks}"
            assert len(key) == len(parent) == KEY_BYTES, f"keys of {len(key)} and {len(parent)} bytes"
            assert len(ids) == BLOCK_SIZE, f"a full block of {len(ids)} tokens"
            self._changes[block_id] = key + parent, ids

    def remove(self, block_ids: Sequence[int]) -> None:
        """They cannot be found any more, if they could."""
        self._changes.update(dict.fromkeys(block_ids))

    @property
    def num_changes(self) -> int:
        """Blocks that changed since the device was told."""
        return len(self._changes)

    def flush(self) -> None:
        """Tells the device of what changed since the last time. Raises: MemoryError, and then it is told the next
        time."""
        inserted = {block_id: known for block_id, known in self._changes.items() if known is not None}
        removed = [block_id for block_id in self._changes if block_id in self._findable and block_id not in inserted]
        if inserted or removed:
            changes = self.launcher.upload(change_rows(inserted, removed))
            if self._num_taken + len(inserted) > self.capacity // 2:
                clear_table(self.launcher, self._table)
                insert_all(self.launcher, self._table, self._places, self._blocks, self._secret)
                self.num_rebuilds += 1
                self._num_taken = len(self._findable)
            apply_changes(self.launcher, self._table, self._places, self._blocks, changes, self._secret)
            self._num_taken += len(inserted)
            self._findable.update(inserted)
            self._findable.difference_update(removed)
        self._changes.clear()

    def look_up(self, queries: Sequence[Query]) -> Callable[[], list[tuple[int, ...]]]:
        """Of each prompt the ids of its leading blocks that can be found, as of now. What it returns waits for them."""
        if not queries:
            return list
        self.flush()
        starts, roots, lines = query_rows(queries)
        num_requests, num_queries = len(queries), len(lines)
        # One upload: queries and roots, which are read in units of 16 bytes, before the starts.
        sent = self.launcher.upload(np.concatenate([lines.reshape(-1), roots.reshape(-1), starts]))
        roots_at, starts_at = lines.size, lines.size + roots.size
        answers = self.launcher.empty(num_requests + num_queries, np.int32)
        look_up(self.launcher, answers[:num_requests], answers[num_requests:], self._table, self._blocks,
                sent[starts_at:], sent[roots_at:starts_at].reshape(num_requests, KEY_WORDS),
                sent[:roots_at].reshape(num_queries, QUERY_WORDS), self._secret)
        return partial(_read, self.launcher.download_async(answers), starts[:-1].tolist())


def _packed(token_ids: Sequence[int]) -> Ints:
    """int32 [P, BLOCK_SIZE]. In half the time that np.array takes."""
    return np.frombuffer(struct.pack(f"{len(token_ids)}i", *token_ids), np.int32).reshape(-1, BLOCK_SIZE)


def query_rows(queries: Sequence[Query]) -> tuple[Ints, Ints, Ints]:
    """starts, roots and queries, as `look_up` takes them."""
    starts = np.cumsum([0, *(len(query.keys) for query in queries)], dtype=np.int32)
    lines = np.zeros((int(starts[-1]), QUERY_WORDS), np.int32)
    for query, start in zip(queries, starts.tolist(), strict=False):
        part = lines[start:start + len(query.keys)]
        part[:, :KEY_WORDS] = np.frombuffer(b"".join(query.keys), np.int32).reshape(-1, KEY_WORDS)
        part[:, KEY_WORDS:] = _packed(query.token_ids[:len(part) * BLOCK_SIZE])
    return starts, np.frombuffer(b"".join(query.root for query in queries), np.int32).reshape(-1, KEY_WORDS), lines


def change_rows(inserted: Mapping[int, tuple[bytes, Sequence[int]]], removed: Sequence[int]) -> Ints:
    """As `apply_changes` takes them. inserted: block id -> its key and the one before, joined; its tokens."""
    changes = np.zeros((len(inserted) + len(removed), CHANGE_WORDS), np.int32)
    changes[:, 0] = [*inserted, *removed]
    if inserted:
        rows = changes[:len(inserted)]
        rows[:, 1] = 1
        keys = b"".join(keys for keys, _ in inserted.values())
        rows[:, 4:-BLOCK_SIZE] = np.frombuffer(keys, np.int32).reshape(len(inserted), -1)
        rows[:, -BLOCK_SIZE:] = _packed(list(chain.from_iterable(ids for _, ids in inserted.values())))
    return changes


def _read(download: Download, starts: Sequence[int]) -> list[tuple[int, ...]]:
    answers = download.get()
    hits, found = answers[:len(starts)].tolist(), answers[len(starts):]
    return [tuple(found[start:start + count].tolist()) for start, count in zip(starts, hits, strict=True)]


# ---- Specification and cases

def _run(launcher: Launcher, hits: DeviceArray, found: DeviceArray, first: DeviceArray, second: DeviceArray,
         starts: DeviceArray, roots: DeviceArray, queries: DeviceArray, num_blocks: int) -> None:
    """A table from nothing by two rounds of changes, built anew, and then asked."""
    secret = 0x0123456789ABCDEF
    table = launcher.empty(capacity_for(num_blocks), np.int32)
    places = launcher.upload(np.full(num_blocks, -1, np.int32))
    blocks = launcher.empty((num_blocks, BLOCK_WORDS), np.int32)
    clear_table(launcher, table)
    apply_changes(launcher, table, places, blocks, first, secret)
    apply_changes(launcher, table, places, blocks, second, secret)
    clear_table(launcher, table)
    insert_all(launcher, table, places, blocks, secret)
    look_up(launcher, hits, found, table, blocks, starts, roots, queries, secret)


def _reference(hits: Ints, found: Ints, first: Ints, second: Ints, starts: Ints, roots: Ints, queries: Ints,
               num_blocks: int) -> dict[str, NDArray[Any]]:
    findable: dict[int, bytes] = {}
    for changes in (first, second):
        for change in changes:
            findable.pop(int(change[0]), None)
            if change[1]:
                findable[int(change[0])] = change[4:].tobytes()
    block_of: dict[bytes, int] = {}
    for block_id in sorted(findable, reverse=True):
        block_of[findable[block_id]] = block_id             # of equals the lowest
    found[:] = -1
    for request, (start, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        before, hits[request] = roots[request], 0
        for i, query in enumerate(queries[start:end]):
            key, ids = query[:KEY_WORDS], query[KEY_WORDS:]
            known = np.concatenate([key, before, ids]).tobytes()
            if known not in block_of:
                break
            found[start + i], hits[request], before = block_of[known], i + 1, key
    return {"hits": hits, "found": found}


def _case(num_blocks: int, lengths: Sequence[int], large: bool = False) -> Case:
    """Prompts of so many blocks each, whose blocks are known up to some place, one in five with another one's key."""
    def make(random: np.random.Generator) -> dict[str, Any]:
        starts = np.cumsum([0, *lengths], dtype=np.int32)
        num_queries = int(starts[-1])
        queries = random.integers(-2**31, 2**31, (num_queries, QUERY_WORDS)).astype(np.int32)
        queries[:, KEY_WORDS:] &= 0xFFFF
        for i in range(0, num_queries - 1, 5):
            queries[i, :KEY_WORDS] = queries[num_queries - 1 - i, :KEY_WORDS]
        roots = random.integers(-2**31, 2**31, (len(lengths), KEY_WORDS)).astype(np.int32)
        rows = []
        for request, (start, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
            keys, ids = np.split(queries[start:end], [KEY_WORDS], axis=1)
            before = np.concatenate([roots[request:request + 1], keys])[:end - start]
            rows.append(np.concatenate([keys, before, ids], axis=1))
        known = np.concatenate(rows)[random.random(num_queries) < 0.97]

        def changes(block_ids: NDArray[Any], kept: float) -> Ints:
            lines = np.zeros((len(block_ids), CHANGE_WORDS), np.int32)
            lines[:, 0], lines[:, 1] = block_ids, random.random(len(block_ids)) < kept
            lines[:, 4:] = known[random.permutation(len(known))][:len(block_ids)]
            return lines

        block_ids = random.permutation(num_blocks)[:len(known)]
        first = changes(block_ids, 0.5)                     # some of it is changed again or removed
        second = np.zeros((len(known), CHANGE_WORDS), np.int32)
        second[:, 0], second[:, 1], second[:, 4:] = block_ids, 1, known
        return {"hits": np.zeros(len(lengths), np.int32), "found": np.zeros(num_queries, np.int32), "first": first,
                "second": second, "starts": starts, "roots": roots, "queries": queries, "num_blocks": num_blocks}

    return Case(f"{sum(lengths)} blocks of {len(lengths)} prompts, {num_blocks} in the pool", make, large)


SPEC = KernelSpec(
    name="prefix_lookup",
    source=SOURCE,
    instances=(Instance("clear_table", THREADS, 32), Instance("insert_all", THREADS, 40),
               Instance("apply_changes", THREADS, 64), Instance("look_up", THREADS, 64, 64)),
    run=_run,
    reference=_reference,
    outputs=("hits", "found"),
    cases=(_case(4, (1,)), _case(40, (3, 0, 20, 5)), _case(400, (300, 7, 17)),
           _case(200000, (8000, 500, 1, 4000), large=True)),
)

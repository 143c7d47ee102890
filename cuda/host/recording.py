"""A step's forward pass as commands that later steps of the same shapes run again: what a CUDA graph is on a device.

A command holds addresses and counts, so a step that differs only in its numbers (token ids, positions, slots, block
ids, rows) runs the same commands once these numbers lie where the first step had them.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cuda.host.attention import RUN_BYTES
from cuda.host.commands import CommandList
from cuda.host.workspace import Buffer, address_of
from cuda.ops import Batch, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Each sequence's rows in runs of a few positions, which attention computes together."""
    table: Ints                             # [runs, 4] first row, rows, position of the first, sequence
    address: int

    def __len__(self) -> int:
        return len(self.table)


def make_runs(batch: Batch, num_positions: int) -> Runs:
    """Of `num_positions` at most."""
    starts = batch.query_start_loc
    num_runs = -(-np.diff(starts) // num_positions)                                             # [S]
    sequence = np.repeat(np.arange(len(num_runs), dtype=np.int32), num_runs)
    nth = np.arange(len(sequence), dtype=np.int32) - np.repeat(np.cumsum(num_runs) - num_runs, num_runs)
    first = starts[sequence] + nth * num_positions
    table = np.empty((len(sequence), RUN_BYTES // 4), np.int32)
    table[:, 0] = first
    table[:, 1] = np.minimum(num_positions, starts[sequence + 1] - first)
    table[:, 2] = batch.positions[first]
    table[:, 3] = sequence
    return Runs(table, address_of(table) if len(table) else 0)


class Recording:
    """The commands of a forward pass, and the arrays of numbers that they read.

    width: columns of every block table here, enough for all keys; entries beyond a step's own are 0.
    """

    output: tuple[Buffer, tuple[int, int]]      # set when the pass is recorded: its result's buffer and shape

    def __init__(self, batch: Batch, rows: Ints, runs: Runs, width: int) -> None:
        self.commands = CommandList()
        self.runs = runs
        self.rows = np.array(rows, np.int32)
        self.batch = Batch(
            token_ids=np.array(batch.token_ids, np.int32), positions=np.array(batch.positions, np.int32),
            query_start_loc=batch.query_start_loc, seq_lens=batch.seq_lens,     # only of this step: the runs say it all
            block_tables=tuple(np.zeros((len(table), width), np.int32) for table in batch.block_tables),
            slot_mapping=tuple(np.array(slots, np.int32) for slots in batch.slot_mapping))
        self._checks: list[tuple[Ints, NDArray[np.uint32], int, str]] = []
        self._fill_tables(batch)

    def holds(self, numbers: Ints) -> bool:
        """Whether this is one of the arrays that `fill` writes to."""
        batch = self.batch
        return any(numbers is mine for mine in (batch.token_ids, batch.positions, self.rows, *batch.block_tables,
                                                *batch.slot_mapping))

    def check(self, numbers: Ints, limit: int, what: str) -> None:
        """From now on each `fill` sees that `numbers` are from 0 to `limit` - 1."""
        self._checks.append((numbers, numbers.view(np.uint32), limit, what))    # a negative one is a very large one

    def fill(self, batch: Batch, rows: Ints, runs: Runs) -> None:
        """The numbers of another step of the same shapes."""
        np.copyto(self.batch.token_ids, batch.token_ids)
        np.copyto(self.batch.positions, batch.positions)
        np.copyto(self.rows, rows)
        np.copyto(self.runs.table, runs.table)
        for mine, slots in zip(self.batch.slot_mapping, batch.slot_mapping, strict=True):
            np.copyto(mine, slots)
        self._fill_tables(batch)
        for numbers, unsigned, limit, what in self._checks:
            assert not numbers.size or unsigned.max() < limit, f"{what} outside 0..{limit - 1}"

    def _fill_tables(self, batch: Batch) -> None:
        for mine, table in zip(self.batch.block_tables, batch.block_tables, strict=True):
            num_columns = min(table.shape[1], mine.shape[1])
            mine[:, :num_columns] = table[:, :num_columns]
            mine[:, num_columns:] = 0

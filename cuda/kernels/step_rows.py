"""What a step reads, from what is kept of every slot: the tokens of its rows, and where their keys and values go."""
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.kernels.kernel_spec import Case, Instance, KernelSpec, launch
from cuda.launcher import DeviceArray, Launcher
from cuda.ops import BLOCK_SIZE

MAX_THREADS = 256
assert BLOCK_SIZE == 16, "step_rows.cu counts on blocks of 16"


def update_tables(launcher: Launcher, table: DeviceArray, changes: DeviceArray) -> None:
    """table [rows, width] gets changes [P, 3] (row, column, value), all int32; a row below 0 is none. No entry twice.

    Serves block tables as well as tables of tokens. Raises: ValueError naming shapes or types.
    """
    if table.dtype != np.int32 or len(table.shape) != 2:
        raise ValueError(f"table {table.dtype}{list(table.shape)} is not int32 [rows, width]")
    if changes.dtype != np.int32 or len(changes.shape) != 2 or changes.shape[1] != 3:
        raise ValueError(f"changes {changes.dtype}{list(changes.shape)} are not int32 [P, 3]")
    grid, threads = _grid(changes.shape[0])
    launch(launcher, "step_rows.cu", "update_tables", (grid,), threads,
           (table, changes, np.int32(changes.shape[0]), np.int32(table.shape[1])))


write_tokens = update_tables                # tokens [slots, W], changes [P, 3] (slot, position, token id)


def step_rows(launcher: Launcher, token_ids: DeviceArray, slot_mapping: DeviceArray, tokens: DeviceArray,
              row_slots: DeviceArray, positions: DeviceArray, block_tables: DeviceArray) -> None:
    """token_ids [T] and slot_mapping [groups, T] of the rows of a step, -1 where a row's slot is below 0.

    tokens [slots, W]: known or sampled; row_slots [T]; positions [T]; block_tables [groups, slots, M]; all int32.

    Raises: ValueError naming shapes or types.
    """
    arrays = {"token_ids": token_ids, "slot_mapping": slot_mapping, "tokens": tokens, "row_slots": row_slots,
              "positions": positions, "block_tables": block_tables}
    for name, array in arrays.items():
        if array.dtype != np.int32:
            raise ValueError(f"{name} is {array.dtype}, not int32")
    num_groups, num_slots, table_width = block_tables.shape
    num_rows = row_slots.shape[0]
    if not (token_ids.shape == row_slots.shape == positions.shape == (num_rows,)
            and slot_mapping.shape == (num_groups, num_rows) and tokens.shape[0] == num_slots):
        raise ValueError("shapes do not belong together: " +
                         ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items()))
    grid, threads = _grid(num_rows)
    launch(launcher, "step_rows.cu", "step_rows", (grid, num_groups), threads,
           (token_ids, slot_mapping, tokens, row_slots, positions, block_tables, np.int32(num_rows),
            np.int32(num_slots), np.int32(tokens.shape[1]), np.int32(table_width)))


def _grid(count: int) -> tuple[int, int]:
    threads = min(MAX_THREADS, max(32, -(-count // 32) * 32))
    return -(-count // threads), threads


def _run(launcher: Launcher, token_ids: DeviceArray | None = None, slot_mapping: DeviceArray | None = None,
         tokens: DeviceArray | None = None, row_slots: DeviceArray | None = None, positions: DeviceArray | None = None,
         block_tables: DeviceArray | None = None, changes: DeviceArray | None = None) -> None:
    """Either kernel: `changes` are of tokens."""
    if changes is not None:
        update_tables(launcher, tokens, changes)
    else:
        step_rows(launcher, token_ids, slot_mapping, tokens, row_slots, positions, block_tables)


def _reference(tokens: NDArray[np.int32], token_ids: NDArray[np.int32] | None = None,
               slot_mapping: NDArray[np.int32] | None = None, row_slots: NDArray[np.int32] | None = None,
               positions: NDArray[np.int32] | None = None, block_tables: NDArray[np.int32] | None = None,
               changes: NDArray[np.int32] | None = None) -> dict[str, NDArray[Any]]:
    if changes is not None:
        for row, column, value in changes:
            if row >= 0:
                tokens[row, column] = value
        return {"tokens": tokens}
    assert row_slots is not None, "a case has rows or changes"
    assert positions is not None, "rows have positions"
    assert block_tables is not None, "rows have block tables"
    wanted = row_slots >= 0
    places = block_tables[:, row_slots, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return {"tokens": tokens,
            "token_ids": np.where(wanted, tokens[row_slots, positions], -1).astype(np.int32),
            "slot_mapping": np.where(wanted, places, -1).astype(np.int32)}


def _rows_case(num_rows: int, num_groups: int, num_slots: int, width: int, large: bool = False) -> Case:
    def make(random: np.random.Generator) -> dict[str, Any]:
        row_slots = random.integers(-1, num_slots, num_rows).astype(np.int32)
        positions = np.where(row_slots < 0, -1, random.integers(0, width, num_rows)).astype(np.int32)
        blocks = -(-width // BLOCK_SIZE)
        return {"token_ids": np.zeros(num_rows, np.int32), "slot_mapping": np.zeros((num_groups, num_rows), np.int32),
                "tokens": random.integers(0, 200000, (num_slots, width)).astype(np.int32), "row_slots": row_slots,
                "positions": positions,
                "block_tables": random.integers(0, 5000, (num_groups, num_slots, blocks)).astype(np.int32)}

    return Case(f"{num_rows} rows, {num_groups} groups, {num_slots} slots of {width}", make, large)


def _changes_case(num_changes: int, rows: int, width: int) -> Case:
    def make(random: np.random.Generator) -> dict[str, Any]:
        places = random.permutation(rows * width)[:num_changes]
        changes = np.stack([places // width, places % width, random.integers(0, 9999, num_changes)], axis=1)
        changes[::3, 0] = -1
        return {"tokens": random.integers(0, 9999, (rows, width)).astype(np.int32), "changes": changes.astype(np.int32)}

    return Case(f"{num_changes} changes of {rows} x {width}", make)


SPEC = KernelSpec(
    name="step_rows",
    source="step_rows.cu",
    instances=(Instance("step_rows", MAX_THREADS, 32), Instance("update_tables", MAX_THREADS, 32)),
    run=_run,
    reference=_reference,
    outputs=("token_ids", "slot_mapping", "tokens"),
    in_place=("tokens",),
    cases=(
        _rows_case(1, 1, 1, 1), _rows_case(37, 2, 5, 70), _rows_case(300, 3, 8, 33), _changes_case(1, 1, 1),
        _changes_case(50, 7, 40), _changes_case(300, 9, 100), _rows_case(9000, 2, 256, 9000, large=True),
    ),
)

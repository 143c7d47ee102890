"""Rows of a step from what is kept of every slot, and changes of it."""
from __future__ import annotations

import numpy as np
import pytest

from cuda.kernels import step_rows
from cuda.slots import Slots
from tests.cuda_emulator import build
from tests.cuda_emulator.launcher import EmulatorLauncher

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))


def test_rows_are_those_that_the_host_would_make() -> None:
    """Two groups, a chunk and decode rows, padded: as cuda/slots.py and the host's runner have them."""
    launcher = EmulatorLauncher(specs=[step_rows.SPEC])
    random = np.random.default_rng(0)
    slots = Slots(max_num_seqs=4, max_model_len=100, num_groups=2)
    token_ids = random.integers(0, 1000, (4, 101)).astype(np.int32)
    tokens, tables = launcher.upload(token_ids), launcher.zeros((2, 4, 7), np.int32)
    changes = []
    for slot in (0, 1, 3):
        slots.start(slot, 40, 40, True, None)
        for group in range(2):
            block_ids = random.integers(0, 500, 4).tolist()
            first = slots.append_blocks(slot, group, block_ids)
            changes += [(group * 4 + slot, first + i, block_id) for i, block_id in enumerate(block_ids)]
    step_rows.update_tables(launcher, tables.reshape(8, 7), launcher.upload(np.array(changes, np.int32)))
    for group in range(2):
        assert (launcher.download(tables)[group] == slots.block_tables[group]).all()

    slots.rows([(0, 0, 40), (3, 0, 40)], ())
    step_rows.write_tokens(launcher, tokens, launcher.upload(np.array([(0, 40, 7), (3, 40, 8), (-1, 0, 9)], np.int32)))
    token_ids[[0, 3], 40] = 7, 8
    rows = slots.rows([(1, 3, 37)], ())
    assert rows is not None
    num_rows, padding = rows.num_tokens, np.full(5, -1, np.int32)
    found, places = launcher.empty(num_rows + 5, np.int32), launcher.empty((2, num_rows + 5), np.int32)
    step_rows.step_rows(launcher, found, places, tokens, launcher.upload(np.concatenate([rows.row_slots, padding])),
                        launcher.upload(np.concatenate([rows.positions, padding])), tables)
    assert (found[:num_rows] == token_ids[rows.row_slots, rows.positions]).all()
    for group, table in enumerate(slots.block_tables):
        assert (places[group, :num_rows] ==
                table[rows.row_slots, rows.positions // 16] * 16 + rows.positions % 16).all()
    assert (found[num_rows:] == -1).all()
    assert (places[:, num_rows:] == -1).all()


def test_wrong_arrays_are_refused() -> None:
    launcher = EmulatorLauncher(specs=[step_rows.SPEC])
    table, wide = launcher.zeros((4, 7), np.int32), launcher.zeros((4, 7), np.int64)
    with pytest.raises(ValueError, match="changes"):
        step_rows.update_tables(launcher, table, launcher.zeros((3, 2), np.int32))
    with pytest.raises(ValueError, match="int64"):
        step_rows.update_tables(launcher, wide, launcher.zeros((3, 3), np.int32))
    row = launcher.zeros(5, np.int32)
    with pytest.raises(ValueError, match="slot_mapping"):
        step_rows.step_rows(launcher, row, launcher.zeros((2, 4), np.int32), table, row, row,
                            launcher.zeros((2, 4, 7), np.int32))


def test_no_rows_and_no_changes_launch_nothing() -> None:
    launcher = EmulatorLauncher(specs=[step_rows.SPEC])
    nothing, table = launcher.zeros(0, np.int32), launcher.zeros((4, 7), np.int32)
    step_rows.update_tables(launcher, table, launcher.zeros((0, 3), np.int32))
    step_rows.step_rows(launcher, nothing, launcher.zeros((1, 0), np.int32), table, nothing, nothing,
                        launcher.zeros((1, 4, 7), np.int32))

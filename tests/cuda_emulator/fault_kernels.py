"""The kernels of faults.cu and how to launch them."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cuda.kernels.kernel_spec import Instance, KernelSpec
from tests.cuda_emulator.build import PLAIN
from tests.cuda_emulator.launcher import EmulatorLauncher

FAULTS = str(Path(__file__).parent / "faults.cu")
BF16 = np.dtype(ml_dtypes.bfloat16)


def no_reference(**arguments: Any) -> dict[str, NDArray[Any]]:
    raise AssertionError("faults have no reference")


ENTRIES = [f"{name}<{faulty}>" for faulty in ("true", "false")
           for name in ("missing_barrier", "buffer_used_again", "weak_wait", "groups_of_lanes", "blocks_add")]
ENTRIES += [f"lock_step<{order}>" for order in range(3)] + [f"last_block<{fault}>" for fault in range(4)]
ENTRIES += [f"{name}<{dtype}>" for name in ("product", "arithmetic", "parameters")
            for dtype in ("__half", "__nv_bfloat16")]
ENTRIES += ["copies_left_behind", "misaligned_copy", "copy_out_of_bounds", "read_out_of_bounds", "write_out_of_bounds",
            "shared_out_of_bounds", "shared_index_out_of_bounds", "misaligned", "wide_shift", "written_constant",
            "uninitialised_shared", "half_block_barrier", "two_barriers", "lanes_that_left",
            "shuffle_from_outside_the_mask", "lane_outside_its_mask", "overlapping_masks", "two_shuffles",
            "two_collectives", "two_sums", "too_much_shared", "collectives", "votes", "arrivals", "decode",
            "encode", "reductions", "denormals"]
SPEC = KernelSpec("faults", FAULTS, tuple(Instance(entry, 128, 255, 4096) for entry in ENTRIES), lambda **_: None,
                  no_reference, ())


def emulator(order: int = 0, lazy: bool = True, sanitize: str = PLAIN, seed: int = 1) -> EmulatorLauncher:
    return EmulatorLauncher(order, lazy, seed, sanitize, [SPEC])


def floats(count: int) -> NDArray[np.float32]:
    return np.arange(count, dtype=np.float32)


def integers(count: int) -> NDArray[np.int32]:
    return np.arange(count, dtype=np.int32)


# entry: (arrays and scalars, threads, blocks)
LAUNCHES: dict[str, tuple[tuple[Any, ...], int, int]] = {
    "missing_barrier": ((floats(64), floats(64)), 64, 1),
    "buffer_used_again": ((floats(128), floats(128)), 64, 1),
    "weak_wait": ((floats(128), floats(256)), 32, 1),
    "copies_left_behind": ((floats(32), floats(128)), 32, 1),
    "misaligned_copy": ((floats(32), floats(128)), 32, 1),
    "copy_out_of_bounds": ((floats(32), floats(126)), 32, 1),
    "read_out_of_bounds": ((floats(32), floats(32)), 32, 1),
    "write_out_of_bounds": ((floats(32),), 32, 1),
    "shared_out_of_bounds": ((floats(32),), 32, 1),
    "shared_index_out_of_bounds": ((floats(32),), 32, 1),
    "misaligned": ((floats(32), floats(132)), 32, 1),
    "wide_shift": ((integers(32), np.int32(40)), 32, 1),
    "written_constant": ((floats(32), floats(32)), 32, 1),
    "lock_step": ((integers(32), integers(32)), 32, 1),
    "groups_of_lanes": ((integers(32), integers(32)), 32, 1),
    "uninitialised_shared": ((floats(64),), 64, 1),
    "blocks_add": ((integers(1),), 32, 3),
    "last_block": ((floats(64), floats(192), np.zeros(1, np.int32)), 64, 3),
    "half_block_barrier": ((floats(64),), 64, 1),
    "two_barriers": ((floats(64),), 64, 1),
    "lanes_that_left": ((integers(32),), 32, 1),
    "shuffle_from_outside_the_mask": ((integers(32),), 32, 1),
    "lane_outside_its_mask": ((integers(32),), 32, 1),
    "overlapping_masks": ((integers(32),), 32, 1),
    "two_shuffles": ((integers(32),), 32, 1),
    "two_collectives": ((integers(32),), 32, 1),
    "two_sums": ((floats(32),), 32, 1),
}


def run(launcher: EmulatorLauncher, entry: str) -> NDArray[Any]:
    """Launches `entry` on copies of its arguments; returns the first, its output."""
    arguments, threads, blocks = LAUNCHES[entry.split("<")[0]]
    given = [launcher.upload(argument) if isinstance(argument, np.ndarray) else argument for argument in arguments]
    launcher.launch(FAULTS, entry, (blocks,), (threads,), tuple(given))
    return launcher.download(given[0])

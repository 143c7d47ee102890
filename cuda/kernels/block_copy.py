"""Whole KV blocks from one cache to another or within one; blocks filled with what no result survives."""
from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.kernels.kernel_spec import Case, Instance, KernelSpec, launch
from cuda.kernels.types import BF16
from cuda.launcher import DeviceArray, Launcher

MAX_THREADS = 256
UNIT_BYTES = 16
UNITS_A_THREAD = 4
POISON = 0xFF                               # NaN as float32, float16, bfloat16 and fp8


def copy_blocks(launcher: Launcher, destination: DeviceArray, source: DeviceArray, pairs: DeviceArray) -> None:
    """Blocks [P, 2] (from, to), int32, of every layer; a pair with a negative id is none.

    destination [layers, N, ...], source [layers, N', ...]: of one type and, but for N, of one shape; they may be the
    same. NOTE: the pairs run in any order: none may write to a block that another one reads or writes.

    Raises: ValueError naming shapes or types.
    """
    if destination.dtype != source.dtype or destination.shape[:1] + destination.shape[2:] != (
            source.shape[:1] + source.shape[2:]):
        raise ValueError(f"{source.dtype}{list(source.shape)} has no blocks for "
                         f"{destination.dtype}{list(destination.shape)}")
    if pairs.dtype != np.int32 or len(pairs.shape) != 2 or pairs.shape[1] != 2:
        raise ValueError(f"pairs {pairs.dtype}{list(pairs.shape)} are not int32 [P, 2]")
    grid, threads, units = _grid(destination, pairs.shape[0])
    launch(launcher, "block_copy.cu", "copy_blocks", grid, threads,
           (destination, source, pairs, np.int32(destination.shape[1]), np.int32(source.shape[1]), np.int32(units)))


def poison_blocks(launcher: Launcher, cache: DeviceArray, block_ids: DeviceArray) -> None:
    """Every byte of blocks [P], int32, of every layer of cache [layers, N, ...] becomes 0xFF; a negative id is none.

    NOTE: 8-bit integers are poisoned by their scales, which are an array of their own.

    Raises: ValueError naming shapes or types.
    """
    if block_ids.dtype != np.int32 or len(block_ids.shape) != 1:
        raise ValueError(f"block_ids {block_ids.dtype}{list(block_ids.shape)} are not int32 [P]")
    grid, threads, units = _grid(cache, block_ids.shape[0])
    launch(launcher, "block_copy.cu", "fill_blocks", grid, threads,
           (cache, block_ids, np.int32(cache.shape[1]), np.int32(units), np.uint32(POISON * 0x01010101)))


def _grid(cache: DeviceArray, count: int) -> tuple[tuple[int, int, int], int, int]:
    """Grid, threads of a block, 16-byte units of a KV block in one layer."""
    block_bytes = math.prod(cache.shape[2:]) * cache.dtype.itemsize
    if len(cache.shape) < 3 or block_bytes % UNIT_BYTES:
        raise ValueError(f"blocks of {cache.dtype}{list(cache.shape)} have {block_bytes} bytes, "
                         f"no multiple of {UNIT_BYTES}")
    units = block_bytes // UNIT_BYTES
    threads = min(MAX_THREADS, max(32, -(-units // UNITS_A_THREAD // 32) * 32))
    return (count, cache.shape[0], -(-units // (threads * UNITS_A_THREAD))), threads, units


def _run(launcher: Launcher, destination: DeviceArray, source: DeviceArray | None = None,
         pairs: DeviceArray | None = None, block_ids: DeviceArray | None = None) -> None:
    """Either kernel: `block_ids` are poisoned; without a source, pairs are of the destination itself."""
    if block_ids is not None:
        poison_blocks(launcher, destination, block_ids)
    else:
        copy_blocks(launcher, destination, destination if source is None else source, pairs)


def _reference(destination: NDArray[Any], source: NDArray[Any] | None = None, pairs: NDArray[np.int32] | None = None,
               block_ids: NDArray[np.int32] | None = None) -> dict[str, NDArray[Any]]:
    if block_ids is not None:
        destination.view(np.uint8)[:, block_ids[block_ids >= 0]] = POISON
    elif pairs is not None:
        old, new = pairs[(pairs >= 0).all(axis=1)].T
        destination[:, new] = (destination if source is None else source)[:, old]
    return {"destination": destination}


def _case(what: str, blocks_to: int, blocks_from: int, block: tuple[int, ...], dtype: Any, count: int,
          layers: int = 2, large: bool = False) -> Case:
    def make(random: np.random.Generator) -> dict[str, Any]:
        def cache(blocks: int) -> NDArray[Any]:
            return (random.standard_normal((layers, blocks, *block), np.float32) * 50).astype(dtype)

        case: dict[str, Any] = {"destination": cache(blocks_to)}
        if what == "poison":
            case["block_ids"] = random.permutation(blocks_to)[:count].astype(np.int32)
            case["block_ids"][0] = -1
            return case
        new = random.permutation(blocks_to)
        old = random.integers(0, blocks_from, count) if what == "copy" else new[count:2 * count]
        case["source"] = cache(blocks_from) if what == "copy" else None
        case["pairs"] = np.stack([old, new[:count]], axis=1).astype(np.int32)
        case["pairs"][-1, random.integers(0, 2)] = -1
        return case

    return Case(f"{what} {count} of {blocks_from} x {'x'.join(map(str, block))} {np.dtype(dtype)}", make, large)


SPEC = KernelSpec(
    name="block_copy",
    source="block_copy.cu",
    instances=(Instance("copy_blocks", MAX_THREADS, 40), Instance("fill_blocks", MAX_THREADS, 32)),
    run=_run,
    reference=_reference,
    outputs=("destination",),
    in_place=("destination",),
    cases=(
        _case("copy", 7, 5, (2, 16, 64), BF16, 4), _case("copy", 5, 9, (1, 16), np.float32, 5),
        _case("copy", 3, 3, (3, 16, 8), np.int8, 2, layers=1), _case("move", 9, 9, (2, 16, 16), np.float16, 4),
        _case("poison", 6, 6, (2, 16, 64), BF16, 3), _case("poison", 4, 4, (2, 16), np.float32, 2),
        _case("copy", 600, 400, (8, 16, 128), BF16, 300, layers=4, large=True),
    ),
)

"""The emulated language computes as CUDA does: collectives, matrix fragments, votes, narrow numbers."""
from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.cuda_emulator import build
from tests.cuda_emulator.build import PLAIN, RACE
from tests.cuda_emulator.fault_kernels import BF16, FAULTS, emulator, integers

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


# ---- the language ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("order", [0, 1, 2])
def test_warp_collectives_answer_as_documented(order: int) -> None:
    values = np.random.default_rng(2).integers(0, 1000, 32).astype(np.int32)
    values[9] = 7
    out = np.zeros((11, 32), np.int32)
    emulator(order).launch(FAULTS, "collectives", (1,), (32,), (out, values))
    lanes = np.arange(32)
    up, down = np.where(lanes < 2, lanes, lanes - 2), np.where(lanes > 29, lanes, lanes + 2)
    down_in_groups = np.where(lanes % 8 > 5, lanes, lanes + 2) % 32
    ballot = sum(1 << int(lane) for lane in lanes if values[lane] % 3 == 0)
    same = [sum(1 << int(other) for other in lanes if values[other] % 4 == value % 4) for value in values]
    octets = values.view(np.int8).reshape(32, 4).astype(np.int32)
    expected = np.array([np.full(32, values[5]), values[lanes ^ 3], values[up], values[down], values[down_in_groups],
                         np.full(32, ballot), np.full(32, 1), np.full(32, 1), same,
                         (octets * np.roll(octets, -1, axis=0)).sum(axis=1) + 100,
                         np.where(lanes < 16, values[lanes ^ 1], 0)]).astype(np.uint32)
    np.testing.assert_array_equal(out.view(np.uint32), expected)


def arrivals(order: int, seed: int = 1) -> NDArray[np.int32]:
    out, arrived = np.zeros((4, 32), np.int32), np.zeros(1, np.int32)
    emulator(order, seed=seed).launch(FAULTS, "arrivals", (4,), (32,), (out, arrived))
    return out


def test_blocks_and_threads_come_forward_in_reverse_or_at_random_by_seed() -> None:
    np.testing.assert_array_equal(arrivals(0).reshape(-1), np.arange(128))
    np.testing.assert_array_equal(arrivals(1).reshape(-1), np.arange(128)[::-1])
    shuffled = [arrivals(2, seed) for seed in (1, 2)]
    for out in shuffled:
        np.testing.assert_array_equal(np.sort(out.reshape(-1)), np.arange(128))
        assert (np.ptp(out, axis=1) == 31).all(), "a block ends before the next begins"
        assert not np.array_equal(out, arrivals(0))
    assert not np.array_equal(shuffled[0], shuffled[1])
    np.testing.assert_array_equal(arrivals(2, seed=1), shuffled[0])


def test_block_votes_count_all_threads() -> None:
    out = np.zeros((3, 64), np.int32)
    emulator(3).launch(FAULTS, "votes", (1,), (64,), (out, integers(64)))
    np.testing.assert_array_equal(out, np.repeat([[61], [1], [0]], 64, axis=1))


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(("name", "dtype"), [("__half", np.dtype(np.float16)), ("__nv_bfloat16", BF16)])
def test_mma_ldmatrix_and_copies_multiply_matrices(name: str, dtype: np.dtype[Any], lazy: bool) -> None:
    random = np.random.default_rng(3)
    a, b = (random.integers(-8, 9, shape).astype(dtype) for shape in ((16, 16), (16, 8)))
    for sanitize in (PLAIN, RACE):
        launcher = emulator(2, lazy, sanitize)
        out = launcher.empty((16, 8), np.float32)
        launcher.launch(FAULTS, f"product<{name}>", (1,), (32,), (out, launcher.upload(a), launcher.upload(b)))
        np.testing.assert_array_equal(out, a.astype(np.float32) @ b.astype(np.float32))


def test_reductions_give_every_thread_the_sum_in_warp_order() -> None:
    values = np.random.default_rng(4).standard_normal(96).astype(np.float32) * 100
    sums, largest = np.zeros(96, np.float32), np.zeros(96, np.int32)
    emulator(2).launch(FAULTS, "reductions", (1,), (96,), (sums, largest, values))
    lanes = values.reshape(3, 32)
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    np.testing.assert_array_equal(sums, np.full(96, (lanes[0, 0] + lanes[1, 0]) + lanes[2, 0], np.float32))
    np.testing.assert_array_equal(largest, np.full(96, int(values.max()), np.int32))


def test_denormal_floats_are_zero() -> None:
    out = np.zeros(32, np.float32)
    emulator().launch(FAULTS, "denormals", (1,), (32,), (out, np.full(32, 2**-126, np.float32)))
    assert not out.any()
    assert np.float32(2**-126) * np.float32(0.5) != 0, "NumPy's own arithmetic is as before"


# ---- numbers ---------------------------------------------------------------------------------------------------------

ALL_16_BITS = np.arange(65536, dtype=np.uint16)


def assert_same_numbers(result: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(result[numbers].view(np.uint32), expected[numbers].view(np.uint32))
    assert np.isnan(result[~numbers]).all()


def test_every_narrow_number_is_decoded_as_numpy_has_it() -> None:
    half, bf16, e4m3 = (np.zeros(count, np.float32) for count in (65536, 65536, 256))
    e4m3_as_bf16 = np.zeros(256, np.uint16)
    emulator().launch(FAULTS, "decode", (1,), (32,), (half, bf16, e4m3, e4m3_as_bf16))
    octets = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    assert_same_numbers(half, ALL_16_BITS.view(np.float16).astype(np.float32))
    assert_same_numbers(bf16, ALL_16_BITS.view(BF16).astype(np.float32))
    assert_same_numbers(e4m3, octets)
    assert_same_numbers(e4m3_as_bf16.view(BF16).astype(np.float32), octets)


def test_numbers_are_rounded_as_numpy_rounds_them_and_e4m3_saturates() -> None:
    with np.errstate(all="ignore"):
        finite = [bits.view(dtype).astype(np.float32) for bits, dtype in
                  ((ALL_16_BITS, np.float16), (ALL_16_BITS, BF16), (np.arange(256, dtype=np.uint8), E4M3))]
        finite = [np.sort(numbers[np.isfinite(numbers)]) for numbers in finite]
        halfway = [numbers[:-1] / 2 + numbers[1:] / 2 for numbers in finite]
        near = [np.nextafter(numbers, np.float32(sign * np.inf)) for numbers in halfway for sign in (-1, 1)]
        random = np.random.default_rng(5).integers(0, 2**32, 300_000, dtype=np.uint32).view(np.float32)
        values = np.concatenate([*finite, *halfway, *near, random, np.array([np.inf, -np.inf, 464, 1e9, 65520])])
        values = values[~np.isnan(values) & ((values == 0) | (np.abs(values) >= 2**-126))].astype(np.float32)
        half, bf16, e4m3 = (np.zeros(len(values), dtype) for dtype in (np.uint16, np.uint16, np.uint8))
        emulator().launch(FAULTS, "encode", (1,), (32,), (half, bf16, e4m3, values, np.int32(len(values))))
        np.testing.assert_array_equal(half, values.astype(np.float16).view(np.uint16))
        np.testing.assert_array_equal(bf16, values.astype(BF16).view(np.uint16))
        np.testing.assert_array_equal(e4m3, values.clip(-448, 448).astype(E4M3).view(np.uint8))
    nan = np.full(1, np.nan, np.float32)
    emulator().launch(FAULTS, "encode", (1,), (32,), (half, bf16, e4m3, nan, np.int32(1)))
    assert (half[0], bf16[0], e4m3[0]) == (0x7FFF, 0x7FFF, 0x7F)


@pytest.mark.parametrize(("name", "dtype"), [("__half", np.dtype(np.float16)), ("__nv_bfloat16", BF16)])
def test_narrow_arithmetic_rounds_once(name: str, dtype: np.dtype[Any]) -> None:
    bits = np.random.default_rng(6).integers(0, 2**16, (3, 40_000), dtype=np.uint16)
    if dtype == BF16:                       # exponents so near that longdouble holds the exact sum
        bits = np.asarray((bits & 0x83FF) | 0x3C00, np.uint16)
    a, b, c = (row.view(dtype) for row in bits)
    results = [np.zeros(len(a), dtype) for _ in range(3)]
    emulator().launch(FAULTS, f"arithmetic<{name}>", (1,), (32,), (*results, a, b, c, np.int32(len(a))))
    wide = [array.astype(np.float64) for array in (a, b, c)]
    with np.errstate(all="ignore"):
        exact = [wide[0] + wide[1], wide[0] * wide[1], wide[0].astype(np.longdouble) * wide[1] + wide[2]]
        for result, numbers in zip(results, exact, strict=True):
            expected = round_once(numbers, dtype)
            same = (result.view(np.uint16) == expected.view(np.uint16)) | (np.isnan(numbers) & np.isnan(result))
            assert same.all(), f"{np.count_nonzero(~same)} of {len(a)}"


def round_once(numbers: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """To `dtype` by way of a float32 that is odd where it is inexact, as rounding twice would not."""
    rounded = numbers.astype(np.float32)
    inexact = (rounded != numbers) & np.isfinite(rounded) & (rounded.view(np.uint32) & 1 == 0)
    away = np.where(numbers > rounded, np.float32(np.inf), np.float32(-np.inf))
    return np.where(inexact, np.nextafter(rounded, away), rounded).astype(dtype)

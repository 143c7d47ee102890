"""Each instruction of 16-bit arithmetic by itself, against NumPy."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from cuda.host.simd import I64, INTEGERS, LANES, emit_store, emit_words, instruction, load
from cuda.host.simd_int16 import (
    HAS_AVX512_PAIRS,
    emit_add_products,
    emit_code_pairs,
    emit_pair,
    nearest,
    store_int16,
)
from tests.cuda.host_support import assert_same_bits, needs_pairs, pack, random_affine
from tests.cuda.test_host_simd import at, compiled, on_vectors
from weights.quant import Linear

ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])      # of 8 inputs in a quantized row


def add_products(bits: int, whole: bool) -> Any:
    """(packed row, 8 numbers of a quantized row, 16 sums in memory): products are added to the sums."""
    @instruction(types.void, types.int64, types.int64, types.int64)
    def add(builder: ir.IRBuilder, row: ir.Value, pairs: ir.Value, sums: ir.Value) -> None:
        total = emit_words(builder, sums)
        for i, codes in enumerate(emit_code_pairs(builder, row, bits)):
            pair = emit_pair(builder, builder.add(pairs, I64(4 * i)))
            total = emit_add_products(builder, total, codes, pair, whole)
        assert total.type == INTEGERS
        emit_store(builder, sums, total, 4)

    @compiled
    def run(row: int, pairs: int, sums: int) -> None:
        add(row, pairs, sums)

    return run


@needs_pairs
@pytest.mark.parametrize("whole", [False, *([True] if HAS_AVX512_PAIRS else [])])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_of_packed_codes_with_numbers_of_any_size(bits: int, whole: bool) -> None:
    run = add_products(bits, whole)
    rng = np.random.default_rng(bits)
    weight = random_affine(0, 32, 64, bits, 64)
    weight.codes[:3] = 255                                      # all codes at their largest
    packed = pack(Linear((weight,))).parts[0]
    codes = weight.codes if bits == 8 else np.stack([weight.codes & 15, weight.codes >> 4], -1).reshape(32, -1)
    numbers = rng.integers(-32768, 32768, 64).astype(np.int16)
    numbers[:3] = 32767, -32768, -32768
    expected = codes.astype(np.int64) @ numbers                                                 # [32]
    for first in (0, LANES):
        sums: NDArray[np.int32] = rng.integers(-1000, 1000, LANES).astype(np.int32)
        before = sums.copy()
        for row in range(8):
            ordered = np.ascontiguousarray(numbers[8 * row:8 * row + 8][ORDER])
            run(packed.address + 256 + row * 32 * bits + 4 * first, at(ordered), at(sums))
        np.testing.assert_array_equal(sums - before, expected[first:first + LANES])


def test_nearest_integers() -> None:
    values = np.concatenate([np.arange(-40, 40, 0.125), [32767.0, -32767.5, 32766.5, 2**22 - 0.5, -(2**22) + 0.5, -0.0]]
                            ).astype(np.float32)
    values = np.concatenate([values, np.nextafter(values, np.float32(np.inf))])
    np.testing.assert_array_equal(on_vectors(nearest, values), np.rint(values))
    special = np.array([np.nan, np.inf], np.float32)
    assert_same_bits(on_vectors(nearest, special)[1:], special[1:])
    assert np.isnan(on_vectors(nearest, special)[0])


def test_to_int16_in_the_order_of_pairs() -> None:
    @compiled
    def convert(source: int, target: int, count: int) -> None:
        for i in range(0, count, 16):
            store_int16(target + 2 * i, load(source + 4 * i))

    numbers = np.arange(-32768, 32768)
    result = np.zeros(65536, np.int16)
    values = numbers.astype(np.float32)
    convert(at(values), at(result), 65536)
    np.testing.assert_array_equal(result, numbers.reshape(-1, 8)[:, ORDER].ravel())

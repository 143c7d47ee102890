"""Each instruction of the vector layer by itself, against NumPy."""
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import pytest
from numpy.typing import NDArray

from cuda.host import simd
from cuda.host.simd import (
    absolute,
    atomic_add,
    atomic_load,
    byte,
    exp,
    fma,
    keep_lanes,
    lane,
    lane_max,
    lane_sum,
    load,
    load_bf16,
    load_f16,
    load_f32,
    load_first,
    load_i32,
    load_i64,
    load_u8,
    load_u16,
    load_words,
    maximum,
    nibble,
    pause,
    prefetch,
    real,
    scalar_fma,
    splat,
    store,
    store_bf16,
    store_f32,
    store_first,
    store_int8,
    store_u8,
    store_u16,
    tanh,
    word,
    yield_thread,
)
from cuda.reference import to_bf16
from tests.cuda.host_support import GUARD, Floats, assert_same_bits

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    made: F = numba.njit(nogil=True, error_model="numpy")(function)
    return made


def at(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def on_vectors(instruction: Callable[..., Any], values: Floats) -> Floats:
    """instruction(F32x16) -> F32x16 over an array of any length."""
    @compiled
    def run(source: int, target: int, count: int) -> None:
        for i in range(0, count, 16):
            store(target + 4 * i, instruction(load(source + 4 * i)))

    padded = np.concatenate([values, np.zeros(-len(values) % 16, np.float32)])
    result = np.full(len(padded), GUARD, np.float32)
    run(at(padded), at(result), len(padded))
    return result[:len(values)]


def test_vectors_need_no_alignment() -> None:
    source, target = np.arange(40, dtype=np.float32), np.full(40, GUARD, np.float32)

    @compiled
    def copy(source: int, target: int) -> None:
        store(target, load(source))

    for shift in (0, 1, 7):
        target[:] = GUARD
        copy(at(source[shift:]), at(target[shift + 3:]))
        assert (target[shift + 3:shift + 19] == source[shift:shift + 16]).all()
        assert (target[:shift + 3] == GUARD).all()
        assert (target[shift + 19:] == GUARD).all()


def test_any_address_may_be_asked_for() -> None:
    @compiled
    def ask(address: int) -> None:
        prefetch(address)

    values = np.arange(16, dtype=np.float32)
    for address in (at(values), at(values) + 3, 0, -1, 1 << 62):
        ask(address)
    assert values.tolist() == list(range(16))


def test_load_first_and_store_first() -> None:
    source, target = np.arange(1, 17, dtype=np.float32), np.zeros(24, np.float32)

    @compiled
    def first(source: int, target: int, count: int) -> None:
        store_first(target, load(source), count)

    @compiled
    def take(source: int, target: int, count: int) -> None:
        store(target, load_first(source, count))

    for count in range(17):
        target[:] = GUARD
        first(at(source), at(target), count)
        assert (target[:count] == source[:count]).all()
        assert (target[count:] == GUARD).all()
        take(at(source), at(target), count)
        assert (target[:count] == source[:count]).all()
        assert (target[count:16] == 0).all()


def test_load_first_does_not_read_on() -> None:
    """Twice in one function: lanes of the first call do not show in the second."""
    @compiled
    def twice(source: int, target: int) -> None:
        store(target, load_first(source, 16))
        store(target, load_first(source, 2))

    source, target = np.arange(1, 17, dtype=np.float32), np.zeros(16, np.float32)
    twice(at(source), at(target))
    assert target.tolist() == [1, 2] + [0] * 14


def test_scalars() -> None:
    @compiled
    def read(address: int, kind: int) -> Any:
        if kind == 0:
            return load_i64(address)
        if kind == 1:
            return load_i32(address)
        if kind == 2:
            return load_u8(address)
        if kind == 3:
            return load_f32(address)
        if kind == 6:
            return load_u16(address)
        if kind == 4:
            return word(address, 2)
        return real(address, 1)

    assert read(at(np.array([-5], np.int64)), 0) == -5
    assert read(at(np.array([-7], np.int32)), 1) == -7
    assert read(at(np.array([200], np.uint8)), 2) == 200
    assert read(at(np.array([0.1], np.float32)), 3) == np.float32(0.1)
    assert read(at(np.array([1, 2, -3], np.int64)), 4) == -3
    assert read(at(np.array([1, 0.1], np.float64)), 5) == np.float32(0.1)

    assert read(at(np.array([60000], np.uint16)), 6) == 60000

    @compiled
    def write(address: int, value: float) -> None:
        store_f32(address, np.float32(value))
        store_u16(address + 8, 0x12345)
        store_u8(address + 11, 0x678)

    target = np.full(3, GUARD, np.float32)
    write(at(target), 0.1)
    assert target[:2].tolist() == [np.float32(0.1), GUARD]
    assert target[2:].view(np.uint8).tolist() == [0x45, 0x23, GUARD.view("4u1")[2], 0x78]


def test_half_floats_all_65536() -> None:
    @compiled
    def convert(source: int, target: int, count: int) -> None:
        for i in range(0, count, 16):
            store(target + 4 * i, load_f16(source + 2 * i))

    halves = np.arange(65536, dtype=np.uint16)
    result = np.zeros(65536, np.float32)
    convert(at(halves), at(result), 65536)
    with np.errstate(invalid="ignore"):
        expected = halves.view(np.float16).astype(np.float32)
    nan = np.isnan(expected)
    assert_same_bits(result[~nan], expected[~nan])
    assert np.isnan(result[nan]).all()


def test_bfloat16_all_65536() -> None:
    @compiled
    def convert(source: int, target: int, count: int) -> None:
        for i in range(0, count, 16):
            store(target + 4 * i, load_bf16(source + 2 * i))

    halves = np.arange(65536, dtype=np.uint16)
    result = np.zeros(65536, np.float32)
    convert(at(halves), at(result), 65536)
    assert_same_bits(result, (halves.astype(np.uint32) << 16).view(np.float32))


def test_to_bfloat16() -> None:
    """Every upper half with the lower halves at which rounding changes, NaN and infinities among them."""
    @compiled
    def convert(source: int, target: int, count: int) -> None:
        for i in range(0, count, 16):
            store_bf16(target + 2 * i, load(source + 4 * i))

    upper = np.arange(65536, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (upper | lower).view(np.float32)
        result = np.zeros(65536, np.uint16)
        convert(at(values), at(result), 65536)
        np.testing.assert_array_equal(result, to_bf16(values))


def test_to_int8() -> None:
    @compiled
    def convert(source: int, target: int, count: int) -> None:
        for i in range(0, count, 16):
            store_int8(target + i, load(source + 4 * i))

    values = np.arange(-140, 140, 0.125, dtype=np.float32)
    values = np.concatenate([values, np.nextafter(values, np.float32(np.inf)), values * np.float32(1e30)])
    result = np.zeros(len(values), np.int8)
    convert(at(values), at(result), len(values))
    np.testing.assert_array_equal(result, np.clip(np.rint(values), -127, 127).astype(np.int8))


def test_codes_of_words() -> None:
    @compiled
    def unpack(source: int, target: int, num_words: int) -> None:
        for i in range(0, num_words, 16):
            words = load_words(source + 4 * i)
            for k in range(8):
                store(target + 4 * (k * num_words + i), nibble(words, k))
            for k in range(4):
                store(target + 4 * ((8 + k) * num_words + i), byte(words, k))

    words = np.concatenate([np.arange(256) * 0x01010101, np.random.default_rng(0).integers(0, 2**32, 256)]
                           ).astype(np.uint32)
    result = np.zeros((12, 512), np.float32)
    unpack(at(words), at(result), 512)
    expected = [words >> 4 * k & 15 for k in range(8)] + [words >> 8 * k & 255 for k in range(4)]
    np.testing.assert_array_equal(result, np.array(expected, np.float32))


def test_operators_and_splat() -> None:
    @compiled
    def combine(x: int, y: int, target: int) -> None:
        store(target, load(x) + load(y))
        store(target + 64, load(x) - load(y))
        store(target + 128, load(x) * load(y))
        store(target + 192, load(x) / load(y))
        store(target + 256, splat(load_f32(x)))

    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 16)).astype(np.float32)
    y[3] = 0
    result = np.zeros((5, 16), np.float32)
    combine(at(x), at(y), at(result))
    with np.errstate(divide="ignore"):
        assert_same_bits(result, np.stack([x + y, x - y, x * y, x / y, np.full(16, x[0])]))


def test_fma_rounds_once() -> None:
    @compiled
    def run(x: int, y: int, z: int, target: int) -> None:
        store(target, fma(load(x), load(y), load(z)))
        store_f32(target + 64, scalar_fma(load_f32(x), load_f32(y), load_f32(z)))

    rng = np.random.default_rng(1)
    # Twelve bits each: product and sum are exact in float64, so that its rounding is the only one.
    x, y, z = (rng.integers(-4096, 4096, (3, 16)) * 2.0 ** rng.integers(-6, 6, (3, 16))).astype(np.float32)
    x[0] = y[0] = 1 + 2.0**-12
    z[0] = -(1 + 2.0**-11)                                  # x * y rounded first would give 0
    result = np.zeros(17, np.float32)
    run(at(x), at(y), at(z), at(result))
    expected = (x.astype(np.float64) * y + z).astype(np.float32)
    assert expected[0] == 2.0**-24
    assert_same_bits(result[:16], expected)
    assert result[16] == expected[0]


def test_exp() -> None:
    values = np.concatenate([np.linspace(-87.3, 88.3, 100_001), np.linspace(-1e-3, 1e-3, 1001)]).astype(np.float32)
    result = on_vectors(exp, values)
    np.testing.assert_allclose(result, np.exp(values.astype(np.float64)), rtol=2e-7, atol=0)
    special = np.array([0, -0.0, -87.4, -1e4, -np.inf, 88.4, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(on_vectors(exp, special), [1, 1, 0, 0, 0, np.inf, np.inf, np.nan])


def test_tanh() -> None:
    values = np.concatenate([np.linspace(-12, 12, 100_001), np.geomspace(1e-30, 1, 1001)]).astype(np.float32)
    np.testing.assert_allclose(on_vectors(tanh, values), np.tanh(values.astype(np.float64)), rtol=3e-7, atol=0)
    special = np.array([0, -0.0, 100, -100, np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(on_vectors(tanh, special), [0, 0, 1, -1, 1, -1, np.nan])


def test_lanes() -> None:
    @compiled
    def reduce(x: int, target: int) -> None:
        store_f32(target, lane_sum(load(x)))
        store_f32(target + 4, lane_max(load(x)))
        for i in range(16):
            store_f32(target + 8 + 4 * i, lane(load(x), i))

    x = np.random.default_rng(2).standard_normal(16).astype(np.float32) * np.float32(1e3)
    result = np.zeros(18, np.float32)
    reduce(at(x), at(result))
    folded = x
    while len(folded) > 1:
        folded = folded[:len(folded) // 2] + folded[len(folded) // 2:]
    assert result[0] == folded[0]
    assert result[1] == x.max()
    assert (result[2:] == x).all()


def test_maximum() -> None:
    @compiled
    def run(x: int, y: int, target: int) -> None:
        store(target, maximum(load(x), load(y)))

    x = np.array([1, -1, np.nan, 2, -np.inf] + [0] * 11, np.float32)
    y = np.array([0, 3, 4, np.nan, -np.inf] + [0] * 11, np.float32)
    result = np.zeros(16, np.float32)
    run(at(x), at(y), at(result))
    np.testing.assert_array_equal(result[:5], [1, 3, 4, np.nan, -np.inf])


def test_absolute() -> None:
    values = np.array([-1.5, 2, -0.0, np.inf, -np.inf, np.nan, -1e-45], np.float32)
    assert_same_bits(on_vectors(absolute, values), np.abs(values))


def test_keep_lanes() -> None:
    @compiled
    def run(x: int, target: int, first: int, last: int) -> None:
        store(target, keep_lanes(load(x), first, last, np.float32(-5.0)))

    x, result = np.arange(16, dtype=np.float32), np.zeros(16, np.float32)
    for first, last in ((0, 16), (0, 0), (3, 5), (-20, 4), (15, 1000), (-(2**40), 2**40), (2**33, 2**33 + 5), (9, 3)):
        run(at(x), at(result), first, last)
        inside = (np.arange(16) >= first) & (np.arange(16) < last)
        np.testing.assert_array_equal(result, np.where(inside, x, -5))


def test_atomic_add_from_threads() -> None:
    @compiled
    def count(address: int, times: int) -> Any:
        before = atomic_add(address, 0)
        for _ in range(times):
            atomic_add(address, 3)
            pause()
        yield_thread()
        return before

    total = np.zeros(1, np.int64)
    assert count(at(total), 0) == 0
    threads = [threading.Thread(target=count, args=(at(total), 10_000)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    @compiled
    def read(address: int) -> Any:
        return atomic_load(address)

    assert read(at(total)) == 3 * 4 * 10_000


def test_an_instruction_refuses_other_types() -> None:
    @compiled
    def wrong(x: int) -> None:
        simd.store(x, 1.0)

    with pytest.raises(numba.TypingError):
        wrong(0)

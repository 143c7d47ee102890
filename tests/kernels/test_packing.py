"""Weights in the kernels' layouts: what is kept exactly, what is rounded, what is refused."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cuda.kernels.packing import (
    DeviceAffine,
    DeviceDense,
    DeviceLinear,
    DeviceWeight,
    pack_codes,
    pack_linear,
    pack_weight,
    packed_bytes,
    packed_linear_bytes,
    unpack_codes,
    unpack_weight,
)
from cuda.kernels.types import BF16, FP16
from tests.cuda.host_support import random_affine, random_dense
from tests.cuda_emulator.launcher import EmulatorLauncher
from tests.weights.test_ggml import blocks, random_blocks
from weights.quant import Affine, Dense, Linear, Weight, dequantize, take_rows

FORMATS = [(bits, group) for bits in (4, 8) for group in (16, 32, 64, 128)]


@pytest.fixture(scope="module")
def launcher() -> EmulatorLauncher:
    """Only its memory is used."""
    return EmulatorLauncher(specs=[])


def symmetric(bits: int, group: int, middle: int, seed: int = 0) -> Affine:
    """Codes below 2 * middle, the code `middle` is zero everywhere; scales are float16 as in files."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (24, 384 * bits // 8), np.uint8) if bits == 4 else \
        rng.integers(0, 2 * middle, (24, 384)).astype(np.uint8)
    scale = rng.standard_normal((24, 384 // group)).astype(np.float16).astype(np.float32)
    return Affine(codes, scale, -np.float32(middle) * scale, bits, group)


def affine(weight: DeviceWeight) -> DeviceAffine:
    assert isinstance(weight, DeviceAffine)
    return weight


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("inputs", [128, 64, 576])
def test_codes_come_back_from_the_kernels_order(bits: int, group: int, inputs: int) -> None:
    codes = np.random.default_rng(0).integers(0, 256, (3, inputs * bits // 8), np.uint8)
    packed = pack_codes(codes, bits, group)
    assert packed.shape[1] % 64 == 0
    one_a_byte = codes if bits == 8 else np.stack([codes & 15, codes >> 4], axis=-1).reshape(3, inputs)
    np.testing.assert_array_equal(unpack_codes(packed, bits, group)[:, :inputs], one_a_byte)
    assert (unpack_codes(packed, bits, group)[:, inputs:] == 1 << (bits - 1)).all()


@pytest.mark.parametrize(("bits", "middle"), [(4, 8), (8, 128), (8, 32), (8, 16)])
@pytest.mark.parametrize("group", [16, 32, 128])
def test_symmetric_formats_keep_every_bit_and_need_no_offsets(launcher: EmulatorLauncher, bits: int, middle: int,
                                                              group: int) -> None:
    weight = symmetric(bits, group, middle)
    packed = affine(pack_weight(launcher, weight, BF16))
    assert packed.offsets is None
    np.testing.assert_array_equal(unpack_weight(packed), dequantize(weight))


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_scales_and_offsets_are_rounded_to_float16(launcher: EmulatorLauncher, bits: int, group: int) -> None:
    weight = random_affine(0, 24, 384, bits, group)
    packed = affine(pack_weight(launcher, weight, BF16))
    assert packed.offsets is not None
    widest = 2 ** (bits - 1) * np.abs(weight.scale)
    bound = (widest + np.abs(weight.offset + 2 ** (bits - 1) * weight.scale)) * 2.0**-11
    error = np.abs(unpack_weight(packed) - dequantize(weight))
    assert (error <= np.repeat(bound, group, axis=1) * 1.001).all()


@pytest.mark.parametrize("size", [1e-9, 1e9])
def test_scales_beyond_the_range_of_float16_keep_their_bits(launcher: EmulatorLauncher, size: float) -> None:
    plain = random_affine(0, 8, 128, 4, 32)
    scaled = Affine(plain.codes, plain.scale * np.float32(size), plain.offset * np.float32(size), 4, 32)
    packed, error = affine(pack_weight(launcher, scaled, BF16)), []
    for weight, of in ((pack_weight(launcher, plain, BF16), plain), (packed, scaled)):
        error.append(np.abs(unpack_weight(weight) - dequantize(of)).max() / np.abs(dequantize(of)).max())
    assert error[1] <= 2 * error[0]
    assert np.log2(packed.scale_unit).is_integer()


def test_five_bits_in_bytes_lose_no_more_than_the_rounding_of_their_own_range(launcher: EmulatorLauncher) -> None:
    rng = np.random.default_rng(0)
    scale = rng.uniform(0.01, 0.02, (16, 8)).astype(np.float32)
    offset = rng.uniform(-0.3, -0.2, (16, 8)).astype(np.float32)
    weight = Affine(rng.integers(0, 32, (16, 256), np.uint8), scale, offset, 8, 32)
    error = np.abs(unpack_weight(pack_weight(launcher, weight, BF16)) - dequantize(weight)).max()
    assert error <= 17 * 0.02 * 2.0**-11


@pytest.mark.parametrize("kind", ["f4", "f2", "bf16"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_dense_weights_are_rounded_to_the_type_of_activations(launcher: EmulatorLauncher, kind: str,
                                                              dtype: np.dtype[Any]) -> None:
    weight = random_dense(0, 8, 40, kind)
    packed = pack_weight(launcher, weight, dtype)
    assert isinstance(packed, DeviceDense)
    assert packed.data.dtype == dtype
    np.testing.assert_array_equal(packed.data, dequantize(weight).astype(dtype))
    assert packed.nbytes == packed_bytes(weight)


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_packed_bytes_is_what_a_weight_takes(launcher: EmulatorLauncher, bits: int, group: int) -> None:
    weight = random_affine(0, 24, 640, bits, group)
    assert pack_weight(launcher, weight, BF16).nbytes == packed_bytes(weight)
    assert pack_weight(launcher, symmetric(bits, group, 1 << (bits - 1)), BF16).nbytes < packed_bytes(
        symmetric(bits, group, 1 << (bits - 1)))


def rows_of(linear: DeviceLinear) -> NDArray[np.float64]:
    return np.concatenate([unpack_weight(part) for part in linear.parts])


def test_quantized_parts_become_one_without_loss(launcher: EmulatorLauncher) -> None:
    q, k, v = symmetric(4, 32, 8, 1), symmetric(4, 32, 8, 2), symmetric(8, 16, 32, 3)
    bias = np.arange(72, dtype=np.float32)
    linear = pack_linear(launcher, Linear((q, k, v), bias), BF16)
    assert [(part.shape, affine(part).bits, affine(part).group) for part in linear.parts] == [((72, 384), 8, 16)]
    assert linear.nbytes <= packed_linear_bytes(Linear((q, k, v), bias)) + bias.nbytes
    assert (linear.out_columns, linear.in_columns) == (72, 384)
    np.testing.assert_array_equal(rows_of(linear), np.concatenate([dequantize(part) for part in (q, k, v)]))
    np.testing.assert_array_equal(linear.bias, bias)
    assert linear.nbytes == sum(part.nbytes for part in linear.parts) + bias.nbytes


def test_parts_may_have_middles_of_their_own(launcher: EmulatorLauncher) -> None:
    parts = symmetric(8, 32, 16, 1), symmetric(8, 32, 128, 2)
    linear = pack_linear(launcher, Linear(parts), BF16)
    assert len(linear.parts) == 1
    assert affine(linear.parts[0]).offsets is None
    np.testing.assert_array_equal(rows_of(linear), np.concatenate([dequantize(part) for part in parts]))


@pytest.mark.parametrize("parts", [
    (symmetric(4, 32, 8, 1), symmetric(4, 32, 8, 2)),
    (symmetric(4, 32, 8, 1), symmetric(8, 16, 32, 2)),
    (symmetric(8, 64, 128, 1), symmetric(4, 128, 8, 2)),
    (random_dense(1, 24, 384, "bf16"), random_dense(2, 24, 384, "bf16")),
], ids=["one format", "4 and 8 bits", "groups of 64 and 128", "dense"])
def test_gate_and_up_rows_take_turns_of_eight_and_lose_nothing(launcher: EmulatorLauncher,
                                                               parts: tuple[Weight, Weight]) -> None:
    linear = pack_linear(launcher, Linear(parts, np.arange(48, dtype=np.float32)), BF16, gated="silu")
    assert (linear.num_rows, linear.out_columns, len(linear.parts)) == (48, 24, 1)
    turns = rows_of(linear).reshape(3, 2, 8, 384)
    for index, part in enumerate(parts):
        np.testing.assert_array_equal(turns[:, index].reshape(24, 384), dequantize(part))
    np.testing.assert_array_equal(np.asarray(linear.bias).reshape(3, 2, 8)[0], [np.arange(8), np.arange(24, 32)])


def test_a_gate_of_codes_beside_a_dense_up_becomes_dense(launcher: EmulatorLauncher) -> None:
    gate, up = symmetric(4, 32, 8), random_dense(2, 24, 384, "bf16")
    linear = pack_linear(launcher, Linear((gate, up)), BF16, gated="gelu_tanh")
    assert isinstance(linear.parts[0], DeviceDense)
    np.testing.assert_array_equal(rows_of(linear).reshape(3, 2, 8, 384)[:, 0].reshape(24, 384),
                                  dequantize(gate).astype(BF16).astype(np.float64))


def dense(rows: int, inputs: int, value: float = 1.0) -> Dense:
    return Dense(np.full((rows, inputs), value, np.float32))


@pytest.mark.parametrize(("linear", "dtype", "gated", "message"), [
    (Linear((dense(8, 12),)), BF16, None, "12 inputs: must be a multiple of 8"),
    (Linear((dense(8, 16), dense(8, 24))), BF16, None, "16, 24 inputs"),
    (Linear((dense(24, 16),)), BF16, "silu", "24 rows: must be a multiple of 16"),
    (Linear((dense(32, 16),)), BF16, "relu", "gated='relu'"),
    (Linear((dense(8, 16),)), np.dtype(np.float32), None, "activations of float32"),
    (Linear((dense(8, 16, 1e6),)), FP16, None, "range of float16"),
    (Linear((Affine(np.zeros((2, 32), np.uint8), np.full((2, 1), np.inf, np.float32), np.zeros((2, 1), np.float32), 8,
                    32),)), BF16, None, "not finite"),
])
def test_what_does_not_fit_is_refused(launcher: EmulatorLauncher, linear: Linear, dtype: np.dtype[Any],
                                      gated: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_linear(launcher, linear, dtype, gated)


@pytest.mark.parametrize("gated", [None, "silu"])
def test_weights_as_their_file_has_them(launcher: EmulatorLauncher, gated: str | None) -> None:
    """Blocks, and rows in another order, are packed as what they stand for."""
    order = np.random.default_rng(0).permutation(32)
    stored = [blocks(name, random_blocks(name, 32, 1)) for name in ("Q4_K", "Q6_K")]
    numbers = random_dense(0, 32, 256, "bf16")
    cases: list[tuple[list[Weight], list[Weight]]] = [
        ([take_rows(part, order) for part in stored], [take_rows(part.affine(), order) for part in stored]),
        ([take_rows(numbers, order), numbers], [Dense(numbers.data[order], is_bf16=True), numbers])]
    for parts, plain in cases:
        packed = pack_linear(launcher, Linear(tuple(parts)), BF16, gated)
        expected = pack_linear(launcher, Linear(tuple(plain)), BF16, gated)
        for part, other in zip(packed.parts, expected.parts, strict=True):
            np.testing.assert_array_equal(unpack_weight(part), unpack_weight(other))
        assert packed_linear_bytes(Linear(tuple(parts))) == packed_linear_bytes(Linear(tuple(plain)))
        assert [packed_bytes(part) for part in parts] == [packed_bytes(part) for part in plain]
    np.testing.assert_array_equal(unpack_weight(pack_weight(launcher, stored[0], BF16)),
                                  unpack_weight(pack_weight(launcher, stored[0].affine(), BF16)))

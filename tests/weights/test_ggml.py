"""Block formats of GGML against the `gguf` package's dequantisation."""
from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from weights.ggml import TYPES, UNSUPPORTED, weight_from_bytes
from weights.quant import Affine, Blocks, Dense, dequantize, take_rows, unpack_codes

QUANTISED = {kind.name: (number, kind) for number, kind in TYPES.items() if kind.weights_per_block > 1}
# Where a block has its float16 numbers.
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2],
          "Q6_K": [208]}
LARGEST, SMALLEST = 65504.0, 2.0 ** -24


def random_blocks(name: str, rows: int, blocks: int, scales: NDArray[np.float16] | None = None) -> NDArray[np.uint8]:
    """Random bytes [rows, blocks * block_bytes] with finite float16 numbers, drawn from `scales` where given."""
    rng = np.random.default_rng(list(name.encode()))
    kind = QUANTISED[name][1]
    raw = rng.integers(0, 256, (rows, blocks, kind.block_bytes), np.uint8)
    for at in HALVES[name]:
        drawn = rng.standard_normal((rows, blocks)).astype(np.float16) if scales is None \
            else rng.choice(scales, (rows, blocks))
        raw[..., at:at + 2] = drawn[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def blocks(name: str, raw: NDArray[np.uint8]) -> Blocks:
    weight = weight_from_bytes(QUANTISED[name][1], raw.reshape(-1), len(raw), "tensor t")
    assert isinstance(weight, Blocks)
    return weight


def ours(name: str, raw: NDArray[np.uint8]) -> Affine:
    return blocks(name, raw).affine()


def reference(name: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.asarray(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(QUANTISED[name][0])))


@pytest.mark.parametrize("name", QUANTISED)
def test_dequantised_weights_equal_the_reference(name: str) -> None:
    raw = random_blocks(name, rows=6, blocks=5)
    weight = ours(name, raw)
    assert weight.shape == (6, 5 * QUANTISED[name][1].weights_per_block)
    np.testing.assert_array_equal(dequantize(weight), reference(name, raw))


@pytest.mark.parametrize("name", QUANTISED)
def test_extreme_scales_equal_the_reference(name: str) -> None:
    scales = np.array([LARGEST, -LARGEST, SMALLEST, -SMALLEST, 0.0, -0.0, 1.0, 2.0 ** -14], np.float16)
    raw = random_blocks(name, rows=32, blocks=6, scales=scales)
    np.testing.assert_array_equal(dequantize(ours(name, raw)), reference(name, raw))


@pytest.mark.parametrize("name", QUANTISED)
def test_every_weight_of_a_block_lands_in_its_place(name: str) -> None:
    """One block a row, the same but for one flipped bit, another one in each row: no swapped pair can hide."""
    kind = QUANTISED[name][1]
    scales = np.array([1.0], np.float16)
    base = random_blocks(name, rows=1, blocks=1, scales=scales)
    raw = np.repeat(base, kind.block_bytes * 8, axis=0)
    bits = np.unpackbits(raw, axis=1)
    bits[np.arange(len(bits)), np.arange(len(bits))] ^= 1
    raw = np.packbits(bits, axis=1)
    halves = [raw[:, at:at + 2].copy().view(np.float16) for at in HALVES[name]]
    raw = raw[np.all([np.isfinite(half)[:, 0] for half in halves], axis=0)]
    np.testing.assert_array_equal(dequantize(ours(name, raw)), reference(name, raw))


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_refused(name: str, bad: float) -> None:
    raw = random_blocks(name, rows=2, blocks=2)
    at = HALVES[name][-1]
    raw[1, at:at + 2] = np.array([bad], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="tensor t: .* not finite"):
        ours(name, raw)


def test_a_signalling_nan_is_refused_without_a_warning() -> None:
    raw = random_blocks("Q4_0", rows=1, blocks=1)
    raw[0, :2] = [0x01, 0x7C]
    with pytest.raises(ValueError, match="not finite"):
        ours("Q4_0", raw)


def test_four_bit_codes_are_packed_in_pairs_of_neighbours() -> None:
    """Q4_0 with scale 1: byte j of the file holds code j low and code j + 16 high."""
    codes = np.array([*range(16), *range(15, -1, -1)], np.uint8)
    block = np.concatenate([np.array([1.0], np.float16).view(np.uint8), codes[:16] | codes[16:] << 4])
    weight = ours("Q4_0", block[None])
    assert weight.bits == 4
    assert weight.group == 32
    np.testing.assert_array_equal(unpack_codes(weight)[0], codes)
    np.testing.assert_array_equal(weight.codes[0], codes[0::2] | codes[1::2] << 4)
    np.testing.assert_array_equal(dequantize(weight)[0], codes.astype(np.float32) - 8)


@pytest.mark.parametrize(("number", "dtype"), [(0, np.float32), (1, np.float16)])
def test_floats_stay_a_view(number: int, dtype: DTypeLike) -> None:
    values = np.arange(12).reshape(3, 4).astype(dtype)
    weight = weight_from_bytes(TYPES[number], values.view(np.uint8).reshape(-1), 3, "t")
    assert isinstance(weight, Dense)
    assert np.shares_memory(weight.data, values)
    np.testing.assert_array_equal(dequantize(weight), values.astype(np.float32))


def test_bfloat16_stays_raw_bits() -> None:
    values = np.array([[1.0, -2.5], [3e38, 1e-40]], np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16)
    weight = weight_from_bytes(TYPES[30], raw.reshape(-1), 2, "t")
    assert isinstance(weight, Dense)
    assert weight.is_bf16
    assert weight.shape == (2, 2)
    np.testing.assert_array_equal(dequantize(weight), gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.BF16))


def test_the_tables_agree_with_the_reference() -> None:
    for number, kind in TYPES.items():
        reference_kind = gguf.GGMLQuantizationType(number)
        assert (reference_kind.name, gguf.GGML_QUANT_SIZES[reference_kind]) \
            == (kind.name, (kind.weights_per_block, kind.block_bytes))
    for number, name in UNSUPPORTED.items():
        assert gguf.GGMLQuantizationType(number).name == name


@pytest.mark.parametrize("name", QUANTISED)
def test_blocks_know_what_they_become(name: str) -> None:
    raw = random_blocks(name, rows=5, blocks=3)
    stored = blocks(name, raw)
    converted = stored.affine()
    assert (stored.shape, stored.bits, stored.group, stored.nbytes) == (
        converted.shape, converted.bits, converted.group, converted.nbytes)
    assert np.shares_memory(stored.data, raw)


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_rows_of_a_quantised_weight_can_be_reordered(name: str) -> None:
    """As often as one likes, and without a copy until they are converted."""
    raw = random_blocks(name, rows=4, blocks=2)
    first, second = np.array([2, 0, 3, 1]), np.array([1, 1, 3])
    once = take_rows(blocks(name, raw), first)
    twice = take_rows(once, second)
    assert isinstance(twice, Blocks)
    assert np.shares_memory(twice.data, raw)
    assert twice.shape == (3, 2 * QUANTISED[name][1].weights_per_block)
    np.testing.assert_array_equal(dequantize(once), reference(name, raw)[first])
    np.testing.assert_array_equal(dequantize(twice), reference(name, raw)[first][second])
    np.testing.assert_array_equal(dequantize(take_rows(ours(name, raw), first)), reference(name, raw)[first])


def test_rows_of_a_dense_weight_can_be_reordered() -> None:
    weight = Dense(np.arange(6, dtype=np.uint16).reshape(3, 2) + 0x3F80, is_bf16=True)
    taken = take_rows(take_rows(weight, np.array([2, 0, 1])), np.array([0, 1]))
    assert taken.shape == (2, 2)
    assert taken.nbytes == 8
    np.testing.assert_array_equal(dequantize(taken), dequantize(weight)[[2, 0]])

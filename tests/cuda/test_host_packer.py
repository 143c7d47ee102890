"""Packed weights have the bits of an obvious packing in NumPy, whatever their file has them as."""
from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cuda.host.commands import Team
from cuda.host.pack import AFFINE4, AFFINE8, BFLOAT16, FLOAT16, FLOAT32, STRIP, PackedLinear, PackedWeight
from cuda.host.packer import Packer
from cuda.host.repack import FORMATS
from tests.cuda.host_support import pack, random_affine, random_floats
from tests.weights.test_ggml import HALVES, QUANTISED, blocks, random_blocks
from weights.quant import Affine, Blocks, Dense, Linear, Weight, take_rows

# Where strips of 32 outputs begin and end inside of parts.
SIZES = (72, 7, 41, 1, 64, 3)


def permuted(weight: Weight) -> Weight:
    return take_rows(weight, np.random.default_rng(0).permutation(weight.shape[0]))


def stored(name: str, rows: int, seed: int = 0) -> Blocks:
    raw = random_blocks(name, rows + seed, blocks=3)[seed:]
    return blocks(name, np.ascontiguousarray(raw))


def strips(rows: NDArray[Any]) -> NDArray[Any]:
    """[N, X] -> [strips, 32, X], filled up with zeros."""
    filled = np.zeros((-(-len(rows) // STRIP) * STRIP, rows.shape[1]), rows.dtype)
    filled[:len(rows)] = rows
    return filled.reshape(-1, STRIP, rows.shape[1])


def expected_affine(parts: list[Affine]) -> NDArray[np.uint8]:
    bits, group = parts[0].bits, parts[0].group
    scale, offset = (strips(np.concatenate([getattr(part, field) for part in parts])) for field in ("scale", "offset"))
    codes = np.concatenate([part.codes for part in parts])
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    codes = strips(codes).astype(np.uint32)                                                     # [strips, 32, K]
    num_strips, _, num_inputs = codes.shape
    eights = codes.reshape(num_strips, STRIP, num_inputs // group, group // 8, 8).transpose(0, 2, 3, 4, 1)
    # Inputs of a word by their place in it, from the lowest bits on.
    words = [[0, 1, 2, 3, 4, 5, 6, 7]] if bits == 4 else [[0, 1, 4, 5], [2, 3, 6, 7]]
    rows = [sum(eights[:, :, :, k] << np.uint32(bits * place) for place, k in enumerate(word)) for word in words]
    packed = np.stack(rows, axis=3).reshape(num_strips, num_inputs // group, -1)                # [strips, groups, X]
    head = np.concatenate([scale.transpose(0, 2, 1), offset.transpose(0, 2, 1)], axis=2)        # [strips, groups, 64]
    whole = np.concatenate([head.view(np.uint32), packed], axis=2)
    return np.ascontiguousarray(whole).reshape(num_strips, -1).view(np.uint8)


def expected_dense(parts: list[Dense]) -> NDArray[np.uint8]:
    columns = strips(np.concatenate([part.ordered() for part in parts])).transpose(0, 2, 1)     # [strips, K, 32]
    return np.ascontiguousarray(columns).reshape(len(columns), -1).view(np.uint8)


def assert_packed(packed: PackedWeight, parts: list[Weight]) -> None:
    dense = [part for part in parts if isinstance(part, Dense)]
    affine = [part.affine() if isinstance(part, Blocks) else part for part in parts if not isinstance(part, Dense)]
    expected = expected_dense(dense) if dense else expected_affine(affine)
    assert packed.shape == (sum(part.shape[0] for part in parts), parts[0].shape[1])
    assert packed.strip_bytes == expected.shape[1]
    assert packed.address == packed.strips.__array_interface__["data"][0]
    np.testing.assert_array_equal(packed.strips, expected)


def test_the_formats_are_those_that_files_may_have() -> None:
    assert FORMATS.keys() == QUANTISED.keys()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_blocks_in_any_order_one_part_after_the_other(name: str, num_threads: int) -> None:
    in_order = stored(name, SIZES[1])
    parts: list[Weight] = [permuted(stored(name, rows, rows)) for rows in SIZES]
    parts[1], format = in_order, in_order.format
    packed = pack(Linear(tuple(parts)), num_threads).parts
    assert len(packed) == 1
    assert (packed[0].kind, packed[0].group) == (AFFINE4 if format.bits == 4 else AFFINE8, format.group)
    assert_packed(packed[0], parts)


@pytest.mark.parametrize("name", FORMATS)
def test_scales_at_the_ends_of_their_range(name: str) -> None:
    scales = np.array([65504, -65504, 2.0**-24, -(2.0**-24), 1023 * 2.0**-24, 2.0**-14, 0.0, -0.0, 1.0], np.float16)
    weight = blocks(name, random_blocks(name, 40, 4, scales))
    assert_packed(pack(Linear((weight,))).parts[0], [weight])


@pytest.mark.parametrize("name", FORMATS)
def test_every_bit_of_a_block_has_its_place(name: str) -> None:
    """One block a row, the same but for one flipped bit, another one in each row; then the same of its complement."""
    scales = np.array([1.0], np.float16)
    for invert in (0, 255):
        base = random_blocks(name, 1, 1, scales) ^ np.uint8(invert)
        raw = np.repeat(base, QUANTISED[name][1].block_bytes * 8, axis=0)
        for at in HALVES[name]:
            raw[:, at:at + 2] = scales.view(np.uint8)
        bits = np.unpackbits(raw, axis=1)
        bits[np.arange(len(bits)), np.arange(len(bits))] ^= 1
        raw = np.packbits(bits, axis=1)
        halves = [raw[:, at:at + 2].copy().view(np.float16) for at in HALVES[name]]
        weight = blocks(name, raw[np.all([np.isfinite(half)[:, 0] for half in halves], axis=0)])
        assert_packed(pack(Linear((weight,))).parts[0], [weight])


@pytest.mark.parametrize("inputs", [1, 7, 64, 65, 200])
@pytest.mark.parametrize(("dtype", "kind"), [("f4", FLOAT32), ("f2", FLOAT16), ("u2", BFLOAT16)])
def test_numbers_keep_all_bits(dtype: str, kind: int, inputs: int) -> None:
    """Those of NaN too."""
    rng = np.random.default_rng(0)
    sizes = [(rows, inputs * np.dtype(dtype).itemsize) for rows in SIZES]
    parts: list[Weight] = [permuted(Dense(rng.integers(0, 256, size, np.uint8).view(dtype), is_bf16=dtype == "u2"))
                           for size in sizes]
    packed = pack(Linear(tuple(parts))).parts
    assert [part.kind for part in packed] == [kind]
    assert_packed(packed[0], parts)


@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_affine_weights(bits: int, group: int) -> None:
    parts: list[Weight] = [random_affine(rows, rows, 3 * group, bits, group) for rows in SIZES]
    sliced = random_affine(9, 40, 3 * group, bits, group)       # arrays that are not contiguous
    parts.append(Affine(sliced.codes[::2], sliced.scale[::2], sliced.offset[::2], bits, group))
    assert_packed(pack(Linear(tuple(parts))).parts[0], parts)


def test_only_neighbours_of_one_format_become_one_weight() -> None:
    inputs = 768
    numbers = Dense(random_floats(0, 9, inputs).astype(np.float16))
    parts: list[Weight] = [stored("Q4_K", 20), blocks("Q4_0", random_blocks("Q4_0", 5, 24)),
                           random_affine(0, 30, inputs, 4, 32), random_affine(0, 30, inputs, 4, 64), stored("Q6_K", 33),
                           stored("Q5_K", 8), blocks("Q8_0", random_blocks("Q8_0", 50, 24)), numbers, numbers,
                           Dense(numbers.data.view(np.uint16), is_bf16=True)]
    bias = random_floats(1, sum(part.shape[0] for part in parts))
    packed = pack(Linear(tuple(parts), bias))
    runs = [parts[:3], parts[3:4], parts[4:5], parts[5:7], parts[7:9], parts[9:]]
    assert len(packed.parts) == len(runs)
    for part, run in zip(packed.parts, runs, strict=True):
        assert_packed(part, run)
    np.testing.assert_array_equal(np.concatenate([
        padded[:part.shape[0]] for padded, part in zip(packed.biases, packed.parts, strict=True)]), bias)
    assert all((padded[part.shape[0]:] == 0).all() for padded, part in zip(packed.biases, packed.parts, strict=True))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [0x7C00, 0xFC00, 0x7E00, 0x7C01])
def test_a_scale_that_is_not_finite_names_its_tensor(name: str, bad: int) -> None:
    """Infinities, NaN, a signalling one; in the last block of all."""
    for at in HALVES[name]:
        raw = random_blocks(name, 33, 2)
        raw[-1, raw.shape[1] // 2 + at:raw.shape[1] // 2 + at + 2] = np.array([bad], np.uint16).view(np.uint8)
        flawed = blocks(name, raw)
        with pytest.raises(ValueError, match="^tensor t: the scale of a block is not finite$"):
            pack(Linear((flawed,)))
        with pytest.raises(ValueError, match="^tensor t: the scale of a block is not finite$"):
            flawed.affine()


def test_nothing_is_copied() -> None:
    """4 million weights, of which a copy in any form would be 2 MiB and more: rows in another order, three parts."""
    raw = random_blocks("Q4_0", 2048, 64)
    part = permuted(blocks("Q4_0", raw))
    numbers = permuted(Dense(np.zeros((2048, 2048), np.float16)))
    team, packer, packed = Team(1), Packer(), list[PackedLinear]()
    try:
        pack(Linear((stored("Q4_0", 1), Dense(np.zeros((1, 1), np.float16)))))      # the kernels are there
        tracemalloc.start()
        packed.append(packer.linear(Linear((part, part, part, numbers, numbers))))
        packer.run(team)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        team.close()
    assert peak < 2**19
    assert_packed(packed[0].parts[0], [part] * 3)


def test_what_is_packed_outlives_the_packer_and_its_sources() -> None:
    """Weights larger than an arena's piece, whose result alone is kept."""
    team, packer = Team(2), Packer()
    try:
        weight = Dense(random_floats(0, 2048, 4200))
        packed = packer.linear(Linear((weight,)))
        packer.run(team)
        expected = expected_dense([weight])
        del packer, weight
        np.testing.assert_array_equal(packed.parts[0].strips, expected)
    finally:
        team.close()

"""GGML tensor types: the block layouts that GGUF stores, and their conversion to `Affine`.

A row of K weights is stored as K / weights_per_block blocks, one after the other. All numbers are little-endian.
Letters: N rows, K inputs, B blocks in a row.

Source: the block structures of the GGML library (`ggml-common.h`), as the GGUF specification refers to them.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weights.quant import Affine, BlockFormat, Blocks, Dense, Weight

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A tensor type that can be loaded."""
    name: str
    weights_per_block: int
    block_bytes: int


TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    30: GgmlType("BF16", 1, 2),
}

# For error messages only.
UNSUPPORTED = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}


def weight_from_bytes(kind: GgmlType, raw: Bytes, rows: int, name: str) -> Weight:
    """The tensor [rows, K] whose stored bytes are `raw`: a view of them. name: of the tensor, for errors."""
    if kind.name == "F32":
        return Dense(raw.view("<f4").reshape(rows, -1))
    if kind.name == "F16":
        return Dense(raw.view("<f2").reshape(rows, -1))
    if kind.name == "BF16":
        return Dense(raw.view("<u2").reshape(rows, -1), is_bf16=True)
    return Blocks(raw.reshape(rows, -1, kind.block_bytes), FORMATS[kind.name], name)           # [N, B, block_bytes]


def _halves(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, as float32 [N, B]."""
    # NOTE: casting a signalling NaN warns, and warnings may be errors; the check below is the answer to NaN.
    with np.errstate(invalid="ignore"):
        values = blocks[..., at:at + 2].view("<f2")[..., 0].astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError("the scale of a block is not finite")
    return values


def _pair_nibbles(packed: Bytes) -> Bytes:
    """Codes from GGML's order to ours, without unpacking them. [..., m] -> [..., m]

    GGML's byte j holds weight j low and weight j + m high; ours holds weights 2j and 2j + 1.
    """
    two = packed.view("<u2")                                            # bytes a (low) and b = 2j, 2j + 1
    paired = np.empty((*packed.shape[:-1], 2, packed.shape[-1] // 2), np.uint8)
    paired[..., 0, :] = (two & 0x0F) | ((two >> 4) & 0xF0)              # low nibbles of a and b
    paired[..., 1, :] = ((two >> 4) & 0x0F) | ((two >> 8) & 0xF0)       # high nibbles of a and b
    return paired.reshape(packed.shape)


def _split_nibbles(packed: Bytes) -> Bytes:
    """All low nibbles, then all high ones, one code per byte. [..., m] -> [..., 2m]"""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _affine(codes: Bytes, scale: Floats, offset: Floats, bits: int, group: int) -> Affine:
    rows = codes.shape[0]
    return Affine(codes.reshape(rows, -1), scale.reshape(rows, -1), offset.reshape(rows, -1), bits, group)


def _q4_0(blocks: Bytes) -> Affine:
    """float16 d, 16 bytes of nibbles; w = d (q - 8)."""
    scale = _halves(blocks, 0)
    return _affine(_pair_nibbles(blocks[..., 2:]), scale, -8 * scale, bits=4, group=32)


def _q4_1(blocks: Bytes) -> Affine:
    """float16 d, float16 m, 16 bytes of nibbles; w = d q + m."""
    return _affine(_pair_nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2), bits=4, group=32)


def _fifth_bits(bits: Bytes, nibbles: Bytes) -> Bytes:
    """5-bit codes from 4 bytes of high bits (bit i: weight i) and 16 bytes of nibbles. -> [..., 32]"""
    return _split_nibbles(nibbles) | (np.unpackbits(bits, axis=-1, bitorder="little") << np.uint8(4))


def _q5_0(blocks: Bytes) -> Affine:
    """float16 d, 4 bytes of fifth bits, 16 bytes of nibbles; w = d (q - 16)."""
    scale = _halves(blocks, 0)
    return _affine(_fifth_bits(blocks[..., 2:6], blocks[..., 6:]), scale, -16 * scale, bits=8, group=32)


def _q5_1(blocks: Bytes) -> Affine:
    """float16 d, float16 m, 4 bytes of fifth bits, 16 bytes of nibbles; w = d q + m."""
    codes = _fifth_bits(blocks[..., 4:8], blocks[..., 8:])
    return _affine(codes, _halves(blocks, 0), _halves(blocks, 2), bits=8, group=32)


def _q8_0(blocks: Bytes) -> Affine:
    """float16 d, 32 signed bytes; w = d q. Codes become unsigned: q + 128 is the byte with its sign bit flipped."""
    scale = _halves(blocks, 0)
    return _affine(blocks[..., 2:] ^ np.uint8(0x80), scale, -128 * scale, bits=8, group=32)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scale and offset of the 8 groups of a Q4_K or Q5_K block, each [N, B, 8].

    The block starts with float16 d, float16 dmin and 12 bytes that hold eight 6-bit scales and eight 6-bit minima:
    bytes 0-3 and 4-7 the first four of each in their low 6 bits; the last four are a nibble of bytes 8-11 below the
    two high bits of bytes 0-3 and 4-7.
    """
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=-1)
    return _halves(blocks, 0)[..., None] * scales, -_halves(blocks, 2)[..., None] * minima


def _q4_k(blocks: Bytes) -> Affine:
    """16 bytes of scales, 128 of nibbles: 32 bytes hold one group low and the next one high; w = d s q - dmin m."""
    nibbles = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    return _affine(_pair_nibbles(nibbles), *_k_scales(blocks), bits=4, group=32)


def _q5_k(blocks: Bytes) -> Affine:
    """16 bytes of scales, 32 of fifth bits (bit g of byte i: weight i of group g), 128 of nibbles as in Q4_K."""
    nibbles = _split_nibbles(blocks[..., 48:].reshape(*blocks.shape[:-1], 4, 32))              # [N, B, 4, 64]
    fifth = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)    # [N, B, 8, 32]
    codes = nibbles.reshape(fifth.shape) | (fifth << np.uint8(4))
    return _affine(codes, *_k_scales(blocks), bits=8, group=32)


def _q6_k(blocks: Bytes) -> Affine:
    """128 bytes of low nibbles, 64 of high bit pairs, 16 signed scales, float16 d; w = d s (q - 32), groups of 16.

    Each half of the block (128 weights) has 64 bytes of nibbles, low ones first, and 32 bytes of bit pairs: pair p of
    byte i belongs to weight 32 p + i.
    """
    halves = (*blocks.shape[:-1], 2)
    nibbles = _split_nibbles(blocks[..., :128].reshape(*halves, 64))                           # [N, B, 2, 128]
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    pairs = blocks[..., 128:192].reshape(*halves, 1, 32) >> shifts & np.uint8(3)               # [N, B, 2, 4, 32]
    codes = nibbles.reshape(pairs.shape) | (pairs << np.uint8(4))
    scale = _halves(blocks, 208)[..., None] * blocks[..., 192:208].view(np.int8)               # [N, B, 16]
    return _affine(codes, scale, -32 * scale, bits=8, group=16)


def _format(name: str, bits: int, group: int, convert: Callable[[Bytes], Affine]) -> BlockFormat:
    kind = next(kind for kind in TYPES.values() if kind.name == name)
    return BlockFormat(name, kind.weights_per_block, kind.block_bytes, bits, group, convert)


# The quantised types by name.
FORMATS = {made.name: made for made in (
    _format("Q4_0", 4, 32, _q4_0), _format("Q4_1", 4, 32, _q4_1), _format("Q5_0", 8, 32, _q5_0),
    _format("Q5_1", 8, 32, _q5_1), _format("Q8_0", 8, 32, _q8_0), _format("Q4_K", 4, 32, _q4_k),
    _format("Q5_K", 8, 32, _q5_k), _format("Q6_K", 8, 16, _q6_k))}

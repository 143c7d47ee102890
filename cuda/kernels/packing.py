"""Weights on the device: the layouts that the GEMM kernels and the embedding read, and how weights get into them.

A row of weights is a run of units of 64 bytes, whatever the format: 32 inputs of a dense weight, 64 of 8-bit codes, 128
of 4-bit codes. Four threads read a unit, 16 bytes each, and these are at once their operands of `mma.m16n8k16`:

  dense     as stored, so that cuBLAS, the embedding and a tied head share one array. The two mma of a unit take inputs
            8t .. 8t + 3 and 8t + 4 .. 8t + 7 of thread t: in another order than they lie, which a sum allows.
  8 bits    the same for each 32 inputs, a word of thread t's 16 bytes for each mma. It holds its four codes in order
            0, 2, 1, 3: two pairs, a mask and a shift away.
  4 bits    the same, a word for two mma: nibbles 0, 4, 1, 5 are the codes for the first, 2, 6, 3, 7 for the second.

In groups of 16 an mma must not take inputs of two groups: there thread t has 4t .. 4t + 3 of each 16.

Codes are kept around a centre (8 or 128): w = scale * (code - centre) + offset, with code - centre exact in every
16-bit type. Formats that are symmetric about their own centre (Q4_0, Q5_0, Q8_0, Q6_K) need no offsets then. Scales and
offsets are float16 in multiples of `scale_unit`, a power of two a weight, so that they neither overflow nor lose bits
among the denormals.

Gated projections have gate and up rows in turns of eight: a 16-row tile holds eight gate rows and the up rows that
belong to them, and the product of both is formed where the sums are.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cuda.kernels.types import ACTIVATION_TYPES, BF16, FP16
from cuda.launcher import DeviceArray, Launcher
from weights.quant import Affine, Blocks, Dense, Linear, Weight, dequantize

UNIT_BYTES = 64                                 # of a row: what four threads read at once
SCALE_CHUNK = 8                                 # groups of a row whose scales are one 16-byte copy
GATE_TURN = 8                                   # gate rows, then as many up rows
ACTIVATIONS = (None, "silu", "gelu_tanh")       # a place here is the kernels' number of it


@dataclass(frozen=True, slots=True, eq=False)
class DeviceDense:
    """w [N, K] of type T, row-major."""
    data: DeviceArray

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceAffine:
    """w [N, K] = scale_unit * (scales * (code - centre) + offsets), groups along K; see the module's docstring."""
    codes: DeviceArray                          # uint8 [N, units * 64]
    scales: DeviceArray                         # float16 [N, groups, filled up to whole chunks with zeros]
    offsets: DeviceArray | None                 # the same, or None: all zero
    shape: tuple[int, int]                      # N, K
    bits: int                                   # 4 or 8
    group: int                                  # 16, 32, 64 or 128
    scale_unit: float

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes + self.scales.nbytes + (0 if self.offsets is None else self.offsets.nbytes))


DeviceWeight: TypeAlias = DeviceDense | DeviceAffine


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLinear:
    """A projection. Parts differ in format; their rows lie one after the other in the output's columns."""
    parts: tuple[DeviceWeight, ...]
    bias: DeviceArray | None = None             # float32, one a row of the parts
    gated: str | None = None                    # activation; then one part, gate and up rows in turns of eight

    @property
    def num_rows(self) -> int:
        return sum(part.shape[0] for part in self.parts)

    @classmethod
    def of(cls, weight: DeviceWeight, bias: DeviceArray | None = None) -> DeviceLinear:
        """Over a weight that something else uses too: a tied head."""
        return cls((weight,), bias)

    @property
    def out_columns(self) -> int:
        return self.num_rows // (1 if self.gated is None else 2)

    @property
    def in_columns(self) -> int:
        return self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts) + (0 if self.bias is None else int(self.bias.nbytes))


def unit_inputs(bits: int) -> int:
    """Inputs in 64 bytes of a row; bits 16: dense."""
    return UNIT_BYTES * 8 // bits


def pack_weight(launcher: Launcher, weight: Weight, dtype: np.dtype[Any]) -> DeviceWeight:
    """A weight [N, K] as it is multiplied by activations of `dtype`. Dense weights are rounded to it.

    Raises: ValueError where K or the numbers do not fit; MemoryError.
    """
    return _upload(launcher, [_converted(weight)], dtype)


def packed_bytes(weight: Weight) -> int:
    """Device memory that a weight takes at most, before it is packed."""
    rows, inputs = weight.shape
    if isinstance(weight, Dense):
        return rows * inputs * 2
    units, chunks = units_and_chunks(inputs, weight.bits, weight.group)
    return rows * (units * UNIT_BYTES + chunks * SCALE_CHUNK * 2 * FP16.itemsize)


def packed_linear_bytes(linear: Linear) -> int:
    """The same of a projection without its bias."""
    affine = [part for part in linear.parts if not isinstance(part, Dense)]
    if len(affine) < len(linear.parts):     # what is packed with a dense part may become dense
        return sum(max(packed_bytes(part), 2 * part.shape[0] * part.shape[1]) for part in linear.parts)
    units, chunks = units_and_chunks(linear.in_features, max(part.bits for part in affine),
                                     min(part.group for part in affine))
    return linear.out_features * (units * UNIT_BYTES + chunks * SCALE_CHUNK * 2 * FP16.itemsize)


def pack_linear(launcher: Launcher, linear: Linear, dtype: np.dtype[Any], gated: str | None = None) -> DeviceLinear:
    """A projection as `gemm.linear` takes it. Quantized parts become one, in the narrowest format that holds them all
    without loss: the projection of queries, keys and values is one launch even where v is stored with more bits.

    gated: the activation of a projection whose first half of rows are gates and whose second half are multiplied.
    Raises: ValueError where shapes, the activation or the numbers do not fit; MemoryError.
    """
    if gated not in ACTIVATIONS:
        raise ValueError(f"gated={gated!r}: no such activation ({', '.join(map(str, ACTIVATIONS))})")
    bias, stored = linear.bias, [_converted(part) for part in linear.parts]
    if gated is not None:
        order = _gate_turns(linear.out_features)
        parts: tuple[DeviceWeight, ...] = (_upload(launcher, _one_format(stored), dtype, order),)
        bias = None if bias is None else bias[order]
    else:
        runs: list[list[Weight]] = []
        is_affine = all(isinstance(part, Affine) for part in stored)
        for part in _one_format(stored) if is_affine else stored:
            if runs and _format(runs[-1][0]) == _format(part):
                runs[-1].append(part)
            else:
                runs.append([part])
        parts = tuple(_upload(launcher, run, dtype) for run in runs)
    return DeviceLinear(parts, None if bias is None else launcher.upload(np.ascontiguousarray(bias, np.float32)), gated)


def unpack_weight(weight: DeviceWeight) -> NDArray[np.float64]:
    """The numbers of a weight whose arrays are NumPy's, float64 [N, K]: what the kernels compute with."""
    if isinstance(weight, DeviceDense):
        return np.asarray(weight.data).astype(np.float64)
    rows, inputs = weight.shape
    codes = unpack_codes(np.asarray(weight.codes), weight.bits, weight.group)[:, :inputs]              # [N, K]
    centre = 1 << (weight.bits - 1)
    groups = inputs // weight.group
    scales = np.repeat(np.asarray(weight.scales)[:, :groups].astype(np.float64), weight.group, axis=1)
    wide = scales * (codes.astype(np.float64) - centre)
    if weight.offsets is not None:
        wide += np.repeat(np.asarray(weight.offsets)[:, :groups].astype(np.float64), weight.group, axis=1)
    unpacked: NDArray[np.float64] = wide * weight.scale_unit
    return unpacked


# Formats


def _converted(weight: Weight) -> Weight:
    return weight.affine() if isinstance(weight, Blocks) else weight


def _format(weight: Weight) -> tuple[int, int]:
    """Bits and group; weights alike in both can lie in one array."""
    return (weight.bits, weight.group) if isinstance(weight, Affine) else (16, 0)


def units_and_chunks(inputs: int, bits: int, group: int) -> tuple[int, int]:
    """Of a row of codes: units of 64 bytes, and chunks of scales for all inputs that these have room for."""
    units = -(-inputs // unit_inputs(bits))
    return units, -(-units * unit_inputs(bits) // (SCALE_CHUNK * group))


def _one_format(parts: Sequence[Weight]) -> list[Weight]:
    """Parts in the narrowest format that holds them all. Among affine ones nothing is lost."""
    if len({_format(part) for part in parts}) == 1:
        return list(parts)
    affine = [part for part in parts if isinstance(part, Affine)]
    if len(affine) < len(parts):
        return [part if isinstance(part, Dense) else Dense(dequantize(part)) for part in parts]
    bits, group = max(part.bits for part in affine), min(part.group for part in affine)
    return [_refined(part, bits, group) for part in affine]


def _refined(weight: Affine, bits: int, group: int) -> Affine:
    """The same weights with wider codes and smaller groups."""
    codes = weight.codes
    if weight.bits < bits:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(weight.shape)
    times = weight.group // group
    return Affine(codes, np.repeat(weight.scale, times, axis=1), np.repeat(weight.offset, times, axis=1), bits, group)


def _gate_turns(rows: int) -> NDArray[np.intp]:
    """The order of rows of a gated projection: eight gates, the eight rows they belong to, and so on."""
    if rows % (2 * GATE_TURN):
        raise ValueError(f"a gated projection of {rows} rows: must be a multiple of {2 * GATE_TURN}")
    return np.arange(rows).reshape(2, -1, GATE_TURN).swapaxes(0, 1).reshape(rows)


def _upload(launcher: Launcher, parts: Sequence[Weight], dtype: np.dtype[Any],
            order: NDArray[np.intp] | None = None) -> DeviceWeight:
    """Parts of one format in one array, rows in the given order."""
    if np.dtype(dtype) not in ACTIVATION_TYPES:
        raise ValueError(f"activations of {np.dtype(dtype)}: must be bfloat16 or float16")
    inputs = parts[0].shape[1]
    if any(part.shape[1] != inputs for part in parts):
        raise ValueError(f"parts of a projection have {', '.join(str(part.shape[1]) for part in parts)} inputs")
    affine = [part for part in parts if isinstance(part, Affine)]
    if affine:
        assert len(affine) == len(parts), "a run of parts has one format"
        return _upload_affine(launcher, affine, order)
    if inputs % 8:
        raise ValueError(f"a dense weight with {inputs} inputs: must be a multiple of 8, for reads of 16 bytes")
    rows = np.concatenate([_as_type(part, np.dtype(dtype)) for part in parts if isinstance(part, Dense)])
    return DeviceDense(launcher.upload(np.ascontiguousarray(rows if order is None else rows[order])))


def _as_type(weight: Dense, dtype: np.dtype[Any]) -> NDArray[Any]:
    stored = weight.ordered().view(BF16) if weight.is_bf16 else weight.ordered()
    if stored.dtype == dtype:
        return stored
    with np.errstate(over="ignore"):
        rows = stored.astype(np.float32).astype(dtype)
    if dtype == FP16 and not np.isfinite(rows).all():
        raise ValueError("a weight is beyond the range of float16: use bfloat16")
    return rows


def _upload_affine(launcher: Launcher, parts: Sequence[Affine], order: NDArray[np.intp] | None) -> DeviceAffine:
    bits, group, inputs = parts[0].bits, parts[0].group, parts[0].shape[1]
    if not all(np.isfinite(part.scale).all() and np.isfinite(part.offset).all() for part in parts):
        raise ValueError("a scale or an offset of a quantized weight is not finite")
    centred = [_centred(part) for part in parts]
    codes = np.concatenate([part.codes for part in centred])
    scale = np.concatenate([part.scale for part in centred])
    offset = np.concatenate([part.offset for part in centred])
    if order is not None:
        codes, scale, offset = codes[order], scale[order], offset[order]
    largest = float(max(np.abs(scale).max(initial=0), np.abs(offset).max(initial=0)))
    if largest > 1e36:
        raise ValueError(f"a quantized weight has scales or offsets of {largest:.3g}")
    # The largest number becomes one of 2^14 .. 2^15: below the end of float16, far above its denormals.
    # NOTE: 2^-100 .. 2^100, so that products with it neither vanish nor overflow in float32.
    exponent = int(np.clip(np.frexp(largest)[1] - 15, -100, 100)) if largest else 0
    scale_unit = 2.0**exponent
    _, chunks = units_and_chunks(inputs, bits, group)

    def stored(numbers: NDArray[np.float32]) -> DeviceArray:
        padded = np.zeros((len(numbers), chunks * SCALE_CHUNK), np.float16)
        padded[:, :numbers.shape[1]] = numbers / np.float32(scale_unit)
        return launcher.upload(padded)

    return DeviceAffine(launcher.upload(pack_codes(codes, bits, group)), stored(scale),
                        stored(offset) if offset.any() else None, (len(codes), inputs), bits, group, scale_unit)


def _centred(weight: Affine) -> Affine:
    """The same weights as scale * (code - centre) + offset, codes moved so that their own middle is the centre."""
    centre = 1 << (weight.bits - 1)
    own = _symmetry(weight)
    middle, codes = centre, weight.codes
    if weight.bits == 8:
        lowest, highest = int(codes.min(initial=255)), int(codes.max(initial=0))
        middle = own if own is not None else (highest + 1) // 2
        # NOTE: a middle that would push codes out of a byte is of no use; offsets then carry the difference.
        if lowest + centre - middle < 0 or highest + centre - middle > 255:
            middle = centre
        codes = codes + np.uint8((centre - middle) % 256)
    if own == middle:
        offset = np.zeros_like(weight.offset)
    else:
        with np.errstate(over="ignore"):
            offset = (weight.scale.astype(np.float64) * middle + weight.offset).astype(np.float32)
    return Affine(codes, weight.scale, offset, weight.bits, weight.group)


def _symmetry(weight: Affine) -> int | None:
    """The code that stands for zero, if it is one and the same in all groups."""
    nonzero = np.flatnonzero(weight.scale)
    if not len(nonzero):
        return None
    first = nonzero[0]
    code = -float(weight.offset.flat[first]) / float(weight.scale.flat[first])
    if not (code.is_integer() and 0 <= code < 1 << weight.bits):
        return None
    with np.errstate(over="ignore"):
        offset = (weight.scale.astype(np.float64) * -code).astype(np.float32)
    return int(code) if np.array_equal(weight.offset, offset) else None


# Codes inside a row


def pack_codes(codes: NDArray[np.uint8], bits: int, group: int) -> NDArray[np.uint8]:
    """Codes as `weights.quant.Affine` has them -> [N, units * 64] in the kernels' order; missing inputs are zeros."""
    rows, row_bytes = codes.shape
    units = -(-row_bytes // UNIT_BYTES)
    if row_bytes % UNIT_BYTES:
        filled = np.full((rows, units * UNIT_BYTES), 0x88 if bits == 4 else 0x80, np.uint8)
        filled[:, :row_bytes] = codes
        codes = filled
    # Parts of 32 inputs, mma of a part, threads, bytes of the four inputs of a thread in an mma.
    fours = codes.reshape(rows, units, 16 // bits, *((2, 4) if group == 16 else (4, 2)), bits // 2)
    if group == 16:
        fours = fours.swapaxes(3, 4)                                                    # [N, u, part, t, mma, i]
    if bits == 8:
        words = fours[..., [0, 2, 1, 3]]
    else:
        first, second = fours[..., 0], fours[..., 1]                                    # inputs 0 and 1, 2 and 3
        even = (first & 15) | (second << 4)                                             # inputs 0 and 2
        odd = (first >> 4) | (second & 0xF0)                                            # inputs 1 and 3
        words = np.stack([even, odd], axis=4)                                           # [N, u, part, t, i % 2, mma]
    return np.ascontiguousarray(words.swapaxes(2, 3)).reshape(rows, -1)


def unpack_codes(packed: NDArray[np.uint8], bits: int, group: int) -> NDArray[np.uint8]:
    """The inverse of `pack_codes`, one code a byte: [N, units * inputs of a unit]."""
    rows = len(packed)
    words = packed.reshape(rows, -1, 4, 16 // bits, 2, bits // 2)
    if bits == 8:
        fours = words[..., [0, 2, 1, 3]].swapaxes(2, 3)                                 # [N, u, part, t, mma, i]
    else:
        both = np.stack([words & 15, words >> 4], axis=-1)                  # [N, u, t, part, i % 2, mma, i / 2]
        fours = both.transpose(0, 1, 3, 2, 5, 6, 4).reshape(rows, -1, 4, 4, 2, 4)
    if group == 16:
        fours = fours.swapaxes(3, 4)
    return np.ascontiguousarray(fours).reshape(rows, -1)

"""Weights in the layout that `matmul.py` reads: strips of 32 outputs, each strip one run of memory.

A strip by kind:
  AFFINE4   a group: 32 scales, 32 offsets (float32), then for 8 inputs at a time a row of 32 words of 32 bits, one an
            output: input k of the 8 in bits 4k .. 4k + 3
  AFFINE8   a group: 32 scales, 32 offsets, then for 8 inputs two rows of 32 words: bytes of inputs 0, 1, 4, 5 and of
            inputs 2, 3, 6, 7
  FLOAT32, FLOAT16, BFLOAT16   K rows of 32 numbers, one an output
Missing outputs are zeros.

From a word float32 arithmetic takes one code by a shift and a mask, 16-bit arithmetic two: of inputs k and k + 4.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.host.simd import LANES, VECTOR_BYTES
from cuda.host.workspace import address_of, allocate
from weights.quant import Affine, Dense, Linear, Weight

AFFINE4, AFFINE8, FLOAT32, FLOAT16, BFLOAT16 = range(5)
_DENSE_KINDS = {np.dtype(np.float32): FLOAT32, np.dtype(np.float16): FLOAT16}

STRIP = 2 * LANES                               # outputs
STRIP_BYTES = 2 * VECTOR_BYTES                  # a float32 or a word of each
GROUP_HEAD_BYTES = 2 * STRIP_BYTES              # scales and offsets
BLOCK_HEAD_BYTES = 8                            # of quantized activations: a block's scale and sum
ROW_INPUTS = 8                                  # of an affine kind: 4 bits each in a row of words, 8 in two
ARENA_BYTES = 1 << 25


class Arena:
    """Memory for many weights from few large pieces, which the system can map in huge pages."""

    def __init__(self) -> None:
        self._free = np.zeros(0, np.uint8)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Zeros that begin on a cache line; kept alive by the array itself."""
        if num_bytes > len(self._free):
            self._free = np.frombuffer(allocate(max(num_bytes, ARENA_BYTES)), np.uint8)
        taken = self._free[:num_bytes]
        self._free = self._free[-(-num_bytes // VECTOR_BYTES) * VECTOR_BYTES:]
        return taken


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    kind: int
    shape: tuple[int, int]                      # N, K
    group: int                                  # of affine kinds; 0 for others
    strip_bytes: int
    strips: NDArray[np.uint8]                   # [strips, strip_bytes]
    address: int

    @property
    def num_strips(self) -> int:
        return len(self.strips)


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """Parts whose outputs lie one after the other."""
    parts: tuple[PackedWeight, ...]
    biases: tuple[NDArray[np.float32], ...]     # a part's, padded to whole strips; zeros where there is none
    bias_addresses: tuple[int, ...]

    @property
    def out_features(self) -> int:
        return sum(part.shape[0] for part in self.parts)

    @property
    def in_features(self) -> int:
        return self.parts[0].shape[1]

    @property
    def block(self) -> int:
        """Inputs that are quantized together for the affine parts; 0 where there are none."""
        return min((min(part.group, 32) for part in self.parts if part.group), default=0)


def quantized_block_bytes(block: int) -> int:
    """Scale, sum, codes."""
    return BLOCK_HEAD_BYTES + 2 * block


def pack_weight(weight: Weight, arena: Arena) -> PackedWeight:
    return _pack_affine(weight, arena) if isinstance(weight, Affine) else _pack_dense(weight, arena)


def pack_linear(linear: Linear, arena: Arena, packed: dict[int, PackedWeight]) -> PackedLinear:
    """packed: by `id`, weights that are packed already and shared (a tied head)."""
    parts = tuple(packed.get(id(part)) or pack_weight(part, arena) for part in _merge(linear.parts))
    biases, first = [], 0
    for part in parts:
        bias = arena.take(part.num_strips * STRIP_BYTES).view(np.float32)
        n = part.shape[0]
        if linear.bias is not None:
            bias[:n] = linear.bias[first:first + n]
        biases.append(bias)
        first += n
    return PackedLinear(parts, tuple(biases), tuple(address_of(bias) for bias in biases))


def _merge(parts: tuple[Weight, ...]) -> list[Weight]:
    """Neighbours of one format as one weight: one command instead of several."""
    merged: list[Weight] = [parts[0]]
    for part in parts[1:]:
        last = merged[-1]
        if isinstance(part, Affine) and isinstance(last, Affine) and (part.bits, part.group) == (last.bits, last.group):
            merged[-1] = Affine(np.concatenate([last.codes, part.codes]), np.concatenate([last.scale, part.scale]),
                                np.concatenate([last.offset, part.offset]), part.bits, part.group)
        elif (isinstance(part, Dense) and isinstance(last, Dense)
              and (part.data.dtype, part.is_bf16) == (last.data.dtype, last.is_bf16)):
            merged[-1] = Dense(np.concatenate([last.data, part.data]), part.is_bf16)
        else:
            merged.append(part)
    return merged


def _new_strips(num_outputs: int, strip_bytes: int, arena: Arena) -> NDArray[np.uint8]:
    num_strips = -(-num_outputs // STRIP)
    return arena.take(num_strips * strip_bytes).reshape(num_strips, strip_bytes)


def _strips(rows: NDArray[Any]) -> NDArray[Any]:
    """[N, X] -> [strips, 32, X], filled up with zeros."""
    missing = -len(rows) % STRIP
    if missing:
        rows = np.concatenate([rows, np.zeros((missing, rows.shape[1]), rows.dtype)])
    return rows.reshape(-1, STRIP, rows.shape[1])


def _pack_affine(weight: Affine, arena: Arena) -> PackedWeight:
    n, k = weight.shape
    num_groups, num_rows = k // weight.group, weight.group // ROW_INPUTS
    kind, unit, halves = (AFFINE4, np.uint32, 1) if weight.bits == 4 else (AFFINE8, np.uint16, 2)
    group_bytes = GROUP_HEAD_BYTES + num_rows * halves * STRIP_BYTES
    strips = _new_strips(n, num_groups * group_bytes, arena)
    groups = strips.reshape(len(strips), num_groups, group_bytes)
    head = groups[:, :, :GROUP_HEAD_BYTES].view(np.float32)                                    # [strips, groups, 64]
    head[:, :, :STRIP] = _strips(weight.scale).transpose(0, 2, 1)
    head[:, :, STRIP:] = _strips(weight.offset).transpose(0, 2, 1)
    # Of 8-bit codes the units are inputs 0, 1 | 2, 3 | 4, 5 | 6, 7: the first and the third share a word.
    units = _strips(np.ascontiguousarray(weight.codes).view(unit))
    units = units.reshape(len(strips), STRIP, num_groups, num_rows, halves, halves)
    rows = groups[:, :, GROUP_HEAD_BYTES:].view(unit).reshape(len(strips), num_groups, num_rows, halves, STRIP, halves)
    np.copyto(rows, units.transpose(0, 2, 3, 5, 1, 4))
    return PackedWeight(kind, (n, k), weight.group, strips.shape[1], strips, address_of(strips))


def _pack_dense(weight: Dense, arena: Arena) -> PackedWeight:
    n, k = weight.shape
    dtype = weight.data.dtype
    kind = BFLOAT16 if weight.is_bf16 else _DENSE_KINDS[dtype]
    strips = _new_strips(n, k * STRIP * dtype.itemsize, arena)
    np.copyto(strips.view(dtype).reshape(len(strips), k, STRIP), _strips(weight.data).transpose(0, 2, 1))
    return PackedWeight(kind, (n, k), 0, strips.shape[1], strips, address_of(strips))

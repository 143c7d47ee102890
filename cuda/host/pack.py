"""Weights in the layout that `matmul.py` reads: strips of 16 outputs, each strip one run of memory.

Vector k of a strip holds input k's 16 weights, one a lane. By kind:
  AFFINE4   a group: 16 scales, 16 offsets (float32), then group / 2 rows of 16 bytes: k = 2j in the low nibbles of row
            j, k = 2j + 1 in the high ones
  AFFINE8   a group: 16 scales, 16 offsets, then group rows of 16 bytes
  FLOAT32, FLOAT16, BFLOAT16   K rows of 16 numbers
Strips come in pairs: missing outputs are zeros.
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

PAIR = 2 * LANES                                # outputs of a pair of strips
GROUP_HEAD_BYTES = 2 * VECTOR_BYTES             # scales and offsets
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
    def num_pairs(self) -> int:
        return -(-self.shape[0] // PAIR)


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """Parts whose outputs lie one after the other."""
    parts: tuple[PackedWeight, ...]
    biases: tuple[NDArray[np.float32], ...]     # a part's, padded to whole pairs; zeros where there is none
    bias_addresses: tuple[int, ...]

    @property
    def out_features(self) -> int:
        return sum(part.shape[0] for part in self.parts)

    @property
    def in_features(self) -> int:
        return self.parts[0].shape[1]


def pack_weight(weight: Weight, arena: Arena) -> PackedWeight:
    return _pack_affine(weight, arena) if isinstance(weight, Affine) else _pack_dense(weight, arena)


def pack_linear(linear: Linear, arena: Arena, packed: dict[int, PackedWeight]) -> PackedLinear:
    """packed: by `id`, weights that are packed already and shared (a tied head)."""
    parts = tuple(packed.get(id(part)) or pack_weight(part, arena) for part in _merge(linear.parts))
    biases, first = [], 0
    for part in parts:
        bias = arena.take(part.num_pairs * PAIR * 4).view(np.float32)
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
    num_strips = 2 * -(-num_outputs // PAIR)
    return arena.take(num_strips * strip_bytes).reshape(num_strips, strip_bytes)


def _strips(rows: NDArray[Any]) -> NDArray[Any]:
    """[N, X] -> [N / 16 rounded up, 16, X], filled up with zeros."""
    missing = -len(rows) % LANES
    if missing:
        rows = np.concatenate([rows, np.zeros((missing, rows.shape[1]), rows.dtype)])
    return rows.reshape(-1, LANES, rows.shape[1])


def _pack_affine(weight: Affine, arena: Arena) -> PackedWeight:
    n, k = weight.shape
    num_groups, row_bytes = k // weight.group, weight.group * weight.bits // 8
    group_bytes = GROUP_HEAD_BYTES + row_bytes * LANES
    strips = _new_strips(n, num_groups * group_bytes, arena)
    num_strips = -(-n // LANES)
    groups = strips[:num_strips].reshape(num_strips, num_groups, group_bytes)
    head = groups[:, :, :GROUP_HEAD_BYTES].view(np.float32)                                    # [strips, groups, 32]
    head[:, :, :LANES] = _strips(weight.scale).transpose(0, 2, 1)
    head[:, :, LANES:] = _strips(weight.offset).transpose(0, 2, 1)
    codes = _strips(weight.codes).reshape(num_strips, LANES, num_groups, row_bytes)
    rows = groups[:, :, GROUP_HEAD_BYTES:].reshape(num_strips, num_groups, row_bytes, LANES)
    np.copyto(rows, codes.transpose(0, 2, 3, 1))
    kind = AFFINE4 if weight.bits == 4 else AFFINE8
    return PackedWeight(kind, (n, k), weight.group, strips.shape[1], strips, address_of(strips))


def _pack_dense(weight: Dense, arena: Arena) -> PackedWeight:
    n, k = weight.shape
    dtype = weight.data.dtype
    kind = BFLOAT16 if weight.is_bf16 else _DENSE_KINDS[dtype]
    strips = _new_strips(n, k * LANES * dtype.itemsize, arena)
    num_strips = -(-n // LANES)
    np.copyto(strips[:num_strips].view(dtype).reshape(num_strips, k, LANES), _strips(weight.data).transpose(0, 2, 1))
    return PackedWeight(kind, (n, k), 0, strips.shape[1], strips, address_of(strips))

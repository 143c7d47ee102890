"""Weights in the layout that `matmul.py` reads: strips of 32 outputs, each strip one run of memory. See `packer.py`.

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

import numpy as np
from numpy.typing import NDArray

from cuda.host.simd import LANES, VECTOR_BYTES
from cuda.host.workspace import allocate

AFFINE4, AFFINE8, FLOAT32, FLOAT16, BFLOAT16 = range(5)

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

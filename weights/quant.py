"""Weight formats: what a stored tensor is after loading, and its one dequantisation.

Two kinds so far. `Dense`: plain numbers. `Affine`: integer codes with a scale and an offset per group along K,
`w[n, k] = scale[n, k // group] * q[n, k] + offset[n, k // group]`, correctly rounded to float32 (as one fused
multiply-add does it). GGUF's Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K all become `Affine` without loss; until
a back end asks for that they are `Blocks`, where the file has them.

Letters: N output features, K input features. A weight is always [N, K]; a layer computes y = x W^T.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """Unquantised weight [N, K] float32, float16, or bfloat16 as raw uint16 bits (`is_bf16`).

    The data may be a read-only view of the model's file. rows [N]: where in `data` each one is; None: in order.
    """
    data: NDArray[np.generic]
    is_bf16: bool = False
    rows: NDArray[np.intp] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.data if self.rows is None else self.rows), self.data.shape[1]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.data.itemsize

    def ordered(self) -> NDArray[np.generic]:
        """The data with all rows in order."""
        return self.data if self.rows is None else self.data[self.rows]


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """Group-quantised weight [N, K].

    codes: uint8 [N, K * bits // 8]; with 4 bits, byte j holds k = 2j in its low and k = 2j + 1 in its high nibble.
    scale, offset: float32 [N, K // group].
    """
    codes: NDArray[np.uint8]
    scale: NDArray[np.float32]
    offset: NDArray[np.float32]
    bits: int                               # 4 or 8
    group: int                              # 16, 32, 64 or 128

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.bits

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + self.offset.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class BlockFormat:
    """A file's layout of rows: blocks of some weights each, one after the other. See `weights.ggml`."""
    name: str
    weights_per_block: int
    block_bytes: int
    bits: int                               # of the `Affine` that it becomes
    group: int
    convert: Callable[[NDArray[np.uint8]], Affine]      # of blocks [N, B, block_bytes]; raises ValueError


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Group-quantised weight [N, K] as its file has it.

    data: uint8 [N, B, block_bytes], a read-only view of the file. rows [N]: as of `Dense`.
    """
    data: NDArray[np.uint8]
    format: BlockFormat
    name: str                               # file and tensor, for errors
    rows: NDArray[np.intp] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return (len(self.data if self.rows is None else self.rows),
                self.data.shape[1] * self.format.weights_per_block)

    @property
    def bits(self) -> int:
        return self.format.bits

    @property
    def group(self) -> int:
        return self.format.group

    @property
    def nbytes(self) -> int:
        """Of the `Affine` that it becomes."""
        n, k = self.shape
        return n * k * self.bits // 8 + n * k // self.group * 8

    def affine(self) -> Affine:
        """Raises: ValueError naming the tensor if a block's scale is infinite or NaN."""
        try:
            return self.format.convert(self.data if self.rows is None else self.data[self.rows])
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None


Quantized: TypeAlias = Affine | Blocks
Weight: TypeAlias = Dense | Quantized


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A projection: weights stacked along N (q, k, v may be stored in different formats) and an optional bias [N]."""
    parts: tuple[Weight, ...]
    bias: NDArray[np.float32] | None = None

    @property
    def out_features(self) -> int:
        return sum(part.shape[0] for part in self.parts)

    @property
    def in_features(self) -> int:
        return self.parts[0].shape[1]


def unpack_codes(weight: Affine) -> NDArray[np.uint8]:
    """Codes one per byte, uint8 [N, K]."""
    if weight.bits == 8:
        return weight.codes
    pairs = np.stack([weight.codes & 15, weight.codes >> 4], axis=-1)
    return pairs.reshape(weight.shape)                                                        # [N, K]


def dequantize(weight: Weight) -> NDArray[np.float32]:
    """The weight as float32 [N, K], correctly rounded. Raises: ValueError, see `Blocks.affine`."""
    if isinstance(weight, Dense):
        if weight.is_bf16:
            return (weight.ordered().astype(np.uint32) << 16).view(np.float32)
        return np.ascontiguousarray(weight.ordered(), dtype=np.float32)
    if isinstance(weight, Blocks):
        weight = weight.affine()
    n, k = weight.shape
    grouped = unpack_codes(weight).reshape(n, k // weight.group, weight.group)                # [N, K/g, g]
    # NOTE: scale * code is exact in float64, so the sum is rounded once, as by an FMA: Q6_K needs it to equal ggml.
    wide = weight.scale[..., None].astype(np.float64) * grouped + weight.offset[..., None]
    return wide.astype(np.float32).reshape(n, k)


def take_rows(weight: Weight, rows: NDArray[np.intp]) -> Weight:
    """The weight with row i replaced by its row rows[i]; of an `Affine` a copy. rows [N']: [N, K] -> [N', K]"""
    if isinstance(weight, Affine):
        return Affine(weight.codes[rows], weight.scale[rows], weight.offset[rows], weight.bits, weight.group)
    return replace(weight, rows=rows if weight.rows is None else weight.rows[rows])

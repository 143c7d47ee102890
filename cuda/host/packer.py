"""Weights into strips (`pack.py`), from where their file is mapped, by commands that a team of threads runs.

Neighbours of a projection that are alike in kind and group become one weight, so that a step has one command for them.
No weight is copied on the way.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.host.commands import CommandList, Team
from cuda.host.pack import (
    AFFINE4,
    AFFINE8,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    GROUP_HEAD_BYTES,
    ROW_INPUTS,
    STRIP,
    STRIP_BYTES,
    Arena,
    PackedLinear,
    PackedWeight,
)
from cuda.host.repack import FORMATS, REPACK_AFFINE, REPACK_BLOCKS, REPACK_DENSE
from cuda.host.workspace import address_of
from weights.quant import Affine, Blocks, Dense, Linear, Weight


class Packer:
    """`weight` and `linear` say where everything will be; it is there after `run`."""

    def __init__(self) -> None:
        self._arena = Arena()
        self._commands = CommandList()
        self._kept: list[Any] = []                              # what the commands read and write
        self._flaws: list[tuple[str, NDArray[np.int64]]] = []   # groups whose numbers are not finite, by tensor
        self._shared: dict[int, PackedWeight] = {}              # by id

    def shared(self, weight: Weight) -> PackedWeight:
        """A weight that may come again, and is packed once: a tied head. It must live as long as this."""
        self._shared[id(weight)] = packed = self._pack([weight])
        return packed

    def linear(self, linear: Linear) -> PackedLinear:
        parts = tuple(self._shared.get(id(run[0])) or self._pack(run) for run in _runs(linear.parts))
        biases, first = [], 0
        for part in parts:
            bias = self._arena.take(part.num_strips * STRIP_BYTES).view(np.float32)
            n = part.shape[0]
            if linear.bias is not None:
                bias[:n] = linear.bias[first:first + n]
            biases.append(bias)
            first += n
        return PackedLinear(parts, tuple(biases), tuple(address_of(bias) for bias in biases))

    def run(self, team: Team) -> None:
        """Raises: ValueError naming a tensor with a scale that is infinite or NaN."""
        team.run(self._commands)
        for name, count in self._flaws:
            if count[0]:
                raise ValueError(f"{name}: the scale of a block is not finite")
        self._commands.clear()
        self._kept.clear()
        self._flaws.clear()

    def _pack(self, run: Sequence[Weight]) -> PackedWeight:
        """Weights of one format as one."""
        num_outputs, (_, in_features) = sum(part.shape[0] for part in run), run[0].shape
        kind, group = _format(run[0])
        if group:
            bits = 4 if kind == AFFINE4 else 8
            group_bytes = GROUP_HEAD_BYTES + group // ROW_INPUTS * (STRIP_BYTES * bits // 4)
            strip_bytes = in_features // group * group_bytes
        else:
            strip_bytes = in_features * STRIP * (4 if kind == FLOAT32 else 2)
        num_strips = -(-num_outputs // STRIP)
        strips = self._arena.take(num_strips * strip_bytes).reshape(num_strips, strip_bytes)
        self._kept.append(strips)
        address, start = address_of(strips), 0
        for part in run:
            self._add(part, start, address, strip_bytes)
            start += part.shape[0]
        return PackedWeight(kind, (num_outputs, in_features), group, strip_bytes, strips, address)

    def _add(self, part: Weight, start: int, strips: int, strip_bytes: int) -> None:
        """Its rows are outputs from `start` on."""
        rows, in_features = part.shape
        items = (start + rows - 1) // STRIP - start // STRIP + 1
        if isinstance(part, Blocks):
            flaws, format = np.zeros(1, np.int64), part.format
            self._flaws.append((part.name, flaws))
            self._commands.add(REPACK_BLOCKS, items, 1, self._row_addresses(part), rows, start, strips,
                               strip_bytes, FORMATS[format.name], part.data.shape[1], format.block_bytes,
                               format.weights_per_block // format.group, format.bits, format.group, address_of(flaws))
        elif isinstance(part, Affine):
            arrays = [np.ascontiguousarray(array) for array in (part.codes, part.scale, part.offset)]
            self._kept.append(arrays)
            self._commands.add(REPACK_AFFINE, items, 1, *map(address_of, arrays), rows, start, strips, strip_bytes,
                               in_features // part.group, part.bits, part.group)
        else:
            self._commands.add(REPACK_DENSE, items, 1, self._row_addresses(part), rows, start, strips,
                               strip_bytes, in_features, part.data.itemsize)

    def _row_addresses(self, part: Dense | Blocks) -> int:
        """Of a table of them."""
        data = np.ascontiguousarray(part.data)
        rows = np.arange(len(data)) if part.rows is None else part.rows
        addresses = address_of(data) + data.nbytes // len(data) * rows.astype(np.int64)
        self._kept.append((data, addresses))
        return address_of(addresses)


def _runs(parts: Sequence[Weight]) -> list[list[Weight]]:
    """Neighbours of one format together."""
    runs: list[list[Weight]] = []
    for part in parts:
        if runs and _format(runs[-1][0]) == _format(part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _format(weight: Weight) -> tuple[int, int]:
    """Kind and group, 0 where there is none."""
    if not isinstance(weight, Dense):
        return AFFINE4 if weight.bits == 4 else AFFINE8, weight.group
    if weight.is_bf16:
        return BFLOAT16, 0
    return {np.dtype(np.float32): FLOAT32, np.dtype(np.float16): FLOAT16}[weight.data.dtype], 0

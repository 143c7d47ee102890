"""What the tests of both attention kernels share: a cache, and any part of its sequences' rows run by themselves."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.kernels.paged_kv import random_cache
from cuda.kernels.types import BF16
from tests.cuda_emulator.launcher import EmulatorLauncher

Piece = tuple[int, int, int]                # sequence, start, end
Run = Callable[["PagedAttention", NDArray[Any], NDArray[np.int32]], None]

NOTHING = np.float32(-1232)                 # a bfloat16


class PagedAttention:
    """Rows of sequences [start, end) over one cache; any part of them can be run."""

    def __init__(self, run: Run, launcher: EmulatorLauncher, lengths: Sequence[tuple[int, int]], num_heads: int,
                 num_kv_heads: int, head_dim: int, kv_dtype: np.dtype[Any] = BF16, window: int | None = None) -> None:
        """run(attention, out, runs) launches the kernel."""
        self._run = run
        self.launcher, self.lengths, self.window = launcher, lengths, window
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.first_rows = np.cumsum([0, *(end - start for start, end in lengths)])
        inputs = random_cache(np.random.default_rng(3), BF16, kv_dtype, self.runs(self.pieces), num_heads, num_kv_heads,
                              head_dim, window)
        self.inputs: dict[str, Any] = {name: None if value is None else launcher.upload(value)
                                       for name, value in inputs.items()}

    @property
    def pieces(self) -> list[Piece]:
        return [(s, start, end) for s, (start, end) in enumerate(self.lengths)]

    def runs(self, pieces: Sequence[Piece]) -> NDArray[np.int32]:
        return np.array([(self.first_rows[s] + start - self.lengths[s][0], end - start, start, s)
                         for s, start, end in pieces], np.int32)

    def run(self, pieces: Sequence[Piece]) -> NDArray[Any]:
        """All rows [T, H D]; those of no piece are NOTHING."""
        nothing = np.full((self.first_rows[-1], self.num_heads * self.head_dim), NOTHING)
        out = self.launcher.upload(nothing.astype(BF16))
        self._run(self, out, self.runs(pieces))
        return self.launcher.download(out)

    def assert_same_bits_in_pieces(self, steps: Sequence[int]) -> None:
        """All together, then each sequence alone, so many rows at a time."""
        expected = self.run(self.pieces)
        for step in steps:
            for s, start, end in self.pieces:
                for chunk in range(start, end, step):
                    piece = s, chunk, min(chunk + step, end)
                    first = self.first_rows[s] - start
                    rows = slice(first + piece[1], first + piece[2])
                    result = self.run([piece])
                    assert result[rows].tobytes() == expected[rows].tobytes(), piece
                    result[rows] = NOTHING
                    assert (result == NOTHING).all(), "rows of no item stay as they were"

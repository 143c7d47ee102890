"""prefill_attention beyond its cases: a row's bits in any chunk, the work list, what is refused."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cuda.kernels import prefill_attention
from cuda.kernels.prefill_attention import plan
from cuda.kernels.types import BF16, FP16
from tests.cuda_emulator import build
from tests.cuda_emulator.launcher import EmulatorLauncher
from tests.kernels.paged_attention import PagedAttention

SPEC = prefill_attention.SPEC
INT8, FP8 = np.dtype(np.int8), np.dtype(np.uint8)

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))


@pytest.fixture(scope="module")
def launcher() -> EmulatorLauncher:
    return EmulatorLauncher(order=3, specs=[SPEC])


def run(attention: PagedAttention, out: NDArray[Any], runs: NDArray[np.int32]) -> None:
    work = plan(runs, attention.num_heads // attention.num_kv_heads)
    padded = np.concatenate([work, np.zeros((2, 4), np.int32)])
    prefill_attention.prefill_attention(
        attention.launcher, out, **attention.inputs, work=attention.launcher.upload(padded),
        num_heads=attention.num_heads, scale=attention.head_dim**-0.5, window=attention.window)


@pytest.mark.parametrize(("group", "head_dim", "kv_dtype", "window"), [
    (2, 16, BF16, None), (3, 32, BF16, 25), (2, 64, INT8, None), (5, 64, FP8, 40),
])
def test_a_row_has_the_same_bits_in_any_chunk(launcher: EmulatorLauncher, group: int, head_dim: int,
                                              kv_dtype: np.dtype[Any], window: int | None) -> None:
    lengths = [(0, 70), (100, 131), (5, 6)]
    attention = PagedAttention(run, launcher, lengths, group, 1, head_dim, kv_dtype, window)
    attention.assert_same_bits_in_pieces(steps=(7, 32))


def test_a_work_list_covers_every_row_once_and_starts_with_the_most_keys() -> None:
    runs = np.array([(0, 1, 600, 4), (1, 300, 500, 2), (301, 3, 0, 0)], np.int32)
    for group, rows_of_item in ((1, 128), (3, 42), (128, 1)):
        work = plan(runs, group)
        assert work[:, 1].max() == rows_of_item
        assert (np.diff(work[:, 2]) <= 0).all()
        rows = sorted((row + i, position + i, table_row) for row, num_rows, position, table_row in work.tolist()
                      for i in range(num_rows))
        assert rows == sorted((first + i, start + i, table_row) for first, length, start, table_row in runs.tolist()
                              for i in range(length))


def test_an_empty_plan_is_empty() -> None:
    assert plan(np.zeros((0, 4), np.int32), 2).shape == (0, 4)


@pytest.mark.parametrize(("change", "message"), [
    ({"work": np.zeros((1, 8), np.int32)}, r"work must be int32\[any, 4\], not int32\[1, 8\]"),
    ({"out": np.zeros((1, 64), FP16)}, r"out must be bfloat16\[1, 64\], not float16\[1, 64\]"),
    ({"block_table": np.zeros((1, 1), np.int64)}, r"block_table must be int32\[any, any\]"),
    ({"k_scale": np.zeros((2, 1, 16), np.float32)}, "k_scale is not used with a KV cache of bfloat16"),
])
def test_what_does_not_fit_is_refused(launcher: EmulatorLauncher, change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "out": np.zeros((1, 64), BF16), "qkv": np.zeros((1, 128), BF16), "k_cache": np.zeros((2, 1, 16, 32), BF16),
        "v_cache": np.zeros((2, 1, 16, 32), BF16), "k_scale": None, "v_scale": None,
        "block_table": np.zeros((1, 1), np.int32), "work": np.zeros((1, 4), np.int32), "num_heads": 2, "scale": 1.0}
    with pytest.raises(ValueError, match=message):
        prefill_attention.prefill_attention(launcher, **{**arguments, **change})

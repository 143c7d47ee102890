"""decode_attention beyond its cases: a row's bits in any company, the work list, the merge of splits, refusals."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cuda.kernels import decode_attention
from cuda.kernels.decode_attention import counters_size, cut, partials_size, plan
from cuda.kernels.types import BF16
from tests.cuda_emulator import build
from tests.cuda_emulator.launcher import EmulatorLauncher
from tests.kernels.paged_attention import PagedAttention

SPEC = decode_attention.SPEC
INT8, FP8 = np.dtype(np.int8), np.dtype(np.uint8)

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))


@pytest.fixture(scope="module")
def launcher() -> EmulatorLauncher:
    return EmulatorLauncher(order=3, specs=[SPEC])


def run_work(attention: PagedAttention, out: NDArray[Any], work: NDArray[np.int32]) -> None:
    launcher, num_heads, num_kv_heads = attention.launcher, attention.num_heads, attention.num_kv_heads
    partials = launcher.empty(partials_size(len(work), num_heads, num_kv_heads, attention.head_dim), np.float32)
    counters = launcher.zeros(counters_size(len(work), num_heads, num_kv_heads), np.int32)
    decode_attention.decode_attention(
        launcher, out, **attention.inputs, work=launcher.upload(work), partials=partials, counters=counters,
        num_heads=num_heads, scale=attention.head_dim**-0.5, window=attention.window)
    assert not launcher.download(counters).any(), "counters are as they were for the next launch"


def run(attention: PagedAttention, out: NDArray[Any], runs: NDArray[np.int32]) -> None:
    run_work(attention, out, plan(runs, attention.num_heads // attention.num_kv_heads, attention.window))


def run_shuffled(attention: PagedAttention, out: NDArray[Any], runs: NDArray[np.int32]) -> None:
    work = plan(runs, attention.num_heads // attention.num_kv_heads, attention.window)
    padded = np.concatenate([work, np.zeros((3, 8), np.int32)])
    run_work(attention, out, np.random.default_rng(0).permutation(padded))


@pytest.mark.parametrize(("group", "kv_dtype", "window"), [
    (2, BF16, None), (2, INT8, None), (2, FP8, 37), (2, BF16, 20), (3, BF16, None), (16, BF16, 20),
])
def test_a_row_has_the_same_bits_in_any_company(launcher: EmulatorLauncher, group: int, kv_dtype: np.dtype[Any],
                                                window: int | None) -> None:
    """One of the sequences lies across the end of a split."""
    lengths = [(508, 516), (30, 36), (0, 5)]
    attention = PagedAttention(run, launcher, lengths, group, 1, 32, kv_dtype, window)
    attention.assert_same_bits_in_pieces(steps=(1, 3, 8))


def test_the_order_of_items_and_padding_change_nothing(launcher: EmulatorLauncher) -> None:
    lengths = [(1030, 1031), (510, 514), (7, 8)]
    results = []
    for how in (run, run_shuffled):
        attention = PagedAttention(how, launcher, lengths, 2, 2, 32)
        results.append(attention.run(attention.pieces).tobytes())
    assert results[0] == results[1]


def test_the_block_that_arrives_last_merges_whichever_it_is() -> None:
    results = []
    for order in (0, 1, 2, 3):
        attention = PagedAttention(run, EmulatorLauncher(order=order, specs=[SPEC]), [(1100, 1102)], 2, 2, 32)
        results.append(attention.run(attention.pieces).tobytes())
    assert len(set(results)) == 1


def test_a_work_list_covers_every_row_and_key_once() -> None:
    runs = np.array([(0, 1, 600, 4), (1, 20, 500, 2), (21, 3, 0, 0)], np.int32)
    for group, window, rows_of_item in ((4, None, 4), (1, None, 8), (3, 100, 5), (40, 700, 1)):
        work = plan(runs, group, window)
        assert work[:, 1].max() == min(rows_of_item, 20)
        seen: dict[tuple[int, int], list[int]] = {}
        for row, num_rows, position, table_row, first_key, split, num_splits, slot in work.tolist():
            assert 0 <= split < num_splits
            assert 0 <= slot <= len(work) - num_splits
            end_key = min(position + num_rows, (first_key // 512 + 1) * 512)
            assert 0 < end_key - first_key <= 512
            for i in range(num_rows):
                seen.setdefault((row + i, table_row), []).extend(
                    key for key in range(first_key, end_key)
                    if key <= position + i and (window is None or key > position + i - window))
        expected = {(first + i, table_row): list(range(0 if window is None else max(0, start + i - window + 1),
                                                       start + i + 1))
                    for first, length, start, table_row in runs.tolist() for i in range(length)}
        assert {row: sorted(keys) for row, keys in seen.items()} == expected


def test_an_empty_plan_is_empty() -> None:
    assert plan(np.zeros((0, 4), np.int32), 2, None).shape == (0, 8)


@pytest.mark.parametrize(("change", "message"), [
    ({"work": np.zeros((1, 4), np.int32)}, r"work must be int32\[any, 8\], not int32\[1, 4\]"),
    ({"counters": np.zeros(0, np.int32)}, "counters of 0 are too small for 1 items"),
    ({"partials": np.zeros(7, np.float32)}, "partials of 7 are too small for 1 items"),
    ({"out": np.zeros((1, 48), BF16)}, r"out must be bfloat16\[1, 64\], not bfloat16\[1, 48\]"),
    ({"sinks": np.zeros(3, np.float32)}, r"sinks must be float32\[2\]"),
    ({"num_heads": 3}, r"qkv must be bfloat16\[any, 160\]"),
])
def test_what_does_not_fit_is_refused(launcher: EmulatorLauncher, change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "out": np.zeros((1, 64), BF16), "qkv": np.zeros((1, 128), BF16), "k_cache": np.zeros((2, 1, 16, 32), BF16),
        "v_cache": np.zeros((2, 1, 16, 32), BF16), "k_scale": None, "v_scale": None,
        "block_table": np.zeros((1, 1), np.int32), "work": np.zeros((1, 8), np.int32),
        "partials": np.zeros(partials_size(1, 2, 1, 32), np.float32), "counters": np.zeros(1, np.int32),
        "num_heads": 2, "scale": 1.0}
    with pytest.raises(ValueError, match=message):
        decode_attention.decode_attention(launcher, **{**arguments, **change})


def test_head_sizes_that_no_kernel_has_are_refused(launcher: EmulatorLauncher) -> None:
    for head_dim, message in ((20, "no multiple of 8"), (264, "at most 256")):
        cache = np.zeros((2, 1, 16, head_dim), BF16)
        with pytest.raises(ValueError, match=message):
            decode_attention.decode_attention(
                launcher, np.zeros((1, head_dim), BF16), np.zeros((1, 3 * head_dim), BF16), cache, cache, None, None,
                np.zeros((1, 1), np.int32), np.zeros((1, 8), np.int32), np.zeros(9999, np.float32),
                np.zeros(1, np.int32), 1, 1.0)


def test_parts_of_a_work_list_are_the_whole() -> None:
    """Runs of several splits stay together, and their results have places of their own in each part."""
    runs = np.array([[0, 1, 1500, 0], [1, 1, 30, 1], [2, 1, 5000, 2], [3, 1, 511, 3], [4, 1, 512, 4]], np.int32)
    work = plan(runs, 4)
    parts = cut(work, 11)
    assert [len(part) for part in parts] == [4, 11, 2]
    assert max(map(len, cut(work, len(work)))) == len(work)
    joined = np.concatenate(parts)
    np.testing.assert_array_equal(joined[:, :7], work[:, :7])
    for part in parts:
        np.testing.assert_array_equal(part[:, 7], np.arange(len(part)) - part[:, 5])
    with pytest.raises(AssertionError, match="10 splits of a run, at most 9"):
        cut(work, 9)

"""Products with packed weights: every format, any shape, and the same bits for a row in any company."""
from __future__ import annotations

import numpy as np
import pytest

from cuda.host import ops as ops_module
from cuda.host.ops import HostOps
from cuda.host.register_tile import MAX_ROWS, PACKED_TILES
from tests.cuda.host_support import (
    Floats,
    assert_same_bits,
    assert_writes_its_rows_alone,
    host_ops,
    make_spec,
    prepare,
    random_affine,
    random_dense,
    random_floats,
)
from weights.quant import Linear, Weight, dequantize

# One tile or less, whole tiles, tiles of unequal height.
MANY = PACKED_TILES * MAX_ROWS + 1              # rows that are worth unpacked weights
ROWS = sorted({1, 2, 3, 5, 6, 7, MAX_ROWS - 1, MAX_ROWS, MAX_ROWS + 1, 2 * MAX_ROWS, 2 * MAX_ROWS + 1, MANY - 1, MANY})

FORMATS = [("f4", 0, 0), ("f2", 0, 0), ("bf16", 0, 0), *(("affine", bits, group) for bits in (4, 8)
                                                       for group in (16, 32, 64, 128))]


def make_weight(format: tuple[str, int, int], outputs: int, inputs: int, seed: int = 0) -> Weight:
    kind, bits, group = format
    if kind == "affine":
        return random_affine(seed, outputs, inputs, bits, group)
    return random_dense(seed, outputs, inputs, kind)


def multiply(ops: HostOps, head: Linear, x: Floats) -> Floats:
    prepared = prepare(ops, make_spec(head.in_features), head)
    y = ops.linear(x, prepared.head)
    ops.finish()
    return np.array(y)


def dense(head: Linear) -> Floats:
    return np.concatenate([dequantize(part) for part in head.parts])


def assert_product(y: Floats, x: Floats, head: Linear) -> None:
    """Within what rounding a float32 sum over K may cost."""
    matrix = dense(head).astype(np.float64)
    expected = x.astype(np.float64) @ matrix.T
    bound = np.abs(x).astype(np.float64) @ np.abs(matrix).T
    if head.bias is not None:
        expected, bound = expected + head.bias, bound + np.abs(head.bias)
    assert (np.abs(y - expected) <= (x.shape[1] + 1) * 2.0**-24 * bound + 1e-30).all()


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: "-".join(map(str, format)))
def test_product_and_its_bits_for_any_number_of_rows(format: tuple[str, int, int]) -> None:
    outputs, inputs = 72, 384
    head = Linear((make_weight(format, outputs, inputs),), random_floats(1, outputs))
    x = random_floats(2, max(ROWS), inputs)
    with host_ops() as ops:
        prepared = prepare(ops, make_spec(inputs), head)

        def run(rows: Floats) -> Floats:
            y = ops.linear(rows, prepared.head)
            ops.finish()
            return np.array(y)

        whole = run(x)
        assert_product(whole, x, head)
        for num_rows in ROWS:
            for first in {0, (max(ROWS) - num_rows) // 2, max(ROWS) - num_rows}:
                assert_same_bits(run(x[first:first + num_rows]), whole[first:first + num_rows])


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: "-".join(map(str, format)))
@pytest.mark.parametrize("num_rows", [1, MAX_ROWS + 1, MANY])
def test_weights_are_dequantized_to_the_bit(format: tuple[str, int, int], num_rows: int) -> None:
    """A row with a single 1 picks a column of W."""
    outputs, inputs = 33, 128
    weight = make_weight(format, outputs, inputs)
    with host_ops() as ops:
        prepared = prepare(ops, make_spec(inputs), Linear((weight,)))
        columns = []
        for first in range(0, inputs, num_rows):
            y = ops.linear(np.eye(inputs, dtype=np.float32)[first:first + num_rows], prepared.head)
            ops.finish()
            columns.append(np.array(y))
    np.testing.assert_array_equal(np.concatenate(columns).T, dequantize(weight))


@pytest.mark.parametrize("inputs", [1, 7, 16, 64, 72, 112])
def test_any_number_of_outputs_and_inputs(inputs: int) -> None:
    formats = [("f4", 0, 0), ("bf16", 0, 0)] + ([("affine", 4, 16), ("affine", 8, 16)] if inputs % 16 == 0 else [])
    with host_ops() as ops:
        for format in formats:
            for outputs in (1, 15, 16, 17, 31, 32, 33, 100):
                for num_rows in (1, MAX_ROWS + 1, MANY):
                    head = Linear((make_weight(format, outputs, inputs),))
                    x = random_floats(3, num_rows, inputs)
                    assert_product(multiply(ops, head, x), x, head)


def test_parts_of_different_formats_with_a_bias() -> None:
    """Parts that end inside a pair of strips, equal neighbours, and all of them at once."""
    inputs = 128
    parts = (random_affine(0, 20, inputs, 4, 32), random_affine(1, 8, inputs, 4, 32),
             random_affine(2, 8, inputs, 8, 16), random_dense(3, 5, inputs, "f4"), random_dense(4, 40, inputs, "bf16"),
             random_dense(5, 3, inputs, "bf16"), random_dense(6, 1, inputs, "f2"), random_affine(7, 33, inputs, 4, 64))
    with host_ops() as ops:
        for bias in (None, random_floats(8, sum(part.shape[0] for part in parts))):
            for num_rows in (1, 5, MAX_ROWS + 3, MANY):
                head, x = Linear(parts, bias), random_floats(9, num_rows, inputs)
                assert_product(multiply(ops, head, x), x, head)


@pytest.mark.parametrize("format", [("f4", 0, 0), ("f2", 0, 0), ("affine", 4, 32), ("affine", 8, 32)], ids=str)
def test_nothing_else_is_written(format: tuple[str, int, int]) -> None:
    with host_ops() as ops:
        for outputs in (1, 31, 40, 64):
            for num_rows in (1, 3, MAX_ROWS + 1, MANY):
                assert_writes_its_rows_alone(ops, Linear((make_weight(format, outputs, 64),)), num_rows)


def test_inputs_may_lie_anywhere() -> None:
    """Rows of a larger array, not aligned, are read as they are."""
    head = Linear((random_affine(0, 32, 64, 4, 32),))
    wide = random_floats(1, 20, 80)
    with host_ops() as ops:
        expected = multiply(ops, head, np.ascontiguousarray(wide[2:18, 3:67]))
        assert_same_bits(multiply(ops, head, wide[2:18, 3:67]), expected)


def test_no_rows() -> None:
    with host_ops() as ops:
        assert multiply(ops, Linear((random_affine(0, 32, 64, 4, 32),)), np.zeros((0, 64), np.float32)).shape == (0, 32)


@pytest.mark.parametrize("num_rows", [1, 7, 30, MANY])
def test_a_row_that_is_not_finite_spoils_no_other(num_rows: int) -> None:
    for format in (("f4", 0, 0), ("bf16", 0, 0), ("affine", 4, 32), ("affine", 8, 32)):
        head = Linear((make_weight(format, 40, 64),))
        x = random_floats(5, num_rows, 64)
        bad = x.copy()
        bad[num_rows // 2, 9] = np.nan
        bad[0, 3] = np.inf
        others = [row for row in range(num_rows) if row not in (0, num_rows // 2)]
        with host_ops() as ops:
            good, spoiled = multiply(ops, head, x), multiply(ops, head, bad)
        assert not np.isfinite(spoiled[num_rows // 2]).any()
        assert_same_bits(spoiled[others], good[others])


def test_bits_do_not_depend_on_threads() -> None:
    results: dict[int, list[Floats]] = {}
    for num_threads in (1, 2, 3):
        with host_ops(num_threads) as ops:
            results[num_threads] = [
                multiply(ops, Linear((make_weight(format, 500, 128),)), random_floats(6, num_rows, 128))
                for format in (("f2", 0, 0), ("affine", 4, 64), ("affine", 8, 16)) for num_rows in (1, 4, 25, MANY)]
    for num_threads in (2, 3):
        for result, expected in zip(results[num_threads], results[1], strict=True):
            assert_same_bits(result, expected)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_threads_take_about_equal_shares_of_neighbours(num_threads: int) -> None:
    for num_strips in (1, 2, 18, 30, 96, 1536, 8192):
        for rows in (0, 1, 8, 40, 512):
            share = ops_module._strips_at_a_time(num_strips, rows, num_threads)
            turns = -(-num_strips // share)
            busiest = -(-turns // num_threads) * share
            assert busiest <= max(1, -(-num_strips // num_threads)) * 33 / 32
            assert share == 1 or (share * rows <= 64 and turns >= 3 * num_threads)
    assert ops_module._strips_at_a_time(1536, 1, num_threads) > 1


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_logits(softcap: float | None) -> None:
    """A buffer of its own that is reused; a step with few rows after one with many."""
    head = Linear((random_affine(0, 300, 64, 8, 32),))
    with host_ops() as ops:
        prepared = prepare(ops, make_spec(64), head)
        for num_rows in (3, 64, 1):
            x = random_floats(num_rows, num_rows, 64)
            logits = ops.logits(x, prepared.head, softcap)
            ops.finish()
            expected = x.astype(np.float64) @ dense(head).astype(np.float64).T
            if softcap is not None:
                expected = softcap * np.tanh(expected / softcap)
            np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: "-".join(map(str, format)))
def test_embedding_rows(format: tuple[str, int, int]) -> None:
    weight = make_weight(format, 45, 128)
    ids = np.array([0, 44, 15, 16, 17, 31, 32, 44, 7], np.int32)
    with host_ops() as ops:
        prepared = prepare(ops, make_spec(128), embed=weight)
        for scale in (1.0, 11.3137085):
            rows = ops.embed(ids, prepared.embed, scale)
            ops.finish()
            assert_same_bits(rows, dequantize(weight)[ids] * np.float32(scale))


def test_a_tied_head_is_packed_once() -> None:
    table = random_affine(0, 64, 64, 8, 32)
    with host_ops() as ops:
        prepared = prepare(ops, make_spec(64), Linear((table,)), embed=table)
        assert prepared.head.parts[0] is prepared.embed


def test_token_ids_are_checked_before_native_code_sees_them() -> None:
    with host_ops() as ops:
        prepared = prepare(ops, make_spec(64), embed=random_dense(0, 10, 64, "f4"))
        for ids in ([10], [-1]):
            with pytest.raises(AssertionError, match="token ids outside"):
                ops.embed(np.array(ids, np.int32), prepared.embed, 1.0)

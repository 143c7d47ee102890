"""Norms, rotation, gates, gathers and the KV store of the host back end, against the reference or plain NumPy."""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from numpy.typing import NDArray

from cuda.host.ops import HostOps
from cuda.reference import ReferenceOps
from tests.cuda.host_support import (
    GUARD,
    MAX_POSITION,
    Floats,
    assert_same_bits,
    host_ops,
    make_batch,
    make_spec,
    prepare,
    random_floats,
)
from weights.spec import ModelSpec, RopeSpec

ROWS = (1, 2, 7, 40)
COLUMNS = (8, 16, 24, 72, 576, 1000)


def reference_ops(spec: ModelSpec) -> ReferenceOps:
    ops = ReferenceOps()
    prepare(ops, spec)
    return ops


def guarded(values: Floats) -> tuple[Floats, Floats]:
    """The same values as rows of a larger array of guards, with that array."""
    around = np.full((values.shape[0] + 2, values.shape[1] + 9), GUARD, np.float32)
    inside = around[1:-1, 4:-5]
    inside[:] = values
    return inside, around


def assert_guards(around: Floats) -> None:
    around[1:-1, 4:-5] = GUARD
    assert (around == GUARD).all()


@pytest.mark.parametrize("columns", COLUMNS)
def test_rms_norm(columns: int) -> None:
    weight = random_floats(0, columns)
    reference = reference_ops(make_spec())
    with host_ops() as ops:
        for rows in ROWS:
            for with_add in (False, True):
                x, around = guarded(random_floats(rows, rows, columns))
                add = random_floats(rows + 1, rows, columns) if with_add else None
                expected_x = x.copy()
                expected = reference.rms_norm(expected_x, weight, 1e-6, add)
                y = ops.rms_norm(x, weight, 1e-6, add)
                ops.finish()
                np.testing.assert_allclose(y, expected, rtol=3e-6, atol=0)
                assert_same_bits(x, expected_x)
                assert_guards(around)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("columns", COLUMNS)
def test_gated(columns: int, activation: str) -> None:
    reference = reference_ops(make_spec())
    with host_ops() as ops:
        for rows in ROWS:
            gate_up = random_floats(rows, rows, 2 * columns)
            y = ops.gated(gate_up, activation)
            ops.finish()
            np.testing.assert_allclose(y, reference.gated(gate_up, activation), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_that_saturate(activation: str) -> None:
    gates = np.array([[0, -0.0, 90, 1e4, 3e38, -90, -1e4, np.nan]], np.float32)
    with host_ops() as ops:
        y = ops.gated(np.concatenate([gates, np.full_like(gates, 2)], axis=1), activation)
        ops.finish()
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(y, [[0, 0, 180, 2e4, np.inf, 0, 0, np.nan]], rtol=1e-6, atol=1e-30)


ROPE_CASES = [(heads, kv_heads, head_dim, rotary_dim)
              for heads, kv_heads, head_dim in ((2, 1, 16), (3, 3, 24), (9, 3, 64), (2, 2, 256))
              for rotary_dim in (head_dim, 8, 0)]


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "rotary_dim"), ROPE_CASES)
def test_rope(heads: int, kv_heads: int, head_dim: int, rotary_dim: int, qk_norm: bool) -> None:
    spec = make_spec(16, heads, kv_heads, head_dim)
    inv_freq = tuple(float(f) for f in 1e4 ** (-np.arange(rotary_dim // 2) / max(1, rotary_dim // 2)))
    rope = RopeSpec(inv_freq, attention_factor=1.2) if rotary_dim else None
    q_norm, k_norm = (random_floats(7, head_dim), random_floats(8, head_dim)) if qk_norm else (None, None)
    reference = reference_ops(spec)
    with host_ops() as ops:
        prepare(ops, spec)
        for positions in ([0], [MAX_POSITION - 1], [5, 5, 100, 3, 0, 511, 17]):
            numbers = np.array(positions, np.int32)
            qkv, around = guarded(random_floats(1, len(positions), (heads + 2 * kv_heads) * head_dim))
            expected = qkv.copy()
            reference.rope(expected, numbers, rope, q_norm, k_norm, 1e-6)
            ops.rope(qkv, numbers, rope, q_norm, k_norm, 1e-6)
            ops.finish()
            np.testing.assert_allclose(qkv, expected, rtol=1e-5, atol=1e-4)
            if not qk_norm:             # the same table, the same products
                np.testing.assert_allclose(qkv, expected, rtol=0, atol=np.abs(expected).max() * 2e-7)
            assert_same_bits(qkv[:, (heads + kv_heads) * head_dim:], expected[:, (heads + kv_heads) * head_dim:])
            assert_guards(around)


def test_rope_with_equal_specs_shares_a_table_and_takes_new_ones() -> None:
    spec = make_spec()
    with host_ops() as ops:
        prepare(ops, spec)
        results = []
        for inv_freq in ((1.0, 0.5), (1.0, 0.5), (1.0, 0.25)):
            qkv = random_floats(0, 3, 64)
            ops.rope(qkv, np.array([1, 2, 3], np.int32), RopeSpec(inv_freq), None, None, 1e-6)
            ops.finish()
            results.append(qkv)
    assert_same_bits(results[0], results[1])
    assert not np.array_equal(results[0], results[2])


def test_take_rows() -> None:
    with host_ops() as ops:
        for columns in COLUMNS:
            x = random_floats(columns, 9, columns)
            for rows in ([], [8], [0, 0, 5, 8, 1]):
                y = ops.take_rows(x, np.array(rows, np.int32))
                ops.finish()
                assert_same_bits(y, x[np.array(rows, np.intp)])
        with pytest.raises(AssertionError, match="rows outside"):
            ops.take_rows(x, np.array([9], np.int32))


def run_all(ops: HostOps, rows: NDArray[np.intp]) -> list[Floats]:
    """Every row-wise op on some rows of the same inputs."""
    x, gate_up, qkv = (random_floats(seed, 50, 192)[rows] for seed in (1, 2, 3))
    positions = np.arange(50, dtype=np.int32)[rows]
    rope = RopeSpec((1.0, 0.3, 0.1))
    norm = random_floats(4, 16)
    ops.begin(make_batch([(0, len(rows))], np.zeros((1, 4), np.int32)))
    results = [ops.rms_norm(x, random_floats(5, 192), 1e-6, add=gate_up)]
    results += [ops.gated(gate_up, activation) for activation in ("silu", "gelu_tanh")]
    ops.rope(qkv, positions, rope, norm, norm, 1e-6)
    ops.finish()
    return [*(np.array(result) for result in results), x, qkv]


def test_rows_have_the_same_bits_anywhere_and_on_any_number_of_threads() -> None:
    spec = make_spec(16, 8, 2, 16)
    everything = np.arange(50)
    with host_ops(1) as ops:
        prepare(ops, spec)
        whole = run_all(ops, everything)
    for num_threads in (1, 2, 3):
        with host_ops(num_threads) as ops:
            prepare(ops, spec)
            for rows in (everything, np.array([17]), np.array([49, 3, 3, 20, 0])):
                for result, expected in zip(run_all(ops, rows), whole, strict=True):
                    assert_same_bits(result, expected[rows])


def test_rows_that_are_not_finite_stay_alone() -> None:
    spec = dataclasses.replace(make_spec(16, 8, 2, 16))
    x = random_floats(1, 6, 192)
    bad = x.copy()
    bad[2, 5], bad[4, 100] = np.nan, np.inf
    others = [0, 1, 3, 5]
    with host_ops() as ops:
        prepare(ops, spec)
        results = []
        for values in (x, bad):
            results.append([np.array(array) for array in finished(ops, values.copy())])
    for good, spoiled in zip(*results, strict=True):
        assert_same_bits(spoiled[others], good[others])
        assert not np.isfinite(spoiled[[2, 4]]).all(axis=1).any()


def finished(ops: HostOps, x: Floats) -> list[Floats]:
    """Norm, gate and rotation of x; the norm spreads what is not finite over its row."""
    positions = np.arange(len(x), dtype=np.int32)
    results = [ops.rms_norm(x, np.ones(192, np.float32), 1e-6), ops.gated(x, "silu"), ops.gated(x, "gelu_tanh")]
    ops.rope(x, positions, RopeSpec((1.0,)), None, None, 1e-6)
    ops.finish()
    return [*results, x]

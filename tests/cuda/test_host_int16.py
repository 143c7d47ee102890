"""16-bit arithmetic: what a row becomes, products with it, and the same bits for a row in any company."""
from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from actors.system import EngineConfig, choose_host_math, make_ops
from cuda.host import simd_int16
from cuda.host.commands import CommandList, Team
from cuda.host.elementwise import QUANTIZE
from cuda.host.matmul import LINEAR, LINEAR_INT16
from cuda.host.ops import HostOps
from cuda.host.pack import quantized_block_bytes
from cuda.host.register_tile import MAX_INT16_ROWS
from cuda.host.workspace import address_of
from tests.cuda.host_support import (
    Floats,
    assert_same_bits,
    assert_writes_its_rows_alone,
    host_ops,
    make_spec,
    needs_pairs,
    prepare,
    random_affine,
    random_dense,
    random_floats,
)
from tests.cuda.test_host_simd_int16 import ORDER
from weights.quant import Linear, dequantize

pytestmark = needs_pairs

ROWS = sorted({1, 2, 3, 4, 5, MAX_INT16_ROWS - 1, MAX_INT16_ROWS, MAX_INT16_ROWS + 1, 2 * MAX_INT16_ROWS + 1, 40})
FORMATS = [(bits, group) for bits in (4, 8) for group in (16, 32, 64, 128)]

formats = pytest.mark.parametrize(("bits", "group"), FORMATS)


def quantize(x: Floats, block: int) -> tuple[Floats, Floats, NDArray[np.int16]]:
    """By the kernel: scales and sums [T, K / block], codes [T, K]."""
    rows, columns = x.shape
    block_bytes = quantized_block_bytes(block)
    target = np.zeros((rows, columns // block, block_bytes), np.uint8)
    commands, team = CommandList(), Team(2)
    commands.add(QUANTIZE, rows, 1, address_of(x), 4 * columns, address_of(target), target.strides[0], columns, block)
    team.run(commands)
    team.close()
    heads, codes = target[:, :, :8].copy().view(np.float32), target[:, :, 8:].copy().view(np.int16)
    ordered = np.empty_like(codes).reshape(-1, 8)
    ordered[:, ORDER] = codes.reshape(-1, 8)
    return heads[:, :, 0], heads[:, :, 1], ordered.reshape(rows, columns)


def assert_product(y: Floats, x: Floats, head: Linear, block: int) -> None:
    """Within what rounding a block's inputs to 16 bits may cost, and a float32 sum over K."""
    matrix = np.concatenate([dequantize(part) for part in head.parts]).astype(np.float64)
    expected = x.astype(np.float64) @ matrix.T
    largest = np.abs(x.reshape(len(x), -1, block)).max(axis=2)                                  # [T, K / block]
    sizes = np.abs(matrix).reshape(len(matrix), -1, block).sum(axis=2)                          # [N, K / block]
    # Codes are not negative: where offsets are, scale times code may be twice as large as any weight.
    bound = largest.astype(np.float64) @ sizes.T * (0.5 / 32767) * 1.01
    parts = np.concatenate([np.abs(np.repeat(part.offset, part.group, axis=1)) for part in head.parts])     # type: ignore
    rounding = np.abs(x).astype(np.float64) @ (np.abs(matrix) + 2 * parts).T * (x.shape[1] + 8) * 2.0**-24
    if head.bias is not None:
        expected, rounding = expected + head.bias, rounding + np.abs(head.bias) * 2.0**-20
    assert (np.abs(y - expected) <= bound + rounding + 1e-30).all()


@pytest.mark.parametrize("block", [16, 32])
def test_a_row_in_blocks(block: int) -> None:
    x = random_floats(0, 30, 128) * np.float32(10.0) ** np.arange(-15, 15, dtype=np.float32)[:, None]
    x[3] = 0
    x[4, :64] = 1e-31                                           # nothing that a product would show
    x[5, 1:] = 0
    scales, sums, codes = quantize(x, block)
    blocks = x.reshape(30, -1, block)
    largest = np.abs(blocks).max(axis=2)
    is_something = largest > np.float32(1e-30)
    assert_same_bits(scales, np.where(is_something, largest / np.float32(32767), np.float32(0)))
    inverse = np.divide(np.float32(32767), largest, out=np.zeros_like(largest), where=is_something)
    np.testing.assert_array_equal(codes.reshape(blocks.shape), np.rint(blocks * inverse[:, :, None]))
    assert np.abs(codes).max() == 32767
    assert_same_bits(sums, scales * codes.reshape(blocks.shape).sum(axis=2).astype(np.float32))


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_shows_in_its_block(block: int, bad: float) -> None:
    x = random_floats(1, 2, 128)
    x[1, 50] = bad
    _, sums, _ = quantize(x, block)
    expected = np.zeros(sums.shape, np.bool_)
    expected[1, 50 // block] = True
    np.testing.assert_array_equal(np.isnan(sums), expected)


@formats
def test_product_and_its_bits_for_any_number_of_rows(bits: int, group: int) -> None:
    outputs, inputs = 72, 384
    head = Linear((random_affine(0, outputs, inputs, bits, group),), random_floats(1, outputs))
    x = random_floats(2, max(ROWS), inputs)
    with host_ops(math="int16") as ops:
        prepared = prepare(ops, make_spec(inputs), head)

        def run(rows: Floats) -> Floats:
            y = ops.linear(rows, prepared.head)
            ops.finish()
            return np.array(y)

        whole = run(x)
        assert_product(whole, x, head, min(group, 32))
        for num_rows in ROWS:
            for first in {0, (max(ROWS) - num_rows) // 2, max(ROWS) - num_rows}:
                assert_same_bits(run(x[first:first + num_rows]), whole[first:first + num_rows])


def multiply(ops: HostOps, head: Linear, x: Floats) -> Floats:
    prepared = prepare(ops, make_spec(head.in_features), head)
    y = ops.linear(x, prepared.head)
    ops.finish()
    return np.array(y)


@formats
@pytest.mark.parametrize("num_rows", [1, 40])
def test_a_row_with_a_single_number_picks_a_column(bits: int, group: int, num_rows: int) -> None:
    """Its code is 32767 exactly, so that no weight and no place can be confused with another."""
    outputs, inputs = 33, 128
    weight = random_affine(0, outputs, inputs, bits, group)
    columns = []
    with host_ops(math="int16") as ops:
        for first in range(0, inputs, num_rows):
            columns.append(multiply(ops, Linear((weight,)), np.eye(inputs, dtype=np.float32)[first:first + num_rows]))
    np.testing.assert_allclose(np.concatenate(columns).T, dequantize(weight), rtol=0, atol=1e-5)


@pytest.mark.parametrize("inputs", [16, 64, 112])
def test_any_number_of_outputs_and_inputs(inputs: int) -> None:
    with host_ops(math="int16") as ops:
        for bits in (4, 8):
            for outputs in (1, 15, 16, 17, 31, 32, 33, 100):
                for num_rows in (1, MAX_INT16_ROWS + 1):
                    head = Linear((random_affine(0, outputs, inputs, bits, 16),))
                    x = random_floats(3, num_rows, inputs)
                    assert_product(multiply(ops, head, x), x, head, 16)


def test_parts_of_different_formats_with_a_bias() -> None:
    """The smallest group sets the blocks; dense parts stay exact."""
    inputs = 128
    affine = tuple(random_affine(seed, outputs, inputs, bits, group)
                   for seed, (outputs, bits, group) in enumerate([(20, 4, 32), (8, 8, 16), (33, 4, 64)]))
    dense = random_dense(3, 40, inputs, "bf16")
    bias, x = random_floats(8, 101), random_floats(9, MAX_INT16_ROWS + 3, inputs)
    with host_ops(math="int16") as ops:
        y = multiply(ops, Linear((*affine, dense), bias), x)
    assert_product(y[:, :61], x, Linear(affine, bias[:61]), 16)
    with host_ops() as ops:
        assert_same_bits(y[:, 61:], multiply(ops, Linear((dense,), bias[61:]), x))


def test_no_rows() -> None:
    with host_ops(math="int16") as ops:
        assert multiply(ops, Linear((random_affine(0, 32, 64, 4, 32),)), np.zeros((0, 64), np.float32)).shape == (0, 32)


def test_nothing_else_is_written() -> None:
    with host_ops(math="int16") as ops:
        for bits in (4, 8):
            for outputs in (1, 31, 40, 64):
                for num_rows in (1, 3, MAX_INT16_ROWS + 1):
                    assert_writes_its_rows_alone(ops, Linear((random_affine(0, outputs, 64, bits, 32),)), num_rows)


@pytest.mark.parametrize("num_rows", [1, 7, 30])
def test_a_row_that_is_not_finite_spoils_no_other(num_rows: int) -> None:
    for bits in (4, 8):
        head = Linear((random_affine(0, 40, 64, bits, 32),))
        x = random_floats(5, num_rows, 64)
        bad = x.copy()
        bad[num_rows // 2, 9] = np.nan
        bad[0, 3] = np.inf
        others = [row for row in range(num_rows) if row not in (0, num_rows // 2)]
        with host_ops(math="int16") as ops:
            good, spoiled = multiply(ops, head, x), multiply(ops, head, bad)
        assert not np.isfinite(spoiled[[0, num_rows // 2]]).any()
        assert_same_bits(spoiled[others], good[others])


def test_bits_do_not_depend_on_threads() -> None:
    results: dict[int, list[Floats]] = {}
    for num_threads in (1, 2, 3):
        with host_ops(num_threads, "int16") as ops:
            results[num_threads] = [
                multiply(ops, Linear((random_affine(0, 500, 128, bits, group),)), random_floats(6, num_rows, 128))
                for bits, group in ((4, 64), (8, 16)) for num_rows in (1, 4, 25)]
    for num_threads in (2, 3):
        for result, expected in zip(results[num_threads], results[1], strict=True):
            assert_same_bits(result, expected)


def test_logits() -> None:
    head = Linear((random_affine(0, 300, 64, 8, 32),))
    with host_ops(math="int16") as ops:
        prepared = prepare(ops, make_spec(64), head)
        for num_rows in (3, 64, 1):
            x = random_floats(num_rows, num_rows, 64)
            logits = ops.logits(x, prepared.head, None)
            ops.finish()
            assert_product(logits, x, head, 32)


def test_only_what_a_model_needs_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(HostOps, "_compile", lambda _, kernels: compiled.extend(kernel.name for kernel in kernels))
    affine, dense = Linear((random_affine(0, 32, 64, 4, 32),)), Linear((random_dense(0, 32, 64, "f4"),))
    both = Linear((*affine.parts, *dense.parts))
    int16 = {QUANTIZE.name, LINEAR_INT16.name}
    for head, math, expected in ((affine, "int16", int16), (dense, "int16", {LINEAR.name}),
                                 (both, "int16", {LINEAR.name, *int16}), (both, "exact", {LINEAR.name})):
        compiled.clear()
        with host_ops(math=math) as ops:                        # type: ignore[arg-type]
            prepare(ops, make_spec(64), head)
        assert {name for name in compiled if name in {LINEAR.name, *int16}} == expected


def test_the_choice_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    by = simd_int16.PAIRS_BY
    assert choose_host_math("auto") == ("int16", f"int16 arithmetic for quantized weights (auto: {by})")
    assert choose_host_math("int16") == ("int16", f"int16 arithmetic for quantized weights (as asked: {by})")
    assert choose_host_math("exact") == ("exact", "exact arithmetic (as asked)")
    monkeypatch.setattr(simd_int16, "HAS_PAIRS", False)
    assert choose_host_math("auto") == ("exact", "exact arithmetic (auto: this processor has no AVX2)")
    with pytest.raises(ValueError, match="^host_math int16: this processor has no AVX2"):
        choose_host_math("int16")


def test_other_back_ends_refuse_the_choice() -> None:
    for device in ("reference", "cuda"):
        for math in ("exact", "int16"):
            with pytest.raises(ValueError, match=f"^host_math {math} is for device cpu: device {device} has one"):
                make_ops(device, EngineConfig(host_math=math))
    with pytest.raises(ValueError, match="^host_math must be auto, exact or int16, got 'int8'"):
        EngineConfig(host_math="int8")

"""The register tile: the one inner loop of matrix products and of attention.

A tile multiplies a few rows with 32 outputs. Its sums stay in registers, and every sum is one chain of fused
multiply-adds in ascending k, whatever the number of rows: that is why a row's bits depend on nothing but the row.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target

from cuda.host.simd import (
    F32,
    I64,
    LANES,
    VECTOR,
    VECTOR_BYTES,
    emit_bf16_floats,
    emit_code_floats,
    emit_codes,
    emit_floats,
    emit_fma,
    emit_int8_floats,
    emit_load,
    emit_splat,
    emit_store,
    instruction,
)

HAS_AVX512 = "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2].split(",")
# As many sums as fit the registers, beside the weights and the input in use: up to MAX_ROWS rows with one vector of
# outputs, up to PAIR_ROWS rows with two.
MAX_ROWS = 12 if HAS_AVX512 else 6
PAIR_ROWS = 12 if HAS_AVX512 else 2

_Load: TypeAlias = Callable[[ir.IRBuilder, ir.Value], ir.Value]     # from an address, 16 weights as floats
_Accumulate = Callable[[list[ir.Value], ir.Value], None]    # see _tile_of


def _tile(builder: ir.IRBuilder, name: str, rows: ir.Value, arguments: list[ir.Value],
          build: Callable[..., None]) -> None:
    """`build(builder, num_rows, *arguments)` for the number of rows at hand.

    Each number has a function of its own: inlined into a large one, the loop would lose its registers.
    """
    done = builder.append_basic_block("tile_done")
    switch = builder.switch(rows, done)
    for num_rows in range(1, MAX_ROWS + 1):
        function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [I64] * len(arguments)),
                               builder.module.get_unique_name(f"{name}_{num_rows}"))
        function.linkage = "internal"
        function.attributes.add("noinline")
        inside = ir.IRBuilder(function.append_basic_block("entry"))
        build(inside, num_rows, *function.args)
        inside.ret_void()
        case = builder.append_basic_block(function.name)
        switch.add_case(I64(num_rows), case)
        builder.position_at_end(case)
        builder.call(function, arguments)
        builder.branch(done)
    builder.position_at_end(done)


def _tile_of(builder: ir.IRBuilder, num_rows: int, strips: list[ir.Value], x: ir.Value, x_stride: ir.Value,
             start: ir.Value, start_stride: ir.Value, y: ir.Value, y_stride: ir.Value,
             multiply: Callable[[list[ir.Value], _Accumulate], None]) -> None:
    """Sums in registers from start to y. `multiply(strips, accumulate)` builds the loop over k; `accumulate(weights,
    offset)` adds to every row's sums weights[v] times the float at offset in the row of x."""
    def row_addresses(base: ir.Value, stride: ir.Value) -> list[ir.Value]:
        return [builder.add(base, builder.mul(I64(row), stride)) for row in range(num_rows)]

    def accumulate(sums: list[list[ir.Value]], weights: list[ir.Value], offset: ir.Value) -> None:
        for address, row_sums in zip(inputs, sums, strict=True):
            value = emit_splat(builder, emit_load(builder, builder.add(address, offset), F32, 4))
            for weight, total in zip(weights, row_sums, strict=True):
                builder.store(emit_fma(builder, weight, value, builder.load(total, typ=VECTOR)), total)

    inputs = row_addresses(x, x_stride)
    vectors = list(range(len(strips)))
    for together in [vectors] if num_rows <= PAIR_ROWS else [[v] for v in vectors]:
        offsets = [I64(v * VECTOR_BYTES) for v in together]
        sums = [[cgutils.alloca_once_value(builder, emit_load(builder, builder.add(address, offset), VECTOR, 4))
                 for offset in offsets] for address in row_addresses(start, start_stride)]
        multiply([strips[v] for v in together], partial(accumulate, sums))
        for address, row_sums in zip(row_addresses(y, y_stride), sums, strict=True):
            for offset, total in zip(offsets, row_sums, strict=True):
                emit_store(builder, builder.add(address, offset), builder.load(total, typ=VECTOR), 4)


def _tile_with(load: _Load) -> Callable[..., Any]:
    @instruction(types.void, *[types.int64] * 11)
    def tile(builder: ir.IRBuilder, rows: ir.Value, first: ir.Value, second: ir.Value, w_step: ir.Value, x: ir.Value,
             x_stride: ir.Value, count: ir.Value, start: ir.Value, start_stride: ir.Value, y: ir.Value,
             y_stride: ir.Value) -> None:
        """y[row] = start[row] + sum over k < count of w[k] * x[row][k], for 1 to MAX_ROWS rows and 32 outputs.

        w[k] is two vectors of 16 numbers, at `first` + k w_step and `second` + k w_step; x[row][k] a float at `x` +
        row x_stride + 4 k; start and y have two vectors a row, one after the other. Every sum is one chain of fused
        multiply-adds in ascending k, whatever `rows` is: that is why a row's bits depend on nothing but the row.
        """
        _tile(builder, "tile", rows, [first, second, w_step, x, x_stride, count, start, start_stride, y, y_stride],
              partial(_build_tile, load=load))
    return tile


# The same with numbers of w that are float32, bfloat16 and signed bytes.
tile_float32, tile_bf16, tile_int8 = (_tile_with(load) for load in (emit_floats, emit_bf16_floats, emit_int8_floats))


def _build_tile(builder: ir.IRBuilder, num_rows: int, first: ir.Value, second: ir.Value, w_step: ir.Value, x: ir.Value,
                x_stride: ir.Value, count: ir.Value, start: ir.Value, start_stride: ir.Value, y: ir.Value,
                y_stride: ir.Value, load: _Load) -> None:
    def multiply(strips: list[ir.Value], accumulate: _Accumulate) -> None:
        with cgutils.for_range(builder, count) as loop:
            offset = builder.mul(loop.index, w_step)
            weights = [load(builder, builder.add(strip, offset)) for strip in strips]
            accumulate(weights, builder.mul(loop.index, I64(4)))

    _tile_of(builder, num_rows, [first, second], x, x_stride, start, start_stride, y, y_stride, multiply)


@instruction(types.void, *[types.int64] * 10)
def tile_affine4(builder: ir.IRBuilder, rows: ir.Value, first: ir.Value, second: ir.Value, num_groups: ir.Value,
                 group: ir.Value, x: ir.Value, x_stride: ir.Value, start: ir.Value, y: ir.Value, y_stride: ir.Value
                 ) -> None:
    """`tile` with two packed strips of 4-bit codes, unpacked on the way; one start for all rows. The same bits as
    unpacking first."""
    _tile(builder, "tile_affine4", rows, [first, second, num_groups, group, x, x_stride, start, y, y_stride],
          partial(_build_affine_tile, bits=4))


@instruction(types.void, *[types.int64] * 10)
def tile_affine8(builder: ir.IRBuilder, rows: ir.Value, first: ir.Value, second: ir.Value, num_groups: ir.Value,
                 group: ir.Value, x: ir.Value, x_stride: ir.Value, start: ir.Value, y: ir.Value, y_stride: ir.Value
                 ) -> None:
    """`tile_affine4` for 8-bit codes."""
    _tile(builder, "tile_affine8", rows, [first, second, num_groups, group, x, x_stride, start, y, y_stride],
          partial(_build_affine_tile, bits=8))


def _build_affine_tile(builder: ir.IRBuilder, num_rows: int, first: ir.Value, second: ir.Value, num_groups: ir.Value,
                       group: ir.Value, x: ir.Value, x_stride: ir.Value, start: ir.Value, y: ir.Value,
                       y_stride: ir.Value, bits: int) -> None:
    """Strips as `pack.py` describes them: a group's scales, its offsets, its rows of codes."""
    codes_per_byte = 8 // bits
    code_rows = builder.sdiv(group, I64(codes_per_byte))
    group_bytes = builder.add(builder.mul(code_rows, I64(LANES)), I64(2 * VECTOR_BYTES))

    def multiply(strips: list[ir.Value], accumulate: _Accumulate) -> None:
        with cgutils.for_range(builder, num_groups) as outer:
            groups = [builder.add(strip, builder.mul(outer.index, group_bytes)) for strip in strips]
            scales = [emit_load(builder, head, VECTOR, 4) for head in groups]
            offsets = [emit_load(builder, builder.add(head, I64(VECTOR_BYTES)), VECTOR, 4) for head in groups]
            with cgutils.for_range(builder, code_rows) as inner:
                row = builder.add(builder.mul(inner.index, I64(LANES)), I64(2 * VECTOR_BYTES))
                codes = [emit_codes(builder, builder.add(head, row)) for head in groups]
                k = builder.add(builder.mul(outer.index, group), builder.mul(inner.index, I64(codes_per_byte)))
                for nibble in range(codes_per_byte):
                    weights = [emit_fma(builder, emit_code_floats(builder, code, bits, nibble), scale, offset)
                               for code, scale, offset in zip(codes, scales, offsets, strict=True)]
                    accumulate(weights, builder.mul(builder.add(k, I64(nibble)), I64(4)))

    _tile_of(builder, num_rows, [first, second], x, x_stride, start, I64(0), y, y_stride, multiply)

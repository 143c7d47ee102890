"""The register tile: the one inner loop of matrix products and of attention.

A tile multiplies a few rows with 32 outputs. Its sums stay in registers, and every sum is one chain of fused
multiply-adds in ascending k, whatever the number of rows: that is why a row's bits depend on nothing but the row.
With 16-bit activations a link of that chain is a block of inputs, whose products are summed as integers.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target

from cuda.host.pack import BLOCK_HEAD_BYTES, GROUP_HEAD_BYTES, ROW_INPUTS, STRIP_BYTES
from cuda.host.simd import (
    F32,
    I64,
    INTEGERS,
    LANES,
    VECTOR,
    VECTOR_BYTES,
    emit_bf16_floats,
    emit_code_floats,
    emit_floats,
    emit_fma,
    emit_int8_floats,
    emit_load,
    emit_prefetch,
    emit_splat,
    emit_store,
    emit_words,
    instruction,
)
from cuda.host.simd_int16 import HAS_AVX512_PAIRS, emit_add_products, emit_code_pairs, emit_pair

HAS_AVX512 = "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2].split(",")
# As many sums as fit the registers, beside the weights and the input in use: up to MAX_ROWS rows with one vector of
# outputs, up to PAIR_ROWS rows with two.
MAX_ROWS = 12 if HAS_AVX512 else 6
PAIR_ROWS = 12 if HAS_AVX512 else 2
# For so many tiles it takes longer to store unpacked weights and to load them again than to unpack for each.
PACKED_TILES = 6 if HAS_AVX512 else 1
# With 16-bit activations the registers hold integer sums, and the others wait in the cache for the end of a block.
MAX_INT16_ROWS, PAIR_INT16_ROWS = (12, 12) if HAS_AVX512_PAIRS else (4, 1)

# Weights are asked for so far ahead of their use: what one core computes while memory answers. The processor's own
# prefetcher takes long to notice that a new strip has begun.
AHEAD_BYTES = 8192

_Load: TypeAlias = Callable[[ir.IRBuilder, ir.Value], ir.Value]     # from an address, 16 weights as floats
_Accumulate = Callable[[list[ir.Value], ir.Value], None]    # see _tile_of


def _tile(builder: ir.IRBuilder, name: str, rows: ir.Value, arguments: list[ir.Value], build: Callable[..., None],
          max_rows: int = MAX_ROWS) -> None:
    """`build(builder, num_rows, *arguments)` for the number of rows at hand.

    Each number has a function of its own: inlined into a large one, the loop would lose its registers.
    """
    done = builder.append_basic_block("tile_done")
    switch = builder.switch(rows, done)
    for num_rows in range(1, max_rows + 1):
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


def _passes(num_rows: int, pair_rows: int) -> list[list[int]]:
    """The vectors of outputs of each pass over the weights."""
    return [[0, 1]] if num_rows <= pair_rows else [[0], [1]]


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
    for together in _passes(num_rows, PAIR_ROWS):
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


@instruction(types.void, *[types.int64] * 9)
def tile_affine4(builder: ir.IRBuilder, rows: ir.Value, strip: ir.Value, num_groups: ir.Value, group: ir.Value,
                 x: ir.Value, x_stride: ir.Value, start: ir.Value, y: ir.Value, y_stride: ir.Value) -> None:
    """`tile` with a packed strip of 4-bit codes, unpacked on the way; one start for all rows. The same bits as
    unpacking first."""
    _tile(builder, "tile_affine4", rows, [strip, num_groups, group, x, x_stride, start, y, y_stride],
          partial(_build_affine_tile, bits=4))


@instruction(types.void, *[types.int64] * 9)
def tile_affine8(builder: ir.IRBuilder, rows: ir.Value, strip: ir.Value, num_groups: ir.Value, group: ir.Value,
                 x: ir.Value, x_stride: ir.Value, start: ir.Value, y: ir.Value, y_stride: ir.Value) -> None:
    """`tile_affine4` for 8-bit codes."""
    _tile(builder, "tile_affine8", rows, [strip, num_groups, group, x, x_stride, start, y, y_stride],
          partial(_build_affine_tile, bits=8))


def _build_affine_tile(builder: ir.IRBuilder, num_rows: int, strip: ir.Value, num_groups: ir.Value, group: ir.Value,
                       x: ir.Value, x_stride: ir.Value, start: ir.Value, y: ir.Value, y_stride: ir.Value, bits: int
                       ) -> None:
    """A strip as `pack.py` describes it: a group's scales, its offsets, its rows of codes."""
    row_bytes = bits * STRIP_BYTES // 4
    rows_in_group = builder.sdiv(group, I64(ROW_INPUTS))
    group_bytes = builder.add(builder.mul(rows_in_group, I64(row_bytes)), I64(GROUP_HEAD_BYTES))

    def multiply(halves: list[ir.Value], accumulate: _Accumulate) -> None:
        with cgutils.for_range(builder, num_groups) as outer:
            groups = [builder.add(half, builder.mul(outer.index, group_bytes)) for half in halves]
            scales, offsets = _heads(builder, groups)
            if halves[0] is strip:
                _prefetch(builder, groups[0], GROUP_HEAD_BYTES)
            with cgutils.for_range(builder, rows_in_group) as inner:
                row = builder.add(builder.mul(inner.index, I64(row_bytes)), I64(GROUP_HEAD_BYTES))
                k = builder.add(builder.mul(outer.index, group), builder.mul(inner.index, I64(ROW_INPUTS)))
                codes = [builder.add(head, row) for head in groups]
                if halves[0] is strip:
                    _prefetch(builder, codes[0], row_bytes)
                words = [[emit_words(builder, builder.add(address, I64(offset))) for address in codes]
                         for offset in range(0, row_bytes, STRIP_BYTES)]
                for place, (word, index) in enumerate(_PLACES[bits]):
                    weights = [emit_fma(builder, emit_code_floats(builder, half, bits, I64(index)), scale, offset)
                               for half, scale, offset in zip(words[word], scales, offsets, strict=True)]
                    accumulate(weights, builder.mul(builder.add(k, I64(place)), I64(4)))

    _tile_of(builder, num_rows, _halves(builder, strip), x, x_stride, start, I64(0), y, y_stride, multiply)


# Which words of a packed row hold an input's codes, and which of the codes in a word it is.
_PLACES = {4: [(0, k) for k in range(8)], 8: [(k // 2 % 2, k // 4 * 2 + k % 2) for k in range(8)]}


def _halves(builder: ir.IRBuilder, strip: ir.Value) -> list[ir.Value]:
    """Where the two vectors of a strip's first 32 numbers are."""
    return [strip, builder.add(strip, I64(VECTOR_BYTES))]


def _heads(builder: ir.IRBuilder, groups: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
    """Scales and offsets of a group's outputs."""
    return ([emit_load(builder, head, VECTOR, 4) for head in groups],
            [emit_load(builder, builder.add(head, I64(STRIP_BYTES)), VECTOR, 4) for head in groups])


def _prefetch(builder: ir.IRBuilder, address: ir.Value, num_bytes: int) -> None:
    """What is as far ahead of these bytes of a strip."""
    for offset in range(0, num_bytes, VECTOR_BYTES):
        emit_prefetch(builder, builder.add(address, I64(AHEAD_BYTES + offset)))


@instruction(types.void, *[types.int64] * 10)
def tile_int16_affine4(builder: ir.IRBuilder, rows: ir.Value, strip: ir.Value, num_groups: ir.Value, group: ir.Value,
                       block: ir.Value, x: ir.Value, x_stride: ir.Value, start: ir.Value, y: ir.Value,
                       y_stride: ir.Value) -> None:
    """y[row] = start + x[row] W^T for 1 to MAX_INT16_ROWS rows, quantized in blocks of `block` inputs (`quantize`),
    with a packed strip of 4-bit codes.

    A block adds its offsets times its sum, then scales times its scale times the sum of the products of codes: two
    fused multiply-adds to a float32 sum, in ascending order of blocks, whatever `rows` is. The products are summed as
    integers, which is exact: 32 of them are less than 2^29.
    """
    _tile(builder, "tile_int16_affine4", rows, [strip, num_groups, group, block, x, x_stride, start, y, y_stride],
          partial(_build_int16_tile, bits=4), MAX_INT16_ROWS)


@instruction(types.void, *[types.int64] * 10)
def tile_int16_affine8(builder: ir.IRBuilder, rows: ir.Value, strip: ir.Value, num_groups: ir.Value, group: ir.Value,
                       block: ir.Value, x: ir.Value, x_stride: ir.Value, start: ir.Value, y: ir.Value,
                       y_stride: ir.Value) -> None:
    """`tile_int16_affine4` for 8-bit codes."""
    _tile(builder, "tile_int16_affine8", rows, [strip, num_groups, group, block, x, x_stride, start, y, y_stride],
          partial(_build_int16_tile, bits=8), MAX_INT16_ROWS)


def _build_int16_tile(builder: ir.IRBuilder, num_rows: int, strip: ir.Value, num_groups: ir.Value, group: ir.Value,
                      block: ir.Value, x: ir.Value, x_stride: ir.Value, start: ir.Value, y: ir.Value,
                      y_stride: ir.Value, bits: int) -> None:
    row_bytes = bits * STRIP_BYTES // 4
    rows_in_block = builder.sdiv(block, I64(ROW_INPUTS))
    blocks_in_group = builder.sdiv(group, block)
    code_bytes = builder.mul(rows_in_block, I64(row_bytes))                 # of a block
    group_bytes = builder.add(builder.mul(blocks_in_group, code_bytes), I64(GROUP_HEAD_BYTES))
    block_bytes = builder.add(builder.mul(block, I64(2)), I64(BLOCK_HEAD_BYTES))
    inputs = [builder.add(x, builder.mul(I64(row), x_stride)) for row in range(num_rows)]
    outputs = [builder.add(y, builder.mul(I64(row), y_stride)) for row in range(num_rows)]
    zeros = ir.Constant(INTEGERS, [ir.IntType(32)(0)] * LANES)

    def add_products(codes: list[list[ir.Value]], pairs: ir.Value, totals: list[list[ir.Value]]) -> None:
        """To the integer sums, the products of 8 inputs; `pairs` is where they are in a row."""
        for i in range(ROW_INPUTS // 2):
            for address, row_totals in zip(inputs, totals, strict=True):
                pair = emit_pair(builder, builder.add(address, builder.add(pairs, I64(4 * i))))
                for half, total in zip(codes, row_totals, strict=True):
                    value = builder.load(total, typ=INTEGERS)
                    builder.store(emit_add_products(builder, value, half[i], pair), total)

    def add_block(head: ir.Value, scales: list[ir.Value], offsets: list[ir.Value], totals: list[list[ir.Value]],
                  sums: list[list[ir.Value]]) -> None:
        """To the float32 sums, what a block's integer sums stand for; `head` is where the block is in a row."""
        for address, row_totals, row_sums in zip(inputs, totals, sums, strict=True):
            block_scale, block_sum = (
                emit_splat(builder, emit_load(builder, builder.add(builder.add(address, head), I64(offset)), F32, 4))
                for offset in (0, 4))
            for scale, offset, total, result in zip(scales, offsets, row_totals, row_sums, strict=True):
                value = emit_fma(builder, offset, block_sum, builder.load(result, typ=VECTOR))
                product = builder.sitofp(builder.load(total, typ=INTEGERS), VECTOR)
                builder.store(emit_fma(builder, builder.fmul(scale, block_scale), product, value), result)

    for together in _passes(num_rows, PAIR_INT16_ROWS):
        starts = [emit_load(builder, builder.add(start, I64(v * VECTOR_BYTES)), VECTOR, 4) for v in together]
        sums = [[cgutils.alloca_once_value(builder, value) for value in starts] for _ in inputs]
        totals = [[cgutils.alloca_once(builder, INTEGERS) for _ in together] for _ in inputs]
        with cgutils.for_range(builder, num_groups) as outer:
            groups = [builder.add(_halves(builder, strip)[v], builder.mul(outer.index, group_bytes)) for v in together]
            scales, offsets = _heads(builder, groups)
            if together[0] == 0:
                _prefetch(builder, groups[0], GROUP_HEAD_BYTES)
            with cgutils.for_range(builder, blocks_in_group) as middle:
                number = builder.add(builder.mul(outer.index, blocks_in_group), middle.index)
                head = builder.mul(number, block_bytes)
                first_row = builder.add(builder.mul(middle.index, code_bytes), I64(GROUP_HEAD_BYTES))
                for row_totals in totals:
                    for total in row_totals:
                        builder.store(zeros, total)
                with cgutils.for_range(builder, rows_in_block) as inner:
                    row = builder.add(first_row, builder.mul(inner.index, I64(row_bytes)))
                    if together[0] == 0:
                        _prefetch(builder, builder.add(groups[0], row), row_bytes)
                    codes = [emit_code_pairs(builder, builder.add(group_head, row), bits) for group_head in groups]
                    pairs = builder.add(builder.add(head, I64(BLOCK_HEAD_BYTES)),
                                        builder.mul(inner.index, I64(2 * ROW_INPUTS)))
                    add_products(codes, pairs, totals)
                add_block(head, scales, offsets, totals, sums)
        for address, row_sums in zip(outputs, sums, strict=True):
            for v, total in zip(together, row_sums, strict=True):
                emit_store(builder, builder.add(address, I64(v * VECTOR_BYTES)), builder.load(total, typ=VECTOR), 4)

"""What sampling does with every row of logits, compiled: one pass that sums the row up by segments, so that whatever is
asked later looks into few of them; the ids of large logits; a grammar's mask; the draw."""
from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from cuda.host.compilation import entry_point, inner
from cuda.host.simd import (
    LANES,
    VECTOR,
    F32x16,
    fma,
    instruction,
    lane_max,
    lane_sum,
    load,
    load_f32,
    maximum,
    splat,
)

SEGMENT = 128                                   # entries of a row
LOWEST = float(np.finfo(np.float32).min)


@instruction(F32x16, F32x16, F32x16)
def scale(builder: ir.IRBuilder, x: ir.Value, exponent: ir.Value) -> ir.Value:
    """x 2^n with n in the low bits of `exponent`; x and the result are normal numbers."""
    integers = ir.VectorType(ir.IntType(32), LANES)
    shift = ir.Constant(integers, [23] * LANES)
    n = builder.shl(builder.bitcast(exponent, integers), shift)
    return builder.bitcast(builder.add(builder.bitcast(x, integers), n), VECTOR)


@inner
def exp2(x: Any) -> Any:
    """2^x for x <= 0 with a relative error below 3e-7, or 1e-37 if that is more; 0 for -inf, NaN for NaN."""
    magic = splat(np.float32(1.5 * 2.0**23))    # adding it rounds to an integer and leaves that in the low bits
    x = maximum(splat(np.float32(-126.0)), x)   # the smallest normal result; in this order a NaN stays
    rounded = x + magic
    f = x - (rounded - magic)
    p = fma(splat(np.float32(0.0013264709)), f, splat(np.float32(0.0096715111)))
    p = fma(p, f, splat(np.float32(0.05550734)))
    p = fma(p, f, splat(np.float32(0.24022242)))
    p = fma(p, f, splat(np.float32(0.693147)))
    p = scale(fma(p, f, splat(np.float32(1.0))), rounded)
    # Less the smallest result, so that nothing remains of -inf. NOTE: `scale` makes a number of some NaNs.
    return p + fma(x, splat(np.float32(0.0)), splat(np.float32(-(2.0**-126))))


@entry_point("void(int64, float64, float32[::1], float32[::1])")
def summarize(row: int, temperature: float, maxima: NDArray[np.float32], sums: NDArray[np.float32]) -> None:
    """For each whole segment of a row: the largest x, and the sum of e^((x - largest) / temperature); where there is a
    NaN or +inf, the sum is NaN."""
    slope = splat(np.float32(1.0 / (temperature * math.log(2.0))))
    for segment in range(len(maxima)):
        start = row + 4 * segment * SEGMENT
        top = load(start)
        for i in range(LANES, SEGMENT, LANES):
            top = maximum(load(start + 4 * i), top)
        largest = lane_max(top)
        top = splat(max(largest, np.float32(LOWEST)))           # where all are -inf, their sum is 0
        total = splat(np.float32(0.0))
        for i in range(0, SEGMENT, LANES):
            total = total + exp2((load(start + 4 * i) - top) * slope)
        maxima[segment], sums[segment] = largest, lane_sum(total)


@entry_point("int64(int64, int64, float32[::1], float32, int64[::1])")
def collect(row: int, count: int, maxima: NDArray[np.float32], bound: float, ids: NDArray[np.int64]) -> int:
    """The indices of logits >= bound, ascending, into `ids`. Returns how many."""
    found = 0
    for segment in range(len(maxima)):
        if maxima[segment] >= bound:
            start = segment * SEGMENT
            for i in range(start, min(count, start + SEGMENT)):
                ids[found] = i                  # without a branch: there is no telling which way it would go
                found += load_f32(row + 4 * i) >= bound
    return found


@entry_point("void(float32[::1], uint32[::1])")
def mask(row: NDArray[np.float32], allowed: NDArray[np.uint32]) -> None:
    """-inf where there is no bit; a word has 32 of them, the lowest first."""
    nothing = np.float32(-np.inf)
    for word in range(len(row) // 32):
        bits, start = allowed[word], 32 * word
        if bits == np.uint32(0):
            row[start:start + 32] = nothing
        elif bits != np.uint32(0xFFFFFFFF):
            for i in range(32):                 # without a branch: there is no telling which way it would go
                row[start + i] = row[start + i] if bits & (np.uint32(1) << np.uint32(i)) else nothing
    for i in range(len(row) // 32 * 32, len(row)):
        if not allowed[i // 32] & (np.uint32(1) << np.uint32(i % 32)):
            row[i] = nothing


@entry_point("int64(float64[::1], float64, float64, float64[::1])")
def draw(weights: NDArray[np.float64], goal: float, uniform: float, room: NDArray[np.float64]) -> int:
    """An index, each as likely as its share of the weights, of the nucleus: the fewest largest weights whose sum
    reaches `goal`, among equals the first; all where they do not. 0 <= uniform < 1; room as long as weights."""
    # Quickselect by sums. Kept is what is above `threshold`, and the first `ties` of those equal to it. In `room` are
    # those not decided yet; `above` is the sum of those decided to be kept, always less than `goal`.
    threshold, ties, above = -1.0, 0, 0.0
    size = len(weights) if goal < np.inf else 0
    for i in range(size):
        room[i] = weights[i]
    while size > 0:
        pivot = room[size // 2]
        greater, equal = 0.0, 0
        for i in range(size):
            greater += room[i] if room[i] > pivot else 0.0
            equal += room[i] == pivot
        enough = above + greater >= goal
        if enough:
            threshold = pivot
        else:
            above += greater
            while ties < equal and above < goal:
                above += pivot
                ties += 1
            if above >= goal:
                threshold = pivot
                break
            ties = 0
        left = 0
        for i in range(size):
            weight = room[i]
            room[left] = weight
            left += weight > pivot if enough else weight < pivot
        size = left
    total = 0.0
    for i in range(len(weights)):
        weight = weights[i]
        if weight == threshold:
            ties -= 1
        if weight > threshold or (weight == threshold and ties >= 0):
            total += weight
        room[i] = total
    # The first sum above the target: never at a weight of 0, and there is one because uniform < 1.
    place, target = 0, uniform * total
    while room[place] <= target:
        place += 1
    return place

"""The distribution of a row: its sums against float64, its draws against the inverse of the cumulative distribution."""
from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cuda.host import segments
from cuda.softmax import LARGEST_UNIFORM, Softmax

Floats32 = NDArray[np.float32]
Floats64 = NDArray[np.float64]


def normal(size: int, seed: int = 0, spread: float = 4.0) -> Floats32:
    return (spread * np.random.default_rng(seed).standard_normal(size)).astype(np.float32)


def exact_weights(logits: Floats32, temperature: float) -> Floats64:
    wide = logits.astype(np.float64)
    weights: Floats64 = np.exp((wide - wide.max()) / temperature)
    return weights


@pytest.mark.parametrize("size", [1, 15, 16, 17, 127, 128, 129, 256, 1000, 4001])
@pytest.mark.parametrize("temperature", [1e-5, 0.3, 1.0, 100.0])
def test_sums_and_maxima(size: int, temperature: float) -> None:
    logits = normal(size)
    if size > 300:
        logits[128:256] = -np.inf                           # a whole segment
    logits[size // 2 + 1:size // 2 + 20] = -np.inf
    softmax = Softmax(logits, temperature)
    assert softmax.best == logits.max()
    weights = exact_weights(logits, temperature)
    starts = range(0, size, segments.SEGMENT)
    sums = [weights[start:start + segments.SEGMENT].sum() for start in starts]
    np.testing.assert_allclose(softmax.sums, sums, rtol=2e-6, atol=1e-30)
    assert softmax.maxima.tolist() == [logits[start:start + segments.SEGMENT].max() for start in starts]
    np.testing.assert_array_equal(softmax.weights(np.arange(size)), weights)
    if temperature == 1.0:
        assert softmax.log_total == pytest.approx(math.log(np.exp(logits.astype(np.float64)).sum()), abs=1e-6)


def test_exponentials_of_every_size() -> None:
    """Two logits a segment: the largest and one at a distance."""
    distances = np.geomspace(1e-7, 86.0, 2000).astype(np.float32)
    logits = np.full((len(distances), segments.SEGMENT), -np.inf, np.float32)
    logits[:, 3] = 0.0
    logits[:, 77] = -distances
    maxima, sums = np.empty((2, len(distances)), np.float32)
    segments.summarize(logits.ctypes.data, 1.0, maxima, sums)
    np.testing.assert_allclose(sums, 1.0 + np.exp(-distances.astype(np.float64)), rtol=2e-7)
    assert (maxima == 0.0).all()


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x7FA55555, 0x7FFFFE81])
def test_any_nan_anywhere_is_seen(bits: int) -> None:
    """FAULTS N07: NaN has many bit patterns."""
    nan = np.array([bits], np.uint32).view(np.float32)[0]
    for size in (1, 100, 300):
        for place in {0, 1, size // 2, size - 1} & set(range(size)):
            for other in (0.0, -np.inf, np.inf, 3e38, -3e38):
                logits = np.full(size, other, np.float32)
                logits[place] = nan
                assert not math.isfinite(Softmax(logits, 0.7).best)


def test_rows_without_a_finite_logit_and_with_infinity() -> None:
    assert Softmax(np.full(200, -np.inf, np.float32), 1.0).best == -np.inf
    logits = normal(200)
    logits[150] = np.inf
    assert not math.isfinite(Softmax(logits, 1.0).best)


def test_the_same_bits_wherever_a_row_lies() -> None:
    """A row of a batch may begin at any float."""
    logits = normal(1001)
    room = np.empty(1001 + 32, np.float32)
    expected = Softmax(logits, 0.8)
    for offset in range(32):
        room[offset:offset + 1001] = logits
        softmax = Softmax(room[offset:offset + 1001], 0.8)
        assert softmax.sums.tobytes() == expected.sums.tobytes()
        assert softmax.draw_from_nucleus(0.9, 0.3) == expected.draw_from_nucleus(0.9, 0.3)


def exact_draws(weights: Floats64, uniform: float, error: float) -> range:
    """The ids that are right where cumulative shares are off by `error`."""
    shares = weights.cumsum() / weights.sum()
    low, high = (min(int(shares.searchsorted(u, side="right")), len(weights) - 1)
                 for u in (uniform - error, uniform + error))
    return range(low, high + 1)


UNIFORMS = [0.0, 1e-300, 1e-9, *np.linspace(0.001, 0.999, 300).tolist(), 1 - 1e-9, LARGEST_UNIFORM]


@pytest.mark.parametrize("kind", ["normal", "flat", "one", "ends masked", "peaked"])
def test_draws_from_the_whole_row(kind: str) -> None:
    logits = normal(1003, spread=2.0)
    if kind == "flat":
        logits[:] = -7.0
    elif kind == "one":
        logits[:] = -np.inf
        logits[1002] = -3.0
    elif kind == "ends masked":
        logits[:300] = -np.inf
        logits[700:] = -np.inf
    elif kind == "peaked":
        logits[500] = 60.0
    softmax = Softmax(logits, 0.8)
    weights = exact_weights(logits, 0.8)
    for uniform in UNIFORMS:
        token_id = softmax.draw(uniform)
        assert weights[token_id] > 0.0
        assert token_id in exact_draws(weights, uniform, 1e-6)


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999, 1 - 1e-12])
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 3.0, 20.0])
def test_draws_from_the_nucleus(top_p: float, spread: float) -> None:
    """Narrow and wide ones: whether the likely tokens hold it or not."""
    logits = normal(5003, seed=1, spread=spread)
    weights = exact_weights(logits, 1.0)
    order = np.argsort(-weights, kind="stable")
    num = int((weights[order].cumsum() / weights.sum()).searchsorted(top_p)) + 1
    softmax = Softmax(logits, 1.0)
    right = []
    for length in {max(1, num - 1), num, min(num + 1, 5003)} if 1 - top_p < 1e-6 or spread == 0.0 else {num}:
        kept = np.zeros_like(weights)
        kept[order[:length]] = weights[order[:length]]
        right.append(kept)
    if 1 - top_p < 1e-6:                                    # float32 sums do not tell: anything but masked is right
        right.append(weights)
    for uniform in UNIFORMS[::10]:
        token_id = softmax.draw_from_nucleus(top_p, uniform)
        assert any(token_id in exact_draws(kept, uniform, 2e-6) for kept in right)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60).filter(any), st.floats(0.0, 1.2), st.floats(0, 0.999))
def test_the_compiled_draw_keeps_the_fewest_largest(values: list[int], share: float, uniform: float) -> None:
    """Whole numbers: sums are exact, and equals are everywhere."""
    goal = math.ceil(share * sum(values)) if share <= 1.0 else math.inf
    kept: list[int] = []
    mass = 0
    for index in sorted(range(len(values)), key=lambda i: (-values[i], i)):
        if mass >= goal and kept:
            break
        kept.append(index)
        mass += values[index]
    target, below = uniform * mass, 0
    for expected in sorted(kept):
        below += values[expected]
        if below > target:
            break
    weights = np.array(values, np.float64)
    assert segments.draw(weights, max(goal, 1e-9), uniform, np.empty_like(weights)) == expected
    assert weights.tolist() == values


def test_best_and_likely_ids() -> None:
    for size in (5, 128, 1000, 4001):
        logits = normal(size).round(1)                      # with equals
        softmax = Softmax(logits, 2.0)
        order = np.argsort(-logits, kind="stable")
        for num in {1, 2, 5, size // 3, size - 1, size} - {0}:
            assert softmax.best_ids(num).tolist() == sorted(order[:num].tolist())
            assert [token_id for token_id, _ in softmax.top_logprobs(num)] == order[:num].tolist()
        for weight in (1.0, 0.5, 1e-3, 1e-30, 1e-300):
            likely = softmax.likely_ids(weight).tolist()
            assert set(np.flatnonzero(softmax.weights(np.arange(size)) >= weight).tolist()) <= set(likely)
            assert (softmax.weights(np.array(likely)) >= weight * (1 - 1e-5)).all()

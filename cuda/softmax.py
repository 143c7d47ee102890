"""The distribution over the vocabulary that a row of logits stands for: its best tokens, its nucleus, draws from it.

One compiled pass sums the row up by segments; what is asked later looks into the few segments that matter, with weights
in float64. Only the sums of segments are of float32 exponentials: their relative error is below 1e-6.
"""
from __future__ import annotations

import math
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats32 = NDArray[np.float32]
Floats64 = NDArray[np.float64]
Ids = NDArray[np.int64]
TopLogprobs = tuple[tuple[int, float], ...]                     # (token id, logprob), best first

LARGEST_LOGIT = float(np.finfo(np.float32).max)
LARGEST_UNIFORM = 1.0 - 2.0**-53
LIKELY = (1e-3, 1e-4)                   # a nucleus is first sought among tokens of these weights: most lie within


class Softmax:
    """A token's weight is e^((its logit - best) / temperature): its probability times a constant, 1 of the best token.

    best: the largest logit; nan or inf where the row has NaN or +inf, -inf where it has nothing else. Of such a row
    nothing else may be asked.
    """

    def __init__(self, logits: Floats32, temperature: float) -> None:
        """logits [V]; temperature > 0."""
        # NOTE: with this import comes Numba, and the first one compiles: not for everybody who imports the engine.
        from cuda.host import segments
        assert logits.flags.c_contiguous, "a row of logits is not in one piece"
        self.logits, self.temperature = logits, temperature
        self.segments = segments
        self._address = logits.ctypes.data
        num_whole, rest = divmod(len(logits), segments.SEGMENT)
        maxima, sums = np.empty((2, num_whole + (rest > 0)), np.float32)
        segments.summarize(self._address, temperature, maxima[:num_whole], sums[:num_whole])
        if rest:
            last = np.full(segments.SEGMENT, -np.inf, np.float32)
            last[:rest] = logits[-rest:]
            segments.summarize(last.ctypes.data, temperature, maxima[num_whole:], sums[num_whole:])
        self.best = float(maxima.max())
        if math.isfinite(self.best):
            self.maxima = maxima                                                # [segments]
            self.sums = self._to_weights(maxima)                                # [segments] sums of weights
            self.sums *= sums
            self.total = float(self.sums.sum())
            if math.isnan(self.total):
                self.best = math.nan

    @cached_property
    def log_total(self) -> float:
        """What a logit is above its log-softmax, where the temperature is 1."""
        return self.best + math.log(self.total)

    def top_logprobs(self, num: int) -> TopLogprobs:
        """Of the `num` best tokens, among equals the lower id first; masked ones (-inf) are left out."""
        if num == 0:
            return ()
        ids = self._some_best_ids(num)
        logits = self.logits[ids]
        order = np.argsort(-logits, kind="stable")[:min(num, np.count_nonzero(logits > -np.inf))]
        logprobs = logits[order].astype(np.float64) - self.log_total
        return tuple(zip(ids[order].tolist(), logprobs.astype(np.float32).tolist(), strict=True))

    def weights(self, ids: Ids) -> Floats64:
        return self._to_weights(self.logits[ids])

    def best_ids(self, num: int) -> Ids:
        """The `num` best tokens, ascending; among equals the lower id. 1 <= num <= V"""
        ids = self._some_best_ids(num)
        logits = self.logits[ids]
        last = _nth_largest(logits, num)
        kept = logits > last
        ties = np.flatnonzero(logits == last)
        kept[ties[:num - np.count_nonzero(kept)]] = True
        return ids[np.flatnonzero(kept)]

    def likely_ids(self, weight: float) -> Ids:
        """All tokens of at least this weight, ascending, and perhaps some a rounding error below it. weight > 0"""
        return self._at_least(max(-LARGEST_LOGIT, self.best + self.temperature * (math.log(weight) - 1e-12)))

    def draw_from(self, ids: Ids, weights: Floats64, goal: float, uniform: float) -> int:
        """One of the ids, by weight, of their nucleus: the fewest largest weights whose sum reaches the goal, among
        equals the lower id; all where they do not. 0 <= uniform < 1"""
        return int(ids[self.segments.draw(weights, goal, uniform, np.empty_like(weights))])

    def draw_from_nucleus(self, top_p: float, uniform: float) -> int:
        """One of the fewest tokens whose share of the whole row reaches top_p. top_p < 1; 0 <= uniform < 1"""
        goal = top_p * self.total
        # What lies below the last of these weights adds up to less than 1 - top_p: none of it is needed.
        for weight in (*LIKELY, (1.0 - top_p) * self.total / len(self.logits)):
            ids = self.likely_ids(weight)
            weights = self.weights(ids)
            if weights.sum() >= goal:
                break
        return self.draw_from(ids, weights, goal, uniform)

    def draw(self, uniform: float) -> int:
        """A token of the whole row. 0 <= uniform < 1"""
        cumulative = self.sums.cumsum()
        target = uniform * cumulative[-1]
        segment = int(cumulative.searchsorted(target, side="right"))
        below = cumulative[segment - 1] if segment else 0.0
        share = min(float((target - below) / (cumulative[segment] - below)), LARGEST_UNIFORM)
        start = segment * self.segments.SEGMENT
        ids = np.arange(start, min(start + self.segments.SEGMENT, len(self.logits)))
        return self.draw_from(ids, self.weights(ids), math.inf, share)

    def _to_weights(self, logits: Floats32) -> Floats64:
        weights = logits.astype(np.float64)
        weights -= self.best
        weights /= self.temperature
        return np.exp(weights, out=weights)

    def _some_best_ids(self, num: int) -> Ids:
        """At least min(num, V) ids, ascending, among them the `num` best tokens; hardly more where num is small."""
        if num > len(self.maxima):
            return np.arange(len(self.logits))
        return self._at_least(float(_nth_largest(self.maxima, num)))    # as many maxima reach it, and so many tokens

    def _at_least(self, logit: float) -> Ids:
        """Ids, ascending, of the tokens whose logit reaches this one, and perhaps some a rounding error below it."""
        # NOTE: a bound rounded to float32 is at most the smallest float32 that reaches it: it excludes nothing.
        ids = np.empty(np.count_nonzero(self.maxima >= np.float32(logit)) * self.segments.SEGMENT, np.int64)
        return ids[:self.segments.collect(self._address, len(self.logits), self.maxima, logit, ids)]


def _nth_largest(values: Floats32, num: int) -> np.float32:
    nth: np.float32 = np.partition(values, len(values) - num)[len(values) - num]
    return nth
